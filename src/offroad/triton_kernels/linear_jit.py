"""The linear kernel: `y = x w^T` for few rows, weights kept as they are stored, for plain and grouped linears.

Weights are the left operand of `tl.dot` (its rows are outputs, its columns are tokens), so that a few tokens fill the
narrow side of a matrix instruction, and nothing is wasted on padding of the wide one. A tile is `BN` outputs and `BM`
tokens. `SPLIT` programs have a tile, each as many of its steps of k; or programs have equal shares of all tiles' steps,
each a run of them from somewhere in a tile to somewhere in the same or a later one, so that all that fit on the GPU
work for as long. Where a tile has several programs, their sums go to memory in fp32, and the one that comes last adds
them in order, so the result does not depend on who that is.

With `GATE`, `y = act(gate) * up` of a weight whose first half is the gate's: half of a tile's outputs are the gate's
and half are the same ones of up. So the loop is that of the linear, and so is every sum.
"""

import triton
import triton.language as tl

from offroad.triton_kernels.dependent import wait_turn
from offroad.triton_kernels.elementwise_jit import gated
from offroad.triton_kernels.linear_codes import bytes4, nibbles, scale_numbers

BK = tl.constexpr(128)  # k of one step


@triton.jit
def _fragments(p, NT: tl.constexpr, BN: tl.constexpr, KIND: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """Numbers [BN, 128] of NT records. The order of a record (see `linear_pack.pack`) is that in which the threads of
    a warp hold a matrix operand, so this moves nothing between threads."""
    if (KIND == "int4") or (KIND == "e2m1"):
        words = tl.reshape(p, (NT * 4, 2, 8, 4, 4))  # 16 outputs, 64 of k, output, pair of k, 16 of k
        a0, a1, b0, b1, c0, c1, d0, d1 = nibbles(words, DTYPE, KIND == "e2m1", ASM)
        low = tl.join(tl.join(a0, a1), tl.join(b0, b1))
        high = tl.join(tl.join(c0, c1), tl.join(d0, d1))
        parts = tl.join(low, high)  # ..., even or odd k, upper or lower 8 outputs, upper or lower 8 k
        return tl.reshape(tl.permute(parts, (0, 6, 2, 1, 4, 7, 3, 5)), (BN, BK))
    else:
        words = tl.reshape(p, (NT * 4, 2, 2, 8, 4, 4))  # 16 outputs, 64 of k, 8 outputs, output, pair of k, 16 of k
        a, b, c, d = bytes4(words, DTYPE, KIND == "e4m3", ASM)
        parts = tl.join(tl.join(a, b), tl.join(c, d))  # ..., even or odd k, upper or lower 8 k
        return tl.reshape(tl.permute(parts, (0, 2, 3, 1, 5, 7, 4, 6)), (BN, BK))


@triton.jit
def _scales(s, sn, unit, units, s_group, GROUP_UNITS: tl.constexpr, FOLD: tl.constexpr):
    """Scales of step `unit` (the last one's past the end), [BN] or [BN, FOLD]; `sn` are offsets of a row's first."""
    unit = tl.minimum(unit, units - 1)
    if FOLD > 1:
        return tl.load(s + sn + unit.to(tl.int64) * (FOLD * s_group))
    else:
        return tl.load(s + sn + (unit // GROUP_UNITS).to(tl.int64) * s_group)


@triton.jit
def _minima(minima, scales):
    """Minima in fp32: integers are multiples of the scale."""
    wide = minima.to(tl.float32)
    if minima.dtype == tl.int16:
        return wide * scales.to(tl.float32)
    else:
        return wide


@triton.jit
def _spread(scales, FOLD: tl.constexpr, BN: tl.constexpr, dtype: tl.constexpr):
    """[BN, 128] of scales [BN, FOLD]."""
    wide = tl.broadcast_to(scales.to(dtype)[:, :, None], (BN, FOLD, BK // FOLD))
    return tl.reshape(wide, (BN, BK))


@triton.jit
def _words(pn, half, units, NT: tl.constexpr, WORDS: tl.constexpr, GATE: tl.constexpr):
    """Where the words of a program's outputs begin, of step 0. Records hold 16 outputs after 16, so that with GATE half
    a record of the gate and half a record of up are one tile; `half` is the first output of up."""
    i = tl.arange(0, NT * WORDS)
    if GATE == "":
        return pn.to(tl.int64) * NT * units * WORDS + (i // WORDS) * (units * WORDS) + i % WORDS
    else:
        SIDE: tl.constexpr = NT * WORDS // 2  # words of each
        j = i % SIDE
        output = pn * (NT * 32)
        gate = (output // 64).to(tl.int64) * units * WORDS + output % 64 * (WORDS // 64)
        output += half
        up = (output // 64).to(tl.int64) * units * WORDS + output % 64 * (WORDS // 64)
        return tl.where(i < SIDE, gate, up) + (j // WORDS) * (units * WORDS) + j % WORDS


@triton.jit
def _product(
    x, w, s, m, xk, first_row, pn, n, k, units, s_group, begin, end,
    KIND: tl.constexpr, FOLD: tl.constexpr, GROUP_UNITS: tl.constexpr, E4M3_SCALES: tl.constexpr, HAS_M: tl.constexpr,
    GATE: tl.constexpr, EVEN: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, STAGES: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """fp32 [BN, BM]: steps [begin, end) of k of tile pn; xk are offsets of tokens' rows and whether they are there."""
    DTYPE: tl.constexpr = x.dtype.element_ty
    DENSE: tl.constexpr = KIND == "dense"
    WORDS: tl.constexpr = 1024 if (KIND == "int4") or (KIND == "e2m1") else 2048  # of a record: 64 outputs by 128 k
    NT: tl.constexpr = BN // 64
    source, ok = xk
    rn = _outputs(pn, n, GATE, BN)
    kk = tl.arange(0, BK)
    xp = x + source.to(tl.int64)[None, :] * k + kk[:, None]
    if not DENSE:
        wp = w + first_row // 64 * units * WORDS + _words(pn, n // 2, units, NT, WORDS, GATE)
        if FOLD > 1:
            sn = (first_row + rn.to(tl.int64))[:, None] + tl.arange(0, FOLD)[None, :] * s_group
        else:
            sn = first_row + rn.to(tl.int64)
        # Read one step ahead: Triton prefetches only what a product reads as it is.
        sc = _scales(s, sn, begin, units, s_group, GROUP_UNITS, FOLD)
        if HAS_M:
            mc = _scales(m, sn, begin, units, s_group, GROUP_UNITS, FOLD)
    else:
        wp = w + (first_row + rn.to(tl.int64))[:, None] * k + kk[None, :]
    acc = tl.zeros((BN, BM), tl.float32)
    for j in tl.range(0, end - begin, num_stages=STAGES):
        unit = begin + j
        if not DENSE:
            sc_next = _scales(s, sn, unit + 1, units, s_group, GROUP_UNITS, FOLD)
            if HAS_M:
                mc_next = _scales(m, sn, unit + 1, units, s_group, GROUP_UNITS, FOLD)
        if EVEN:
            xt = tl.load(xp + unit * BK, mask=ok[None, :], other=0.0)
        else:
            xt = tl.load(xp + unit * BK, mask=ok[None, :] & (unit * BK + kk < k)[:, None], other=0.0)
        if not DENSE:
            wt = _fragments(tl.load(wp + unit * WORDS), NT, BN, KIND, DTYPE, ASM)
        elif EVEN:
            wt = tl.load(wp + unit * BK)
        else:
            wt = tl.load(wp + unit * BK, mask=(rn < n)[:, None] & (unit * BK + kk < k)[None, :], other=0.0)
        if not ASM:
            xt = xt.to(tl.float32)
            wt = wt.to(tl.float32)
        if DENSE:
            acc = tl.dot(wt, xt, acc, input_precision="ieee")
        elif FOLD > 1:
            if E4M3_SCALES:
                wt = wt * _spread(scale_numbers(sc, DTYPE, ASM), FOLD, BN, wt.dtype)
            else:
                wt = wt * _spread(sc, FOLD, BN, wt.dtype)
            if HAS_M:
                wt = wt + _spread(_minima(mc, sc), FOLD, BN, wt.dtype)
            acc = tl.dot(wt, xt, acc, input_precision="ieee")
        else:
            acc += tl.dot(wt, xt, input_precision="ieee") * sc.to(tl.float32)[:, None]
            if HAS_M:
                acc += _minima(mc, sc)[:, None] * tl.sum(xt.to(tl.float32), axis=0)[None, :]
        if not DENSE:
            sc = sc_next
            if HAS_M:
                mc = mc_next
    return acc


@triton.jit
def _outputs(pn, n, GATE: tl.constexpr, BN: tl.constexpr):
    """Outputs of tile pn, [BN]; with GATE in 64 bits, so that all rows of a thread have addresses from one base."""
    at = tl.arange(0, BN)
    if GATE == "":
        return pn * BN + at
    else:
        return (pn * (BN // 2)).to(tl.int64) + at % (BN // 2) + tl.where(at < BN // 2, 0, (n // 2).to(tl.int64))


@triton.jit
def _finish(
    acc, y, row_scale, bias, rm, ok, first_row, pn, n, HAS_ROW_SCALE: tl.constexpr, HAS_BIAS: tl.constexpr,
    GATE: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Stores a tile's results."""
    rn = _outputs(pn, n, GATE, BN)
    if HAS_ROW_SCALE:
        acc *= tl.load(row_scale + first_row + rn, mask=rn < n, other=0.0)[:, None]
    if HAS_BIAS:
        acc += tl.load(bias + rn, mask=rn < n, other=0.0).to(tl.float32)[:, None]
    if GATE == "":
        out = rm.to(tl.int64)[None, :] * n + rn[:, None]
        tl.store(y + out, acc.to(y.dtype.element_ty), mask=(rn < n)[:, None] & ok[None, :])
    else:  # rounded as what a linear stores and an activation reads
        sides = tl.permute(tl.reshape(acc.to(y.dtype.element_ty), (2, BN // 2, BM)), (1, 2, 0))
        gate, up = tl.split(sides)
        value = gated(gate.to(tl.float32), up.to(tl.float32), GATE == "silu")
        half = pn * (BN // 2) + tl.arange(0, BN // 2)
        out = rm.to(tl.int64)[None, :] * (n // 2) + half[:, None]
        tl.store(y + out, value.to(y.dtype.element_ty), mask=(half < n // 2)[:, None] & ok[None, :])


@triton.jit
def _place(partial, program, second, SUMS: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr):
    """Where a program's sum of a tile lies, [BN, BM]. It has places for one, or for the two that it may have in part,
    its first and its last."""
    first = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + program
    at = tl.arange(0, BN)[:, None] + tl.arange(0, BM)[None, :] * BN
    return partial + (SUMS * first + second) * (BN * BM) + at


@triton.jit(do_not_specialize=["rows", "units", "tiles", "per_token"])  # one kernel for every batch
def linear(
    x, w, s, m, row_scale, bias, y, partial, arrived, ids, owner, rows, n, k, units, tiles, s_group, per_token,
    KIND: tl.constexpr,  # "int4", "e2m1", "int8", "e4m3" in records, "dense" by rows
    FOLD: tl.constexpr,  # 1: one scale a step at most; else scales a step
    GROUP_UNITS: tl.constexpr,  # steps that share a scale, where FOLD is 1
    E4M3_SCALES: tl.constexpr, HAS_M: tl.constexpr, HAS_ROW_SCALE: tl.constexpr, HAS_BIAS: tl.constexpr,
    GROUPED: tl.constexpr,
    GATE: tl.constexpr,  # "": y is the product; "silu", "gelu_tanh": n / 2 columns, act(gate) * up
    EVEN: tl.constexpr,  # n % BN == 0 (by rows) and k % 128 == 0
    SPLIT: tl.constexpr,  # programs that have a tile each; 0: equal shares of all tiles
    BN: tl.constexpr, BM: tl.constexpr, STAGES: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (p, b): the p-th share of the tiles of token block b."""
    program, pm, programs = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    rm = pm * BM + tl.arange(0, BM)
    first_row = tl.cast(0, tl.int64)  # of the weight
    wait_turn(PDL)
    if GROUPED:
        expert = tl.load(owner + pm)
        if expert < 0:
            return
        first_row = expert.to(tl.int64) * n
        rm = tl.load(ids + rm)
    ok = rm < rows
    source = tl.where(ok, rm // per_token, 0) if GROUPED else rm
    there = tl.broadcast_to(ok[None, :], (BN, BM))
    # A tile's own programs go without the loop of shares, which takes registers (125 for 78, 253 for 151 of 64 tokens).
    if SPLIT > 0:
        pn, part = program % tiles, program // tiles
        begin, end = part * units // SPLIT, (part + 1) * units // SPLIT
        acc = _product(
            x, w, s, m, (source, ok), first_row, pn, n, k, units, s_group, begin, end, KIND, FOLD, GROUP_UNITS,
            E4M3_SCALES, HAS_M, GATE, EVEN, BN, BM, STAGES, ASM,
        )  # fmt: skip
        if SPLIT > 1:
            tl.store(_place(partial, program, 0, 1, BN, BM), acc, mask=there)
            tl.debug_barrier()  # this program's stores before its arrival
            place = arrived + pm * tiles + pn
            if tl.atomic_add(place, 1, sem="acq_rel", scope="gpu") != SPLIT - 1:
                return
            acc = tl.load(_place(partial, pn, 0, 1, BN, BM), mask=there, other=0.0, cache_modifier=".cg")
            for j in tl.static_range(1, SPLIT):
                parts = _place(partial, pn + j * tiles, 0, 1, BN, BM)
                acc += tl.load(parts, mask=there, other=0.0, cache_modifier=".cg")
            tl.atomic_xchg(place, 0)  # ready for the next launch
        _finish(acc, y, row_scale, bias, rm, ok, first_row, pn, n, HAS_ROW_SCALE, HAS_BIAS, GATE, BN, BM)
    else:
        # Shares are as even as whole steps are; the host sees to it that no product leaves 32 bits.
        total = tiles * units
        begin, end = program * total // programs, (program + 1) * total // programs
        for i in range((end - 1) // units - begin // units + 1):
            pn = begin // units + i
            low, high = tl.maximum(begin - pn * units, 0), tl.minimum(end - pn * units, units)
            acc = _product(
                x, w, s, m, (source, ok), first_row, pn, n, k, units, s_group, low, high, KIND, FOLD, GROUP_UNITS,
                E4M3_SCALES, HAS_M, GATE, EVEN, BN, BM, STAGES, ASM,
            )  # fmt: skip
            done = high - low == units
            if high - low < units:
                tl.store(_place(partial, program, i > 0, 2, BN, BM), acc, mask=there)
                tl.debug_barrier()
                # Who has the tile's first and last step.
                first = ((pn * units + 1) * programs - 1) // total
                last = ((pn * units + units) * programs - 1) // total
                place = arrived + pm * tiles + pn
                done = tl.atomic_add(place, 1, sem="acq_rel", scope="gpu") == last - first
                if done:
                    second = first * total // programs < pn * units  # the tile is its last one; of others the first
                    parts = _place(partial, first, second, 2, BN, BM)
                    acc = tl.load(parts, mask=there, other=0.0, cache_modifier=".cg")
                    for j in tl.range(1, last - first + 1, loop_unroll_factor=4):
                        parts = _place(partial, first + j, 0, 2, BN, BM)
                        acc += tl.load(parts, mask=there, other=0.0, cache_modifier=".cg")
                    tl.atomic_xchg(place, 0)
            if done:
                _finish(acc, y, row_scale, bias, rm, ok, first_row, pn, n, HAS_ROW_SCALE, HAS_BIAS, GATE, BN, BM)


@triton.jit(do_not_specialize=["first", "last", "units"])
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
    s_group,
    KIND: tl.constexpr,
    FOLD: tl.constexpr,
    GROUP_UNITS: tl.constexpr,
    E4M3_SCALES: tl.constexpr,
    HAS_M: tl.constexpr,
    HAS_ROW_SCALE: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr,
):
    """Rows [first, last) of a weight into `out` [last - first, k], scaled in fp32; `first` is a multiple of 64."""
    DTYPE: tl.constexpr = out.dtype.element_ty
    WORDS: tl.constexpr = 1024 if (KIND == "int4") or (KIND == "e2m1") else 2048
    BN: tl.constexpr = 64
    wait_turn(PDL)
    unit = tl.program_id(1)
    rn = first + tl.program_id(0) * BN + tl.arange(0, BN)
    kk = unit * BK + tl.arange(0, BK)
    record = (first // 64 + tl.program_id(0)).to(tl.int64) * units + unit
    p = tl.load(w + record * WORDS + tl.arange(0, WORDS))
    wt = _fragments(p, 1, BN, KIND, DTYPE, ASM).to(tl.float32)
    if FOLD > 1:
        sn = rn.to(tl.int64)[:, None] + tl.arange(0, FOLD)[None, :] * s_group
        sc = _scales(s, sn, unit, units, s_group, GROUP_UNITS, FOLD)
        if E4M3_SCALES:
            sc = scale_numbers(sc, tl.float32, False)
        wt = wt * _spread(sc, FOLD, BN, tl.float32)
        if HAS_M:
            mc = _minima(_scales(m, sn, unit, units, s_group, GROUP_UNITS, FOLD), sc)
            wt = wt + _spread(mc, FOLD, BN, tl.float32)
    else:
        sn = rn.to(tl.int64)
        sc = _scales(s, sn, unit, units, s_group, GROUP_UNITS, FOLD)
        wt = wt * sc.to(tl.float32)[:, None]
        if HAS_M:
            mc = _scales(m, sn, unit, units, s_group, GROUP_UNITS, FOLD)
            wt = wt + _minima(mc, sc)[:, None]
    if HAS_ROW_SCALE:
        wt = wt * tl.load(row_scale + rn)[:, None]
    tl.store(
        out + (rn - first).to(tl.int64)[:, None] * k + kk[None, :],
        wt.to(DTYPE),
        mask=(rn < last)[:, None] & (kk < k)[None, :],
    )
