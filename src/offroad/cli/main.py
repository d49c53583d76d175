"""The command `offroad`: its verbs, and how an error becomes a message and an exit code."""

from __future__ import annotations

import sys
from typing import Annotated, Any, TextIO

import typer
from typer.core import TyperGroup

from offroad import __version__
from offroad.cli import bench, bench_engine, doctor, plan, pull, quantize, replay, rm, run, serve, show
from offroad.cli import list as listing
from offroad.cli.options import GroupedCommand
from offroad.errors import OffroadError


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"offroad {__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Serve language models on the hardware you own."""


class Verbs(TyperGroup):
    """Verbs, of which some have two words: `bench engine`."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name = " ".join(args[:2])
        if name in self.commands:
            return name, self.commands[name], args[2:]
        return super().resolve_command(ctx, args)


def make_app() -> typer.Typer:
    """The command line with all verbs."""
    app = typer.Typer(
        name="offroad",
        cls=Verbs,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    for name, verb in (
        ("run", run.run),
        ("serve", serve.serve),
        ("plan", plan.plan),
        ("pull", pull.pull),
        ("list", listing.list_models),
        ("show", show.show),
        ("rm", rm.rm),
        ("bench", bench.bench),
        ("bench serve", bench.bench_serve),
        ("bench engine", bench_engine.bench_engine),
        ("replay", replay.replay),
        ("quantize", quantize.quantize),
        ("doctor", doctor.doctor),
    ):
        app.command(name, cls=GroupedCommand)(verb)
    return app


def print_error(error: OffroadError, stream: TextIO) -> None:
    """The four parts of an error, one a line."""
    print(f"error: {error.what}", file=stream)
    for name, value in (("found", error.found), ("accepted", error.accepted), ("next", error.next)):
        if value is not None and value != "":
            text = str(value)
            lines = text.strip("\n").split("\n")
            print(f"  {name:<9}" + f"\n{'':<11}".join(lines), file=stream)


def main() -> None:
    """Runs the command line; ends the process with its exit code.

    An OffroadError is shown by its parts and ends with its own code; Ctrl-C ends with 130; wrong usage with 2. Anything
    else is a bug and shows its traceback.
    """
    try:
        make_app()(prog_name="offroad")
    except OffroadError as error:
        print_error(error, sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
