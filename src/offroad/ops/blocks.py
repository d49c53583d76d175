"""Blocks: the largest ops, which a model calls by name. A kernel may do one whole, else it is done by its parts.

A block is given its layer, and calls the layer's parts as the plan resolved them: so no family knows what is fused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from offroad.ops.activation import TOLERANCE
from offroad.ops.spec import OpSpec
from offroad.run.rows import Rows

if TYPE_CHECKING:
    from offroad.ops.bound import LayerOps


def attention_block(h: torch.Tensor, rows: Rows, layer: LayerOps) -> torch.Tensor:
    """`o(gate * attention(rope(qkv(h))))`, storing the step's keys and values; h [tokens, hidden] -> [tokens, hidden].

    Without an output gate there is no such factor.
    """
    qkv = layer.linear("qkv", h)
    out = layer.rope_attention(qkv, rows)
    return layer.linear("o", layer.output_gate(out, qkv) if layer.mixer.output_gate else out)


def rope_attention(qkv: torch.Tensor, rows: Rows, layer: LayerOps) -> torch.Tensor:
    """`attention(rope(qkv))`, storing keys and values of the step where the layer has its own; qkv [tokens, n] ->
    [tokens, heads * dim]."""
    return layer.attention(*layer.qkv_rope(qkv, rows), rows)


def mlp_block(x: torch.Tensor, residual: torch.Tensor, layer: LayerOps) -> tuple[torch.Tensor, torch.Tensor]:
    """The mlp between two residual adds: (norm(r), r), r = s + mlp(norm(s)), s = residual + x; [tokens, hidden].

    The last norm is the next layer's first (or the model's). Where a layer has post norms, what is added is normed.
    """
    tensors = layer.tensors
    h, residual = layer.add_norm(x, residual, tensors["mlp_norm"], tensors.get("post_attention_norm"))
    h = layer.linear("down", layer.gated_linear(h))
    return layer.add_norm(h, residual, layer.following, tensors.get("post_mlp_norm"))


def gated_linear(x: torch.Tensor, layer: LayerOps) -> torch.Tensor:
    """`act(gate) * up` of the linear gate_up, whose first half is the gate; x [tokens, k] -> [tokens, size]."""
    return layer.gated_activation(layer.linear("gate_up", x))


def experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    chosen: torch.Tensor,
    shared: torch.Tensor | None,
    gate: torch.Tensor | None,
    layer: LayerOps,
) -> torch.Tensor:
    """The weighted sum of each token's experts, which are gated mlps, and of a shared one; x [tokens, hidden] ->
    [tokens, hidden], chosen int64 [tokens, top_k], the others as in `ops.moe.moe_combine`."""
    moe, bounds, linears = layer.moe, layer.bounds, layer.linears
    # One name for what each kernel reads: the one before is free again while the next runs.
    x = bounds["grouped_linear:experts_gate_up"](x, chosen, linears["experts_gate_up"], moe.experts)
    x = bounds["gated_activation:experts"](x.flatten(0, 1), moe.activation).unflatten(0, chosen.shape)
    x = bounds["grouped_linear:experts_down"](x, chosen, linears["experts_down"], moe.experts)
    return bounds["moe_combine"](x, weights, shared, gate)


OPS = (
    OpSpec("attention_block", attention_block.__doc__ or "", attention_block, TOLERANCE),
    OpSpec("rope_attention", rope_attention.__doc__ or "", rope_attention, TOLERANCE),
    OpSpec("mlp_block", mlp_block.__doc__ or "", mlp_block, TOLERANCE),
    OpSpec("gated_linear", gated_linear.__doc__ or "", gated_linear, TOLERANCE),
    OpSpec("experts", experts.__doc__ or "", experts, TOLERANCE),
)
