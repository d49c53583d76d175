"""Gated activations over the fused gate and up projection."""

from __future__ import annotations

import torch
from torch.nn.functional import gelu, silu

from offroad.models.spec import AttentionSpec
from offroad.ops.spec import OpSpec, Tolerance

TOLERANCE = {"float32": Tolerance(1e-5, 1e-5), "bfloat16": Tolerance(2e-2, 1.6e-2), "float16": Tolerance(2e-3, 2e-3)}


def gated_activation(gate_up: torch.Tensor, kind: str) -> torch.Tensor:
    """`act(gate) * up`; gate_up [tokens, 2 * size], gate first -> [tokens, size]. kind "silu" or "gelu_tanh"."""
    gate, up = gate_up.chunk(2, dim=-1)
    return (silu(gate) if kind == "silu" else gelu(gate, approximate="tanh")) * up


def output_gate(x: torch.Tensor, qkv: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
    """`x * sigmoid(gate)`; x [tokens, heads * dim], the gates are those of qkv (see `AttentionSpec.output_gate`)."""
    gate = qkv[:, : spec.q_width].view(-1, spec.heads, 2, spec.head_dim)[:, :, 1].flatten(1)
    return x * gate.sigmoid()


_CLAMPED = (
    """`silu(min(gate, limit)) * clamp(up, -limit, limit)`; gate_up [tokens, 2 * size], gate first -> [tokens, size]."""
)

OPS = (
    OpSpec("clamped_activation", _CLAMPED, None, TOLERANCE),
    OpSpec("gated_activation", gated_activation.__doc__ or "", gated_activation, TOLERANCE),
    OpSpec("output_gate", output_gate.__doc__ or "", output_gate, TOLERANCE),
)
