"""Hopper's kernels in CUDA C++ beside Triton's, each alone, at the shapes of Qwen3.5-27B: microseconds, and GB/s of
what has to be read and written.

    python benchmarks/kernels_hopper.py [--rows 1 8 16 32 64] [--kind w4g128 w4g32 fp8]

Linears are timed over weights that do not stay in the L2 cache, gate_up with its activation; Gated DeltaNet over rows
of which an eighth folds its records at each call, as rows of a server do.
"""

from __future__ import annotations

import argparse
from functools import partial

import numpy as np
import torch
from kernels_linear import copies, microseconds, random_weight

from offroad.device.profile import load_profile
from offroad.models.spec import GatedDeltaSpec
from offroad.nvrtc import linear_by_rows
from offroad.ops.gated_delta import DeltaWeights
from offroad.ops.registry import default_registry
from offroad.ops.spec import Problem
from offroad.run.rows import ReplayView, RingView, Rows
from offroad.triton_kernels.linear_gated import fused
from offroad.triton_kernels.linear_run import run

SHAPES = {
    "gate_up": (34816, 5120),
    "down": (5120, 17408),
    "qkvz": (16384, 5120),
    "qkv": (14336, 5120),
    "out": (5120, 6144),
}
KINDS = ("w4g128", "w4g32", "fp8")
DELTA, LAG, BASE = GatedDeltaSpec(16, 48, 128, 128, 4), 8, 1000


def linears(rows: int, kind: str) -> None:
    for name, (n, k) in SHAPES.items():
        gate = "silu" if name == "gate_up" else ""
        first = random_weight(kind, n, k)
        weights = [first] + [random_weight(kind, n, k) for _ in range(copies(first.nbytes) - 1)]
        x = torch.randn(rows, k, device="cuda").bfloat16()
        triton = partial(fused, x, kind=gate) if gate else partial(run, x)
        hopper = partial(linear_by_rows.product, x, gate=gate)
        times = (microseconds([partial(call, weight=w) for w in weights]) for call in (triton, hopper))
        report(f"{name} {kind}", rows, first.nbytes, *times)


def report(name: str, rows: int, size: float, triton: float, hopper: float) -> None:
    print(
        f"{name:<20} rows {rows:>3} Triton {triton:7.1f} us, Hopper {hopper:7.1f} us ({triton / hopper:.2f}), "
        f"{size / hopper * 1e-3:5.0f} GB/s",
        flush=True,
    )


def delta(rows: int) -> None:
    device, state = load_profile("h200-141gb"), 48 * 128 * 128 * 4
    calls = {}
    for name in ("triton.gated_delta", "hopper.gated_delta"):
        kernel = default_registry().kernels[name].prepare(device, Problem("gated_delta", "decode", "bfloat16"))
        views = [rings(rows) for _ in range(2)]  # so that states are not in the L2 cache
        calls[name] = [step(kernel, view, rows, turn) for view in views for turn in range(LAG)]
    folded = rows * state * (1 + 1 / LAG)
    report("gated_delta", rows, folded, *(microseconds(made) for made in calls.values()))


def rings(slots: int) -> tuple[RingView, ReplayView]:
    """Columns and states of `slots` sequences, with records behind them."""

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda").mul_(0.01)

    conv = RingView(normal(slots, DELTA.kernel, DELTA.channels).bfloat16())
    places = (slots, LAG + 1)
    key, records = normal(*places, DELTA.key_heads, DELTA.key_dim), normal(*places, DELTA.value_heads, DELTA.value_dim)
    decay, base = -normal(*places, DELTA.value_heads).abs(), torch.full((slots,), BASE, device="cuda")
    state = normal(slots, DELTA.value_heads, DELTA.key_dim, DELTA.value_dim)
    return conv, ReplayView(state, key, records, decay, base, LAG)


def step(kernel, view: tuple[RingView, ReplayView], count: int, turn: int):
    """A call with a token for each row, whose records are 1 to LAG, another eighth of the rows at LAG each turn."""
    start = BASE + 1 + (np.arange(count) + turn) % LAG
    slot, ones, zeros = np.arange(count), np.ones(count, np.int32), np.zeros(count, np.int32)
    arrays = [slot.astype(np.int32), start.astype(np.int32), ones, slot.astype(np.int32)]
    tensors = [torch.from_numpy(array).cuda() for array in arrays]
    nothing = torch.zeros(0, dtype=torch.int64, device="cuda")
    rows = Rows(nothing, nothing, *arrays, *tensors, count, nothing, zeros)
    weights = DeltaWeights(
        torch.randn(DELTA.channels, DELTA.kernel, device="cuda"),
        *(torch.randn(size, device="cuda") for size in (DELTA.value_heads, DELTA.value_heads, DELTA.value_dim)),
    )
    qkvz = torch.randn(count, DELTA.channels + DELTA.value_width, device="cuda").bfloat16()
    ba = torch.randn(count, 2 * DELTA.value_heads, device="cuda").bfloat16()
    return lambda: kernel(qkvz, ba, *view, rows, DELTA, weights, 1e-6)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 16, 32, 64])
    parser.add_argument("--kind", nargs="+", choices=KINDS, default=["w4g128"])
    arguments = parser.parse_args()
    print(torch.cuda.get_device_name())
    for rows in arguments.rows:
        for kind in arguments.kind:
            linears(rows, kind)
        delta(rows)


if __name__ == "__main__":
    main()
