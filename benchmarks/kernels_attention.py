"""Times attention on this GPU: decode in GB/s of keys and values and as a share of 3.0 TB/s, of Triton's kernel and, on
Hopper, of its own beside it; prefill in TFLOP/s.

    python benchmarks/kernels_attention.py            # decode and prefill, the kernels' own tiles
    python benchmarks/kernels_attention.py --prefill  # chunks alone
    python benchmarks/kernels_attention.py --sweep    # decode with other tiles: which is best here

Decode is timed in a CUDA graph of calls on different pages (more than the L2 holds), with store and sum included.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from offroad.device.probe import probe_cuda
from offroad.models.spec import AttentionSpec, RopeSpec
from offroad.nvrtc import attention_few, hopper
from offroad.ops.registry import default_registry
from offroad.ops.spec import Problem
from offroad.run.rows import PagedView, Rows
from offroad.triton_kernels import attention as triton

BLOCK, PEAK = 64, 3.0e12
KERNELS = ("triton.paged_decode", hopper.ATTENTION)
# (name, heads, kv_heads, head_dim, window)
SHAPES = (
    ("Qwen3-8B", 32, 8, 128, None),
    ("Qwen3.5-27B", 24, 4, 256, None),
    ("Gemma-4-31B full", 32, 4, 512, None),
    ("Gemma-4-31B sliding", 32, 16, 256, 1024),
)


def rows_of(start: int, width: int, count: int) -> Rows:
    """`count` rows alike, in slots 1 to count."""
    packed = np.array([np.arange(1, count + 1), [start] * count, [width] * count, np.arange(count) * width], np.int32)
    on_device = torch.from_numpy(packed).cuda()
    positions = torch.arange(start, start + width, device="cuda").repeat(count)
    return Rows(positions, positions, *packed, *on_device, count, positions[:0], np.zeros(count, np.int32))


def pages_of(
    kv_heads: int, dim: int, window: int | None, length: int, count: int, longest: int, kv: torch.dtype = torch.bfloat16
) -> PagedView:
    """Pages of `count` rows of `length` positions at random places, in a table for `longest` positions."""
    first = max(0, length - window) // BLOCK if window else 0
    each = -(-length // BLOCK) - first
    table = torch.zeros((count + 1, -(-longest // BLOCK)), dtype=torch.int32, device="cuda")
    table[1:, first : first + each] = (torch.randperm(count * each, device="cuda") + 1).view(count, each).int()
    k, v = (torch.randn((count * each + 1, BLOCK, kv_heads, dim), device="cuda").to(kv) for _ in "kv")
    return PagedView(k, v, table, BLOCK, window)


def problem(heads: int, kv_heads: int, dim: int, phase: str) -> Problem:
    sizes = (("heads", heads), ("kv_heads", kv_heads), ("head_dim", dim), ("block", BLOCK))
    return Problem("attention", phase, "bfloat16", "bfloat16", sizes)


def seconds(call: Callable[[int], object], calls: int) -> float:
    """Median time of one of `calls` calls, replayed in a graph."""
    call(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(calls):
            call(i)
    times = []
    for _ in range(7):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in "be")
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / calls)
    return statistics.median(times[1:])


def decode(
    shape: tuple,
    rows: int,
    context: int,
    longest: int,
    width: int = 1,
    kv: torch.dtype = torch.bfloat16,
    kernels: tuple[str, ...] = KERNELS,
) -> tuple[dict[str, float], float]:
    """(seconds of those of `kernels` that the GPU has, bytes of keys and values) of one call."""
    _, heads, kv_heads, dim, window = shape
    seen = min(context, window) if window else context
    size = rows * seen * kv_heads * dim * 2 * kv.itemsize
    copies = max(1, min(16, int(2e8 / size) + 1))
    views = [pages_of(kv_heads, dim, window, context, rows, longest, kv) for _ in range(copies)]
    step = rows_of(context - width, width, rows)
    q = torch.randn((rows * width, heads, dim), device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn((rows * width, kv_heads, dim), device="cuda", dtype=torch.bfloat16) for _ in "kv")
    spec = AttentionSpec(heads, kv_heads, dim, dim**-0.5, RopeSpec(dim, 1e4), window)
    asked = replace(problem(heads, kv_heads, dim, "decode"), kv_dtype=str(kv).removeprefix("torch."))
    times = {}
    for name in kernels:
        kernel = default_registry().kernels[name]
        if not kernel.check(probe_cuda(), asked).ok:
            continue
        bound = kernel.prepare(probe_cuda(), asked)
        times[name] = seconds(lambda i, bound=bound: bound(q, k, v, views[i % copies], step, spec), max(16, copies))
    return times, size


def prefill(shape: tuple, tokens: int, start: int, kv: torch.dtype = torch.bfloat16) -> tuple[float, float]:
    """(seconds, operations that the mask leaves) of one chunk of `tokens` after `start` older ones."""
    _, heads, kv_heads, dim, window = shape
    view = pages_of(kv_heads, dim, None, start + tokens, 1, start + tokens, kv)
    view = replace(view, window=window)
    step = rows_of(start, tokens, 1)
    q = torch.randn((tokens, heads, dim), device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn((tokens, kv_heads, dim), device="cuda", dtype=torch.bfloat16) for _ in "kv")
    spec = AttentionSpec(heads, kv_heads, dim, dim**-0.5, RopeSpec(dim, 1e4), window)
    asked = replace(problem(heads, kv_heads, dim, "prefill"), kv_dtype=str(kv).removeprefix("torch."))
    kernel = triton.bind_prefill(probe_cuda(), asked)
    seen = np.minimum(np.arange(start, start + tokens) + 1, window or start + tokens).sum()
    return seconds(lambda i: kernel(q, k, v, view, step, spec), 3), 4.0 * float(seen) * heads * dim


def sweep(shape: tuple) -> None:
    """Decode with other tiles at 16k for 1 row and 1k for 64 rows."""
    own = triton.decode_tile
    try:
        for keys in (16, 32, 64):
            for warps in (4, 8):
                for stages in (2, 3, 4):
                    tile = triton.Tile(16, keys, warps, stages, 0)
                    triton.decode_tile = lambda dim, wide, room, tile=tile: tile
                    try:
                        shares = [size / times[KERNELS[0]] / PEAK for times, size in (
                            decode(shape, rows, context, 40960, kernels=KERNELS[:1])
                            for rows, context in ((1, 16384), (64, 1024)))]  # fmt: skip
                    except Exception as error:  # a tile that does not fit: the next
                        print(f"  {keys} keys, {warps} warps, {stages} stages: {type(error).__name__}")
                        continue
                    print(
                        f"  {keys} keys, {warps} warps, {stages} stages: {shares[0]:.0%} (1 row), {shares[1]:.0%} (64)"
                    )
    finally:
        triton.decode_tile = own


def report(what: str, times: dict[str, float], size: float) -> None:
    figures = (
        f"{name} {time * 1e6:8.1f} us {size / time / 1e9:5.0f} GB/s {size / time / PEAK:5.0%}"
        for name, time in times.items()
    )
    print(f"  decode {what}: {'; '.join(figures)}", flush=True)


def report_decode(shape: tuple, longest: int) -> None:
    """Decode of few and many rows, short and long."""
    for kv in (torch.bfloat16, torch.float8_e5m2):
        for context in (1024, 16384):
            for rows in (1, 8, 32, 64):
                if rows * context * shape[2] * shape[3] * 4 <= 12e9:
                    report(f"{rows:2} x {context:5}, {kv}", *decode(shape, rows, context, longest, kv=kv))
    report("8 x 2048, 4 wide", *decode(shape, 8, 2048, longest, width=4))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true", help="decode with other tiles")
    parser.add_argument("--prefill", action="store_true", help="chunks alone")
    parser.add_argument("--longest", type=int, default=40960, help="positions that the tables have columns for")
    arguments = parser.parse_args()
    attention_few.LEAST_STREAMS = 0  # of few rows too, which it leaves to Triton's
    for shape in SHAPES:
        print(f"{shape[0]}: {shape[1]} heads, {shape[2]} kv heads of {shape[3]}, window {shape[4]}", flush=True)
        if arguments.sweep:
            sweep(shape)
            continue
        if not arguments.prefill:
            report_decode(shape, arguments.longest)
        for kv in (torch.bfloat16, torch.float8_e5m2, torch.float8_e4m3fn):
            for tokens, start in ((8192, 0), (8192, 8192), (64, 500)):
                time, work = prefill(shape, tokens, start, kv)
                rate = f"{time * 1e3:7.3f} ms {work / time / 1e12:5.0f} TFLOP/s"
                print(f"  prefill {tokens} after {start}, {kv}: {rate}", flush=True)


if __name__ == "__main__":
    main()
