"""`offroad bench engine`: a model of given shapes in the cases that engines are compared by."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from offroad.cli.options import ENGINE_GROUPS, with_settings
from offroad.errors import SettingsError

ModelConfig = Annotated[
    str,
    typer.Option("--config", metavar="FILE", show_default=False, help="The model's config.json, e.g. of benchmarks/."),
]
Quantization = Annotated[
    str | None,
    typer.Option(
        "--quantization",
        metavar="NAME",
        show_default=False,
        help="w4a16-g32, w4a16-g128, fp8-block or none; default: what the config says.",
    ),
]
Dummy = Annotated[
    bool, typer.Option("--dummy-weights", help="Random weights, made on the device. The only ones that there are here.")
]
Cases = Annotated[
    list[str], typer.Option("--cases", metavar="NAME", show_default=False, help="Only this one; may be repeated.")
]
Rounds = Annotated[
    int,
    typer.Option(
        "--repeat", metavar="N", show_default=False, min=1, help="Rounds, of which the best counts. (default: 2)"
    ),
]
Profile = Annotated[bool, typer.Option("--profile", help="Also the time of each op, in a decode step and a prefill.")]
ProfileRows = Annotated[
    int, typer.Option("--profile-rows", metavar="N", show_default=False, min=1, help="Rows of that step. (default: 1)")
]
Output = Annotated[
    str | None, typer.Option("--json", metavar="FILE", show_default=False, help="Write the record to this file.")
]


@with_settings(*ENGINE_GROUPS, file=False)
def bench_engine(
    model_config: ModelConfig,
    quantization: Quantization = None,
    dummy_weights: Dummy = False,
    cases: Cases = (),
    repeat: Rounds = 2,
    profile: Profile = False,
    profile_rows: ProfileRows = 1,
    output: Output = None,
    *,
    flags: dict[str, Any],
) -> None:
    """Measure the engine on a model's shapes, with dummy weights.

    Decode speed of 1, 8, 32 and 64 sequences after prompts of 1,024 tokens and of one after 16,384, prefill of 8,192
    and 16,384 tokens, the time until the engine is ready, and what share of the device's roofline each figure is.
    decode_cN is by difference: rounds with 129 tokens of answer and with 1, so that steps count in which prompts are
    still read while others decode. decode_steady_cN is over the middle half of the steps in which all N decode. The
    record is written after every case.

    Verify steps are measured with dummy drafts, e.g. --speculative-config '{"method": "dummy",
    "num_speculative_tokens": 3, "acceptance": 0.7}': a draft is accepted with that probability if those before it in
    its step were, which takes (1 - 0.7^4) / (1 - 0.7) = 2.53 tokens a step. Nothing is spent on making them.
    """
    if not dummy_weights:
        raise SettingsError("--dummy-weights", found="not given", accepted="it: a config alone has no weights")

    def write(record: dict[str, Any]) -> None:
        if output:
            write_record(Path(output), record)

    data = run(model_config, quantization, list(cases), repeat, profile_rows if profile else 0, flags, write)
    from offroad.evidence import engine_bench, op_times

    print(engine_bench.render(data))
    if profile:
        print("\n" + op_times.render(data["profile"]))


def write_record(path: Path, record: dict[str, Any]) -> None:
    """Replaces the file at once: who reads it finds one record or the next, whenever this process is ended."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(json.dumps(record, indent=1) + "\n")
    os.replace(part, path)


def run(
    path: str,
    quantization: str | None,
    names: list[str],
    repeat: int,
    profile_rows: int,
    flags: dict[str, Any],
    write: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """The record of one model, written after every case and again with times of ops (`profile_rows` 0: none are
    taken)."""
    from offroad.device.probe import resolve_device
    from offroad.evidence import engine_bench, op_times
    from offroad.models.registry import resolve_source
    from offroad.ops.budget import packed_bytes
    from offroad.weights.dummy import DummySource
    from offroad.weights.safetensors_source import read_json

    cases = engine_bench.chosen(names)
    label = f"{Path(path).stem} {quantization or 'as configured'}"
    settings = engine_bench.BenchSettings.resolve({**engine_bench.settings_for(cases), **flags, "model": label})
    began = time.perf_counter()
    source = DummySource(read_json(Path(path)), resolve_device(settings).kind, quantization)
    from offroad.cli.progress import LoadProgress
    from offroad.engine import Engine

    with LoadProgress() as progress:
        engine = Engine(settings, progress, source)
    ready = time.perf_counter() - began
    try:
        report = lambda note: print(note, file=sys.stderr, flush=True)  # noqa: E731
        data, found = {}, engine_bench.costs_of(engine, source)

        def save(speeds: dict[str, float], rounds: dict[str, list[float]], per_step: dict[str, float]) -> None:
            data.update(engine_bench.record(engine, found, ready, cases, speeds, rounds, per_step))
            data.update(quantization=quantization, command=["offroad", *sys.argv[1:]])
            write(data)

        report(f"ready in {ready:.1f} s")
        engine_bench.measure(engine, cases, repeat, report, save)
        if profile_rows:
            data["profile"] = op_times.step_times(engine, profile_rows, min(8192, engine.plan.max_len - 65))
            resolved, renamed = resolve_source(source)
            packed = packed_bytes(resolved.spec, renamed.headers, engine.plan.cells, engine.plan.dtype)
            op_times.add_kernels(engine, data["profile"], op_times.weight_bytes(packed))
            write(data)
    finally:
        engine.close()
    return data
