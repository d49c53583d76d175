"""Runs `offroad bench engine` on the shapes of the targets, within given minutes, and prints a Markdown table.

    python benchmarks/gpu_targets.py --minutes 9 --json records.json
    python benchmarks/gpu_targets.py --only qwen3.5-27b:w4a16-g128 --cases decode_c1 prefill_8k --profile

Each model runs in a process of its own, so that what one leaves behind is not measured with the next. A model that has
begun when the time is up is ended: the cases that it has measured count, and what did not run is listed. The targets
hold on an H100 80GB, for figures by difference; steady decode has none (`offroad bench engine --help` says what each
is).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

CONFIGS = Path(__file__).parent / "configs"
CASES = (
    "decode_c1",
    "decode_c8",
    "decode_c32",
    "decode_c64",
    "decode_c1_ctx16k",
    "prefill_8k",
    "prefill_16k",
    "ready_s",
)
SHOWN = tuple(
    key
    for case in CASES
    for key in ((case, case.replace("decode", "decode_steady", 1)) if case.startswith("decode") else (case,))
)


@dataclass(frozen=True)
class Model:
    """A shape, how it is stored, what must be reached by case, and engine flags that it needs."""

    config: str
    quantization: str
    targets: tuple[float, ...] = ()
    flags: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.config}:{self.quantization}"


MODELS = (
    Model("qwen3-8b", "none", (160, 1200, 3900, 6200, 143, 38300, 33000, 25)),
    Model("qwen3.5-27b", "w4a16-g128", (140, 950, 2700, 3700, 130, 11500, 11300, 40)),
    # Windows of 32 sequences in bf16, twice each, do not fit: more than 24 run in waves.
    Model("gemma-4-31b", "w4a16-g32", (108, 690, 1550, 1700, 102, 8000, 7400, 40), ("--kv-cache-dtype", "fp8_e5m2")),
    Model("qwen3.5-27b", "fp8-block", (90, 650, 2000, 3000, 85, 14000, 13500, 40)),
    Model("qwen3.5-35b-a3b", "w4a16-g128"),
    Model("gemma-4-e4b", "none"),
)


def run(model: Model, arguments: argparse.Namespace, seconds: float) -> tuple[dict | None, str]:
    """(the record, why it lacks cases): None if there is none, "" if it lacks nothing."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "record.json"
        command = [sys.executable, "-m", "offroad.cli.main", "bench", "engine", "--dummy-weights"]
        command += ["--config", str(CONFIGS / f"{model.config}.json"), "--quantization", model.quantization]
        command += ["--json", str(out), "--repeat", str(arguments.repeat), *model.flags, *arguments.flag]
        for case in arguments.cases or ():
            command += ["--cases", case]
        command += ["--profile", "--profile-rows", str(arguments.profile_rows)] if arguments.profile else []
        print("$", " ".join(command), file=sys.stderr, flush=True)
        try:
            code = subprocess.run(command, timeout=seconds, check=False).returncode
            why = f"exit code {code}" if code else ""
        except subprocess.TimeoutExpired:
            why = f"ended after {seconds:.0f} s: the time was up"
        return (json.loads(out.read_text()) if out.exists() else None), why


def table(records: dict[str, dict], missing: dict[str, str]) -> str:
    """A row for each model and case: figure, target, ratio (above 1 is better), share of the roofline."""
    lines = ["| model | case | offroad | must reach | ratio | of the roofline |", "|---|---|---|---|---|---|"]
    for model in MODELS:
        if (record := records.get(model.name)) is None:
            continue
        wanted = dict(zip(CASES, model.targets, strict=False))
        for case in SHOWN:
            if case not in record:
                continue
            value, target, share = record[case], wanted.get(case), record["roofline_share"].get(case)
            ratio = None if not target else target / value if case == "ready_s" else value / target
            cells = (
                model.name,
                case,
                f"{value:,.1f}",
                f"{target:,.0f}" if target else "-",
                f"{ratio:.2f}" if ratio else "-",
                f"{100 * share:.0f} %" if share else "-",
            )
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, *(f"\n{name}: {why}" for name, why in missing.items())])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--only", nargs="+", metavar="MODEL:SCHEME", choices=[model.name for model in MODELS])
    parser.add_argument("--cases", nargs="+", choices=CASES[:-1])
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--profile-rows", type=int, default=1)
    parser.add_argument("--flag", action="append", default=[], help="one more argument of `offroad bench engine`")
    parser.add_argument("--json", type=Path, help="write all records to this file")
    arguments = parser.parse_args()
    end = time.monotonic() + 60 * arguments.minutes
    records: dict[str, dict] = {}
    missing: dict[str, str] = {}
    for model in MODELS:
        if arguments.only and model.name not in arguments.only:
            continue
        left = end - time.monotonic()
        record, why = run(model, arguments, left) if left > 20 else (None, "not begun: the time was up")
        if record is not None:
            records[model.name] = record
        if why:
            lacks = "" if record is None else f", without {', '.join(record['missing']) or 'its profile'}"
            missing[model.name] = why + lacks
        if arguments.json:
            arguments.json.write_text(json.dumps(records, indent=1) + "\n")
    print(table(records, missing))


if __name__ == "__main__":
    main()
