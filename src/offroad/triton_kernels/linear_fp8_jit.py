"""Operands of FP8 products: activations rounded to e4m3 by token and 128 of k, and weights out of records by rows.

A group of 128 activations becomes `q * s`, s = max|x| / 448 in fp32. A group with a value that is not finite has
s = NaN, so that every output of its token is NaN: e4m3 has no infinity, and a product would hide it.
"""

from collections.abc import Iterator
from typing import NamedTuple

import triton
import triton.language as tl

from offroad.triton_kernels.compile import Variant
from offroad.triton_kernels.kv_rows import encode
from offroad.triton_kernels.linear import FP8_SHARED

GROUP = tl.constexpr(128)  # of k: activations that share a scale
LARGEST = tl.constexpr(448.0)  # of e4m3
# A group's largest value counts as no less, so that 448 / it is finite; what is below 2^-109 becomes 0.
LEAST = tl.constexpr(2.0**-100)
WORDS = tl.constexpr(2048)  # of a record: 64 outputs by 128 k


class Tile(NamedTuple):
    """Of a product: tokens and outputs of a program, bands of tokens that run together, warps, stages, and bytes of
    shared memory as the compiler reports them."""

    tokens: int
    outputs: int
    wide: int
    warps: int
    stages: int
    shared: int


TILE = Tile(tokens=128, outputs=128, wide=8, warps=8, stages=3, shared=FP8_SHARED)


@triton.jit
def _rounded(x, NATIVE: tl.constexpr):
    """(codes uint8 [tokens, 128], scales fp32 [tokens]) of a group of activations in fp32."""
    size = tl.abs(x)
    finite = tl.min((size < float("inf")).to(tl.int32), axis=1) == 1
    most = tl.maximum(tl.max(tl.where(size < float("inf"), size, 0.0), axis=1), LEAST)
    y = tl.where(finite[:, None], x * tl.div_rn(LARGEST, most)[:, None], 0.0)
    codes = y.to(tl.float8e4nv).to(tl.uint8, bitcast=True) if NATIVE else encode(y, 3, 7, LARGEST)
    return codes, tl.where(finite, tl.div_rn(most, LARGEST), float("nan"))


@triton.jit(do_not_specialize=["rows", "padded"])
def quantise(x, q, s, rows, padded, k, BT: tl.constexpr, NATIVE: tl.constexpr):
    """x [rows, k] as codes q uint8 [padded, k] and scales s fp32 [k / 128, padded]; rows past the last are 0.

    A program has BT tokens and one group. Scales of a group lie side by side by token, as cuBLASLt reads them. NATIVE:
    by the GPU's own conversion, which is the nearest number (ties to even), as `encode` is.
    """
    token = tl.program_id(0) * BT + tl.arange(0, BT)
    group = tl.program_id(1)
    place = token.to(tl.int64)[:, None] * k + group * GROUP + tl.arange(0, GROUP)[None, :]
    wide = tl.load(x + place, mask=(token < rows)[:, None], other=0.0).to(tl.float32)
    codes, scales = _rounded(wide, NATIVE)
    tl.store(q + place, codes, mask=(token < padded)[:, None])
    tl.store(s + group.to(tl.int64) * padded + token, scales, mask=token < padded)


