"""Gated DeltaNet of chunk rows, 64 tokens at a time: `ops.gated_delta.chunked` as four kernels.

1. mix: convolution and silu of q, k and v, rounded to the type of activations, and 1 / length of each q and k.
2. solve: for each 64 tokens and value head T = (I + strictly lower(beta K K^T D))^-1 diag(beta), A = lower(Q K^T D)
   and the running sum G of decays: all that does not need the state.
3. scan: from 64 to 64 tokens, delta = T (V - e^G K S), out = e^G Q S + A delta and
   S = e^last S + K^T (e^(last - G) delta).
4. gate: the gated norm, which needs all of a head's columns where the scan has a block of them.

T comes from blocked forward substitution: the four diagonal blocks of 16 rows are inverted together, row by row, in
fp32; with B their inverses and N = B times what is left of them, T = (I - N)(I + N^2) B, for N^4 = 0. N has solved rows
only, so its powers do not grow as those of the whole system do when keys repeat.

16-bit activations do not make 16-bit sums: q and k enter dots as they are and their lengths as factors of rows; T, A, S
and delta, which are not of that type, as a rounded part and what it lacks. With parts left out, outputs of keys that
repeat are off by half their size: T is large then, and its terms cancel.
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
from offroad.triton_kernels.delta import HOPPER, OTHERS, Tiles
from offroad.triton_kernels.kv_rows import LISTS

GATED = 16  # tokens of a program of the gate


@triton.jit(do_not_specialize=["first"], do_not_specialize_on_alignment=LISTS)
def mix_kernel(
    qkvz, ring, slots, starts, widths, offsets, taps, mixed, lengths, first, stride, ring_slot, ring_stride, capacity,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BACK: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (c, h, r): tokens [c CHUNK, (c + 1) CHUNK) of row first + r in head h: queries, then keys, then values.
    `lengths` fp32 [tokens, 2 KEY_HEADS] gets what queries (times DK^-0.5) and keys are to be multiplied by."""
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
        rounded = (total * tl.sigmoid(total)).to(kind)
        if key:
            total = rounded.to(tl.float32)
            scale = tl.rsqrt(tl.sum(total * total, axis=1) + 1e-6) * tl.where(head < KEY_HEADS, DK**-0.5, 1.0)
            tl.store(lengths + (offset + t) * (2 * KEY_HEADS) + head, scale, mask=t < width)
        channels: tl.constexpr = 2 * KEY_HEADS * DK + HEADS * DV
        tl.store(mixed + (offset + t)[:, None] * channels + at[None], rounded, mask=live)


@triton.jit
def _parts(x, kind: tl.constexpr):
    """fp32 numbers rounded to a type, and what that lacks."""
    rounded = x.to(kind)
    return rounded, (x - rounded.to(tl.float32)).to(kind)


@triton.jit
def _dot(a, x, SPLIT: tl.constexpr):
    """a x in fp32, of a as it is and fp32 x."""
    if SPLIT:
        high, low = _parts(x, a.dtype)
        return tl.dot(a, high, tl.dot(a, low))
    else:
        return tl.dot(a, x, input_precision="ieee")


@triton.jit
def _product(a, x, kind: tl.constexpr, SPLIT: tl.constexpr):
    """a x in fp32, of two fp32 matrices."""
    if SPLIT:
        high, low = _parts(a, kind)
        x_high, x_low = _parts(x, kind)
        return tl.dot(high, x_high, tl.dot(low, x_high, tl.dot(high, x_low)))
    else:
        return tl.dot(a, x, input_precision="ieee")


@triton.jit
def _inverse(system, rows, columns, SIZE: tl.constexpr, kind: tl.constexpr, SPLIT: tl.constexpr):
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
    n = _product(inverse, tl.where(same, 0.0, system), kind, SPLIT)
    square = _product(n, n, kind, SPLIT)
    powers = square - n - _product(n, square, kind, SPLIT)
    return inverse + _product(powers, inverse, kind, SPLIT)


@triton.jit
def _dot_parts(place, lacking, live, x, SPLIT: tl.constexpr):
    """a x in fp32, of a matrix whose parts lie at `place` and `lacking` elements further."""
    high = tl.load(place, mask=live, other=0.0)
    if SPLIT:
        low = tl.load(place + lacking, mask=live, other=0.0)
        x_high, x_low = _parts(x, high.dtype)
        return tl.dot(high, x_high, tl.dot(high, x_low, tl.dot(low, x_high)))
    else:
        return tl.dot(high, x, input_precision="ieee")


@triton.jit
def _store_parts(place, lacking, live, x, SPLIT: tl.constexpr):
    """Stores fp32 x as `_dot_parts` reads it."""
    high, low = _parts(x, place.dtype.element_ty)
    tl.store(place, high, mask=live)
    if SPLIT:
        tl.store(place + lacking, low, mask=live)


