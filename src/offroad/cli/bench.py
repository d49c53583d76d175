"""`offroad bench`: latency and throughput of a model or a server, with a record."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from offroad.cli.options import ENGINE_GROUPS, Json, with_settings
from offroad.errors import SettingsError

Target = Annotated[
    str,
    typer.Argument(metavar="MODEL|URL", help="A model to load here, or the address of a server.", show_default=False),
]
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
    from offroad.evidence import perf, warmth

    if turns and baseline:
        raise SettingsError("--baseline", found="--turns", accepted="one of the two")
    if turns:
        load, way = warmth.Chat(turns, prompt_tokens, output_tokens), warmth
    else:
        load, way = perf.Load(tuple(concurrency), prompt_tokens, output_tokens, repeat), perf
    old = perf.read_record(Path(baseline)) if baseline else None
    bencher = open_target(target, {} if turns else {"max_num_seqs": max(concurrency)}, flags, config)
    try:
        points = way.sweep(bencher, load, lambda note: print(note, file=sys.stderr, flush=True))
        record = perf.record(bencher, load, points, ["offroad", *sys.argv[1:]]) | {"format": way.FORMAT}
    finally:
        bencher.close()
    if output:
        Path(output).write_text(json.dumps(record, indent=1) + "\n")
    if json_output:
        json.dump(record | ({"ratios": perf.ratios(record, old)} if old else {}), sys.stdout, indent=1)
        print()
        return
    print(way.render(record))
    if old:
        print("\n" + perf.render_ratios(record, old))


def open_target(target: str, defaults: dict[str, Any], flags: dict[str, Any], config: str | None) -> Any:
    """A server behind an address, or the model loaded here with `defaults` under the flags."""
    from offroad.evidence import perf

    if target.startswith(("http://", "https://")):
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
