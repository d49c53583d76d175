"""Gated DeltaNet of verify rows: convolution, gates, recurrence and gated norm of a value head in one program.

A program holds the whole state [key_dim, value_dim] of its head in registers: sums over key_dim are in a thread, the
gated norm needs no other program, and a state is read once and written once a token, which is all the traffic there is.
The convolution of a key head is computed again by each of its value heads, so no program may store columns that another
still reads: `store_columns_kernel` does so afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from offroad.models.spec import GatedDeltaSpec
from offroad.ops.gated_delta import DeltaWeights
from offroad.run.rows import RingView, Rows
from offroad.triton_kernels import delta_chunk_jit
from offroad.triton_kernels.compile import Variant
from offroad.triton_kernels.delta import Tiles
from offroad.triton_kernels.dependent import launching, take_turn, wait_turn
from offroad.triton_kernels.kv_rows import LISTS

COLUMNS = 1024  # columns of a program that stores them


@triton.jit
def _column(
    raw, ring, taps, at, live, t, offset, start, stride, ring_stride, capacity, BACK: tl.constexpr
):  # fmt: skip
    """silu(convolution) of token t of a row at columns `at`, rounded to raw's type, in fp32. `ring` is the slot's."""
    kind = raw.dtype.element_ty
    total = tl.zeros(at.shape, tl.float32)
    for tap in tl.static_range(BACK + 1):
        behind = t - (BACK - tap)
        position = start + behind
        new = tl.load(raw + (offset + behind) * stride + at, mask=live & (behind >= 0), other=0.0)
        kept = live & (behind < 0) & (position >= 0)
        old = tl.load(ring + (position % capacity) * ring_stride + at, mask=kept, other=0.0).to(kind)
        weight = tl.load(taps + at * (BACK + 1) + tap, mask=live, other=0.0)
        total += (new.to(tl.float32) + old.to(tl.float32)) * weight
    return (total * tl.sigmoid(total)).to(kind).to(tl.float32)


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
    live_key, live_value = key < DK, value < DV
    width_of_keys: tl.constexpr = HEADS // GROUP * DK
    q_at = head // GROUP * DK + key
    v_at = 2 * width_of_keys + head * DV + value
    ring += slot * ring_slot
    inner = key[:, None] * DV + value[None]
    live = live_key[:, None] & live_value[None]
    states += slot * state_slot + head * (DK * DV)
    before = (start + state_capacity - 1) % state_capacity * state_stride
    state = tl.load(states + before + inner, mask=live & (start > 0), other=0.0).to(tl.float32)
    rate = -tl.exp(tl.load(a_log + head))
    bias = tl.load(dt_bias + head)
    weight = tl.load(norm + value, mask=live_value, other=0.0)
    for t in range(width):
        q = _column(qkvz, ring, taps, q_at, live_key, t, offset, start, stride, ring_stride, capacity, BACK)
        k = _column(
            qkvz, ring, taps, width_of_keys + q_at, live_key, t, offset, start, stride, ring_stride, capacity, BACK
        )
        v = _column(qkvz, ring, taps, v_at, live_value, t, offset, start, stride, ring_stride, capacity, BACK)
        q *= tl.rsqrt(tl.sum(q * q, axis=0) + 1e-6) * (DK**-0.5)
        k *= tl.rsqrt(tl.sum(k * k, axis=0) + 1e-6)
        token = offset + t
        beta = tl.sigmoid(tl.load(ba + token * ba_stride + head).to(tl.float32))
        x = tl.load(ba + token * ba_stride + HEADS + head).to(tl.float32) + bias
        softplus = tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))
        state *= tl.exp(rate * softplus)
        delta = (v - tl.sum(state * k[:, None], axis=0)) * beta
        state += k[:, None] * delta[None]
        place = (start + t) % state_capacity * state_stride
        tl.store(states + place + inner, state.to(states.dtype.element_ty), mask=live)
        y = tl.sum(state * q[:, None], axis=0).to(out.dtype.element_ty).to(tl.float32)
        y *= tl.rsqrt(tl.sum(y * y, axis=0) / DV + eps)
        y = y.to(out.dtype.element_ty).to(tl.float32) * weight
        z_at = 2 * width_of_keys + (HEADS + head) * DV + value
        z = tl.load(qkvz + token * stride + z_at, mask=live_value, other=0.0).to(tl.float32)
        y *= tl.sigmoid(z) * (z if SILU else 1.0)
        tl.store(out + token * (HEADS * DV) + head * DV + value, y.to(out.dtype.element_ty), mask=live_value)


@triton.jit(do_not_specialize_on_alignment=LISTS)
def store_columns_kernel(
    qkvz, ring, slots, starts, widths, offsets, stride, ring_slot, ring_stride, channels,
    CAPACITY: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (r, c): the newest raw columns of row r, as many as the ring has room for, in a block of channels."""
    take_turn(PDL)
    row = tl.program_id(0)
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
    state: RingView,
    rows: Rows,
    spec: GatedDeltaSpec,
    weights: DeltaWeights,
    eps: float,
    tiles: Tiles,
) -> torch.Tensor:
    """The contract of `ops.gated_delta.gated_delta`. The grid of verify rows is a matter of their number alone."""
    qkvz, ba = (t if t.stride(1) == 1 else t.contiguous() for t in (qkvz, ba))
    out = torch.empty((qkvz.shape[0], spec.value_width), dtype=qkvz.dtype, device=qkvz.device)
    count = len(rows.slot)
    places = (rows.slot_t, rows.start_t, rows.width_t, rows.offset_t)
    ring, kept = conv.data, state.data
    if rows.verify:
        step_kernel[(rows.verify, spec.value_heads)](
            qkvz, ba, ring, kept, *places, weights.conv, weights.a_log, weights.dt_bias, weights.norm, out,
            qkvz.stride(0), ba.stride(0), ring.stride(0), ring.stride(1), conv.capacity,
            kept.stride(0), kept.stride(1), state.capacity, eps,
            spec.value_heads, spec.value_heads // spec.key_heads, spec.key_dim, spec.value_dim, spec.kernel - 1,
            spec.gate == "silu", triton.next_power_of_2(spec.key_dim), triton.next_power_of_2(spec.value_dim),
            num_warps=4, **launching(qkvz.shape[0]),
        )  # fmt: skip
    if rows.verify < count:
        delta_chunk_jit.gated_delta(qkvz, ba, conv, state, rows, spec, weights, eps, out, tiles)
    if count and conv.capacity:
        store_columns_kernel[(count, triton.cdiv(spec.channels, COLUMNS))](
            qkvz, ring, *places, qkvz.stride(0), ring.stride(0), ring.stride(1), spec.channels, conv.capacity, COLUMNS,
            **launching(qkvz.shape[0]),
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
    for archs in ((80, 90), (100, 120)):  # the latter spill a few registers: the state alone takes half of them
        hot = 90 in archs
        yield Variant("gated_delta step", step_kernel, kinds, constants, aligned=aligned, archs=archs, hot=hot)
    names = ("qkvz", "ring", "slots", "starts", "widths", "offsets", "stride", "ring_slot", "ring_stride")
    columns = {name: kinds[name] for name in names} | {"channels": "i32"}
    yield Variant("gated_delta columns", store_columns_kernel, columns, {"CAPACITY": 3, "BLOCK": COLUMNS}, archs=(90,))
