"""Writes docs/cli.md from the command line's own code; `--check` only says whether the file is current."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import typer

from offroad.cli.environment import VARIABLES
from offroad.cli.main import make_app
from offroad.cli.options import ALL_GROUPS

TARGET = Path(__file__).resolve().parent.parent / "docs" / "cli.md"

HEAD = """\
# The command line

This page is made by `python scripts/cli_docs.py` from the code; a test checks that it is current.

An option that is not given takes its value from the file named by `--config` (TOML, the names below with `_` for `-`),
and then its default. Unknown options and unknown keys are errors. Exit codes: 0 done, 2 wrong usage or a failure with a
message, 3 no plan (a layer without a kernel, or not enough memory), 130 Ctrl-C.
"""


def document() -> str:
    """The whole page."""
    parts = [HEAD]
    seen: dict[tuple[str, ...], str] = {}
    for name, command in typer.main.get_command(make_app()).commands.items():
        parts.append(section(name, command, seen))
    parts.append("## Environment variables\n")
    parts.append(table(("variable", "meaning"), [(f"`{v.name}`", v.meaning) for v in VARIABLES]))
    return "\n".join(parts)


def section(name: str, command: Any, seen: dict[tuple[str, ...], str]) -> str:
    """One verb; a group of options that an earlier verb listed is referred to."""
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    usage = " ".join(["offroad", name, *(p.metavar for p in arguments), "[OPTIONS]"])
    lines = [
        f"## offroad {name}\n",
        "```",
        usage,
        "```\n",
        *(f"{line.strip()}" for line in command.help.splitlines()),
        "",
    ]
    if arguments:
        lines.append(table(("argument", "meaning"), [(f"`{p.metavar}`", p.help) for p in arguments]))
    options = [p for p in command.params if p.param_type_name == "option"]
    for group in (None, *ALL_GROUPS):
        rows = [option_row(p) for p in options if getattr(p, "rich_help_panel", None) == group]
        if not rows:
            continue
        key = tuple(row[0] for row in rows)
        if group and key in seen:
            lines.append(f"Options of group *{group}*: as for `offroad {seen[key]}`.\n")
            continue
        seen[key] = name
        if group:
            lines.append(f"Options of group *{group}*:\n")
        lines.append(table(("option", "meaning"), rows))
    return "\n".join(lines)


def option_row(option: Any) -> tuple[str, str]:
    names = " / ".join([*option.opts, *option.secondary_opts])
    value = "" if option.is_flag or not option.metavar else f" {option.metavar}"
    return f"`{names}{value}`".replace("|", "\\|"), option.help.replace("|", "\\|")


def table(header: tuple[str, str], rows: list[tuple[str, str]]) -> str:
    lines = [f"| {' | '.join(header)} |", "|---|---|", *(f"| {left} | {right} |" for left, right in rows)]
    return "\n".join(lines) + "\n"


def main() -> None:
    text = document()
    if "--check" in sys.argv[1:]:
        if not TARGET.exists() or TARGET.read_text() != text:
            sys.exit(f"{TARGET.name} is not current: run `python scripts/cli_docs.py`")
    else:
        TARGET.write_text(text)


if __name__ == "__main__":
    main()
