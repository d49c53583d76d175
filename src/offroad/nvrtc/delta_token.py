"""Gated DeltaNet of rows of one token over replayed states: what kernels/delta_token.cu is specialised by, and how it
is launched."""

from __future__ import annotations

import torch

from offroad.models.spec import GatedDeltaSpec
from offroad.nvrtc import launch
from offroad.nvrtc.compile import Source
from offroad.nvrtc.hopper import DIM
from offroad.nvrtc.linear_args import TARGET
from offroad.ops.gated_delta import DeltaWeights
from offroad.run.rows import ReplayView, RingView, Rows
from offroad.triton_kernels.dependent import launching

ARGS = "@17Q5q3if"  # `Args` of the kernel
WARPS = 8


def source(lag: int, silu: bool) -> Source:
    """For up to `lag` records behind a state."""
    floats = 2 * DIM + 2 * WARPS * DIM + 2 * lag * DIM + 3 * lag + WARPS + 4 + 1
    return Source("delta_token.cu", (("LAG", lag), ("SILU", int(silu))), 4 * floats, TARGET)


def takes(view: ReplayView) -> bool:
    """Whether rows have one token, and the records of each a warp of its own."""
    return view.capacity - view.lag == 1 and view.lag <= WARPS and view.state.dtype == torch.float32


def single(
    qkvz: torch.Tensor,
    ba: torch.Tensor,
    conv: RingView,
    view: ReplayView,
    rows: Rows,
    spec: GatedDeltaSpec,
    weights: DeltaWeights,
    eps: float,
    out: torch.Tensor,
) -> None:
    """Writes the verify rows' part of `out`, their records and their columns; `takes` the view."""
    ring, state = conv.data, view.state
    tensors = (
        *(qkvz, ba, ring, state, view.key, view.delta, view.decay, view.base),
        *(rows.slot_t, rows.start_t, rows.width_t, rows.offset_t),
        *(weights.conv, weights.a_log, weights.dt_bias, weights.norm, out),
    )
    made = source(view.lag, spec.gate == "silu")
    if qkvz.device.type == "meta":
        launch.rehearse(made, "token", ARGS)
        return
    launch.load(made, "token", ARGS).launch(
        (spec.value_heads, rows.verify, 1),
        32 * WARPS,
        *(tensor.data_ptr() for tensor in tensors),
        *(qkvz.stride(0), ba.stride(0), ring.stride(0), ring.stride(1), state.stride(0)),
        *(conv.capacity, spec.value_heads, spec.value_heads // spec.key_heads),
        eps,
        early=launching(qkvz.shape[0])["PDL"],
    )
