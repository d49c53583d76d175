"""Gated DeltaNet of rows of one token over replayed states: what kernels/delta_token.cu is specialised by, and how it
is launched."""

from __future__ import annotations

import torch

from offroad.models.spec import GatedDeltaSpec
from offroad.nvrtc import launch
from offroad.nvrtc.compile import Source
from offroad.nvrtc.hopper import DIM, TAPS
from offroad.nvrtc.linear_args import TARGET
from offroad.ops.gated_delta import DeltaWeights
from offroad.run.rows import ReplayView, RingView, Rows
from offroad.triton_kernels.dependent import launching

ARGS = "@17Q5q4if4x"  # `Args` of the kernel, to its alignment
WARPS = 8  # beside the one that starts copies
STATES, SMALLS = 2, 3  # of items, that a block holds: more states have no room, more of the rest gain nothing


def source(lag: int, silu: bool) -> Source:
    """For up to `lag` records behind a state."""
    small = 4 * (2 * lag * DIM + 3 * TAPS * DIM + lag + 7) + 2 * DIM * (4 + 3 * (TAPS - 1))
    own = 4 * (2 * DIM + 2 * WARPS * DIM + 3 * lag + WARPS + 4 + 1)
    shared = STATES * 4 * DIM * DIM + SMALLS * (small + -small % 16) + own + -own % 16
    sizes = {"LAG": lag, "SILU": int(silu), "STATES": STATES, "SMALLS": SMALLS}
    return Source("delta_token.cu", tuple(sizes.items()), shared + 16 * (STATES + SMALLS), TARGET)


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
    *,
    sms: int,
) -> None:
    """Writes the verify rows' part of `out`, their records and their columns, by a block on each of `sms` at most;
    `takes` the view."""
    ring, state = conv.data, view.state
    # Copies read whole 16 bytes.
    assert not any(tensor.data_ptr() % 16 for tensor in (qkvz, ring))
    assert not any(stride % 8 for stride in (qkvz.stride(0), *ring.stride()[:2])), (qkvz.stride(), ring.stride())
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
        (min(rows.verify * spec.value_heads, sms), 1, 1),
        32 * (WARPS + 1),
        *(tensor.data_ptr() for tensor in tensors),
        *(qkvz.stride(0), ba.stride(0), ring.stride(0), ring.stride(1), state.stride(0)),
        *(conv.capacity, spec.value_heads, spec.value_heads // spec.key_heads, rows.verify),
        eps,
        early=launching(qkvz.shape[0])["PDL"],
    )
