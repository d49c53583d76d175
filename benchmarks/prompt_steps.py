"""Where the time of steps with prompts goes, alone and with sequences that decode beside them, on one GPU.

    PYTHONPATH=src python benchmarks/prompt_steps.py benchmarks/configs/qwen3.5-27b.json --quantization w4a16-g128

The rounds of `offroad bench engine`'s decode_c64: 64 prompts of 1,024 tokens, once with one token of answer and once
with 16. Prints the time of some steps of both, the host's part of it, and their kernels by time, torch's GEMMs as one.

With --products, the products of one layer's linears instead, a second for each number of rows, as torch's GEMM does
them from dequantised weights: TFLOP/s, and the clock and power that `nvidia-smi` tells in the middle. A card at its
limit of power is slower than the same products are alone.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import torch
from kernels_linear import SHAPES
from torch.profiler import ProfilerActivity, profile

from offroad.engine import Engine
from offroad.evidence.engine_bench import BenchSettings
from offroad.sample.params import SamplingParams
from offroad.schedule.request import Request
from offroad.schedule.step import Step
from offroad.weights.dummy import DummySource

PROMPTS, LENGTH, CHUNK = 64, 1024, 8192
ROWS = (8192, 8184, 8128, 4096, 2048, 1024)


class Steps:
    """Launches of an engine; those in `looked_at` are profiled, and waited for."""

    def __init__(self, engine: Engine) -> None:
        self.launch: Callable[[Step], None] = engine.runner.launch
        self.looked_at: tuple[int, ...] = ()
        self.number = 0
        self.found: list[tuple[str, dict[str, float]]] = []
        engine.runner.launch = self

    def __call__(self, step: Step) -> None:
        self.number += 1
        if self.number - 1 not in self.looked_at:
            self.launch(step)
            return
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            began = time.perf_counter()
            self.launch(step)
            host = time.perf_counter() - began
            torch.cuda.synchronize()
            whole = time.perf_counter() - began
        times: dict[str, float] = {}
        for kernel in seen.key_averages():
            name = "GEMM" if "nvjet" in kernel.key or "gemm" in kernel.key.lower() else kernel.key[:40]
            times[name] = times.get(name, 0.0) + kernel.self_device_time_total / 1000
        tokens = int(step.width.sum())
        self.found.append((f"{len(step.slot)} rows, {tokens} tokens: host {1e3 * host:.0f}, {1e3 * whole:.0f}", times))


def round_of(engine: Engine, steps: Steps, answer: int, looked_at: tuple[int, ...] = ()) -> float:
    """Seconds of a round with answers of `answer` tokens."""
    dice, params = random.Random(1), SamplingParams(temperature=0.0, max_tokens=answer, ignore_eos=True)
    for number in range(PROMPTS):
        ids = [dice.randrange(32, 200_000) for _ in range(LENGTH)]
        engine.submit(Request(id=f"{answer}-{number}-{time.time()}", prompt_ids=ids, params=params))
    steps.number, steps.looked_at = 0, looked_at
    torch.cuda.synchronize()
    began = time.perf_counter()
    while engine.has_work():
        engine.step()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def rounds(config: Path, quantization: str) -> None:
    settings = BenchSettings.of(
        model=config.stem, device="cuda", max_num_seqs=PROMPTS, max_num_batched_tokens=CHUNK,
        max_model_len=LENGTH + 129, enable_prefix_caching=False, memory_utilization=0.9,
    )  # fmt: skip
    engine = Engine(settings, source=DummySource(json.loads(config.read_text()), "cuda", quantization))
    steps = Steps(engine)
    round_of(engine, steps, 4)
    for answer in (1, 16):
        print(f"{answer} tokens of answer: {round_of(engine, steps, answer):.3f} s", flush=True)
    round_of(engine, steps, 1, (0, 4))
    round_of(engine, steps, 16, (1, 4, 7))
    for name, times in steps.found:
        print(f"{name} ms, kernels {sum(times.values()):.0f} ms")
    names = {name for _, times in steps.found for name in times}
    for name in sorted(names, key=lambda name: -max(times.get(name, 0.0) for _, times in steps.found))[:20]:
        print(f"  {name:<42}" + "".join(f"{times.get(name, 0.0):9.2f}" for _, times in steps.found), flush=True)


def products() -> None:
    """Of Qwen3.5-27B's layer with Gated DeltaNet, from weights as codes of 4 bits times scales are."""
    weights = []
    for name in ("gate_up", "down", "qkvz", "out"):
        n, k = SHAPES["qwen3.5-27b"][name]
        codes = torch.randint(-8, 8, (n, k // 128, 128), device="cuda").bfloat16()
        scales = torch.rand(n, k // 128, 1, device="cuda").mul_(0.01).add_(0.001).bfloat16()
        weights.append((codes * scales).view(n, k))
    flops = sum(2.0 * weight.numel() for weight in weights)
    for rows in ROWS:
        xs = [torch.randn(rows, weight.shape[1], device="cuda").bfloat16() for weight in weights]
        count = max(1, int(0.9e15 / (1.3 * flops * rows)))
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(count):
            for weight, x in zip(weights, xs, strict=True):
                torch.mm(x, weight.T)
        said = load()
        torch.cuda.synchronize()
        seconds = (time.perf_counter() - began) / count
        print(f"{rows} rows: {1e3 * seconds:.3f} ms a layer, {flops * rows / seconds / 1e12:.0f} TFLOP/s; {said}")


def load() -> str:
    command = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--quantization", default="w4a16-g128")
    parser.add_argument("--products", action="store_true", help="products of one layer instead")
    options = parser.parse_args()
    print(torch.cuda.get_device_name())
    if options.products:
        products()
    else:
        rounds(options.config, options.quantization)


if __name__ == "__main__":
    main()
