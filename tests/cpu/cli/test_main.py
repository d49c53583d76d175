"""The command as a process: quick start, error messages by their parts, exit codes, current docs."""

import io
import subprocess
import sys
import time
from pathlib import Path

import pytest

from offroad.cli import main as cli
from offroad.errors import OffroadError, PlanError

ROOT = Path(__file__).resolve().parents[3]


def test_an_error_is_shown_by_its_parts():
    stream = io.StringIO()
    cli.print_error(OffroadError("kv dtype", found="fp8\nline two", accepted="f16", next="try f16"), stream)
    assert stream.getvalue() == (
        "error: kv dtype\n  found    fp8\n           line two\n  accepted f16\n  next     try f16\n"
    )


def test_parts_that_are_empty_are_left_out():
    stream = io.StringIO()
    cli.print_error(OffroadError("it failed", found=0), stream)
    assert stream.getvalue() == "error: it failed\n  found    0\n"


@pytest.mark.parametrize(("raised", "code"), [(OffroadError("x"), 2), (PlanError("y", found="z"), 3)])
def test_exit_codes(monkeypatch, capsys, raised, code):
    def app(**options):
        raise raised

    monkeypatch.setattr(cli, "make_app", lambda: app)
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == code
    assert capsys.readouterr().err.startswith(f"error: {raised.what}")


def test_a_bug_keeps_its_traceback(monkeypatch):
    def app(**options):
        raise RuntimeError("a bug")

    monkeypatch.setattr(cli, "make_app", lambda: app)
    with pytest.raises(RuntimeError, match="a bug"):
        cli.main()


@pytest.mark.parametrize(("raised", "code"), [(KeyboardInterrupt(), 130), (PlanError("no plan"), 3)])
def test_exit_codes_through_typer(monkeypatch, raised, code):
    def failing(*args, **kwargs):
        raise raised

    monkeypatch.setattr("offroad.settings.Settings.resolve", failing)
    monkeypatch.setattr(sys, "argv", ["offroad", "serve", "m"])
    stand_in(monkeypatch, "offroad.serve.server", serve=None)
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == code


def stand_in(monkeypatch, name, **attributes):
    from types import ModuleType

    module = ModuleType(name)
    for key, value in attributes.items():
        setattr(module, key, value)
    monkeypatch.setitem(sys.modules, name, module)
    return module


def test_help_imports_no_torch_and_is_quick():
    code = (
        "import sys\nsys.argv = ['offroad', '--help']\nfrom offroad.cli.main import main\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert end.code == 0\n"
        "heavy = {'torch', 'numpy', 'transformers', 'rich', 'httpx'} & set(sys.modules)\nassert not heavy, heavy\n"
    )
    best = float("inf")
    for _ in range(3):
        began = time.perf_counter()
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        best = min(best, time.perf_counter() - began)
        assert done.returncode == 0, done.stderr
    assert "doctor" in done.stdout
    assert best < 1.0  # 0.2 s on an idle machine; the margin is for busy ones


def test_version(capsys, monkeypatch):
    from offroad import __version__

    monkeypatch.setattr(sys, "argv", ["offroad", "--version"])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 0
    assert capsys.readouterr().out.strip() == f"offroad {__version__}"


def test_docs_are_current():
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "cli_docs.py"), "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
