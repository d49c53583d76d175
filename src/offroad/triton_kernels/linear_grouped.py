"""Linears of experts: which expert's weight each block of tokens reads, found on the device.

Nothing here waits for the device, and grids depend on shapes alone, so a step can be captured in a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

import torch

from offroad.quant.packed import Packed
from offroad.triton_kernels.linear import PAIRS_AT_ONCE
from offroad.triton_kernels.linear_run import INVARIANT_ROWS, Card, Tile, card, launch, stored, tile, width
from offroad.triton_kernels.route_jit import moe_combine, room, sort_few

if TYPE_CHECKING:
    from offroad.ops.bound import LayerOps

PAIRS = 64  # (token, expert) pairs up to which each is a block of its own: nothing is sorted


def blocks_of(pairs: int, count: int, size: int) -> int:
    """Blocks of `size` that hold `pairs` pairs of `count` experts however they fall."""
    return min(pairs, pairs // size + count)


@cache
def _alone(pairs: int, size: int, device: torch.device) -> torch.Tensor:
    """ids of blocks that hold one pair each."""
    ids = torch.full((pairs, size), pairs, dtype=torch.int64, device=device)
    ids[:, 0] = torch.arange(pairs, device=device)
    return ids


def sort(experts: torch.Tensor, count: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids [blocks * size], owner [blocks]), both int64: pairs in blocks of one expert each, a pair's index being its
    place in `experts` [tokens, top_k]; places without a pair hold tokens * top_k, blocks without any expert -1."""
    if room(*experts.shape) <= PAIRS_AT_ONCE:
        return sort_few(experts, count, size, blocks_of(experts.numel(), count, size))
    return sort_many(experts, count, size)


def sort_many(experts: torch.Tensor, count: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`sort` of any number of pairs, by some sixteen launches of torch's kernels."""
    flat = experts.flatten()
    pairs, device = flat.numel(), flat.device
    sizes = torch.zeros(count, dtype=torch.int64, device=device).scatter_add_(0, flat, torch.ones_like(flat))
    needed = (sizes + size - 1) // size
    ends = needed.cumsum(0)
    owners, order = flat.sort(stable=True)
    rank = torch.arange(pairs, device=device) - (sizes.cumsum(0) - sizes)[owners]
    blocks = blocks_of(pairs, count, size)
    ids = torch.full((blocks * size,), pairs, dtype=torch.int64, device=device)
    ids[(ends - needed)[owners] * size + rank] = order
    owner = torch.searchsorted(ends, torch.arange(blocks, device=device), right=True)
    return ids, torch.where(owner < count, owner, -1)


@dataclass(frozen=True)
class Blocks:
    """Pairs in blocks of `size`, with `ids` and `owner` as in `sort`; `rows` are how many a block is expected to have,
    `expected` how many blocks."""

    ids: torch.Tensor
    owner: torch.Tensor
    size: int
    rows: int
    expected: int


def in_blocks(
    experts: torch.Tensor, count: int, dtype: torch.dtype, *, invariant: bool = False, size: int | None = None
) -> Blocks:
    """What linears of `count` experts read for activations in `dtype`; `size`: None, or of a tile to measure."""
    pairs = experts.numel()
    alone = pairs <= PAIRS and not invariant
    rows = INVARIANT_ROWS if invariant else 1 if alone else -(-pairs // count)
    size = size or width(rows, dtype)
    if alone:
        return Blocks(_alone(pairs, size, experts.device), experts.flatten(), size, rows, pairs)
    return Blocks(*sort(experts, count, size), size, rows, 1 if invariant else blocks_of(pairs, count, size))


def grouped(
    x: torch.Tensor,
    experts: torch.Tensor,
    weight: Packed,
    count: int,
    *,
    invariant: bool = False,
    choice: Tile | None = None,
    on: Card | None = None,
    blocks: Blocks | None = None,
    gate: str = "",
) -> torch.Tensor:
    """`x w_e^T` for each token's experts; x [tokens, k] or [tokens, top_k, k], experts int64 [tokens, top_k], weight
    [count * n, k] -> [tokens, top_k, n], or with the activation `gate` its halves' `act(gate) * up` [tokens, top_k,
    n / 2]. Few pairs are blocks of their own, and each reads its expert's weight; more are sorted by expert, and a
    block reads it for all of its tokens. `blocks`: None, or where another linear of these experts has found them.
    `invariant`, `choice`, `on`: as in `linear_run.run`."""
    n, pairs, top_k = weight.n // count, experts.numel(), experts.shape[1]
    if weight.perm is not None:
        x = x.index_select(-1, weight.perm)
    x = x.contiguous()
    outputs = n // 2 if gate else n
    y = torch.empty(*experts.shape, outputs, dtype=x.dtype, device=x.device)
    if not pairs:
        return y
    blocks = blocks or in_blocks(experts, count, x.dtype, invariant=invariant, size=choice and choice.m)
    it = stored(weight)
    at = choice or tile(
        it.kind, n, weight.k, blocks.rows, blocks.expected, on or card(x.device), x.dtype, True, it.summed
    )
    if invariant:
        at = replace(at, split=1)  # experts are programs enough, and parts of sums of a whole prompt's pairs too many
    per_token = top_k if x.ndim == 2 else 1
    y_rows = y.view(pairs, outputs)
    launch(x, it, y_rows, weight, at, len(blocks.owner), n, blocks.ids, blocks.owner, per_token, gate)
    return y


def experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    chosen: torch.Tensor,
    shared: torch.Tensor | None,
    gate: torch.Tensor | None,
    layer: LayerOps,
    *,
    on: Card,
) -> torch.Tensor:
    """The contract of `ops.blocks.experts`: pairs are put in blocks once for both linears, and the activation is behind
    the sums of the first. Bit for bit what the four parts give."""
    count, linears = layer.moe.experts, layer.linears
    blocks = in_blocks(chosen, count, x.dtype) if chosen.numel() else None
    kind = layer.moe.activation
    x = grouped(x, chosen, linears["experts_gate_up"], count, on=on, blocks=blocks, gate=kind)
    x = grouped(x, chosen, linears["experts_down"], count, on=on, blocks=blocks)
    return moe_combine(x, weights, shared, gate)
