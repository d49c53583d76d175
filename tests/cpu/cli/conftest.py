"""The command line, called in this process."""

import sys

import pytest

from offroad.cli import main as cli


@pytest.fixture
def offroad(monkeypatch, capsys):
    """Runs the command in this process: (exit code, stdout, stderr)."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["offroad", *arguments])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        captured = capsys.readouterr()
        return caught.value.code or 0, captured.out, captured.err

    return call
