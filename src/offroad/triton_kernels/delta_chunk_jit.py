"""Gated DeltaNet of chunk rows, 64 tokens at a time: `ops.gated_delta.chunked` as four kernels.

1. mix: convolution, silu and unit lengths; q (times key_dim^-0.5), k and v in the type of activations.
2. solve: for each 64 tokens and value head T = (I + strictly lower(beta K K^T D))^-1 diag(beta), A = lower(Q K^T D), and
   the running sum G of decays. This is all that does not need the state.
3. scan: from 64 to 64 tokens, delta = T (V - e^G K S), out = e^G Q S + A delta, S = e^last S + K^T (e^(last - G) delta).
4. gate: the gated norm, which needs all of a head's columns where the scan has a block of them.

T comes from blocked forward substitution: the four diagonal blocks of 16 rows are inverted together, row by row, in
fp32; with B their inverses and N = B times what is left of them, T = (I - N)(I + N^2) B, for N^4 = 0. N has solved rows
only, so its powers do not grow as those of the whole system do when keys repeat.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from offroad.models.spec import GatedDeltaSpec
from offroad.ops.gated_delta import CHUNK, DeltaWeights
from offroad.run.rows import RingView, Rows
from offroad.triton_kernels.compile import Variant

VALUES = 64  # value columns of a program of the scan
GATED = 16  # tokens of a program of the gate


@triton.jit
def mix_kernel(
    qkvz, ring, slots, starts, widths, offsets, taps, mixed, first, stride, ring_slot, ring_stride, capacity,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BACK: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (c, h, r): tokens [c CHUNK, (c + 1) CHUNK) of row first + r in head h, queries first, then keys, values."""
    chunk = tl.program_id(0)
    head = tl.program_id(1)
    row = first + tl.program_id(2)
    width = tl.load(widths + row)
    if chunk * CHUNK < width:
        slot = tl.load(slots + row).to(tl.int64)
        start = tl.load(starts + row).to(tl.int64)
        offset = tl.load(offsets + row).to(tl.int64)
        key = head < 2 * KEY_HEADS
        size = tl.where(key, DK, DV)
        base = tl.where(key, head * DK, 2 * KEY_HEADS * DK + (head - 2 * KEY_HEADS) * DV)
        column = tl.arange(0, BLOCK)
        at = base + column
        t = chunk * CHUNK + tl.arange(0, CHUNK)
        live_column = (column < size)[None]
        live = (t < width)[:, None] & live_column
        kind = qkvz.dtype.element_ty
        total = tl.zeros([CHUNK, BLOCK], tl.float32)
        for tap in tl.static_range(BACK + 1):
            behind = t - (BACK - tap)
            new = live & (behind >= 0)[:, None]
            x = tl.load(qkvz + (offset + behind)[:, None] * stride + at[None], mask=new, other=0.0).to(tl.float32)
            if chunk == 0:
                position = start + behind
                old = live & ((behind < 0) & (position >= 0))[:, None]
                place = ring + slot * ring_slot + (position % capacity)[:, None] * ring_stride + at[None]
                x += tl.load(place, mask=old, other=0.0).to(kind).to(tl.float32)
            total += x * tl.load(taps + at * (BACK + 1) + tap, mask=column < size, other=0.0)[None]
        total = (total * tl.sigmoid(total)).to(kind).to(tl.float32)
        if key:
            total *= tl.rsqrt(tl.sum(total * total, axis=1) + 1e-6)[:, None]
            total *= tl.where(head < KEY_HEADS, DK**-0.5, 1.0)
        channels: tl.constexpr = 2 * KEY_HEADS * DK + HEADS * DV
        tl.store(mixed + (offset + t)[:, None] * channels + at[None], total.to(kind), mask=live)


