"""Gated DeltaNet of verify rows over states that are replayed from records: see `run.rows.ReplayView`.

A decode step's time is that of its bytes, and a state that is read and written at every token is most of them for many
sequences. Here it is read at every token and written at every few. With S the state at the base, G the running sum of
the decays of n records, and g = exp(G_n) e^decay, a token's `S_p^T k` is

    g S^T k + e^decay sum_i exp(G_n - G_i) (key_i . k) delta_i

so records cost products of vectors, and no later state is made until records are folded. Where rows may have several
tokens, all make the state in registers first, by the recurrence itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from offroad.models.spec import GatedDeltaSpec
from offroad.ops.gated_delta import DeltaWeights
from offroad.run.rows import ReplayView, RingView, Rows
from offroad.triton_kernels.compile import Variant
from offroad.triton_kernels.delta_token_jit import (
    store_token_columns,
    token_inputs,
    token_output,
    token_rule,
)
from offroad.triton_kernels.dependent import launching, wait_turn
from offroad.triton_kernels.kv_rows import LISTS


@triton.jit
def _replayed(
    state, keys, deltas, decays, base, count, head,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """The state [K, V] with `count` records from `base` on folded in, one after another. Records are the slot's."""
    key, value = tl.arange(0, K), tl.arange(0, V)
    for i in range(count):
        at = (base + i) % CAPACITY
        k = tl.load(keys + at * (HEADS // GROUP * DK) + head // GROUP * DK + key, mask=key < DK, other=0.0)
        delta = tl.load(deltas + (at * HEADS + head) * DV + value, mask=value < DV, other=0.0)
        state = state * tl.exp(tl.load(decays + at * HEADS + head)) + k[:, None] * delta[None]
    return state


@triton.jit(do_not_specialize_on_alignment=LISTS)
def replay_kernel(
    qkvz, ba, ring, states, keys, deltas, decays, bases, slots, starts, widths, offsets, taps, a_log, dt_bias, norm,
    out, stride, ba_stride, ring_slot, ring_stride, capacity, state_slot, eps,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BACK: tl.constexpr,
    SILU: tl.constexpr, K: tl.constexpr, V: tl.constexpr, LAG: tl.constexpr, WIDEST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (r, h): the tokens of row r in value head h, one after another, behind the state that the records make; a
    record is stored for each token, and the state where it folds."""
    wait_turn(PDL)
    row, head = tl.program_id(0), tl.program_id(1)
    width = tl.load(widths + row)
    if width == 0:
        return
    slot, start = tl.load(slots + row).to(tl.int64), tl.load(starts + row).to(tl.int64)
    offset, base = tl.load(offsets + row).to(tl.int64), tl.load(bases + slot)
    CAPACITY: tl.constexpr = LAG + WIDEST
    KEYS: tl.constexpr = HEADS // GROUP * DK
    key, value = tl.arange(0, K), tl.arange(0, V)
    live_key, live_value = key < DK, value < DV
    inner = key[:, None] * DV + value[None]
    live = live_key[:, None] & live_value[None]
    ring += slot * ring_slot
    keys += slot * (CAPACITY * KEYS)
    deltas += slot * (CAPACITY * HEADS * DV)
    decays += slot * (CAPACITY * HEADS)
    states += slot * state_slot + head * (DK * DV)
    state = tl.load(states + inner, mask=live & (base > 0), other=0.0).to(tl.float32)
    count = (start - base).to(tl.int32)
    state = _replayed(state, keys, deltas, decays, base, count, head, HEADS, GROUP, DK, DV, K, V, CAPACITY)
    tl.store(states + inner, state.to(states.dtype.element_ty), mask=live & (count + WIDEST > LAG))
    for t in range(width):
        q, k, by_q, by_k, v, beta, step = token_inputs(
            qkvz, ba, ring, taps, a_log, dt_bias, t, offset, start, stride, ba_stride, ring_stride, capacity, head,
            HEADS, GROUP, DK, DV, BACK, K, V,
        )  # fmt: skip
        state, delta, y = token_rule(state, q, k, by_q, by_k, v, beta, step)
        place = (start + t) % CAPACITY
        first = live_key & (head % GROUP == 0)
        tl.store(keys + place * KEYS + head // GROUP * DK + key, k * by_k, mask=first)
        tl.store(deltas + (place * HEADS + head) * DV + value, delta, mask=live_value)
        tl.store(decays + place * HEADS + head, step)
        token_output(y, qkvz, norm, out, offset + t, stride, eps, head, HEADS, GROUP, DK, DV, SILU, V)
        store_token_columns(
            qkvz, ring, t, offset, start, stride, ring_stride, capacity, head, HEADS, GROUP, DK, DV, K, V
        )


@triton.jit
def _two_sums(x, y, axis: tl.constexpr):
    """Sums of both over an axis, whose threads meet once for the two."""
    return tl.split(tl.sum(tl.join(x, y), axis=axis))


@triton.jit(do_not_specialize_on_alignment=LISTS)
def single_kernel(
    qkvz, ba, ring, states, keys, deltas, decays, bases, slots, starts, widths, offsets, taps, a_log, dt_bias, norm,
    out, stride, ba_stride, ring_slot, ring_stride, capacity, state_slot, eps,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BACK: tl.constexpr,
    SILU: tl.constexpr, K: tl.constexpr, V: tl.constexpr, LAG: tl.constexpr, R: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (r, h): the one token of row r in value head h, where no step has rows of more. Loads that wait for
    nothing but the row's numbers come first; a state that is folded is so behind the token, which does not need it."""
    wait_turn(PDL)
    row, head = tl.program_id(0), tl.program_id(1)
    width = tl.load(widths + row)
    slot, start = tl.load(slots + row).to(tl.int64), tl.load(starts + row).to(tl.int64)
    offset = tl.load(offsets + row).to(tl.int64)
    if width == 0:
        return
    CAPACITY: tl.constexpr = LAG + 1
    KEYS: tl.constexpr = HEADS // GROUP * DK
    key, value, record = tl.arange(0, K), tl.arange(0, V), tl.arange(0, R)
    live_key, live_value = key < DK, value < DV
    inner = key[:, None] * DV + value[None]
    live = live_key[:, None] & live_value[None]
    states += slot * state_slot + head * (DK * DV)
    state = tl.load(states + inner, mask=live, other=0.0).to(tl.float32)
    base = tl.load(bases + slot)
    ring += slot * ring_slot
    keys += slot * (CAPACITY * KEYS) + head // GROUP * DK
    deltas += slot * (CAPACITY * HEADS * DV) + head * DV
    decays += slot * (CAPACITY * HEADS) + head
    count = (start - base).to(tl.int32)
    known = record < count
    at, place = (base + record) % CAPACITY, start % CAPACITY
    decay = tl.load(decays + at * HEADS, mask=known, other=0.0)
    key_of = tl.load(keys + at[:, None] * KEYS + key[None], mask=known[:, None] & live_key[None], other=0.0)
    q, k, by_q, by_k, v, beta, step = token_inputs(
        qkvz, ba, ring, taps, a_log, dt_bias, 0, offset, start, stride, ba_stride, ring_stride, capacity, head,
        HEADS, GROUP, DK, DV, BACK, K, V,
    )  # fmt: skip
    total = tl.sum(decay, axis=0) + step
    left = tl.where(known, tl.exp(total - tl.cumsum(decay, axis=0)), 0.0)
    near_k, near_q = _two_sums(key_of * k[None], key_of * q[None], 1)
    old_k, old_q = _two_sums(state * k[:, None], state * q[:, None], 0)
    near_k, near_q, old_k, old_q = near_k * by_k, near_q * by_q, old_k * by_k, old_q * by_q
    delta_at = deltas + at[:, None] * (HEADS * DV) + value[None]
    delta_of = tl.load(delta_at, mask=known[:, None] & live_value[None], other=0.0)
    new_k, new_q = _two_sums((near_k * left)[:, None] * delta_of, (near_q * left)[:, None] * delta_of, 0)
    further = tl.exp(total)
    # What lies there before the first fold may be anything: it is replaced, not multiplied by zero.
    delta = (v - new_k - tl.where(base > 0, old_k * further, 0.0)) * beta
    y = new_q + tl.where(base > 0, old_q * further, 0.0) + tl.sum(q * k, axis=0) * (by_q * by_k) * delta
    tl.store(keys + place * KEYS + key, k * by_k, mask=live_key & (head % GROUP == 0))
    tl.store(deltas + place * (HEADS * DV) + value, delta, mask=live_value)
    tl.store(decays + place * HEADS, step)
    store_token_columns(qkvz, ring, 0, offset, start, stride, ring_stride, capacity, head, HEADS, GROUP, DK, DV, K, V)
    token_output(y, qkvz, norm, out, offset, stride, eps, head, HEADS, GROUP, DK, DV, SILU, V)
    if count == LAG:
        state = tl.load(states + inner, mask=live & (base > 0), other=0.0).to(tl.float32) * tl.exp(total - step)
        later = total - step
        for i in tl.range(0, LAG, loop_unroll_factor=2):
            from_here = (base + i) % CAPACITY
            later -= tl.load(decays + from_here * HEADS)
            k = tl.load(keys + from_here * KEYS + key, mask=live_key, other=0.0) * tl.exp(later)
            delta = tl.load(deltas + from_here * (HEADS * DV) + value, mask=live_value, other=0.0)
            state += k[:, None] * delta[None]
        tl.store(states + inner, state.to(states.dtype.element_ty), mask=live)


@triton.jit
def _state_before(
    boundary, states, keys, deltas, decays, bases, slot, head,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """A head's state before a boundary [K, V], its places behind the slot's `states`, and which of them there are."""
    base = tl.load(bases + slot)
    key, value = tl.arange(0, K), tl.arange(0, V)
    live = (key < DK)[:, None] & (value < DV)[None]
    inner = head * (DK * DV) + key[:, None] * DV + value[None]
    state = tl.load(states + inner, mask=live & (base > 0), other=0.0).to(tl.float32)
    keys += slot * (CAPACITY * (HEADS // GROUP) * DK)
    deltas += slot * (CAPACITY * HEADS * DV)
    decays += slot * (CAPACITY * HEADS)
    count = (boundary - base).to(tl.int32)
    state = _replayed(state, keys, deltas, decays, base, count, head, HEADS, GROUP, DK, DV, K, V, CAPACITY)
    return state, inner, live


@triton.jit(do_not_specialize_on_alignment=LISTS, do_not_specialize=["first"])
def fold_kernel(
    states, keys, deltas, decays, bases, slots, starts, first, state_slot,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """Program (r, h): folds the records before row first + r in value head h, where there are any."""
    row, head = first + tl.program_id(0), tl.program_id(1)
    slot, start = tl.load(slots + row).to(tl.int64), tl.load(starts + row).to(tl.int64)
    if start == tl.load(bases + slot):
        return
    states += slot * state_slot
    state, inner, live = _state_before(
        start, states, keys, deltas, decays, bases, slot, head, HEADS, GROUP, DK, DV, K, V, CAPACITY
    )
    tl.store(states + inner, state.to(states.dtype.element_ty), mask=live)


@triton.jit(do_not_specialize=["slot", "boundary"])
def state_kernel(
    states, keys, deltas, decays, bases, out, slot, boundary, state_slot,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """Program (h): out [HEADS, DK, DV], the state of a slot before a boundary in value head h."""
    head, slot = tl.program_id(0), tl.cast(slot, tl.int64)
    states += slot * state_slot
    state, inner, live = _state_before(
        boundary, states, keys, deltas, decays, bases, slot, head, HEADS, GROUP, DK, DV, K, V, CAPACITY
    )
    tl.store(out + inner, state, mask=live)


@dataclass(frozen=True)
class Single:
    """Another kernel for rows of one token: which views it `takes`, and `run` with the arguments of `verify`."""

    takes: Callable[[ReplayView], bool]
    run: Callable[..., None]


def _sizes(view: ReplayView) -> tuple[int, ...]:
    """HEADS, GROUP, DK, DV, K, V."""
    heads, dk, dv = view.state.shape[1:]
    k, v = (max(16, triton.next_power_of_2(size)) for size in (dk, dv))  # fewer would have threads that do the same
    return heads, heads // view.key.shape[2], dk, dv, k, v


def _records(view: ReplayView) -> tuple[torch.Tensor, ...]:
    assert all(t.is_contiguous() for t in (view.key, view.delta, view.decay)), "records lie side by side"
    return view.state, view.key, view.delta, view.decay, view.base


def verify(
    qkvz: torch.Tensor,
    ba: torch.Tensor,
    conv: RingView,
    view: ReplayView,
    rows: Rows,
    spec: GatedDeltaSpec,
    weights: DeltaWeights,
    eps: float,
    out: torch.Tensor,
    single: Single | None = None,
) -> None:
    """Writes the verify rows' part of `out`, their records and their columns. `single` does so where it takes the
    view."""
    if single is not None and single.takes(view):
        single.run(qkvz, ba, conv, view, rows, spec, weights, eps, out)
        return
    ring, widest = conv.data, view.capacity - view.lag
    heads, group, dk, dv, k, v = _sizes(view)
    tensors = (
        qkvz, ba, ring, *_records(view), rows.slot_t, rows.start_t, rows.width_t, rows.offset_t, weights.conv,
        weights.a_log, weights.dt_bias, weights.norm, out,
    )  # fmt: skip
    strides = qkvz.stride(0), ba.stride(0), ring.stride(0), ring.stride(1), conv.capacity, view.state.stride(0)
    sizes = heads, group, dk, dv, spec.kernel - 1, spec.gate == "silu", k, v, view.lag
    options = launching(qkvz.shape[0])
    if widest > 1:
        replay_kernel[(rows.verify, heads)](*tensors, *strides, eps, *sizes, widest, num_warps=4, **options)
        return
    records = triton.next_power_of_2(view.lag)
    single_kernel[(rows.verify, heads)](*tensors, *strides, eps, *sizes, records, num_warps=4, **options)


def fold_chunks(view: ReplayView, rows: Rows) -> RingView:
    """Makes the states before the chunk rows' first tokens, where chunks read and leave them."""
    heads, *sizes = _sizes(view)
    fold_kernel[(len(rows.slot) - rows.verify, heads)](
        *_records(view), rows.slot_t, rows.start_t, rows.verify, view.state.stride(0), heads, *sizes, view.capacity,
        num_warps=4,
    )  # fmt: skip
    return RingView(view.state.unsqueeze(1))


def state_at(view: ReplayView, slot: int, boundary: int) -> torch.Tensor:
    """The state of a slot before a boundary, fp32 [1, heads, key_dim, value_dim]."""
    heads, *sizes = _sizes(view)
    out = torch.empty((1, *view.state.shape[1:]), dtype=torch.float32, device=view.state.device)
    state_kernel[(heads,)](
        *_records(view), out, slot, boundary, view.state.stride(0), heads, *sizes, view.capacity, num_warps=4
    )
    return out


def variants() -> Iterator[Variant]:
    """Qwen3.5-27B without drafts and with 3."""
    kinds = {"qkvz": "*bf16", "ba": "*bf16", "ring": "*bf16", "out": "*bf16", "bases": "*i64"}
    kinds |= dict.fromkeys(("slots", "starts", "widths", "offsets"), "*i32")
    kinds |= dict.fromkeys(("states", "keys", "deltas", "decays", "taps", "a_log", "dt_bias", "norm"), "*fp32")
    kinds |= dict.fromkeys(("stride", "ba_stride", "ring_slot", "ring_stride", "capacity", "state_slot"), "i32")
    kinds |= {"eps": "fp32", "slot": "i32", "boundary": "i32", "first": "i32"}
    sizes = {"HEADS": 48, "GROUP": 3, "DK": 128, "DV": 128, "K": 128, "V": 128}
    aligned = {"qkvz", "ring", "out", "states", "keys", "deltas", "decays", "stride", "ring_slot", "ring_stride"}
    aligned |= {"state_slot"}

    def variant(label: str, function, constants: dict, **more) -> Variant:
        signature = {name: kinds[name] for name in function.arg_names if name not in constants and name != "PDL"}
        return Variant(
            f"gated_delta {label}",
            function,
            signature,
            constants,
            aligned=tuple(sorted(aligned & set(signature))),
            **more,
        )

    step = sizes | {"BACK": 3, "SILU": True, "LAG": 8, "R": 8}
    archs = (80, 90, 100, 120)
    yield variant("token", single_kernel, step, archs=archs)
    drafts = {name: value for name, value in step.items() if name != "R"} | {"WIDEST": 4}
    yield variant("replayed step, 3 drafts", replay_kernel, drafts, archs=archs)
    yield variant("fold", fold_kernel, sizes | {"CAPACITY": 9}, archs=(90,))
