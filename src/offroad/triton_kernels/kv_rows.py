"""Triton functions for stored rows of keys and values: how 8-bit kinds are written and read, and the store."""

import triton
import triton.language as tl

from offroad.triton_kernels.dependent import take_turn

# Arguments that lie anywhere in a step's arrays: a kernel compiled for each alignment of them would gain nothing.
LISTS = (
    "slots", "starts", "widths", "offsets", "positions", "k_scale", "v_scale", "part_max", "part_sum"
)  # fmt: skip
# Triton's names of stored kinds, as constants of kernels.
PLAIN, E5M2, E4M3 = 0, 1, 2
_E5M2: tl.constexpr = tl.constexpr(E5M2)
_E4M3: tl.constexpr = tl.constexpr(E4M3)


@triton.jit
def encode(x, MANTISSA: tl.constexpr, BIAS: tl.constexpr, LARGEST: tl.constexpr):
    """fp32 as a byte with `MANTISSA` bits of mantissa, to the nearest (ties to even), limited to LARGEST.

    By integers, since for GPUs before compute capability 9.0 Triton converts through fp16, which rounds twice.
    """
    bits = x.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    size = tl.minimum(tl.abs(x), LARGEST)
    exact = size.to(tl.int32, bitcast=True)
    DROPPED: tl.constexpr = 23 - MANTISSA
    rounded = (exact + ((1 << (DROPPED - 1)) - 1) + ((exact >> DROPPED) & 1)) >> DROPPED
    normal = rounded - ((127 - BIAS) << MANTISSA)
    # Below the least normal number codes count steps of 2^(1 - BIAS - MANTISSA): adding 2^23 rounds to a whole number.
    steps = (size * (2.0 ** (BIAS + MANTISSA - 1)) + 8388608.0).to(tl.int32, bitcast=True) - 0x4B000000
    code = tl.where(size < 2.0 ** (1 - BIAS), steps, normal)
    code = tl.where(x == x, code, 0x7F)  # not a number: it stays so
    return (code | sign).to(tl.uint8)


@triton.jit
def stored(x, scale, KIND: tl.constexpr, dtype: tl.constexpr):
    """x as it is stored: bytes for 8-bit kinds, which hold x / scale."""
    if KIND == _E5M2:
        return encode(tl.div_rn(x.to(tl.float32), scale), 2, 15, 57344.0)
    elif KIND == _E4M3:
        return encode(tl.div_rn(x.to(tl.float32), scale), 3, 7, 448.0)
    else:
        return x.to(dtype)


@triton.jit
def loaded(x, KIND: tl.constexpr, dtype: tl.constexpr):
    """A tile of stored rows in the activations' dtype, not yet multiplied by a scale."""
    if KIND == _E5M2:  # a byte is the upper half of an fp16 number
        return (x.to(tl.int16) << 8).to(tl.float16, bitcast=True).to(dtype)
    elif KIND == _E4M3:
        return x.to(tl.float8e4nv, bitcast=True).to(dtype)
    else:
        return x.to(dtype)


@triton.jit(do_not_specialize_on_alignment=LISTS)
def store_rows(
    k, v, k_pages, v_pages, k_fresh, v_fresh, table, slots, starts, widths, offsets, k_scale, v_scale,
    k_stride, v_stride, table_stride,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr,
    KIND: tl.constexpr, SCALED: tl.constexpr, PAGES: tl.constexpr, FRESH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Writes a step's rows to pages where the table has a block above 0 (PAGES), and as they are stored there to
    `k_fresh`, `v_fresh` [tokens, kv_heads, dim] (FRESH). Grid (rows, tiles of TOKENS, kv_heads)."""
    take_turn(PDL)
    row, head = tl.program_id(0), tl.program_id(2)
    number = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    live = number < tl.load(widths + row)
    token = (tl.load(offsets + row) + number).to(tl.int64)
    position = tl.load(starts + row) + number
    columns = table + tl.load(slots + row).to(tl.int64) * table_stride + position // BLOCK
    block = tl.load(columns, mask=live, other=0).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    inside = live[:, None] & (d < DIM)[None]
    own = head * DIM + d
    k_row = tl.load(k + token[:, None] * k_stride + own[None], mask=inside, other=0)
    v_row = tl.load(v + token[:, None] * v_stride + own[None], mask=inside, other=0)
    by_k, by_v = 1.0, 1.0
    if SCALED:
        by_k, by_v = tl.load(k_scale + head), tl.load(v_scale + head)
    k_row = stored(k_row, by_k, KIND, k_pages.dtype.element_ty)
    v_row = stored(v_row, by_v, KIND, v_pages.dtype.element_ty)
    if PAGES:
        to = (block * BLOCK + position % BLOCK)[:, None] * (KV_HEADS * DIM) + own[None]
        placed = inside & (block > 0)[:, None]
        tl.store(k_pages + to, k_row, mask=placed)
        tl.store(v_pages + to, v_row, mask=placed)
    if FRESH:
        to = token[:, None] * (KV_HEADS * DIM) + own[None]
        tl.store(k_fresh + to, k_row, mask=inside)
        tl.store(v_fresh + to, v_row, mask=inside)
