"""The script that runs all checks of a GPU: what passes, what fails, and what is not over in time."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

PATH = Path(__file__).parents[2] / "gpu" / "checks.py"


@pytest.fixture(scope="module")
def checks():
    spec = importlib.util.spec_from_file_location("gpu_checks", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def python(text: str) -> list[str]:
    return [sys.executable, "-c", text]


def test_outcomes_are_those_of_the_commands(checks, tmp_path: Path):
    """A later command is not run behind one that failed, and its output is not taken for that of the one that did."""
    made = [
        checks.Check("fine", (python("print('one')"), python("print('two')\nprint()"))),
        checks.Check("bad first", (python("print('broken'); raise SystemExit(9)"), python("print('after')"))),
        checks.Check("slow", (python("print('begun', flush=True); import time; time.sleep(60)"),)),
    ]
    told = []
    found = {outcome.name: outcome for outcome in checks.run_all(made, tmp_path / "logs", 3, 3.0, told.append)}
    assert len(told) == 3
    assert (found["fine"].code, found["fine"].last) == (0, "two")
    assert (found["bad first"].code, found["bad first"].last) == (9, "broken")
    assert (found["slow"].code, found["slow"].last) == (None, "begun")
    assert "after" not in (tmp_path / "logs" / "bad_first.txt").read_text()
    assert [str(found[name]).split()[0] for name in found if name == "slow"] == ["NOT"]


def test_every_file_of_tests_and_every_script_of_launches_is_checked(checks):
    named = {argument for check in checks.all_checks(None) for command in check.commands for argument in command}
    named |= {argument for check in checks.sanitized(True) for command in check.commands for argument in command}
    scripts = {str(file) for pattern in ("test_*.py", "*_race.py") for file in PATH.parent.glob(pattern)}
    assert scripts <= named


def test_as_another_gpu_only_tests_are_run(checks):
    for check in checks.all_checks("12.0"):
        assert [*check.commands][0][1:3] == ["-m", "pytest"]
        assert check.commands[0][check.commands[0].index("--as") + 1] == "12.0"
