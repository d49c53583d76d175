"""`offroad bench`: latency and throughput of a model or a server, with a record."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from offroad.cli.options import ENGINE_GROUPS, Json, with_settings
from offroad.errors import SettingsError

Target = Annotated[
    str,
    typer.Argument(metavar="MODEL|URL", help="A model to load here, or the address of a server.", show_default=False),
]
Url = Annotated[str, typer.Argument(metavar="URL", help="The address of a server.", show_default=False)]
Concurrency = Annotated[
    list[int],
    typer.Option(
        "--concurrency",
        metavar="N",
        show_default=False,
        help="Requests at once; may be repeated. (default: 1 and 8)",
        min=1,
    ),
]
PromptTokens = Annotated[
    int,
    typer.Option(
        "--prompt-tokens",
        metavar="N",
        show_default=False,
        help="Tokens of each prompt, random ids. (default: 128)",
        min=1,
    ),
]
OutputTokens = Annotated[
    int,
    typer.Option(
        "--output-tokens", metavar="N", show_default=False, help="Tokens of each answer. (default: 64)", min=2
    ),
]
Repeat = Annotated[
    int,
    typer.Option("--repeat", metavar="N", show_default=False, help="Rounds at each concurrency. (default: 3)", min=1),
]
Turns = Annotated[
    int,
    typer.Option(
        "--turns",
        metavar="N",
        show_default=False,
        help="Measure a chat of N turns instead: what is resumed, and first tokens warm and cold.",
        min=0,
    ),
]
Output = Annotated[
    str | None, typer.Option("--output", help="Write the record to this file too.", metavar="FILE", show_default=False)
]
Baseline = Annotated[
    str | None, typer.Option("--baseline", help="Print ratios to this record.", metavar="FILE", show_default=False)
]


@with_settings(*ENGINE_GROUPS)
def bench(
    target: Target,
    concurrency: Concurrency = (1, 8),
    prompt_tokens: PromptTokens = 128,
    output_tokens: OutputTokens = 64,
    repeat: Repeat = 3,
    turns: Turns = 0,
    output: Output = None,
    baseline: Baseline = None,
    json_output: Json = False,
    *,
    flags: dict[str, Any],
    config: str | None,
) -> None:
    """Measure latency and throughput.

    Time to the first token, time between tokens, decode and prefill speed, by concurrency. The record holds raw
    samples, plan, command, commit and versions, so that a figure can be checked. With --turns it is about one chat,
    and --concurrency and --repeat do not matter.
    """
    _measure(
        target,
        _Asked(tuple(concurrency), prompt_tokens, output_tokens, repeat, turns, output, baseline, json_output),
        flags,
        config,
    )


@with_settings(file=False)
def bench_serve(
    url: Url,
    concurrency: Concurrency = (1, 8),
    prompt_tokens: PromptTokens = 128,
    output_tokens: OutputTokens = 64,
    repeat: Repeat = 3,
    turns: Turns = 0,
    output: Output = None,
    baseline: Baseline = None,
    json_output: Json = False,
    *,
    flags: dict[str, Any],
) -> None:
    """Measure a running server.

    The same as `offroad bench URL`, by the completions API. Tokens are those that the server counts: each stream asks
    for its `usage`, and one without it is an error. Where a server does not tell the tokens of each event (offroad and
    vLLM do), an event with text is one token until the last, which has the rest of what `usage` says.
    """
    if not is_address(url):
        raise SettingsError(
            "offroad bench serve",
            found=url,
            accepted="the address of a server, e.g. http://127.0.0.1:8000",
            next="`offroad bench MODEL` loads a model and measures it",
        )
    _measure(
        url,
        _Asked(tuple(concurrency), prompt_tokens, output_tokens, repeat, turns, output, baseline, json_output),
        flags,
        None,
    )


@dataclass(frozen=True)
class _Asked:
    """What is measured, and where the record goes."""

    concurrency: tuple[int, ...]
    prompt_tokens: int
    output_tokens: int
    repeat: int
    turns: int
    output: str | None
    baseline: str | None
    json_output: bool


def _measure(target: str, asked: _Asked, flags: dict[str, Any], config: str | None) -> None:
    from offroad.evidence import perf, warmth

    if asked.turns and asked.baseline:
        raise SettingsError("--baseline", found="--turns", accepted="one of the two")
    if asked.turns:
        load, way = warmth.Chat(asked.turns, asked.prompt_tokens, asked.output_tokens), warmth
    else:
        load, way = perf.Load(asked.concurrency, asked.prompt_tokens, asked.output_tokens, asked.repeat), perf
    old = perf.read_record(Path(asked.baseline)) if asked.baseline else None
    bencher = open_target(target, {} if asked.turns else {"max_num_seqs": max(asked.concurrency)}, flags, config)
    try:
        points = way.sweep(bencher, load, lambda note: print(note, file=sys.stderr, flush=True))
        record = perf.record(bencher, load, points, ["offroad", *sys.argv[1:]]) | {"format": way.FORMAT}
    finally:
        bencher.close()
    if asked.output:
        Path(asked.output).write_text(json.dumps(record, indent=1) + "\n")
    if asked.json_output:
        json.dump(record | ({"ratios": perf.ratios(record, old)} if old else {}), sys.stdout, indent=1)
        print()
        return
    print(way.render(record))
    if old:
        print("\n" + perf.render_ratios(record, old))


def is_address(target: str) -> bool:
    """Whether it is a server's."""
    return target.startswith(("http://", "https://"))


def open_target(target: str, defaults: dict[str, Any], flags: dict[str, Any], config: str | None) -> Any:
    """A server behind an address, or the model loaded here with `defaults` under the flags."""
    from offroad.evidence import perf

    if is_address(target):
        if flags or config:
            raise SettingsError(
                "engine settings",
                found=", ".join(sorted(flags)) or "--config",
                accepted="none for a server's address",
                next="a running server has its own settings",
            )
        return perf.ServerTarget(target)
    from offroad.cli.progress import LoadProgress
    from offroad.engine import Engine
    from offroad.settings import Settings

    settings = Settings.resolve({**defaults, **flags, "model": target}, config)
    with LoadProgress() as progress:
        return perf.EngineTarget(Engine(settings, progress))
