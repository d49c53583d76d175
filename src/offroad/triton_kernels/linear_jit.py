"""The linear kernel: `y = x w^T` for few rows, weights kept as they are stored, for plain and grouped linears.

Weights are the left operand of `tl.dot` (its rows are outputs, its columns are tokens), so that a few tokens fill the
narrow side of a matrix instruction, and nothing is wasted on padding of the wide one. A program owns `BN` outputs, `BM`
tokens and every `SPLIT`-th part of k. Partial sums of a split go to memory in fp32; the program that comes last adds
them in the order of the parts, so the result does not depend on who that is.
"""

import triton
import triton.language as tl

from offroad.triton_kernels.linear_codes import e4m3, int8, nibbles

BK = tl.constexpr(128)  # k of one step
WORDS = tl.constexpr(1024)  # words of 4 bits: one record of 64 outputs by 128 k


@triton.jit
def _fragments(p, NT: tl.constexpr, BN: tl.constexpr, DTYPE: tl.constexpr, E2M1: tl.constexpr, ASM: tl.constexpr):
    """Numbers [BN, 128] of NT records. The order of a record (see `linear_pack.records`) is that in which the threads
    of a warp hold a matrix operand, so this moves nothing between threads."""
    words = tl.reshape(p, (NT * 4, 2, 8, 4, 4))  # 16 outputs, half of k, output, pair of k, 16 of k
    a0, a1, b0, b1, c0, c1, d0, d1 = nibbles(words, DTYPE, E2M1, ASM)
    low = tl.join(tl.join(a0, a1), tl.join(b0, b1))
    high = tl.join(tl.join(c0, c1), tl.join(d0, d1))
    parts = tl.join(low, high)  # ..., even or odd k, upper or lower 8 outputs, upper or lower 8 k
    return tl.reshape(tl.permute(parts, (0, 6, 2, 1, 4, 7, 3, 5)), (BN, BK))


@triton.jit
def _scales(s, at, there, PADDED: tl.constexpr, E4M3: tl.constexpr, DTYPE: tl.constexpr):
    if PADDED:
        value = tl.load(s + at)
    else:
        value = tl.load(s + at, mask=there, other=0)
    if E4M3:
        return e4m3(value, DTYPE, False)
    else:
        return value


