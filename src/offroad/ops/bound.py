"""Ops bound to kernels, weights and caches: what a model's forward calls, by name, without a lookup per call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from offroad.models.spec import FfnSpec, Mixer, MoeSpec
from offroad.ops import blocks
from offroad.ops.gated_delta import DeltaWeights
from offroad.ops.spec import Bound
from offroad.quant.packed import Packed
from offroad.run.rows import PagedView, Rows, View


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
    mixer: Mixer | None = None
    ffn: FfnSpec | None = None
    moe: MoeSpec | None = None
    rope: torch.Tensor | None = None
    views: dict[str, View] = field(default_factory=dict)
    attention_verify: Bound | None = None
    attention_chunk: Bound | None = None
    following: torch.Tensor | None = None
    described: dict[str, Any] = field(default_factory=dict)

    @property
    def view(self) -> PagedView:
        """The pages of keys and values."""
        return self.views["kv"]

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """`x w^T + b` by the linear `name`; x [tokens, k] -> [tokens, n]."""
        return self.bounds[f"linear:{name}"](x, self.linears[name])

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return self.bounds["norm"](x, self.tensors[name], self.eps)

    def next_norm(self, x: torch.Tensor) -> torch.Tensor:
        """x normed for what follows the layer."""
        return self.bounds["norm"](x, self.following, self.eps)

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

    def qkv_rope(self, qkv: torch.Tensor, rows: Rows) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """q [tokens, heads, dim], k and v [tokens, kv_heads, dim], normed where the layer does so, and rotated; no k
        and v in a layer that reads another's."""
        tensors = self.tensors
        return self.bounds["qkv_rope"](
            qkv, self.positions(rows), self.rope, self.mixer, tensors.get("q_norm"), tensors.get("k_norm"), self.eps
        )

    def positions(self, rows: Rows) -> torch.Tensor:
        """What the layer's angles are looked up by, [tokens] or [3, tokens]: a drafter of another family may have the
        other kind of rope."""
        return rows.positions if self.mixer.rope.sections is None else rows.rope_positions

    def rope_attention(self, qkv: torch.Tensor, rows: Rows) -> torch.Tensor:
        """Attention of the projection qkv [tokens, n]; -> [tokens, heads * dim]: by its parts, where the plan has no
        cell for both."""
        return self.bounds.get("rope_attention", blocks.rope_attention)(qkv, rows, self)

    def attention(self, q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None, rows: Rows) -> torch.Tensor:
        """Attention of the step's tokens, storing their rows if it has any; -> [tokens, heads * dim]."""
        verify, chunk = self.attention_verify, self.attention_chunk
        if verify is chunk or rows.verify == len(rows.slot):
            return verify(q, k, v, self.view, rows, self.mixer)
        if rows.verify == 0:
            return chunk(q, k, v, self.view, rows, self.mixer)
        first, second, cut = rows.parts()
        (k0, k1), (v0, v1) = ((None, None) if x is None else (x[:cut], x[cut:]) for x in (k, v))
        return torch.cat(
            (
                verify(q[:cut], k0, v0, self.view, first, self.mixer),
                chunk(q[cut:], k1, v1, self.view, second, self.mixer),
            )
        )

    def output_gate(self, x: torch.Tensor, qkv: torch.Tensor) -> torch.Tensor:
        """`x * sigmoid(gate)` with the gates of the fused projection; x [tokens, heads * dim]."""
        return self.bounds["output_gate"](x, qkv, self.mixer)

    def gated_delta(self, qkvz: torch.Tensor, ba: torch.Tensor, rows: Rows) -> torch.Tensor:
        """Gated DeltaNet between its projections, storing states; -> [tokens, value_heads * value_dim]."""
        t, views = self.tensors, self.views
        weights = DeltaWeights(t["conv"], t["a_log"], t["dt_bias"], t["delta_norm"])
        return self.bounds["gated_delta"](qkvz, ba, views["conv"], views["state"], rows, self.mixer, weights, self.eps)

    def route(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(weights fp32, experts) [tokens, top_k] from the router's logits [tokens, experts]."""
        return self.bounds["route"](logits, self.moe.top_k, self.tensors.get("expert_scale"))

    def experts(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        experts: torch.Tensor,
        shared: torch.Tensor | None = None,
        gate: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The weighted sum of each token's experts, and of a shared one; x [tokens, hidden] -> [tokens, hidden], the
        others as in `ops.moe.moe_combine`: by its parts, where the plan has no cell for all of them."""
        return self.bounds.get("experts", blocks.experts)(x, weights, experts, shared, gate, self)

    def gated_linear(self, x: torch.Tensor) -> torch.Tensor:
        """`act(gate) * up` of the linear gate_up, x [tokens, k] -> [tokens, size]: by its parts, where the plan has
        no cell for both."""
        return self.bounds.get("gated_linear", blocks.gated_linear)(x, self)

    def gated_activation(self, gate_up: torch.Tensor) -> torch.Tensor:
        """`act(gate) * up`; [tokens, 2 * size] -> [tokens, size]."""
        return self.bounds["gated_activation"](gate_up, self.ffn.activation)


def _unobserved(layer: int, residual: torch.Tensor) -> None:
    """Nobody looks at the residual stream."""


@dataclass
class Ops:
    """All ops of one phase. `model` holds the tensors outside layers, for a drafter `drafter` its own;
    `observe(layer, residual)` is called after each layer (used to find the layer that made a non-finite value)."""

    layers: list[LayerOps]
    model: LayerOps
    embed_scale: float
    dtype: torch.dtype
    logit_softcap: float | None = None
    observe: Callable[[int, torch.Tensor], None] = field(default=_unobserved)
    drafter: LayerOps | None = None

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Scaled embeddings, [tokens, hidden]."""
        return self.model.bounds["embed"](ids, self.model.linears["embed"], self.embed_scale, self.dtype)

    def embed_by(self, name: str, ids: torch.Tensor, scale: float) -> torch.Tensor:
        """Rows of another embedding times `scale`, [tokens, k]."""
        return self.model.bounds[f"embed:{name}"](ids, self.model.linears[name], scale, self.dtype)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """fp32 logits [wanted, vocab] of normed hidden states [wanted, hidden]."""
        logits = self.model.linear("head", hidden).float()
        if self.logit_softcap:
            logits = torch.tanh(logits / self.logit_softcap) * self.logit_softcap
        return logits
