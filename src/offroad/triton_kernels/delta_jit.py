"""Gated DeltaNet of verify rows: convolution, gates, recurrence and gated norm of a value head in one program.

A program holds the whole state [key_dim, value_dim] of its head in registers: sums over key_dim are in a thread, the
gated norm needs no other program, and a state is read once and written once a token, which is all the traffic there is.
The convolution of a key head is computed again by each of its value heads; the ring has room for a step's columns
beside those that other programs still read. States that are replayed from records have a kernel of their own.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from offroad.models.spec import GatedDeltaSpec
from offroad.ops.gated_delta import DeltaWeights
from offroad.run.rows import ReplayView, RingView, Rows
from offroad.triton_kernels import delta_chunk_jit, delta_replay_jit
from offroad.triton_kernels.compile import Variant
from offroad.triton_kernels.delta import Tiles
from offroad.triton_kernels.delta_replay_jit import Single
from offroad.triton_kernels.delta_token_jit import store_token_columns, token_inputs, token_output, token_rule
from offroad.triton_kernels.dependent import launching, take_turn, wait_turn
from offroad.triton_kernels.kv_rows import LISTS

COLUMNS = 1024  # columns of a program that stores them


@triton.jit(do_not_specialize_on_alignment=LISTS)
def step_kernel(
    qkvz, ba, ring, states, slots, starts, widths, offsets, taps, a_log, dt_bias, norm, out,
    stride, ba_stride, ring_slot, ring_stride, capacity, state_slot, state_stride, state_capacity, eps,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BACK: tl.constexpr,
    SILU: tl.constexpr, K: tl.constexpr, V: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (r, h): the tokens of row r in value head h, one after another; a state is stored for each."""
    wait_turn(PDL)
    row = tl.program_id(0)
    head = tl.program_id(1)
    slot = tl.load(slots + row).to(tl.int64)
    start = tl.load(starts + row).to(tl.int64)
    offset = tl.load(offsets + row).to(tl.int64)
    width = tl.load(widths + row)
    key, value = tl.arange(0, K), tl.arange(0, V)
    ring += slot * ring_slot
    inner = key[:, None] * DV + value[None]
    live = (key < DK)[:, None] & (value < DV)[None]
    states += slot * state_slot + head * (DK * DV)
    before = (start + state_capacity - 1) % state_capacity * state_stride
    state = tl.load(states + before + inner, mask=live & (start > 0), other=0.0).to(tl.float32)
    for t in range(width):
        q, k, by_q, by_k, v, beta, decay = token_inputs(
            qkvz, ba, ring, taps, a_log, dt_bias, t, offset, start, stride, ba_stride, ring_stride, capacity, head,
            HEADS, GROUP, DK, DV, BACK, K, V,
        )  # fmt: skip
        state, _, y = token_rule(state, q, k, by_q, by_k, v, beta, decay)
        place = (start + t) % state_capacity * state_stride
        token_output(y, qkvz, norm, out, offset + t, stride, eps, head, HEADS, GROUP, DK, DV, SILU, V)
        store_token_columns(
            qkvz, ring, t, offset, start, stride, ring_stride, capacity, head, HEADS, GROUP, DK, DV, K, V
        )
        tl.store(states + place + inner, state.to(states.dtype.element_ty), mask=live)


