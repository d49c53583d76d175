"""`offroad quantize`: write a checkpoint with quantised weights."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Source = Annotated[str, typer.Argument(metavar="SRC", help="A folder, GGUF file, hub name or demo model.")]
Target = Annotated[Path, typer.Argument(metavar="DST", help="The folder to write; must be new or empty.")]
Scheme = Annotated[
    str, typer.Option("--scheme", help="w4a16-g128, fp8-block, nvfp4 or mxfp4.", metavar="NAME", show_default=False)
]
Offline = Annotated[bool, typer.Option("--offline", help="Use what is on disk; ask no network.")]


def quantize(source: Source, target: Target, scheme: Scheme, offline: Offline = False) -> None:
    """Quantise a small dense model by rounding to nearest.

    Linears of layers are quantised; embeddings, head, norms, routers and gates are kept. Where 128 does not divide a
    weight's columns, w4a16-g128 takes groups of 64 or 32. Transformers and vLLM read the result.
    """
    from offroad.cli.progress import LoadProgress
    from offroad.quant.write import quantise
    from offroad.settings import Settings
    from offroad.weights.locate import open_source

    settings = Settings.of(model=source, offline=offline)
    with LoadProgress(("pull", "quantise")) as progress:
        opened = open_source(settings, lambda fraction, note: progress("pull", fraction, note))
        counts = quantise(opened, target, scheme, lambda fraction, note: progress("quantise", fraction, note))
    listed = ", ".join(
        f"{count} in groups of {group}" if group != "1" else f"{count}" for group, count in counts.items()
    )
    print(f"{target}: {scheme}, modules: {listed}")
