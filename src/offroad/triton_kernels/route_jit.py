"""Routing of a mixture of experts: softmax over all experts and the top k of them, one program a token; the blocks in
which linears of experts take their pairs (a token and one of its experts); and the sum of what these give."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from offroad.triton_kernels.compile import Variant
from offroad.triton_kernels.dependent import launching, take_turn
from offroad.triton_kernels.linear import PAIRS_AT_ONCE

COLUMNS = 512  # of a program that adds up a token's experts


@triton.jit
def route_kernel(
    logits, scale, weights, chosen, stride, experts,
    TOP: tl.constexpr, SCALED: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """weights fp32 and chosen int64 [tokens, TOP] of logits [tokens, experts]; of equal ones the first."""
    take_turn(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    live = at < experts
    x = tl.load(logits + row * stride + at, mask=live, other=float("-inf")).to(tl.float32)
    p = tl.exp(x - tl.max(x, axis=0))
    p = tl.where(live, p / tl.sum(p, axis=0), -1.0)
    slots = tl.arange(0, WIDTH)
    best = tl.zeros([WIDTH], tl.float32)
    which = tl.zeros([WIDTH], tl.int64)
    for i in tl.static_range(TOP):
        # Without the bound a row of NaN would choose an expert that is not there.
        expert = tl.minimum(tl.argmax(p, axis=0), experts - 1)
        best = tl.where(slots == i, tl.max(p, axis=0), best)
        which = tl.where(slots == i, expert.to(tl.int64), which)
        p = tl.where(at == expert, -1.0, p)
    best /= tl.sum(best, axis=0)
    kept = slots < TOP
    if SCALED:
        best *= tl.load(scale + which, mask=kept, other=0.0).to(tl.float32)
    tl.store(weights + row * TOP + slots, best, mask=kept)
    tl.store(chosen + row * TOP + slots, which, mask=kept)


def route(logits: torch.Tensor, top_k: int, scale: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The contract of `ops.moe.route`."""
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    tokens, experts = logits.shape
    weights = torch.empty((tokens, top_k), dtype=torch.float32, device=logits.device)
    chosen = torch.empty((tokens, top_k), dtype=torch.int64, device=logits.device)
    if tokens:
        blocks = (triton.next_power_of_2(experts), triton.next_power_of_2(top_k))
        route_kernel[(tokens,)](
            logits,
            scale,
            weights,
            chosen,
            logits.stride(0),
            experts,
            top_k,
            scale is not None,
            *blocks,
            num_warps=1,
            **launching(tokens),
        )
    return weights, chosen