@triton.jit(do_not_specialize_on_alignment=LISTS, do_not_specialize=["first"])
def store_columns_kernel(
    qkvz, ring, slots, starts, widths, offsets, first, stride, ring_slot, ring_stride, channels,
    CAPACITY: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (r, c): the newest raw columns of row first + r, as many as the ring has room for, in a block of
    channels."""
    take_turn(PDL)
    row = first + tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + row).to(tl.int64)
    start = tl.load(starts + row).to(tl.int64)
    offset = tl.load(offsets + row).to(tl.int64)
    width = tl.load(widths + row)
    for i in tl.static_range(CAPACITY):
        t = width - 1 - i
        live = (at < channels) & (t >= 0)
        column = tl.load(qkvz + (offset + t) * stride + at, mask=live, other=0.0)
        place = ring + slot * ring_slot + (start + t) % CAPACITY * ring_stride + at
        tl.store(place, column.to(ring.dtype.element_ty), mask=live)


def gated_delta(
    qkvz: torch.Tensor,
    ba: torch.Tensor,
    conv: RingView,
    state: RingView | ReplayView,
    rows: Rows,
    spec: GatedDeltaSpec,
    weights: DeltaWeights,
    eps: float,
    tiles: Tiles,
    single: Single | None = None,
) -> torch.Tensor:
    """The contract of `ops.gated_delta.gated_delta`. The grid of verify rows is a matter of their number alone.
    `single`: another kernel for rows of one token over replayed states."""
    qkvz, ba = (t if t.stride(1) == 1 else t.contiguous() for t in (qkvz, ba))
    out = torch.empty((qkvz.shape[0], spec.value_width), dtype=qkvz.dtype, device=qkvz.device)
    assert conv.capacity >= spec.kernel - 1 + (rows.width[: rows.verify].max() if rows.verify else 0), "columns apart"
    first, count = rows.verify, len(rows.slot)
    places = (rows.slot_t, rows.start_t, rows.width_t, rows.offset_t)
    ring = conv.data
    if isinstance(state, ReplayView):
        if first:
            delta_replay_jit.verify(qkvz, ba, conv, state, rows, spec, weights, eps, out, single)
    elif first:
        kept = state.data
        step_kernel[(rows.verify, spec.value_heads)](
            qkvz, ba, ring, kept, *places, weights.conv, weights.a_log, weights.dt_bias, weights.norm, out,
            qkvz.stride(0), ba.stride(0), ring.stride(0), ring.stride(1), conv.capacity,
            kept.stride(0), kept.stride(1), state.capacity, eps,
            spec.value_heads, spec.value_heads // spec.key_heads, spec.key_dim, spec.value_dim, spec.kernel - 1,
            spec.gate == "silu", triton.next_power_of_2(spec.key_dim), triton.next_power_of_2(spec.value_dim),
            num_warps=4, **launching(qkvz.shape[0]),
        )  # fmt: skip
    if first < count:
        if isinstance(state, ReplayView):
            state = delta_replay_jit.fold_chunks(state, rows)
        delta_chunk_jit.gated_delta(qkvz, ba, conv, state, rows, spec, weights, eps, out, tiles)
        store_columns_kernel[(count - first, triton.cdiv(spec.channels, COLUMNS))](
            qkvz, ring, *places, first, qkvz.stride(0), ring.stride(0), ring.stride(1), spec.channels, conv.capacity,
            COLUMNS, **launching(qkvz.shape[0]),
        )  # fmt: skip
    return out


def variants() -> Iterator[Variant]:
    """Qwen3.5-27B, of which 35B-A3B differs by a number."""
    kinds = {"qkvz": "*bf16", "ba": "*bf16", "ring": "*bf16", "states": "*fp32", "out": "*bf16"}
    kinds |= dict.fromkeys(("slots", "starts", "widths", "offsets"), "*i32")
    kinds |= dict.fromkeys(("taps", "a_log", "dt_bias", "norm"), "*fp32") | {"eps": "fp32"}
    sizes = ("stride", "ba_stride", "ring_slot", "ring_stride", "capacity", "state_slot", "state_stride")
    kinds |= dict.fromkeys((*sizes, "state_capacity"), "i32")
    constants = {"HEADS": 48, "GROUP": 3, "DK": 128, "DV": 128, "BACK": 3, "SILU": True, "K": 128, "V": 128}
    aligned = ("qkvz", "ring", "states", "out", "stride", "ring_slot", "ring_stride", "state_slot", "state_stride")
    yield Variant("gated_delta step", step_kernel, kinds, constants, aligned=aligned, archs=(80, 90, 100, 120))
    names = ("qkvz", "ring", "slots", "starts", "widths", "offsets", "stride", "ring_slot", "ring_stride")
    columns = {name: kinds[name] for name in names} | {"channels": "i32", "first": "i32"}
    yield Variant("gated_delta columns", store_columns_kernel, columns, {"CAPACITY": 4, "BLOCK": COLUMNS}, archs=(90,))
