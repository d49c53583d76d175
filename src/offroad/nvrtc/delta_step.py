"""Gated DeltaNet of verify rows on GPUs whose blocks have room for several states: how kernels/delta_step.cu is
specialised and launched; chunks are Triton's."""

from __future__ import annotations

from functools import partial

import torch

from offroad.device.profile import DeviceProfile
from offroad.models.spec import GatedDeltaSpec
from offroad.nvrtc import launch
from offroad.nvrtc.compile import Source
from offroad.nvrtc.kernel import CudaKernel
from offroad.ops.gated_delta import DeltaWeights
from offroad.ops.spec import Bound, Problem
from offroad.run.rows import RingView, Rows

ARGS = "@15P6q5if"  # `Args` of the kernels
DIM, THREADS, RING = 128, 256, 3
MOST_ROWS = 512
SHARED = 4 * RING * (DIM * DIM + 3 * DIM + DIM // 2 + 4) + 32 + 16 * MOST_ROWS


def source(bf16: bool, taps: int, silu: bool) -> Source:
    defines = {"BF16": int(bf16), "TAPS": taps, "SILU": int(silu), "RING": RING}
    return Source("delta_step.cu", tuple(defines.items()), SHARED, headers=False)


def step(
    units: int,
    qkvz: torch.Tensor,
    ba: torch.Tensor,
    conv: RingView,
    state: RingView,
    rows: Rows,
    spec: GatedDeltaSpec,
    weights: DeltaWeights,
    eps: float,
    out: torch.Tensor,
) -> None:
    """The verify rows of `triton_kernels.delta_jit.gated_delta`, into `out`, with the columns that are kept."""
    code = source(qkvz.dtype == torch.bfloat16, spec.kernel, spec.gate == "silu")
    if qkvz.is_meta:
        launch.ahead(code, "delta_step", ARGS)
        return
    mix, kernel = (launch.load(code, name, ARGS) for name in ("delta_mix", "delta_step"))
    heads = 2 * spec.key_heads + spec.value_heads
    mixed = torch.empty(qkvz.shape[0], heads, DIM, dtype=torch.float32, device=qkvz.device)
    gates = torch.empty(qkvz.shape[0], spec.value_heads, 2, dtype=torch.float32, device=qkvz.device)
    lists = (rows.slot_t, rows.start_t, rows.width_t, rows.offset_t)
    for first in range(0, rows.verify, MOST_ROWS):
        count = min(MOST_ROWS, rows.verify - first)
        tensors = (qkvz, ba, conv.data, state.data, *(t[first:] for t in lists))
        tensors += (weights.conv, weights.a_log, weights.dt_bias, weights.norm, mixed, gates, out)
        arguments = (
            *(tensor.data_ptr() for tensor in tensors),
            *(qkvz.stride(0), ba.stride(0), *conv.data.stride()[:2], *state.data.stride()[:2]),
            *(count, spec.key_heads, spec.value_heads, conv.capacity, state.capacity, eps),
        )
        mix.launch((count, heads, 1), DIM, *arguments, dependent=True, shared=32)
        kernel.launch((min(units, count * spec.value_heads), 1, 1), THREADS, *arguments, dependent=True)


def bind(device: DeviceProfile, problem: Problem) -> Bound:
    """The op `gated_delta`."""
    from offroad.triton_kernels.delta import tiles
    from offroad.triton_kernels.delta_jit import gated_delta

    return partial(gated_delta, tiles=tiles(device, problem.dtype), step=partial(step, device.units))


def limits(problem: Problem) -> str | None:
    dims = problem.size("key_dim"), problem.size("value_dim")
    return f"is for states of {DIM} x {DIM}; asked: {dims[0]} x {dims[1]}" if dims != (DIM, DIM) else None


KERNELS = (
    CudaKernel(
        "cuda.gated_delta",
        "gated_delta",
        bind,
        limits,
        lambda problem: SHARED,
        frozenset({"silu", "sigmoid"}),
        cost=0.9,
        oldest=(8, 0),
        dtypes=frozenset({"bfloat16", "float16"}),
        reason="decode: CUDA C++, states stream through shared memory; chunks: the Triton kernel",
    ),
)