@triton.jit
def combine_kernel(
    parts, weights, shared, gate, out, shared_stride, gate_stride, hidden,
    TOP: tl.constexpr, SHARED: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [tokens, hidden], a program for each token and BLOCK of columns; parts [tokens, TOP, hidden]."""
    take_turn(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = at < hidden
    parts += row * TOP * hidden + at
    total = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(TOP):
        total += tl.load(parts + i * hidden, mask=live, other=0.0).to(tl.float32) * tl.load(weights + row * TOP + i)
    if SHARED:
        behind = tl.sigmoid(tl.load(gate + row * gate_stride).to(tl.float32))
        total += tl.load(shared + row * shared_stride + at, mask=live, other=0.0).to(tl.float32) * behind
    tl.store(out + row * hidden + at, total.to(out.dtype.element_ty), mask=live)


def moe_combine(
    parts: torch.Tensor, weights: torch.Tensor, shared: torch.Tensor | None, gate: torch.Tensor | None
) -> torch.Tensor:
    """The contract of `ops.moe.moe_combine`."""
    tokens, top_k, hidden = parts.shape
    out = torch.empty((tokens, hidden), dtype=parts.dtype, device=parts.device)
    if shared is not None and shared.stride(1) != 1:
        shared = shared.contiguous()
    if tokens:
        combine_kernel[(tokens, triton.cdiv(hidden, COLUMNS))](
            parts.contiguous(),
            weights.contiguous(),
            shared,
            gate,
            out,
            0 if shared is None else shared.stride(0),
            0 if gate is None else gate.stride(0),
            hidden,
            top_k,
            shared is not None,
            COLUMNS,
            num_warps=4,
            **launching(tokens),
        )
    return out


@triton.jit(do_not_specialize=["pairs", "count"])
def sort_kernel(
    experts, ids, owner, pairs, count,
    SIZE: tl.constexpr, PAIRS: tl.constexpr, COUNT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """ids [blocks * SIZE] and owner [blocks] of `linear_grouped.sort`, all int64, a program for each block: of how many
    blocks each expert needs it finds whose block it is, and of that expert's pairs those that come here. PAIRS is at
    least `pairs`, COUNT more than `count`."""
    take_turn(PDL)
    block = tl.program_id(0)
    at, expert = tl.arange(0, PAIRS), tl.arange(0, COUNT)
    own = tl.load(experts + at, mask=at < pairs, other=COUNT - 1).to(tl.int32)
    held = tl.histogram(own, COUNT)
    needed = tl.where(expert < count, (held + SIZE - 1) // SIZE, 0)
    mine = tl.sum((tl.cumsum(needed, axis=0) <= block).to(tl.int32), axis=0)  # COUNT: no expert's
    first = tl.sum(tl.where(expert < mine, needed, 0), axis=0)
    before = (block - first) * SIZE  # of that expert's pairs
    here = (own == mine) & (at < pairs)
    place = tl.cumsum(here.to(tl.int32), axis=0) - 1 - before
    to = ids + block * SIZE
    tl.store(to + place, at.to(tl.int64), mask=here & (place >= 0) & (place < SIZE))
    empty = tl.arange(0, SIZE)
    left = tl.sum(tl.where(expert == mine, held, 0), axis=0) - before
    tl.store(to + empty, tl.zeros([SIZE], tl.int64) + pairs, mask=empty >= left)
    tl.store(owner + block, tl.where(mine < count, mine, -1).to(tl.int64))


def room(tokens: int, top_k: int) -> int:
    """Pairs that a program reads. By tokens and by top_k: the prepare phase compiles for numbers of tokens around
    powers of two."""
    return triton.next_power_of_2(tokens) * triton.next_power_of_2(top_k)


def _warps(pairs: int) -> int:
    """Of such a program, so that registers suffice."""
    return 8 if pairs > 1024 else 4


def sort_few(experts: torch.Tensor, count: int, size: int, blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The contract of `linear_grouped.sort`, into so many blocks, for `room` of up to `PAIRS_AT_ONCE` pairs: one
    launch."""
    tokens, pairs = experts.shape[0], room(*experts.shape)
    ids = torch.empty(blocks * size, dtype=torch.int64, device=experts.device)
    owner = torch.empty(blocks, dtype=torch.int64, device=experts.device)
    sort_kernel[(blocks,)](
        experts.contiguous(),
        ids,
        owner,
        experts.numel(),
        count,
        size,
        pairs,
        triton.next_power_of_2(count + 1),
        num_warps=_warps(pairs),
        **launching(tokens),
    )
    return ids, owner


def variants() -> Iterator[Variant]:
    """Of Qwen3.5-35B-A3B."""
    kinds = {
        "logits": "*bf16",
        "scale": "*fp32",
        "weights": "*fp32",
        "chosen": "*i64",
        "stride": "i32",
        "experts": "i32",
    }
    constants = {"TOP": 8, "SCALED": False, "BLOCK": 256, "WIDTH": 8}
    yield Variant("route 256 of 8", route_kernel, kinds, constants, warps=1)
    numbers = dict.fromkeys(("shared_stride", "gate_stride", "hidden"), "i32")
    tensors = dict.fromkeys(("parts", "shared", "gate", "out"), "*bf16") | {"weights": "*fp32"}
    constants = {"TOP": 8, "SHARED": True, "BLOCK": COLUMNS}
    aligned = (*tensors, "shared_stride", "hidden")
    yield Variant("sum of 8 experts and a shared one", combine_kernel, tensors | numbers, constants, aligned=aligned)
    places = {"experts": "*i64", "ids": "*i64", "owner": "*i64", "pairs": "i32", "count": "i32"}
    for pairs, size in ((256, 16), (PAIRS_AT_ONCE, 64)):
        constants = {"SIZE": size, "PAIRS": pairs, "COUNT": 512}
        name, aligned = f"blocks of {size} of {pairs} pairs", ("experts", "ids", "owner")
        yield Variant(name, sort_kernel, places, constants, _warps(pairs), aligned=aligned)
