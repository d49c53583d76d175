"""A linear of gate and up with the activation behind its sums, in one launch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from offroad.ops import blocks
from offroad.quant.packed import Packed
from offroad.triton_kernels.gated import LEAST_4_BIT, MOST
from offroad.triton_kernels.linear import DENSE_OUTPUTS
from offroad.triton_kernels.linear_pack import Records
from offroad.triton_kernels.linear_run import DENSE_TOKENS, Card, Tile, card, launch, stored, tile

if TYPE_CHECKING:
    from offroad.ops.bound import LayerOps


def takes(rows: int, dtype: torch.dtype, weight: Packed) -> bool:
    """Whether `fused` is for so many rows: where `linear_run.run` would launch its kernel too."""
    if isinstance(weight, Records):
        return (LEAST_4_BIT if weight.kind in ("int4", "e2m1") else 1) <= rows <= MOST
    dense = dtype != torch.float32 and weight.tensors["w"].is_contiguous() and weight.n <= DENSE_OUTPUTS
    return dense and 0 < rows <= DENSE_TOKENS


def fused(
    x: torch.Tensor, weight: Packed, kind: str, *, choice: Tile | None = None, on: Card | None = None
) -> torch.Tensor:
    """`act(gate) * up` of `x w^T + bias`, whose first half is the gate; x [tokens, k] -> [tokens, n / 2].

    Tiles are those of the linear alone, and so is the order of its sums; gate and up are rounded to x's type before
    the activation. So the result is bit for bit that of the two kernels, but for programs with shares of all tiles:
    those of an output begin elsewhere here. `choice`, `on`: as in `linear_run.run`.
    """
    if weight.perm is not None:
        x = x.index_select(1, weight.perm)
    x, it = x.contiguous(), stored(weight)
    rows = x.shape[0]
    y = torch.empty(rows, weight.n // 2, dtype=x.dtype, device=x.device)
    blocks = -(-rows // 64)
    at = choice or tile(it.kind, weight.n, weight.k, rows, blocks, on or card(x.device), x.dtype, summed=it.summed)
    launch(x, it, y, weight, at, -(-rows // at.m), weight.n, gate=kind)
    return y


def gated_linear(x: torch.Tensor, layer: LayerOps, *, on: Card) -> torch.Tensor:
    """The contract of `ops.blocks.gated_linear`; more tokens than `takes` go through the kernels of both parts."""
    weight, kind = layer.linears["gate_up"], layer.ffn.activation
    if takes(x.shape[0], x.dtype, weight):
        return fused(x, weight, kind, on=on)
    return blocks.gated_linear(x, layer)
