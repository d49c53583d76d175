"""Triton functions of paged attention for few queries a row: partial results by partition, then their sum.

A partition's ends depend on positions alone, and its partial result on nothing but its own rows: so neither the
number of programs nor what else is in the step changes a bit of the answer.
"""

import triton
import triton.language as tl

from offroad.triton_kernels.attention import EACH
from offroad.triton_kernels.dependent import take_turn, wait_turn
from offroad.triton_kernels.kv_rows import LISTS, loaded

# Partitions of a history are SMALLEST tokens long up to position 2 * EACH * SMALLEST, then twice as long per doubling
# of the position: EACH a doubling (see attention.py). So a context has enough of them for all SMs, and a long one not
# too many for memory.
_EACH: tl.constexpr = tl.constexpr(EACH)
_DOUBLINGS: tl.constexpr = tl.constexpr(11)


@triton.jit
def doublings(position, BASE: tl.constexpr, GROWS: tl.constexpr):
    """How often the length of partitions has doubled at a position; BASE is the first length."""
    count = position * 0
    if GROWS:
        for i in tl.static_range(_DOUBLINGS):
            count = tl.where(position >= (2 * _EACH * BASE << i), i + 1, count)
    return count


@triton.jit
def partition(position, BASE: tl.constexpr, GROWS: tl.constexpr):
    """Number of the partition that holds a position."""
    times = doublings(position, BASE, GROWS)
    return _EACH * times + position // (BASE << times)


@triton.jit
def _boundary(position, BASE: tl.constexpr, GROWS: tl.constexpr):
    """The first boundary of partitions at or after a position."""
    length = BASE << doublings(position, BASE, GROWS)
    return (position + length - 1) // length * length


@triton.jit
def capped(scores, softcap):
    """`softcap * tanh(scores / softcap)`."""
    return softcap * (1 - 2 / (tl.exp(scores * (2 / softcap)) + 1))


