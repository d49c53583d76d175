"""Documents say what is there: paths in the tour exist, and the README's commands are the command line's."""

import re
from pathlib import Path

import typer

from offroad.cli.main import make_app

ROOT = Path(__file__).resolve().parents[3]


def test_files_named_in_the_tour_exist():
    named = set(re.findall(r"`([a-z_0-9]+(?:/[a-z_0-9]+)*\.py)`", (ROOT / "docs" / "tour.md").read_text()))
    assert len(named) > 30
    missing = sorted(name for name in named if not (ROOT / "src" / "offroad" / name).is_file())
    assert not missing, missing


def test_commands_of_the_readme_parse():
    """Every `offroad ...` line of the README is taken by the verb it names."""
    shell = "\n".join(re.findall(r"```sh\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL))
    commands = re.findall(r"^offroad ([^#\n]+)", shell, re.MULTILINE)
    assert len(commands) >= 6
    group = typer.main.get_command(make_app())
    for line in commands:
        root = typer.Context(group)
        verb, command, arguments = group.resolve_command(root, re.findall(r'"[^"]*"|\S+', line))
        context = command.make_context(verb, list(arguments), parent=root, resilient_parsing=False)
        assert context.params


def test_make_targets_of_the_readme_exist():
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"^make (\w+)", (ROOT / "README.md").read_text(), re.MULTILINE)) <= targets