@triton.jit
def _inverse(system, rows, columns, SIZE: tl.constexpr, PRECISION: tl.constexpr):
    """(I + system)^-1 of a strictly lower triangular system [SIZE, SIZE], fp32; `rows`, `columns` are its indices."""
    blocks: tl.constexpr = SIZE // 16
    same = (rows // 16) == (columns // 16)
    diagonal = tl.sum(tl.reshape(tl.where(same, system, 0.0), [blocks, 16, blocks, 16]), axis=2)
    i = tl.arange(0, 16)[None, :, None]
    solved = tl.where(i == tl.arange(0, 16)[None, None, :], 1.0, 0.0) + tl.zeros([blocks, 16, 16], tl.float32)
    for step in range(1, 16):
        factors = tl.sum(tl.where(i == step, diagonal, 0.0), axis=1)
        update = tl.sum(factors[:, :, None] * solved, axis=1)
        solved = tl.where(i == step, solved - update[:, None, :], solved)
    spread = tl.broadcast_to(solved[:, :, None, :], [blocks, 16, blocks, 16])
    inverse = tl.where(same, tl.reshape(spread, [SIZE, SIZE]), 0.0)
    n = tl.dot(inverse, tl.where(same, 0.0, system), input_precision=PRECISION)
    square = tl.dot(n, n, input_precision=PRECISION)
    powers = square - n - tl.dot(n, square, input_precision=PRECISION)
    return inverse + tl.dot(powers, inverse, input_precision=PRECISION)


@triton.jit
def solve_kernel(
    mixed, ba, widths, offsets, a_log, dt_bias, solved, scores, sums, first, ba_stride,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    CHUNK: tl.constexpr, K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (c, h, r): T and A [tokens, HEADS, CHUNK] and G [tokens, HEADS] of a chunk of row first + r in head h."""
    chunk = tl.program_id(0)
    head = tl.program_id(1)
    row = first + tl.program_id(2)
    width = tl.load(widths + row)
    if chunk * CHUNK < width:
        token = tl.load(offsets + row).to(tl.int64) + chunk * CHUNK + tl.arange(0, CHUNK)
        live = chunk * CHUNK + tl.arange(0, CHUNK) < width
        beta = tl.sigmoid(tl.load(ba + token * ba_stride + head, mask=live, other=0.0).to(tl.float32))
        beta = tl.where(live, beta, 0.0)
        x = tl.load(ba + token * ba_stride + HEADS + head, mask=live, other=0.0).to(tl.float32)
        x += tl.load(dt_bias + head)
        softplus = tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))
        total = tl.cumsum(tl.where(live, -tl.exp(tl.load(a_log + head)) * softplus, 0.0), axis=0)
        channels: tl.constexpr = 2 * KEY_HEADS * DK + HEADS * DV
        key = tl.arange(0, K)
        place = mixed + token[:, None] * channels + head // (HEADS // KEY_HEADS) * DK + key[None]
        there = live[:, None] & (key < DK)[None]
        q = tl.load(place, mask=there, other=0.0)
        k = tl.load(place + KEY_HEADS * DK, mask=there, other=0.0)
        rows = tl.arange(0, CHUNK)[:, None]
        columns = tl.arange(0, CHUNK)[None]
        between = tl.exp(tl.where(rows >= columns, total[:, None] - total[None], float("-inf")))
        system = tl.dot(k, tl.trans(k), input_precision=PRECISION) * between * beta[:, None]
        inverse = _inverse(tl.where(rows > columns, system, 0.0), rows, columns, CHUNK, PRECISION)
        inside = tl.dot(q, tl.trans(k), input_precision=PRECISION) * between
        at = (token[:, None] * HEADS + head) * CHUNK + columns
        tl.store(solved + at, (inverse * beta[None]).to(solved.dtype.element_ty), mask=live[:, None])
        tl.store(scores + at, inside.to(scores.dtype.element_ty), mask=live[:, None])
        tl.store(sums + token * HEADS + head, total, mask=live)


@triton.jit
def scan_kernel(
    mixed, solved, scores, sums, states, boundaries, slots, starts, widths, offsets, out, first,
    state_slot, state_stride, capacity,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, CHUNK: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, PRECISION: tl.constexpr, EMIT: tl.constexpr,
):  # fmt: skip
    """Program (v, h, r): V value columns of head h over all chunks of row first + r; leaves the last state, and with
    EMIT those behind every chunk in `boundaries` [rows, chunks, HEADS, DK, DV], whose second size is EMIT."""
    row = first + tl.program_id(2)
    head = tl.program_id(1)
    slot = tl.load(slots + row).to(tl.int64)
    start = tl.load(starts + row).to(tl.int64)
    offset = tl.load(offsets + row).to(tl.int64)
    width = tl.load(widths + row)
    key = tl.arange(0, K)
    value = tl.program_id(0) * V + tl.arange(0, V)
    kind = mixed.dtype.element_ty
    inner = key[:, None] * DV + value[None]
    live_state = (key < DK)[:, None] & (value < DV)[None]
    states += slot * state_slot + head * (DK * DV)
    before = (start + capacity - 1) % capacity * state_stride
    state = tl.load(states + before + inner, mask=live_state & (start > 0), other=0.0).to(tl.float32)
    channels: tl.constexpr = 2 * KEY_HEADS * DK + HEADS * DV
    lane = tl.arange(0, CHUNK)
    for chunk in range((width + CHUNK - 1) // CHUNK):
        live = chunk * CHUNK + lane < width
        token = offset + chunk * CHUNK + lane
        q_at = mixed + token[:, None] * channels + head // (HEADS // KEY_HEADS) * DK + key[None]
        there = live[:, None] & (key < DK)[None]
        k = tl.load(q_at + KEY_HEADS * DK, mask=there, other=0.0)
        q = tl.load(q_at, mask=there, other=0.0)
        v_at = mixed + token[:, None] * channels + 2 * KEY_HEADS * DK + head * DV + value[None]
        live_value = live[:, None] & (value < DV)[None]
        v = tl.load(v_at, mask=live_value, other=0.0)
        square = (token[:, None] * HEADS + head) * CHUNK + lane[None]
        t = tl.load(solved + square, mask=live[:, None], other=0.0)
        a = tl.load(scores + square, mask=live[:, None], other=0.0)
        total = tl.load(sums + token * HEADS + head, mask=live, other=0.0)
        end = tl.minimum(width, (chunk + 1) * CHUNK) - 1
        last = tl.load(sums + (offset + end) * HEADS + head)
        growth = tl.exp(total)[:, None]
        rounded = state.to(kind)
        rest = v.to(tl.float32) - growth * tl.dot(k, rounded, input_precision=PRECISION)
        delta = tl.dot(t, rest.to(kind), input_precision=PRECISION)
        y = growth * tl.dot(q, rounded, input_precision=PRECISION)
        y += tl.dot(a, delta.to(kind), input_precision=PRECISION)
        # What is not there has a key of 0 and must not overflow.
        left = delta * tl.exp(tl.where(live, last - total, 0.0))[:, None]
        state = state * tl.exp(last) + tl.dot(tl.trans(k), left.to(kind), input_precision=PRECISION)
        tl.store(out + token[:, None] * (HEADS * DV) + head * DV + value[None], y.to(kind), mask=live_value)
        if EMIT > 0:
            index = (tl.program_id(2).to(tl.int64) * EMIT + chunk) * HEADS + head
            place = boundaries + index * (DK * DV) + inner
            tl.store(place, state.to(boundaries.dtype.element_ty), mask=live_state)
    after = (start + width + capacity - 1) % capacity * state_stride
    tl.store(states + after + inner, state.to(states.dtype.element_ty), mask=live_state & (width > 0))


@triton.jit
def gate_kernel(
    out, qkvz, norm, first, tokens, stride, channels, eps,
    HEADS: tl.constexpr, DV: tl.constexpr, SILU: tl.constexpr, TOKENS: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """Program (i, h): the gated norm of tokens first + [i TOKENS, (i + 1) TOKENS) of head h, in place."""
    index = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    token = (first + index).to(tl.int64)[:, None]
    head = tl.program_id(1)
    value = tl.arange(0, V)
    live = (index < tokens)[:, None] & (value < DV)[None]
    kind = out.dtype.element_ty
    place = out + token * (HEADS * DV) + head * DV + value[None]
    y = tl.load(place, mask=live, other=0.0).to(tl.float32)
    y *= tl.rsqrt(tl.sum(y * y, axis=1) / DV + eps)[:, None]
    y = y.to(kind).to(tl.float32) * tl.load(norm + value, mask=value < DV, other=0.0)[None]
    z = tl.load(qkvz + token * stride + channels + head * DV + value[None], mask=live, other=0.0).to(tl.float32)
    y *= tl.sigmoid(z) * (z if SILU else 1.0)
    tl.store(place, y.to(kind), mask=live)


def gated_delta(
    qkvz: torch.Tensor,
    ba: torch.Tensor,
    conv: RingView,
    state: RingView,
    rows: Rows,
    spec: GatedDeltaSpec,
    weights: DeltaWeights,
    eps: float,
    out: torch.Tensor,
    boundaries: torch.Tensor | None = None,
) -> None:
    """Writes the chunk rows' part of `out` and their last states; columns in `conv` are read, none is stored.

    `boundaries` [chunk rows, chunks, value_heads, key_dim, value_dim], where given, gets the state behind every 64
    tokens of each row (and behind its last ones).
    """
    first, count = rows.verify, len(rows.slot) - rows.verify
    longest, done = int(rows.width[first:].max()), int(rows.offset[first])
    tokens, kind, device = qkvz.shape[0], qkvz.dtype, qkvz.device
    mixed = torch.empty((tokens, spec.channels), dtype=kind, device=device)
    solved, scores = (torch.empty((tokens, spec.value_heads, CHUNK), dtype=kind, device=device) for _ in range(2))
    sums = torch.empty((tokens, spec.value_heads), dtype=torch.float32, device=device)
    dims = (spec.key_heads, spec.value_heads, spec.key_dim, spec.value_dim)
    k, v = (max(16, triton.next_power_of_2(size)) for size in dims[2:])
    precision = "ieee" if kind == torch.float32 else "tf32"
    chunks, ring, kept = triton.cdiv(longest, CHUNK), conv.data, state.data
    mix_kernel[(chunks, 2 * spec.key_heads + spec.value_heads, count)](
        qkvz, ring, rows.slot_t, rows.start_t, rows.width_t, rows.offset_t, weights.conv, mixed, first,
        qkvz.stride(0), ring.stride(0), ring.stride(1), conv.capacity, *dims, spec.kernel - 1, CHUNK, max(k, v),
        num_warps=8,
    )  # fmt: skip
    solve_kernel[(chunks, spec.value_heads, count)](
        mixed, ba, rows.width_t, rows.offset_t, weights.a_log, weights.dt_bias, solved, scores, sums, first,
        ba.stride(0), *dims, CHUNK, k, precision, num_warps=4,
    )  # fmt: skip
    block = min(VALUES, v)
    scan_kernel[(triton.cdiv(spec.value_dim, block), spec.value_heads, count)](
        mixed, solved, scores, sums, kept, boundaries, rows.slot_t, rows.start_t, rows.width_t, rows.offset_t, out, first,
        kept.stride(0), kept.stride(1), state.capacity, *dims, CHUNK, k, block, precision,
        0 if boundaries is None else boundaries.shape[1], num_warps=4, num_stages=1,
    )  # fmt: skip
    gate_kernel[(triton.cdiv(tokens - done, GATED), spec.value_heads)](
        out, qkvz, weights.norm, done, tokens - done, qkvz.stride(0), spec.channels, eps, spec.value_heads,
        spec.value_dim, spec.gate == "silu", GATED, v, num_warps=4,
    )  # fmt: skip


def variants() -> Iterator[Variant]:
    """Qwen3.5-27B."""
    kinds = dict.fromkeys(("qkvz", "ba", "ring", "mixed", "solved", "scores", "out"), "*bf16")
    kinds |= dict.fromkeys(("slots", "starts", "widths", "offsets"), "*i32")
    kinds |= dict.fromkeys(("taps", "a_log", "dt_bias", "norm", "sums", "states", "boundaries"), "*fp32")
    sizes = ("first", "stride", "ba_stride", "ring_slot", "ring_stride", "capacity", "state_slot", "state_stride")
    kinds |= dict.fromkeys((*sizes, "tokens", "channels"), "i32") | {"eps": "fp32"}
    dims = {"KEY_HEADS": 16, "HEADS": 48, "DK": 128, "DV": 128, "CHUNK": CHUNK}
    aligned = {"qkvz", "ring", "mixed", "solved", "scores", "states", "out", "stride", "ring_slot", "ring_stride"}
    aligned |= {"state_slot", "state_stride", "channels"}

    def variant(label: str, function, constants: dict, warps: int, stages: int = 1) -> Variant:
        names = [name for name in function.arg_names if name not in constants]
        signature = {name: kinds[name] for name in names}
        near = tuple(sorted(aligned & set(names)))
        return Variant(f"gated_delta {label}", function, signature, constants, warps, stages, aligned=near)

    yield variant("mix", mix_kernel, dims | {"BACK": 3, "BLOCK": 128}, 8)
    yield variant("solve", solve_kernel, dims | {"K": 128, "PRECISION": "tf32"}, 4)
    scan = dims | {"K": 128, "V": VALUES, "PRECISION": "tf32", "EMIT": 0}
    yield variant("scan", scan_kernel, scan, 4)
    gate = {"HEADS": 48, "DV": 128, "SILU": True, "TOKENS": GATED, "V": 128}
    yield variant("gate", gate_kernel, gate, 4)