@triton.jit(do_not_specialize=("partitions", "first_token"), do_not_specialize_on_alignment=LISTS)
def paged_decode(
    q, k_pages, v_pages, table, slots, starts, widths, offsets, k_scale, part, part_max, part_sum,
    scale, softcap, q_stride, table_stride, partitions, first_token,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr, BASE: tl.constexpr, KIND: tl.constexpr,
    SCALED: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Unnormalised sums of values, largest scores (of base 2) and sums of weights of every partition, as
    [tokens, heads, partitions, dim] and [tokens, heads, partitions] in fp32; number p is at `p % partitions`.

    Grid (rows, tiles of BLOCK_M queries * kv_heads, splits): a split takes neighbouring partitions, about as many
    tokens as any other, or exits. A query is a token's one of the GROUP heads of a KV head, tokens first.
    """
    wait_turn(PDL)
    row, head, tile = tl.program_id(0), tl.program_id(1) % KV_HEADS, tl.program_id(1) // KV_HEADS
    split, splits = tl.program_id(2), tl.num_programs(2)
    width, start = tl.load(widths + row), tl.load(starts + row)
    if tile * BLOCK_M >= width * GROUP:
        return
    end = start + width
    low = start * 0
    if WINDOW:
        low = tl.maximum(start - WINDOW + 1, 0)
    GROWS: tl.constexpr = WINDOW == 0
    begin = low
    if split > 0:
        begin = _boundary(low + (end - low) * split // splits, BASE, GROWS)
    stop = tl.minimum(_boundary(low + (end - low) * (split + 1) // splits, BASE, GROWS), end)
    if split == splits - 1:
        stop = end
    if begin >= stop:
        return
    number = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    of = number // GROUP  # the token in its row
    real = of < width
    position = start + of
    heads = head * GROUP + number % GROUP
    token = (tl.load(offsets + row) + of).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    queries = tl.load(q + token[:, None] * q_stride + heads[:, None] * DIM + d[None],
                      mask=real[:, None] & (d < DIM)[None], other=0)  # fmt: skip
    place = ((token - first_token) * (KV_HEADS * GROUP) + heads) * partitions
    factor = scale
    if SCALED:
        factor = scale * tl.load(k_scale + head)

    columns = table + tl.load(slots + row).to(tl.int64) * table_stride
    first = begin // TILE * TILE
    # The block of a tile is loaded one iteration ahead: an address that is loaded in the same one is not prefetched.
    block = tl.load(columns + first // BLOCK)
    limit = _boundary(first + 1, BASE, GROWS)
    largest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for at in range(first, stop, TILE):
        here = block.to(tl.int64) * BLOCK + at % BLOCK + tl.arange(0, TILE)
        block = tl.load(columns + tl.minimum(at + TILE, stop - 1) // BLOCK)
        key_at = at + tl.arange(0, TILE)
        inside = (key_at >= low) & (key_at < end)
        source = here[:, None] * (KV_HEADS * DIM) + head * DIM + d[None]
        there = inside[:, None] & (d < DIM)[None]
        keys = loaded(tl.load(k_pages + source, mask=there, other=0), KIND, q.dtype.element_ty)
        values = loaded(tl.load(v_pages + source, mask=there, other=0), KIND, q.dtype.element_ty)
        scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * factor
        if SOFTCAP:
            scores = capped(scores, softcap)
        seen = key_at[None] <= position[:, None]
        if WINDOW:
            seen = seen & (key_at[None] > position[:, None] - WINDOW)
        scores = tl.where(seen, scores * 1.4426950408889634, float("-inf"))
        larger = tl.maximum(largest, tl.max(scores, 1))
        base = tl.where(larger == float("-inf"), 0.0, larger)
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(largest - base)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None]
        acc += tl.dot(weights.to(q.dtype.element_ty), values, input_precision=PRECISION)
        largest = larger
        if (at + TILE >= limit) | (at + TILE >= stop):
            to = place + partition(at, BASE, GROWS) % partitions
            tl.store(part_max + to, largest, mask=real)
            tl.store(part_sum + to, total, mask=real)
            tl.store(part + to[:, None] * DIM + d[None], acc, mask=real[:, None] & (d < DIM)[None])
            limit = _boundary(at + TILE + 1, BASE, GROWS)
            largest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
            total = tl.zeros((BLOCK_M,), tl.float32)
            acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)


@triton.jit(do_not_specialize=("partitions", "first_token"), do_not_specialize_on_alignment=LISTS)
def sum_partitions(
    out, part, part_max, part_sum, positions, v_scale, partitions, first_token,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_P: tl.constexpr,
    STEP: tl.constexpr, WINDOW: tl.constexpr, BASE: tl.constexpr, SCALED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [tokens, heads, dim] from a token's partitions, in their order. Grid (tokens, heads), from `first_token`."""
    take_turn(PDL)
    number_of, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = number_of + first_token
    position = tl.load(positions + token).to(tl.int32)
    GROWS: tl.constexpr = WINDOW == 0
    first = position * 0
    if WINDOW:
        first = partition(tl.maximum(position - WINDOW + 1, 0), BASE, GROWS)
    count = tl.minimum(partition(position, BASE, GROWS) - first + 1, partitions)
    place = (number_of * HEADS + head) * partitions
    number = tl.arange(0, BLOCK_P)
    of = place + (first + number) % partitions
    sizes = tl.load(part_max + of, mask=number < count, other=float("-inf"))
    sums = tl.load(part_sum + of, mask=number < count, other=0)
    largest = tl.max(sizes, 0)
    total = tl.sum(sums * tl.exp2(sizes - largest), 0)
    d = tl.arange(0, BLOCK_D)
    acc = tl.zeros((BLOCK_D,), tl.float32)
    for begin in range(0, count, STEP):
        which = begin + tl.arange(0, STEP)
        at = place + (first + which) % partitions
        weight = tl.exp2(tl.load(part_max + at, mask=which < count, other=float("-inf")) - largest)
        values = tl.load(part + at[:, None] * DIM + d[None], mask=(which < count)[:, None] & (d < DIM)[None], other=0)
        acc += tl.sum(values * weight[:, None], 0)
    acc = acc / total
    if SCALED:
        acc = acc * tl.load(v_scale + head // GROUP)
    tl.store(out + (token * HEADS + head) * DIM + d, acc.to(out.dtype.element_ty), mask=d < DIM)
