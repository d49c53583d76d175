"""The script that runs all checks of a GPU: what passes, what fails, and what is not over in time."""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from pathlib import Path

import pytest
import torch

PATH = Path(__file__).parents[2] / "gpu" / "checks.py"
FINE, BAD, EMPTY = "print('fine')", "raise SystemExit(9)", "raise SystemExit(5)"


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
    """A later command is not run behind one that failed."""
    made = [
        checks.Check("fine", (python("print('one')"), python("print('two')\nprint()"))),
        checks.Check("bad first", (python("print('broken'); raise SystemExit(9)"), python("print('after')"))),
        checks.Check("for other GPUs", (python(EMPTY),), may_be_empty=True),
        checks.Check("names nothing", (python(EMPTY),)),
    ]
    told = []
    found = {outcome.name: outcome for outcome in checks.run_all(made, tmp_path / "logs", 2, 60.0, told.append)}
    assert len(told) == 4
    assert (found["fine"].code, found["fine"].last) == (0, "two")
    assert (found["bad first"].code, found["bad first"].last) == (9, "broken")
    assert "after" not in (tmp_path / "logs" / "bad_first.txt").read_text()
    assert (found["for other GPUs"].code, found["names nothing"].code) == (0, 5)


def test_what_looks_at_free_memory_runs_before_the_others_alone(checks, tmp_path: Path, monkeypatch):
    assert {check.name for check in checks.all_checks(None)} >= checks.ALONE
    monkeypatch.setattr(checks, "ALONE", {"second"})
    text = "import time; print(time.monotonic()); time.sleep(0.3); print(time.monotonic())"
    made = [checks.Check(name, (python(text),)) for name in ("first", "second", "third")]
    told = []
    checks.run_all(made, tmp_path, 3, 60.0, told.append)
    assert told[0].name == "second"
    (_, ended), *others = ([float(x) for x in (tmp_path / f"{one.name}.txt").read_text().split()] for one in told)
    assert all(ended < began for began, _ in others)


def test_what_is_not_over_is_ended_with_what_it_has_started(checks, tmp_path: Path):
    child = f"import subprocess, sys; subprocess.run({python('import time; time.sleep(60)')!r})"
    text = f"import subprocess, sys; p = subprocess.Popen({python(child)!r}); print(p.pid, flush=True); p.wait()"
    outcome = checks.run(checks.Check("slow", (python(text),)), tmp_path, 5.0)
    assert outcome.code is None
    assert str(outcome).startswith("NOT OVER")
    for _ in range(50):
        try:
            os.kill(int(outcome.last), 0)
        except ProcessLookupError:
            return
        state = Path(f"/proc/{outcome.last}/stat")
        if state.exists() and state.read_text().split()[2] == "Z":  # ended; nobody here collects it
            return
        time.sleep(0.1)
    raise AssertionError(f"process {outcome.last} is left")


@pytest.mark.parametrize(("commands", "code"), [((FINE,), 0), ((FINE, BAD), 1)])
def test_the_exit_code_tells_whether_any_failed(commands, code: int, checks, tmp_path: Path, monkeypatch, capsys):
    made = [checks.Check(f"check {i}", (python(text),)) for i, text in enumerate(commands)]
    monkeypatch.setattr(checks, "all_checks", lambda wanted: made)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert checks.main(["--logs", str(tmp_path)]) == code
    assert f"1 of {len(made)} checks passed" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_nothing_is_said_to_have_passed(checks, tmp_path: Path):
    with pytest.raises(SystemExit, match="no CUDA device"):
        checks.main(["--logs", str(tmp_path)])


def test_names_that_no_check_has_are_refused_with_those_there_are(checks):
    made = [checks.Check(name, ()) for name in ("attention", "rows", "sm70_race")]
    assert [check.name for check in checks.chosen(made, ["race", "att"])] == ["attention", "sm70_race"]
    assert checks.chosen(made, []) == made
    with pytest.raises(SystemExit, match="--only delta.*attention, rows, sm70_race"):
        checks.chosen(made, ["rows", "delta"])


def test_every_file_of_tests_and_every_script_of_launches_is_checked(checks):
    made = [*checks.all_checks(None), *checks.sanitized(True)]
    named = {argument for check in made for command in check.commands for argument in command}
    scripts = {str(file) for pattern in ("test_*.py", "*_race.py") for file in PATH.parent.glob(pattern)}
    assert scripts <= named


def test_as_another_gpu_only_tests_are_run(checks):
    for check in checks.all_checks("12.0"):
        (command,) = check.commands
        assert command[1:3] == ["-m", "pytest"]
        assert command[command.index("--as") + 1] == "12.0"
