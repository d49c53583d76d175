"""Triton functions of paged attention for chunks: tiles of queries that walk over older rows in pages and fresh rows.

A query meets its keys in tiles that are aligned to positions, in their order: its answer is bit for bit the same
wherever the prompt is cut and whatever else is in the step.
"""

import triton
import triton.language as tl

from offroad.triton_kernels.kv_rows import LISTS, loaded
from offroad.triton_kernels.paged_decode import capped


@triton.jit
def _walk(
    acc, largest, total, queries, position, first, stop, low, early, late, start, columns,
    k_pages, v_pages, k_fresh, v_fresh, factor, softcap,
    MASKED: tl.constexpr, OWN: tl.constexpr, STRIDE: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr, KIND: tl.constexpr, SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds the keys of positions [first, stop), of which those in [low, late] are there; `first` begins a tile. The
    queries are at `position`, from `early` to `late`. Not MASKED: every query sees all of the keys. In place of those
    that are not there the nearest are read, and count for nothing: masks of loads would take registers that sums need.

    A tile that begins before `start` is read from pages: those of its rows that are fresh have been stored there, since
    the block of position start - 1 is there for the first query.
    """
    d = tl.arange(0, BLOCK_D)
    within = tl.arange(0, TILE)[:, None] * STRIDE + d[None]
    block = tl.load(columns + first // BLOCK, mask=first < stop, other=0)
    for at in range(first, stop, TILE):
        key_at = at + tl.arange(0, TILE)
        here = (block.to(tl.int64) * BLOCK + at % BLOCK) * STRIDE
        # One iteration ahead: an address that is loaded in the same one is not prefetched.
        block = tl.load(columns + tl.minimum(at + TILE, stop - 1) // BLOCK)
        k_tile, v_tile = k_pages + here, v_pages + here
        if OWN:
            fresh = (at - start).to(tl.int64) * STRIDE
            k_tile = tl.where(at < start, k_tile, k_fresh + fresh)
            v_tile = tl.where(at < start, v_tile, v_fresh + fresh)
        if not MASKED:
            inner = within
        elif WINDOW:
            inner = (tl.minimum(tl.maximum(key_at, low), late) - at)[:, None] * STRIDE + d[None]
        else:
            inner = tl.minimum(tl.arange(0, TILE), late - at)[:, None] * STRIDE + d[None]
        k_at, v_at = k_tile + inner, v_tile + inner
        if DIM < BLOCK_D:
            keys = tl.load(k_at, mask=(d < DIM)[None], other=0)
            values = tl.load(v_at, mask=(d < DIM)[None], other=0)
        else:
            keys, values = tl.load(k_at), tl.load(v_at)
        keys, values = loaded(keys, KIND, queries.dtype), loaded(values, KIND, queries.dtype)
        scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * factor
        if SOFTCAP:
            scores = capped(scores, softcap) * 1.4426950408889634
        if MASKED:
            if WINDOW:
                if (at + TILE > early + 1) | (at + WINDOW <= late):
                    seen = (key_at[None] <= position[:, None]) & (key_at[None] > position[:, None] - WINDOW)
                    scores = tl.where(seen, scores, float("-inf"))
            else:
                if at + TILE > early + 1:
                    scores = tl.where(key_at[None] <= position[:, None], scores, float("-inf"))
        larger = tl.maximum(largest, tl.max(scores, 1))
        base = larger
        if WINDOW:  # a query's first tiles may hold none of its keys
            base = tl.where(larger == float("-inf"), 0.0, larger)
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(largest - base)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None]
        acc = tl.dot(weights.to(queries.dtype), values, acc, input_precision=PRECISION)
        largest = larger
    return acc, largest, total


@triton.jit
def _queries(tile, head, BLOCK_M: tl.constexpr, GROUP: tl.constexpr):
    """(each query's token in its row, the first of them, each one's head) of a tile of a KV head."""
    number = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    return number // GROUP, tile * BLOCK_M // GROUP, head * GROUP + number % GROUP


@triton.jit(do_not_specialize=["tiles"], do_not_specialize_on_alignment=LISTS)
def paged_prefill(
    q, out, k_pages, v_pages, k_fresh, v_fresh, table, slots, starts, widths, offsets, k_scale, v_scale,
    scale, softcap, q_stride, table_stride, tiles,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr, OWN: tl.constexpr, KIND: tl.constexpr,
    SCALED: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, TWICE: tl.constexpr, AGAIN: tl.constexpr,
):  # fmt: skip
    """out [tokens, heads, dim]. Grid (`tiles` of BLOCK_M queries of the widest row, kv_heads, rows): tiles beyond a row
    exit, and a row's last, which have most keys, start first. A query is a token's one of the GROUP heads of a KV head,
    tokens first. OWN: this step's rows are in `k_fresh`, `v_fresh`, as stored; otherwise in pages like all others.
    """
    row, head, tile = tl.program_id(2), tl.program_id(1), tiles - 1 - tl.program_id(0)
    width, start = tl.load(widths + row), tl.load(starts + row)
    if tile * BLOCK_M >= width * GROUP:
        return
    of, top, heads = _queries(tile, head, BLOCK_M, GROUP)
    position = start + of
    offset = tl.load(offsets + row).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    inside = (of < width)[:, None] & (d < DIM)[None]
    q += (offset + top) * q_stride
    queries = tl.load(q + ((of - top) * q_stride + heads * DIM)[:, None] + d[None], mask=inside, other=0)
    early = start + top  # positions of the tile's first and last tokens
    late = start + tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // GROUP, width - 1)
    low = early * 0
    if WINDOW:
        low = tl.maximum(early - WINDOW + 1, 0)
    factor = scale
    if SCALED:
        factor = scale * tl.load(k_scale + head)
    if not SOFTCAP:
        factor = factor * 1.4426950408889634  # scores of base 2
    columns = table + tl.load(slots + row).to(tl.int64) * table_stride
    k_pages += head * DIM
    v_pages += head * DIM
    k_fresh += (offset * KV_HEADS + head) * DIM
    v_fresh += (offset * KV_HEADS + head) * DIM
    largest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    middle = low // TILE * TILE
    if TWICE:
        middle = (early + 1) // TILE * TILE
        acc, largest, total = _walk(
            acc, largest, total, queries, position, 0, middle, low, early, late, start, columns,
            k_pages, v_pages, k_fresh, v_fresh, factor, softcap,
            False, OWN, KV_HEADS * DIM, DIM, BLOCK_D, BLOCK, TILE, WINDOW, KIND, SOFTCAP, PRECISION,
        )  # fmt: skip
    acc, largest, total = _walk(
        acc, largest, total, queries, position, middle, late + 1, low, early, late, start, columns,
        k_pages, v_pages, k_fresh, v_fresh, factor, softcap,
        True, OWN, KV_HEADS * DIM, DIM, BLOCK_D, BLOCK, TILE, WINDOW, KIND, SOFTCAP, PRECISION,
    )  # fmt: skip
    if AGAIN:
        # Where it is and what it has once more, from what is read once more: else it would wait in memory while loops
        # need all registers, as would the grid's size, which `tiles` is. Two readings of a number differ by nothing,
        # which the compiler does not know.
        nothing = tl.load(widths, volatile=True) - tl.load(widths, volatile=True)
        row, head, tile = tl.program_id(2) + nothing, tl.program_id(1) + nothing, tl.program_id(0) + nothing
        of, top, heads = _queries(tiles - (tile + 1), head, BLOCK_M, GROUP)
        inside = (of < tl.load(widths + row))[:, None] & (d < DIM)[None]
        offset = tl.load(offsets + row).to(tl.int64)
    norm = 1 / total
    if SCALED:
        norm = norm * tl.load(v_scale + head)
    out += (offset + top) * (KV_HEADS * GROUP * DIM)
    to = ((of - top) * (KV_HEADS * GROUP) + heads) * DIM
    tl.store(out + to[:, None] + d[None], (acc * norm[:, None]).to(out.dtype.element_ty), mask=inside)
