"""Ops bound to kernels, weights and caches: what a model's forward calls, by name, without a lookup per call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from offroad.models.spec import AttentionSpec, FfnSpec
from offroad.ops.spec import Bound
from offroad.quant.packed import Packed
from offroad.run.rows import PagedView, Rows


@dataclass
class LayerOps:
    """The ops of one layer (or of the model's own tensors) in one phase.

    `bounds` are kernels by op, linears as "linear:name"; `attention_verify` and `attention_chunk` may differ, then a
    mixed step calls each on its own rows. `following` is the weight of the norm after the layer: the next layer's
    first, or the model's. `described` is where fused kernels keep what they need of the layer.
    """

    bounds: dict[str, Bound]
    linears: dict[str, Packed]
    tensors: dict[str, torch.Tensor]
    eps: float
    mixer: AttentionSpec | None = None
    ffn: FfnSpec | None = None
    rope: torch.Tensor | None = None
    view: PagedView | None = None
    attention_verify: Bound | None = None
    attention_chunk: Bound | None = None
    following: torch.Tensor | None = None
    described: dict[str, Any] = field(default_factory=dict)

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """`x w^T + b` by the linear `name`; x [tokens, k] -> [tokens, n]."""
        return self.bounds[f"linear:{name}"](x, self.linears[name])

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return self.bounds["norm"](x, self.tensors[name], self.eps)

    def add_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, post: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm(r), r) with r = residual + x, or residual + norm(x, post) if `post` is given."""
        if post is None:
            return self.bounds["add_norm"](x, residual, weight, self.eps)
        return self.bounds["sandwich_norm"](x, residual, post, weight, self.eps)

    def attention_block(self, h: torch.Tensor, rows: Rows) -> torch.Tensor:
        """From normed hidden states to what attention adds to the residual stream; [tokens, hidden] both."""
        return self.bounds["attention_block"](h, rows, self)

    def mlp_block(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds x, then the mlp's output, to the residual stream; gives (that normed for what follows, that)."""
        return self.bounds["mlp_block"](x, residual, self)

    def qkv_rope(self, qkv: torch.Tensor, rows: Rows) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q [tokens, heads, dim], k and v [tokens, kv_heads, dim], normed where the layer does so, and rotated."""
        tensors = self.tensors
        return self.bounds["qkv_rope"](
            qkv, rows.positions, self.rope, self.mixer, tensors.get("q_norm"), tensors.get("k_norm"), self.eps
        )

    def attention(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: Rows) -> torch.Tensor:
        """Attention of the step's tokens, storing their rows; -> [tokens, heads * dim]."""
        verify, chunk = self.attention_verify, self.attention_chunk
        if verify is chunk or rows.verify == len(rows.slot):
            return verify(q, k, v, self.view, rows, self.mixer)
        if rows.verify == 0:
            return chunk(q, k, v, self.view, rows, self.mixer)
        first, second, cut = rows.parts()
        return torch.cat(
            (
                verify(q[:cut], k[:cut], v[:cut], self.view, first, self.mixer),
                chunk(q[cut:], k[cut:], v[cut:], self.view, second, self.mixer),
            )
        )

    def gated_activation(self, gate_up: torch.Tensor) -> torch.Tensor:
        """`act(gate) * up`; [tokens, 2 * size] -> [tokens, size]."""
        return self.bounds["gated_activation"](gate_up, self.ffn.activation)


def _unobserved(layer: int, residual: torch.Tensor) -> None:
    """Nobody looks at the residual stream."""


@dataclass
class Ops:
    """All ops of one phase. `model` holds the tensors outside layers; `observe(layer, residual)` is called after each
    layer (used to find the layer that made a non-finite value)."""

    layers: list[LayerOps]
    model: LayerOps
    embed_scale: float
    dtype: torch.dtype
    logit_softcap: float | None = None
    observe: Callable[[int, torch.Tensor], None] = field(default=_unobserved)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Scaled embeddings, [tokens, hidden]."""
        return self.model.bounds["embed"](ids, self.model.linears["embed"], self.embed_scale, self.dtype)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """fp32 logits [wanted, vocab] of normed hidden states [wanted, hidden]."""
        logits = self.model.linear("head", hidden).float()
        if self.logit_softcap:
            logits = torch.tanh(logits / self.logit_softcap) * self.logit_softcap
        return logits
