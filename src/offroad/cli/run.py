"""`offroad run`: chat with a model in the terminal."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from offroad.cli.backend import Backend, LocalBackend, ServerBackend
from offroad.cli.options import ENGINE_GROUPS, Model, with_settings
from offroad.errors import SettingsError

Prompt = Annotated[
    str | None, typer.Argument(metavar="[PROMPT]", help="Answer this and leave; without it, chat.", show_default=False)
]
Url = Annotated[
    str | None,
    typer.Option("--url", metavar="URL", help="Talk to this server instead of loading the model.", show_default=False),
]
System = Annotated[str | None, typer.Option("--system", metavar="TEXT", help="System message.", show_default=False)]
MaxTokens = Annotated[
    int | None,
    typer.Option("--max-tokens", metavar="N", help="Longest answer; default: what fits.", show_default=False),
]
Temperature = Annotated[
    float | None,
    typer.Option(
        "--temperature",
        metavar="T",
        help="0: always the likeliest token. Default: the checkpoint's, or 0.7.",
        show_default=False,
    ),
]


@with_settings(*ENGINE_GROUPS)
def run(
    model: Model,
    prompt: Prompt = None,
    url: Url = None,
    system: System = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    *,
    flags: dict[str, Any],
    config: str | None,
) -> None:
    """Chat with a model in the terminal.

    It is loaded in this process, or reached by --url. One answer is written to stdout when PROMPT is given or stdin is
    not a terminal (then the prompt is read from it).
    """
    from offroad.cli.chat import Chat, terminal_input

    interactive = prompt is None and sys.stdin.isatty()
    if prompt is None and not interactive:
        prompt = sys.stdin.read().strip()
        if not prompt:
            raise SettingsError(
                "prompt", found="an empty standard input", accepted="a PROMPT argument, text on stdin, or a terminal"
            )
    given = {"max_tokens": max_tokens, "temperature": temperature}
    options = {name: value for name, value in given.items() if value is not None}
    backend = open_backend(model, url, flags, config)
    try:
        chat = Chat(backend, options, system, sys.stdout, sys.stderr)
        if interactive:
            print(f"{model}{f' at {url}' if url else ' is ready'}. /help lists commands, Ctrl-D leaves.", file=sys.stderr)
            chat.loop(terminal_input())
        else:
            chat.ask(prompt)
    finally:
        backend.close()


def open_backend(model: str, url: str | None, flags: dict[str, Any], config: str | None) -> Backend:
    """The server at `url`, or the model loaded here with a progress display. Raises OffroadError."""
    if url is not None:
        given = [*(f"--{name.replace('_', '-')}" for name in flags), *(["--config"] if config else [])]
        if given:
            raise SettingsError(
                ", ".join(given),
                found="together with --url",
                accepted="one of the two",
                next="a running server has its own settings; set them with `offroad serve`",
            )
        return ServerBackend(url, model)
    from dataclasses import asdict

    from offroad.cli.progress import LoadProgress
    from offroad.llm import LLM
    from offroad.settings import Settings

    settings = Settings.resolve({**flags, "model": model}, config)
    with LoadProgress() as progress:
        return LocalBackend(LLM(progress=progress, **asdict(settings)))
