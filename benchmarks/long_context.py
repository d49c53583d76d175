"""One long prompt and an answer after it: speed by distance beside the roofline's, and memory beside the plan's.

    PYTHONPATH=src python benchmarks/long_context.py benchmarks/configs/qwen3.5-27b.json --quantization w4a16-g128 \\
        --kv-cache-dtype fp8_e5m2

Random weights. Prefill is timed in segments: what a token costs grows with what attention reads, and the roofline says
by how much. A figure's *share* is measured over predicted; it should hardly fall with distance. The exit code is 1 if
the last segment has less than `--flat` of the first one's share, if decode has less than `--flat` of the share that it
has after a short prompt, or if the peak of the device's memory is more than 3 % from the plan.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from offroad.device.probe import resolve_device
from offroad.engine import Engine
from offroad.errors import OffroadError
from offroad.evidence.engine_bench import costs_of
from offroad.ops.roofline import Costs
from offroad.sample.params import SamplingParams
from offroad.schedule.request import Request
from offroad.settings import Settings
from offroad.weights.dummy import DummySource

GIB = 1024**3
SHORT = 1024  # tokens of the prompt that decode is compared with
UNTIMED = 16  # tokens at an answer's beginning: steps still overlap with the prompt's


@dataclass(frozen=True)
class Times:
    """`reached`: (tokens of the prompt that were computed, seconds since it came); `tokens`: (tokens of the answer, the
    same)."""

    reached: list[tuple[int, float]]
    tokens: list[tuple[int, float]]

    def at(self, position: int) -> tuple[int, float]:
        """The first moment at which so many tokens of the prompt, or more, were computed."""
        return next(entry for entry in self.reached if entry[0] >= position)

    def decode(self) -> float:
        """Tokens a second of the answer behind its beginning."""
        (first, began), (last, ended) = self.tokens[min(UNTIMED, len(self.tokens) - 2)], self.tokens[-1]
        return (last - first) / (ended - began)


def run(engine: Engine, prompt: list[int], answer: int) -> Times:
    """One request on an idle engine. Raises OffroadError if it fails."""
    params = SamplingParams(temperature=0.0, max_tokens=answer, ignore_eos=True)
    engine.submit(Request(id=f"{len(prompt)}", prompt_ids=prompt, params=params))
    reached, tokens, count, began = [(0, 0.0)], [], 0, time.perf_counter()
    while engine.has_work():
        events = engine.step()
        now = time.perf_counter() - began
        for event in events:
            if event.error is not None:
                raise OffroadError(f"the prompt of {len(prompt)} tokens", found=event.error)
            count += len(event.token_ids)
            tokens.append((count, now))
        computed = len(prompt) if tokens else max((s.computed for s in engine.sequences()), default=0)
        if len(prompt) >= computed > reached[-1][0]:
            reached.append((computed, now))
    return Times(reached, tokens)


def segments(times: Times, costs: Costs | None, length: int, size: int) -> list[tuple[int, int, float, float]]:
    """(first token, last token, tokens a second, those of the roofline or 0) of each segment of the prompt. A segment
    ends with a chunk."""
    ends = [times.at(min(length, end)) for end in range(size, length + size, size)]
    found, begin = [], (0, 0.0)
    for end in ends:
        if end[0] == begin[0]:
            continue
        tokens = end[0] - begin[0]
        least = costs.prefill(end[0]) - costs.prefill(begin[0]) if costs else 0.0
        found.append((begin[0], end[0], tokens / (end[1] - begin[1]), tokens / least if least else 0.0))
        begin = end
    return found


def share(speed: float, bound: float) -> str:
    return f"{bound:10.1f} predicted, share {100 * speed / bound:3.0f} %" if bound else "no prediction: unknown rates"


def main() -> int:
    args = arguments()
    settings = Settings.of(
        model=args.config.stem,
        device=args.device,
        max_num_seqs=1,
        max_model_len=args.context,
        max_num_batched_tokens=args.chunk,
        kv_cache_dtype=args.kv_cache_dtype,
        memory_utilization=args.memory_utilization,
        enable_prefix_caching=False,
        **({"dtype": args.dtype} if args.dtype else {}),
    )
    source = DummySource(json.loads(args.config.read_text()), resolve_device(settings).kind, args.quantization)
    began = time.perf_counter()
    engine = Engine(settings, source=source)
    ready, cuda = time.perf_counter() - began, engine.plan.device.kind == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    costs, dice, vocab = costs_of(engine, source), random.Random(args.context), engine.info.vocab
    length = args.context - args.answer - 44
    prompt = [dice.randrange(3, vocab) for _ in range(length)]
    short = min(SHORT, length // 2)
    run(engine, prompt[: min(length, 2 * args.chunk)], 4)  # what the first launches do besides
    before = run(engine, prompt[:short], args.answer)
    times = run(engine, prompt, args.answer)
    print(f"{engine.info.model} on {engine.info.device}, ready in {ready:.1f} s, {engine.info.memory_summary}")
    ratios = report(times, before, costs, length, short, args)
    peak = torch.cuda.max_memory_allocated() if cuda else 0
    return verdict(engine, times, ratios, peak, length, args)


def report(
    times: Times, before: Times, costs: Costs | None, length: int, short: int, args: argparse.Namespace
) -> dict[str, float]:
    """Prints the speeds; gives how much of the near share is left far away, by phase."""
    parts = segments(times, costs, length, args.segment)
    for first, last, speed, bound in parts:
        print(f"  prefill of {first:7,} to {last:7,}: {speed:10.1f} tok/s; {share(speed, bound)}")
    half = args.answer // 2
    decodes = [(short, before.decode()), (length, times.decode())]
    bounds = [1 / costs.decode(1, context + half) if costs else 0.0 for context, _ in decodes]
    for (context, speed), bound in zip(decodes, bounds, strict=True):
        print(f"  decode after {context:7,} tokens:   {speed:10.1f} tok/s; {share(speed, bound)}")
    if costs is None:
        return {}
    shares = [speed / bound for _, _, speed, bound in parts]
    near, far = ((speed / bound) for (_, speed), bound in zip(decodes, bounds, strict=True))
    return {"prefill": shares[-1] / shares[0], "decode": far / near}


def verdict(
    engine: Engine, times: Times, ratios: dict[str, float], peak: int, length: int, args: argparse.Namespace
) -> int:
    """Prints one line, and what failed; gives the exit code."""
    planned, failures = engine.plan.memory.used, []
    failures += [
        f"{phase} has {ratio:.2f} of the share that it has nearby"
        for phase, ratio in ratios.items()
        if ratio < args.flat
    ]
    off = peak / planned - 1 if peak else 0.0
    if abs(off) > 0.03:
        failures.append(f"peak memory is {100 * off:+.1f} % from the plan")
    for failure in failures:
        print(f"FAILED {failure}")
    seconds = times.at(length)[1]
    flat = ", ".join(f"{phase} {ratio:.2f}" for phase, ratio in ratios.items()) or "unknown"
    print(
        f"long context {'FAILED' if failures else 'passed'}: {length:,} tokens of prompt in {seconds:.1f} s "
        f"({length / seconds:.0f} tok/s), then {times.decode():.1f} tok/s; far share over near share: {flat}; "
        f"memory {peak / GIB:.3f} GiB of {planned / GIB:.3f} planned ({100 * off:+.1f} %)"
    )
    return 1 if failures else 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--quantization", help="w4a16-g32, w4a16-g128, fp8-block or none; default: the config's")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype")
    parser.add_argument("--context", type=int, default=131_072, help="tokens of prompt and answer, and 44 to spare")
    parser.add_argument("--answer", type=int, default=256)
    parser.add_argument("--segment", type=int, default=16_384)
    parser.add_argument("--chunk", type=int, default=8192, help="--max-num-batched-tokens")
    parser.add_argument("--memory-utilization", type=float, default=0.5)
    parser.add_argument("--flat", type=float, default=0.6, help="the least of the near share that is left far away")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
