"""Mixture of experts: routing, and linears whose weight depends on the token."""

from __future__ import annotations

import torch

from offroad.ops.linear import TOLERANCE, dense
from offroad.ops.norm import TOLERANCE as ROUNDED
from offroad.ops.spec import OpSpec, Tolerance
from offroad.quant.packed import Packed

ROUTE_TOLERANCE = {name: Tolerance(1e-5, 1e-5) for name in ("float32", "bfloat16", "float16")}


def route(logits: torch.Tensor, top_k: int, scale: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """(weights fp32, experts int64) [tokens, top_k]: the largest of the softmax over all experts, in fp32, divided by
    their sum, then multiplied by `scale` [experts] if given. logits [tokens, experts]."""
    weights, experts = logits.float().softmax(-1).topk(top_k, dim=-1)
    weights = weights / weights.sum(-1, keepdim=True)
    return (weights if scale is None else weights * scale[experts]), experts


def grouped_linear(x: torch.Tensor, experts: torch.Tensor, weight: Packed, count: int) -> torch.Tensor:
    """`x w_e^T` for each token's experts; x [tokens, k], or [tokens, top_k, k] if it differs by expert; experts int64
    [tokens, top_k]; weight [count * n, k] -> [tokens, top_k, n]."""
    n = weight.n // count
    out = torch.empty(*experts.shape, n, dtype=x.dtype, device=x.device)
    for expert in experts.unique().tolist():
        token, choice = (experts == expert).nonzero(as_tuple=True)
        w = dense(weight.rows(slice(expert * n, (expert + 1) * n))).to(x.dtype)
        out[token, choice] = (x[token] if x.ndim == 2 else x[token, choice]) @ w.T
    return out


def moe_combine(
    parts: torch.Tensor, weights: torch.Tensor, shared: torch.Tensor | None, gate: torch.Tensor | None
) -> torch.Tensor:
    """`sum_e weights_e parts_e`, and with a shared expert `+ sigmoid(gate) shared`, in fp32; parts [tokens, top_k,
    hidden], weights fp32 [tokens, top_k], shared [tokens, hidden] and gate [tokens, 1], or None both -> [tokens,
    hidden] in the type of parts."""
    mixed = (parts.float() * weights[..., None]).sum(1)
    if shared is not None and gate is not None:
        mixed = mixed + gate.float().sigmoid() * shared.float()
    return mixed.to(parts.dtype)


_SCORE_ROUTE = """(weights fp32, experts int64) [tokens, top_k] of logits [tokens, experts] in fp32, with
scores = sqrt(softplus(logits)): the experts with the largest score + bias, or those that ids [vocab, top_k] has for the
token; the scores of these, without the bias, divided by their sum and multiplied by a scale."""

OPS = (
    OpSpec("score_route", _SCORE_ROUTE, None, ROUTE_TOLERANCE),
    OpSpec("route", route.__doc__ or "", route, ROUTE_TOLERANCE),
    OpSpec("moe_combine", moe_combine.__doc__ or "", moe_combine, ROUNDED),
    OpSpec("grouped_linear", grouped_linear.__doc__ or "", grouped_linear, TOLERANCE),
)
