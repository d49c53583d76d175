"""Linears over 4-bit integers and e4m3 on Hopper, by the number of tokens: which kernel has them. What none of Hopper's
has goes to Triton's, which read the same records.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from offroad.nvrtc import linear_few, linear_hopper
from offroad.nvrtc.linear_args import BITS
from offroad.triton_kernels import linear_gated, linear_run
from offroad.triton_kernels.linear_pack import Records

if TYPE_CHECKING:
    import torch

    from offroad.ops.bound import LayerOps
    from offroad.quant.packed import Packed
    from offroad.triton_kernels.linear_run import Card

MOST = linear_hopper.MOST  # tokens


def linear(x: torch.Tensor, weight: Packed, *, on: Card) -> torch.Tensor:
    """`x w^T + bias`; x [tokens, k] -> [tokens, n]."""
    if not takes(x.shape[0], weight, weight.n, on):
        return linear_run.run(x, weight, on=on)
    return product(x, weight, sms=on.sms)


def gated_linear(x: torch.Tensor, layer: LayerOps, *, on: Card) -> torch.Tensor:
    """The contract of `ops.blocks.gated_linear`."""
    weight, kind = layer.linears["gate_up"], layer.ffn.activation
    if not takes(x.shape[0], weight, weight.n // 2, on):
        return linear_gated.gated_linear(x, layer, on=on)
    return product(x, weight, kind, on.sms)


def takes(rows: int, weight: Packed, outputs: int, on: Card) -> bool:
    """Whether one of Hopper's kernels has so many rows of x, in bf16, and columns of y."""
    if not isinstance(weight, Records) or weight.kind not in BITS or not 0 < rows <= MOST:
        return False
    return rows > linear_few.MOST or linear_few.takes(rows, weight, outputs, on.sms)


def product(x: torch.Tensor, weight: Records, gate: str = "", sms: int = 0) -> torch.Tensor:
    """[tokens, n] of x [tokens, k] in bf16, or [tokens, n / 2] with the gated activation `gate`; of a plan's card with
    `sms`, or of the one that is there."""
    x = (x if weight.perm is None else x.index_select(1, weight.perm)).contiguous()
    if x.shape[0] <= linear_few.MOST:
        return linear_few.product(x, weight, gate, sms)
    return linear_hopper.product(x, weight, gate)