@triton.jit
def _spread(scales, FOLD: tl.constexpr, BN: tl.constexpr, dtype: tl.constexpr):
    """[BN, 128] of scales [BN, FOLD]."""
    wide = tl.broadcast_to(scales.to(dtype)[:, :, None], (BN, FOLD, BK // FOLD))
    return tl.reshape(wide, (BN, BK))


@triton.jit
def linear(
    x,
    w,
    s,
    m,
    row_scale,
    bias,
    y,
    partial,
    arrived,
    ids,
    owner,
    rows,
    n,
    k,
    units,
    per,
    s_row,
    s_group,
    group_units,
    per_token,
    KIND: tl.constexpr,  # "int4", "e2m1" in records; "int8", "e4m3", "dense" by rows
    FOLD: tl.constexpr,  # 1: one scale a step at most; else scales a step
    E4M3_SCALES: tl.constexpr,
    HAS_M: tl.constexpr,
    HAS_ROW_SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GROUPED: tl.constexpr,
    EVEN: tl.constexpr,  # n % BN == 0 (by rows) and k % 128 == 0 and units % per == 0
    BN: tl.constexpr,
    BM: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    PER: tl.constexpr,  # per, in the interpreter; else 0
    ASM: tl.constexpr,
):
    DTYPE: tl.constexpr = x.dtype.element_ty
    RECORDS: tl.constexpr = (KIND == "int4") or (KIND == "e2m1")
    PADDED: tl.constexpr = RECORDS or EVEN  # scales may be read without a mask
    NT: tl.constexpr = BN // 64
    pn, ps, pm = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    rn = pn * BN + tl.arange(0, BN)
    rm = pm * BM + tl.arange(0, BM)
    first_row = tl.cast(0, tl.int64)  # of the weight
    if GROUPED:
        expert = tl.load(owner + pm)
        if expert < 0:
            return
        first_row = expert.to(tl.int64) * n
        rm = tl.load(ids + rm)
    ok = rm < rows
    source = tl.where(ok, rm // per_token, 0) if GROUPED else rm
    kk = tl.arange(0, BK)
    first = ps * per
    xp = x + source.to(tl.int64)[None, :] * k + kk[:, None]
    if RECORDS:
        i = tl.arange(0, NT * WORDS)
        wp = w + (first_row // 64 + pn * NT) * units * WORDS + (i // WORDS) * (units * WORDS) + i % WORDS
    else:
        wp = w + (first_row + rn.to(tl.int64))[:, None] * k + kk[None, :]
    if KIND != "dense":
        if FOLD > 1:
            sn = (first_row + rn.to(tl.int64))[:, None] * s_row + tl.arange(0, FOLD)[None, :] * s_group
        else:
            sn = (first_row + rn.to(tl.int64)) * s_row
    acc = tl.zeros((BN, BM), tl.float32)
    for j in tl.range(0, PER if PER > 0 else per, num_stages=STAGES):
        unit = first + j
        if EVEN:
            xt = tl.load(xp + unit * BK, mask=ok[None, :], other=0.0)
        else:
            xt = tl.load(xp + unit * BK, mask=ok[None, :] & (unit * BK + kk < k)[:, None], other=0.0)
            unit = tl.minimum(unit, units - 1)  # past the end x is 0
        if RECORDS:
            wt = _fragments(tl.load(wp + unit * WORDS), NT, BN, DTYPE, KIND == "e2m1", ASM)
        else:
            if EVEN:
                q = tl.load(wp + unit * BK)
            else:
                q = tl.load(wp + unit * BK, mask=(rn < n)[:, None] & (unit * BK + kk < k)[None, :], other=0)
            if KIND == "e4m3":
                wt = e4m3(q, DTYPE, ASM)
            elif KIND == "int8":
                wt = int8(q, DTYPE, ASM)
            else:
                wt = q
        if not ASM:
            xt = xt.to(tl.float32)
            wt = wt.to(tl.float32)
        if KIND == "dense":
            acc = tl.dot(wt, xt, acc, input_precision="ieee")
        elif FOLD > 1:
            there = (rn < n)[:, None] & (unit * BK + tl.arange(0, FOLD) * (BK // FOLD) < k)[None, :]
            at = sn + unit.to(tl.int64) * (FOLD * s_group)
            sc = _scales(s, at, there, PADDED, E4M3_SCALES, DTYPE)
            wt = wt * _spread(sc, FOLD, BN, wt.dtype)
            if HAS_M:
                wt = wt + _spread(_scales(m, at, there, PADDED, False, DTYPE), FOLD, BN, wt.dtype)
            acc = tl.dot(wt, xt, acc, input_precision="ieee")
        else:
            at = sn + (unit // group_units).to(tl.int64) * s_group
            sc = _scales(s, at, rn < n, PADDED, E4M3_SCALES, DTYPE)
            acc += tl.dot(wt, xt, input_precision="ieee") * sc.to(tl.float32)[:, None]
            if HAS_M:
                mc = _scales(m, at, rn < n, PADDED, False, DTYPE)
                acc += mc.to(tl.float32)[:, None] * tl.sum(xt.to(tl.float32), axis=0)[None, :]
    keep = (rn < n)[:, None] & ok[None, :]
    out = rm.to(tl.int64)[None, :] * n + rn[:, None]
    if SPLIT > 1:
        size = rows.to(tl.int64) * n
        tl.store(partial + ps * size + out, acc, mask=keep)
        tl.debug_barrier()  # this program's stores before its arrival
        place = arrived + pm * tl.num_programs(0) + pn
        if tl.atomic_add(place, 1, sem="acq_rel", scope="gpu") != SPLIT - 1:
            return
        acc = tl.load(partial + out, mask=keep, other=0.0, cache_modifier=".cg")
        for part in range(1, SPLIT):
            acc += tl.load(partial + part * size + out, mask=keep, other=0.0, cache_modifier=".cg")
        tl.atomic_xchg(place, 0)  # ready for the next launch
    if HAS_ROW_SCALE:
        acc *= tl.load(row_scale + first_row + rn, mask=rn < n, other=0.0)[:, None]
    if HAS_BIAS:
        acc += tl.load(bias + rn, mask=rn < n, other=0.0).to(tl.float32)[:, None]
    tl.store(y + out, acc.to(y.dtype.element_ty), mask=keep)


@triton.jit
def dequantise(
    w,
    s,
    m,
    row_scale,
    out,
    first,
    last,
    k,
    units,
    s_row,
    s_group,
    group_units,
    KIND: tl.constexpr,
    FOLD: tl.constexpr,
    E4M3_SCALES: tl.constexpr,
    HAS_M: tl.constexpr,
    HAS_ROW_SCALE: tl.constexpr,
    ASM: tl.constexpr,
):
    """Rows [first, last) of a weight into `out` [last - first, k], scaled in fp32; `first` is a multiple of 64."""
    DTYPE: tl.constexpr = out.dtype.element_ty
    BN: tl.constexpr = 64
    unit = tl.program_id(1)
    rn = first + tl.program_id(0) * BN + tl.arange(0, BN)
    kk = unit * BK + tl.arange(0, BK)
    there = (rn < last)[:, None] & (kk < k)[None, :]
    if (KIND == "int4") or (KIND == "e2m1"):
        record = (first // 64 + tl.program_id(0)).to(tl.int64) * units + unit
        p = tl.load(w + record * WORDS + tl.arange(0, WORDS))
        wt = _fragments(p, 1, BN, DTYPE, KIND == "e2m1", ASM).to(tl.float32)
    else:
        q = tl.load(w + rn.to(tl.int64)[:, None] * k + kk[None, :], mask=there, other=0)
        wt = (e4m3(q, DTYPE, ASM) if KIND == "e4m3" else int8(q, DTYPE, ASM)).to(tl.float32)
    if FOLD > 1:
        groups = unit * FOLD + tl.arange(0, FOLD)
        known = (rn < last)[:, None] & (groups * (BK // FOLD) < k)[None, :]
        at = rn.to(tl.int64)[:, None] * s_row + groups.to(tl.int64)[None, :] * s_group
        wt = wt * _spread(_scales(s, at, known, False, E4M3_SCALES, DTYPE), FOLD, BN, tl.float32)
        if HAS_M:
            wt = wt + _spread(_scales(m, at, known, False, False, DTYPE), FOLD, BN, tl.float32)
    else:
        at = rn.to(tl.int64) * s_row + (unit // group_units).to(tl.int64) * s_group
        wt = wt * _scales(s, at, rn < last, False, E4M3_SCALES, DTYPE).to(tl.float32)[:, None]
        if HAS_M:
            wt = wt + _scales(m, at, rn < last, False, False, DTYPE).to(tl.float32)[:, None]
    if HAS_ROW_SCALE:
        wt = wt * tl.load(row_scale + rn, mask=rn < last, other=0.0)[:, None]
    tl.store(out + (rn - first).to(tl.int64)[:, None] * k + kk[None, :], wt.to(DTYPE), mask=there)
