"""Microseconds and GB/s of the kernels other than attention and linears, at the shapes of Qwen3.5-27B and Gemma-4-31B.

    python benchmarks/kernels_rows.py [--tokens 1 8 64 8192] [--tune]

Decode shapes are timed as replays of a graph of 20 calls, on inputs that do not stay in the L2 cache where they are
large; GB/s counts what has to be read and written. `--tune` times the prefill of Gated DeltaNet over tile sizes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from itertools import product

import numpy as np
import torch

from offroad.device.profile import DeviceProfile, load_profile
from offroad.models.spec import AttentionSpec, GatedDeltaSpec, RopeSpec
from offroad.ops.gated_delta import DeltaWeights
from offroad.ops.registry import default_registry
from offroad.ops.rope import rope_table
from offroad.ops.spec import Problem
from offroad.quant.packed import Packed
from offroad.run.rows import RingView, Rows

BF16, EPS, CALLS = torch.bfloat16, 1e-6, 20
DELTA = GatedDeltaSpec(16, 48, 128, 128, 4)
QWEN = AttentionSpec(24, 4, 256, 1.0, RopeSpec(64, 1e7, sections=(11, 10)), qk_norm=True, output_gate=True)
LOCAL = AttentionSpec(32, 16, 256, 1.0, RopeSpec(256, 1e4), qk_norm=True, v_norm=True)
GLOBAL = AttentionSpec(32, 4, 512, 1.0, RopeSpec(512, 1e6), qk_norm=True, v_norm=True, k_eq_v=True)


def microseconds(call: Callable[[], object], captured: bool = True) -> float:
    """Of one call: the median of 10 timings of `CALLS` calls, captured as a graph or (what reads on the host) not."""
    for _ in range(3):
        call()
    run: Callable[[], object] = lambda: [call() for _ in range(CALLS)]  # noqa: E731
    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        run = graph.replay
    times = []
    for _ in range(10):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / CALLS)
    return float(np.median(times))


def normal(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype)


def kernel(op: str, device: DeviceProfile) -> Callable[..., object]:
    return default_registry().kernels[f"triton.{op}"].prepare(device, Problem(op, "decode", "bfloat16"))


def rows_of(count: int, width: int, start: int, verify: bool) -> Rows:
    """`count` rows of `width` tokens at `start`, each in a slot of its own."""
    columns = (np.arange(count), np.full(count, start), np.full(count, width), np.arange(count) * width)
    arrays = [column.astype(np.int32) for column in columns]
    ids = torch.zeros(count * width, dtype=torch.int64, device="cuda")
    tensors = [torch.from_numpy(array).cuda() for array in arrays]
    return Rows(ids, ids, *arrays, *tensors, count if verify else 0, ids[:0], arrays[0])


def delta(device: DeviceProfile, rows: Rows, k: int = 0, **options) -> Callable[[], object]:
    """A call of Gated DeltaNet over rows, with rings of random numbers."""
    spec, slots = DELTA, len(rows.slot)
    weights = DeltaWeights(
        normal(spec.channels, 4, dtype=torch.float32) * 0.5,
        *(normal(spec.value_heads, dtype=torch.float32) for _ in range(2)),
        normal(spec.value_dim, dtype=torch.float32),
    )
    qkvz, ba = normal(rows.tokens, spec.channels + spec.value_width), normal(rows.tokens, 2 * spec.value_heads)
    conv = RingView(normal(slots, spec.kernel + k, spec.channels))
    state = RingView(normal(slots, 1 + k, spec.value_heads, spec.key_dim, spec.value_dim, dtype=torch.float32))
    run = kernel("gated_delta", device)
    return lambda: run(qkvz, ba, conv, state, rows, spec, weights, EPS, **options)


def elementwise(device: DeviceProfile, tokens: int) -> Iterator[tuple[str, Callable[[], object], int]]:
    """(what, a call, bytes read and written)."""
    for name, hidden in (("27B", 5120), ("31B", 5376)):
        x, residual, weight = normal(tokens, hidden), normal(tokens, hidden), normal(hidden, dtype=torch.float32)
        one, run = tokens * hidden * 2, {op: kernel(op, device) for op in ("norm", "add_norm", "sandwich_norm")}
        yield f"norm {name}", lambda x=x, w=weight, f=run["norm"]: f(x, w, EPS), 2 * one
        yield f"add_norm {name}", lambda x=x, r=residual, w=weight, f=run["add_norm"]: f(x, r, w, EPS), 4 * one
        call = lambda x=x, r=residual, w=weight, f=run["sandwich_norm"]: f(x, r, w, w, EPS)  # noqa: E731
        yield f"sandwich_norm {name}", call, 4 * one
    for name, size, kind in (("27B", 17408, "silu"), ("31B", 21504, "gelu_tanh")):
        gate_up, run = normal(tokens, 2 * size), kernel("gated_activation", device)
        yield f"gated_activation {name}", lambda x=gate_up, k=kind, f=run: f(x, k), 6 * tokens * size
    for name, spec in (("27B", QWEN), ("31B local", LOCAL), ("31B global", GLOBAL)):
        kv = spec.kv_heads * spec.head_dim
        qkv, weight = normal(tokens, spec.q_width + kv * (1 if spec.k_eq_v else 2)), normal(spec.head_dim).float()
        positions, table = torch.arange(tokens, device="cuda"), rope_table(spec.rope, max(tokens, 64), "cuda")
        positions = positions if spec.rope.sections is None else positions.expand(3, -1).contiguous()
        moved = 4 * tokens * (spec.heads * spec.head_dim + kv * (2 if spec.v_norm else 1))
        run = kernel("qkv_rope", device)
        call = lambda x=qkv, p=positions, t=table, s=spec, w=weight, f=run: f(x, p, t, s, w, w, EPS)  # noqa: E731
        yield f"qkv_rope {name}", call, moved
    qkv, x = normal(tokens, QWEN.q_width + 2048), normal(tokens, 6144)
    run = kernel("output_gate", device)
    yield "output_gate 27B", lambda f=run: f(x, qkv, QWEN), 6 * tokens * 6144
    table, ids = Packed("dense", 50_000, 5120, {"w": normal(50_000, 5120)}), torch.randint(50_000, (tokens,)).cuda()
    run = kernel("embed", device)
    yield "embed 27B", lambda f=run: f(ids, table, 1.0, BF16), 4 * tokens * 5120
    logits, run = normal(tokens, 256), kernel("route", device)
    yield "route 35B", lambda f=run: f(logits, 8, None), tokens * (512 + 96)


def report(name: str, tokens: int, time: float, moved: int) -> None:
    print(f"{name:28} {tokens:6} tokens {time:10.1f} us {moved / time / 1000:8.0f} GB/s", flush=True)


def tune(device: DeviceProfile) -> None:
    """Prefill of one prompt and of eight over tiles of the scan."""
    from offroad.triton_kernels.delta import Tiles

    for count, width in ((1, 8192), (8, 1024)):
        rows = rows_of(count, width, 0, verify=False)
        for values, warps, stages, solve in product((16, 32, 64), (4, 8), (1, 2, 3), (4,)):
            try:
                time = microseconds(
                    delta(device, rows, tiles=Tiles(values, warps, stages, solve, 128, 0)), captured=False
                )
            except Exception as error:  # a tile that does not fit is one of the findings
                print(f"{count} x {width} V={values} warps={warps} stages={stages}: {type(error).__name__}")
                continue
            print(f"{count} x {width} V={values} warps={warps} stages={stages}: {time:.0f} us", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 64, 8192])
    parser.add_argument("--tune", action="store_true")
    options, device = parser.parse_args(), load_profile("h100-80gb")
    if options.tune:
        tune(device)
        return
    state = DELTA.value_heads * DELTA.key_dim * DELTA.value_dim * 4
    for tokens in options.tokens:
        for name, call, moved in elementwise(device, tokens):
            report(name, tokens, microseconds(call), moved)
        if tokens <= 256:
            call = delta(device, rows_of(tokens, 1, 1, verify=True))
            report("gated_delta decode 27B", tokens, microseconds(call), 2 * tokens * state)
            call = delta(device, rows_of(tokens, 4, 1, verify=True), k=3)
            report("gated_delta verify 4 27B", 4 * tokens, microseconds(call), 5 * tokens * state)
        else:
            for count in (1, 8):
                call = delta(device, rows_of(count, tokens // count, 0, verify=False))
                moved = 2 * tokens * (DELTA.channels + 2 * DELTA.value_width)
                report(f"gated_delta prefill x{count} 27B", tokens, microseconds(call, captured=False), moved)


if __name__ == "__main__":
    main()