@triton.jit(do_not_specialize=["first"], do_not_specialize_on_alignment=LISTS)
def solve_kernel(
    mixed, lengths, ba, widths, offsets, a_log, dt_bias, solved, scores, sums, first, ba_stride, lacking,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    CHUNK: tl.constexpr, K: tl.constexpr, PART: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Program (c, h, r): T and A [parts, tokens, HEADS, CHUNK] and G [tokens, HEADS] of a chunk of row first + r in
    head h; `lacking` elements lie between parts. PART dims of keys at once."""
    chunk = tl.program_id(0)
    head = tl.program_id(1)
    row = first + tl.program_id(2)
    width = tl.load(widths + row)
    if chunk * CHUNK < width:
        begin = tl.load(offsets + row).to(tl.int64) + chunk * CHUNK
        token = begin + tl.arange(0, CHUNK)
        live = chunk * CHUNK + tl.arange(0, CHUNK) < width
        beta = tl.sigmoid(tl.load(ba + token * ba_stride + head, mask=live, other=0.0).to(tl.float32))
        beta = tl.where(live, beta, 0.0)
        x = tl.load(ba + token * ba_stride + HEADS + head, mask=live, other=0.0).to(tl.float32)
        x += tl.load(dt_bias + head)
        softplus = tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))
        total = tl.cumsum(tl.where(live, -tl.exp(tl.load(a_log + head)) * softplus, 0.0), axis=0)
        tl.store(sums + token * HEADS + head, total, mask=live)
        channels: tl.constexpr = 2 * KEY_HEADS * DK + HEADS * DV
        inside = tl.zeros((CHUNK, CHUNK), tl.float32)
        system = tl.zeros((CHUNK, CHUNK), tl.float32)
        for part in tl.static_range(0, K, PART):
            key = part + tl.arange(0, PART)
            place = mixed + begin * channels + head // (HEADS // KEY_HEADS) * DK
            place += tl.arange(0, CHUNK)[:, None] * channels + key[None]
            there = live[:, None] & (key < DK)[None]
            q = tl.load(place, mask=there, other=0.0)
            k = tl.load(place + KEY_HEADS * DK, mask=there, other=0.0)
            inside = tl.dot(q, tl.trans(k), inside, input_precision="ieee")
            system = tl.dot(k, tl.trans(k), system, input_precision="ieee")
        rows = tl.arange(0, CHUNK)[:, None]
        columns = tl.arange(0, CHUNK)[None]
        between = tl.exp(tl.where(rows >= columns, total[:, None] - total[None], float("-inf")))
        length = lengths + token * (2 * KEY_HEADS) + head // (HEADS // KEY_HEADS)
        q_scale = tl.load(length, mask=live, other=0.0)
        k_scale = tl.load(length + KEY_HEADS, mask=live, other=0.0)
        between *= k_scale[None]
        at = rows * (HEADS * CHUNK) + columns  # from the chunk's first token on
        scores += (begin * HEADS + head) * CHUNK
        solved += (begin * HEADS + head) * CHUNK
        _store_parts(scores + at, lacking, live[:, None], inside * between * q_scale[:, None], SPLIT)
        system = tl.where(rows > columns, system * between * (beta * k_scale)[:, None], 0.0)
        inverse = _inverse(system, rows, columns, CHUNK, mixed.dtype.element_ty, SPLIT)
        _store_parts(solved + at, lacking, live[:, None], inverse * beta[None], SPLIT)


@triton.jit(do_not_specialize=["first"], do_not_specialize_on_alignment=LISTS)
def scan_kernel(
    mixed, lengths, solved, scores, sums, states, boundaries, slots, starts, widths, offsets, out, first, lacking,
    state_slot, state_stride, capacity,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, CHUNK: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, SPLIT: tl.constexpr, EMIT: tl.constexpr,
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
        total = tl.load(sums + token * HEADS + head, mask=live, other=0.0)
        end = tl.minimum(width, (chunk + 1) * CHUNK) - 1
        last = tl.load(sums + (offset + end) * HEADS + head)
        length = lengths + token * (2 * KEY_HEADS) + head // (HEADS // KEY_HEADS)
        q_scale = tl.load(length, mask=live, other=0.0) * tl.exp(total)
        k_scale = tl.load(length + KEY_HEADS, mask=live, other=0.0)
        rest = v.to(tl.float32) - (k_scale * tl.exp(total))[:, None] * _dot(k, state, SPLIT)
        delta = _dot_parts(solved + square, lacking, live[:, None], rest, SPLIT)
        y = q_scale[:, None] * _dot(q, state, SPLIT)
        y += _dot_parts(scores + square, lacking, live[:, None], delta, SPLIT)
        # What is not there has a key of 0 and must not overflow.
        left = delta * (k_scale * tl.exp(tl.where(live, last - total, 0.0)))[:, None]
        state = state * tl.exp(last) + _dot(tl.trans(k), left, SPLIT)
        tl.store(out + token[:, None] * (HEADS * DV) + head * DV + value[None], y.to(kind), mask=live_value)
        if EMIT > 0:
            index = (tl.program_id(2).to(tl.int64) * EMIT + chunk) * HEADS + head
            place = boundaries + index * (DK * DV) + inner
            tl.store(place, state.to(boundaries.dtype.element_ty), mask=live_state)
    after = (start + width + capacity - 1) % capacity * state_stride
    tl.store(states + after + inner, state.to(states.dtype.element_ty), mask=live_state & (width > 0))


@triton.jit(do_not_specialize=["first", "tokens"])
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
    tiles: Tiles,
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
    lengths = torch.empty((tokens, 2 * spec.key_heads), dtype=torch.float32, device=device)
    split = kind != torch.float32
    shape = (1 + split, tokens, spec.value_heads, CHUNK)
    solved, scores = (torch.empty(shape, dtype=kind, device=device) for _ in range(2))
    sums = torch.empty((tokens, spec.value_heads), dtype=torch.float32, device=device)
    dims = (spec.key_heads, spec.value_heads, spec.key_dim, spec.value_dim)
    k, v = (max(16, triton.next_power_of_2(size)) for size in dims[2:])
    chunks, ring, kept = triton.cdiv(longest, CHUNK), conv.data, state.data
    mix_kernel[(chunks, 2 * spec.key_heads + spec.value_heads, count)](
        qkvz, ring, rows.slot_t, rows.start_t, rows.width_t, rows.offset_t, weights.conv, mixed, lengths, first,
        qkvz.stride(0), ring.stride(0), ring.stride(1), conv.capacity, *dims, spec.kernel - 1, CHUNK, max(k, v),
        num_warps=8,
    )  # fmt: skip
    solve_kernel[(chunks, spec.value_heads, count)](
        mixed, lengths, ba, rows.width_t, rows.offset_t, weights.a_log, weights.dt_bias, solved, scores, sums, first,
        ba.stride(0), solved.stride(0), *dims, CHUNK, k, min(k, tiles.solve_keys), split, num_warps=tiles.solve_warps,
        num_stages=1,
    )  # fmt: skip
    block = min(tiles.values, v)
    scan_kernel[(triton.cdiv(spec.value_dim, block), spec.value_heads, count)](
        mixed, lengths, solved, scores, sums, kept, boundaries, rows.slot_t, rows.start_t, rows.width_t, rows.offset_t,
        out, first, solved.stride(0), kept.stride(0), kept.stride(1), state.capacity, *dims, CHUNK, k, block, split,
        0 if boundaries is None else boundaries.shape[1], num_warps=tiles.warps,
        num_stages=tiles.stages,
    )  # fmt: skip
    gate_kernel[(triton.cdiv(tokens - done, GATED), spec.value_heads)](
        out, qkvz, weights.norm, done, tokens - done, qkvz.stride(0), spec.channels, eps, spec.value_heads,
        spec.value_dim, spec.gate == "silu", GATED, v, num_warps=4,
    )  # fmt: skip


def variants() -> Iterator[Variant]:
    """Qwen3.5-27B."""
    kinds = dict.fromkeys(("qkvz", "ba", "ring", "mixed", "solved", "scores", "out"), "*bf16")
    kinds |= dict.fromkeys(("slots", "starts", "widths", "offsets"), "*i32")
    kinds |= dict.fromkeys(("taps", "a_log", "dt_bias", "norm", "sums", "states", "boundaries", "lengths"), "*fp32")
    sizes = ("first", "stride", "ba_stride", "ring_slot", "ring_stride", "capacity", "state_slot", "state_stride")
    kinds |= dict.fromkeys((*sizes, "tokens", "channels", "lacking"), "i32") | {"eps": "fp32"}
    dims = {"KEY_HEADS": 16, "HEADS": 48, "DK": 128, "DV": 128, "CHUNK": CHUNK}
    aligned = {"qkvz", "ring", "mixed", "solved", "scores", "states", "out", "stride", "ring_slot", "ring_stride"}
    aligned |= {"state_slot", "state_stride", "channels", "lacking"}

    def variant(label: str, function, constants: dict, warps: int, stages: int = 1, **more) -> Variant:
        names = [name for name in function.arg_names if name not in constants]
        signature = {name: kinds[name] for name in names}
        near = tuple(sorted(aligned & set(names)))
        return Variant(f"gated_delta {label}", function, signature, constants, warps, stages, aligned=near, **more)

    yield variant("mix", mix_kernel, dims | {"BACK": 3, "BLOCK": 128}, 8, archs=(80, 90, 120))
    gate = {"HEADS": 48, "DV": 128, "SILU": True, "TOKENS": GATED, "V": 128}
    yield variant("gate", gate_kernel, gate, 4, archs=(80, 90, 120))
    for tiles, archs in ((HOPPER, (90,)), (OTHERS, (80, 100, 120))):
        yield variant(
            "solve",
            solve_kernel,
            dims | {"K": 128, "PART": tiles.solve_keys, "SPLIT": True},
            tiles.solve_warps,
            archs=archs,
        )
        scan = dims | {"K": 128, "V": tiles.values, "SPLIT": True, "EMIT": 0}
        yield variant("scan", scan_kernel, scan, tiles.warps, tiles.stages, archs=archs)