@triton.jit(do_not_specialize=["units", "padded_units"])
def unpack(w, s, out, blocks, k, units, padded_units, s_group):
    """A weight of e4m3 codes in records (see `linear_pack.pack`) as out int32 [n, k / 4], four codes a word in the
    order of k, and scales of blocks of 128 by 128 as `blocks` fp32 [n / 128, padded units]; n is a multiple of 128.

    A program has one record. Of two neighbouring words, the lower halves are four codes in a row, and the upper halves
    the four that come 8 later.
    """
    tile, unit = tl.program_id(0), tl.program_id(1)
    if unit >= units:  # scales of a block of rows begin at a multiple of 16 bytes
        if tile % 2 == 0:
            tl.store(blocks + (tile // 2) * padded_units + unit, 0.0)
        return
    if tile % 2 == 0:
        scale = tl.load(s + unit.to(tl.int64) * s_group + tile * 64).to(tl.float32)
        tl.store(blocks + (tile // 2) * padded_units + unit, scale)
    record = tile.to(tl.int64) * units + unit
    words = tl.load(w + record * WORDS + tl.arange(0, WORDS))
    # 16 outputs, 64 of k, 8 outputs, output, two pairs of k, pair, 16 of k
    words = tl.permute(tl.reshape(words, (4, 2, 2, 8, 2, 2, 4)), (0, 2, 3, 1, 6, 4, 5))
    even, odd = tl.split(words)
    low = (even & 0xFFFF) | (odd << 16)
    high = ((even >> 16) & 0xFFFF) | (odd & -65536)
    rows = tl.reshape(tl.permute(tl.join(low, high), (0, 1, 2, 3, 4, 6, 5)), (64, 32))
    output = tile * 64 + tl.arange(0, 64)
    place = output.to(tl.int64)[:, None] * (k // 4) + unit * 32 + tl.arange(0, 32)[None, :]
    tl.store(out + place, rows)


@triton.jit(do_not_specialize=["rows", "padded_units"])
def product(
    x, x_scales, w, w_scales, out, rows, n, k, padded_units,
    BM: tl.constexpr, BN: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """`x w^T` as out [rows, n] of codes uint8 x [rows, k] and w [n, k], with scales as `quantise` and `unpack` lay
    them out; n and k are multiples of 128, which BN divides.

    The matrix units add up 128 of k, then fp32 the groups, behind both scales: some units' own sums have fewer bits.
    Programs of WIDE times BM tokens follow one another, so that the L2 cache has what they read of x and w.
    """
    across, down = n // BN, tl.cdiv(rows, BM)
    band = tl.program_id(0) // (WIDE * across)
    high = tl.minimum(down - band * WIDE, WIDE)
    within = tl.program_id(0) % (WIDE * across)
    token = (band * WIDE + within % high) * BM + tl.arange(0, BM)
    first = within // high * BN
    output = first + tl.arange(0, BN)
    inner = tl.arange(0, GROUP)
    # Tokens that are not there are the last one: masks of loads would cost more.
    place = tl.minimum(token, rows - 1)
    x += place.to(tl.int64)[:, None] * k + inner[None, :]
    w += output.to(tl.int64)[None, :] * k + inner[:, None]
    x_scales += place
    w_scales += (first // GROUP) * padded_units
    total = tl.zeros((BM, BN), tl.float32)
    for unit in range(0, k // GROUP):
        scale = tl.load(x_scales) * tl.load(w_scales + unit)
        codes = tl.load(x).to(tl.float8e4nv, bitcast=True)
        total += tl.dot(codes, tl.load(w).to(tl.float8e4nv, bitcast=True)) * scale[:, None]
        x += GROUP
        w += GROUP
        x_scales += rows
    to = token.to(tl.int64)[:, None] * n + output[None, :]
    tl.store(out + to, total.to(out.dtype.element_ty), mask=(token < rows)[:, None])


def variants() -> Iterator[Variant]:
    """What Qwen3.5-27B FP8 uses on GPUs that have products of e4m3; on 9.0 cuBLASLt's are taken."""
    sizes = dict.fromkeys(("rows", "padded", "k"), "i32")
    for dtype in ("bf16", "fp16"):
        for native, archs in ((False, (89,)), (True, (90, 100, 120))):
            yield Variant(
                f"quantise {dtype} to e4m3 by 128",
                quantise,
                {"x": f"*{dtype}", "q": "*u8", "s": "*fp32"} | sizes,
                {"BT": 32, "NATIVE": native},
                archs=archs,
                aligned=("x", "q", "s", "k"),
            )
    yield Variant(
        "fp8 records to rows",
        unpack,
        {"w": "*i32", "s": "*bf16", "out": "*i32", "blocks": "*fp32"}
        | dict.fromkeys(("k", "units", "padded_units", "s_group"), "i32"),
        {},
        archs=(89, 90, 100, 120),
        aligned=("w", "s", "out", "blocks", "k", "s_group"),
    )
    operands = {"x": "*u8", "x_scales": "*fp32", "w": "*u8", "w_scales": "*fp32"}
    numbers = dict.fromkeys(("rows", "n", "k", "padded_units"), "i32")
    for dtype in ("bf16", "fp16"):
        yield Variant(
            f"product of e4m3, {dtype}",
            product,
            operands | {"out": f"*{dtype}"} | numbers,
            {"BM": TILE.tokens, "BN": TILE.outputs, "WIDE": TILE.wide},
            TILE.warps,
            TILE.stages,
            archs=(89, 90, 100, 120, 121),
            declared=TILE.shared,
            aligned=(*operands, "out", "n", "k"),
        )
