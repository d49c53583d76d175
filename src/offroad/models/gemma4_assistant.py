"""The drafter that comes beside Gemma-4: a few layers with queries only, over the model's keys and values.

Each of its layers reads the last layer of the model that has keys and values and is of its own type. Sizes of heads are
the model's, hidden states smaller; projections lead from the model's states to the drafter's and back. Small ones score
a part of the vocabulary only: the tokens of the clusters whose centroids score best.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from offroad.errors import PlanError
from offroad.models import gemma4
from offroad.models.config import Config
from offroad.models.spec import (
    AttentionSpec,
    DraftSpec,
    FfnSpec,
    LayerSpec,
    LinearSpec,
    ModelSpec,
    Paged,
    Shared,
    TensorSpec,
)
from offroad.ops.bound import Ops
from offroad.run.rows import Rows

METHOD = "gemma4_assistant"
# The hidden size of the model where a config leaves it out.
ARCHITECTURES = {"Gemma4AssistantForCausalLM": 1536, "Gemma4UnifiedAssistantForCausalLM": 3840}
IGNORED = (r"lm_head\.weight", r"model\.layers\.\d+\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\.weight")


def join(spec: ModelSpec, values: dict[str, Any]) -> tuple[ModelSpec, DraftSpec]:
    """The model as it must be kept for the drafter, and the drafter of a `config.json` under its own names.

    Raises PlanError for a config of something else, and for a drafter of another model.
    """
    names = values.get("architectures") or ["no architecture"]
    if not (usual := [ARCHITECTURES[name] for name in names if name in ARCHITECTURES]):
        raise _misfit(f"a checkpoint of {', '.join(names)}", f"a checkpoint of {' or '.join(ARCHITECTURES)}")
    if spec.family != "gemma4":
        raise _misfit(f"an assistant of Gemma-4, for a {spec.family} model", "a Gemma-4 model")
    config = Config.text(values, METHOD)
    hidden, vocab = config.get("hidden_size", int), config.get("vocab_size", int, 262144)
    backbone = config.get("backbone_hidden_size", int, usual[0])
    for what, found, own in (("hidden states", backbone, spec.hidden), ("tokens", vocab, spec.vocab)):
        if found != own:
            raise _misfit(f"an assistant of a model with {found} {what}", f"one for {own}")
    layers, keeps = _layers(config, spec, hidden)
    linears, tensors, clusters = _outside(config, hidden, vocab, backbone)
    draft = DraftSpec(
        method=METHOD,
        hidden=hidden,
        layers=layers,
        linears=linears,
        tensors=(TensorSpec("model.norm.weight", "norm", (hidden,)), *tensors),
        prefix="",
        family=METHOD,
        norm_eps=config.get("rms_norm_eps", float, 1e-6),
        clusters=clusters,
    )
    config.get("max_position_embeddings", int, None)
    config.done()
    return replace(spec, layers=keeps), draft


def _misfit(found: str, accepted: str) -> PlanError:
    return PlanError(
        f"method {METHOD}", found=found, accepted=accepted, next="name the assistant that was made for the model"
    )


def _layers(config: Config, spec: ModelSpec, hidden: int) -> tuple[tuple[LayerSpec, ...], tuple[LayerSpec, ...]]:
    """(the drafter's layers, the model's with the old keys that those read kept)."""
    config.only(hidden_activation="gelu_pytorch_tanh", attention_bias=False, tie_word_embeddings=True)
    config.only(enable_moe_block=False, use_double_wide_mlp=False, hidden_size_per_layer_input=0)
    config.only(vocab_size_per_layer_input=0, use_bidirectional_attention="vision")
    config.expect("final_logit_softcapping")
    config.read |= {"num_experts", "top_k_experts", "moe_intermediate_size"}
    kinds = config.layer_types(gemma4.SLIDING, gemma4.FULL, 6)
    kinds[-1] = gemma4.FULL
    config.only(num_kv_shared_layers=len(kinds))
    ffn = FfnSpec(config.get("intermediate_size", int), "gelu_tanh")
    layers, own = [], list(spec.layers)
    for i, mixer in enumerate(gemma4.attention_specs(config, kinds)):
        source = _source(spec, mixer, i)
        # One key more than the model's own queries see: the position before the window of the next token's.
        window = mixer.window and mixer.window + 1
        if window:
            own[source] = replace(own[source], items=tuple((n, replace(x, keep=window)) for n, x in own[source].items))
        mixer = replace(mixer, own_kv=False, k_eq_v=False, window=window)
        layers.append(gemma4.layer_spec(f"model.layers.{i}", hidden, mixer, Shared(source), ffn, None, 0))
    return tuple(layers), tuple(own)


def _source(spec: ModelSpec, mixer: AttentionSpec, i: int) -> int:
    """The model's layer whose keys and values the drafter's layer i reads: the last of its type that has any."""
    producers = [
        j
        for j, layer in enumerate(spec.layers)
        if isinstance(dict(layer.items)["kv"], Paged) and (layer.mixer.window is None) == (mixer.window is None)
    ]
    shape = (mixer.kv_heads, mixer.head_dim, mixer.window)
    if not producers:
        raise _misfit(
            f"layer {i}, which reads layers with window {mixer.window}", "layers of a type that the model has"
        )
    own = spec.layers[producers[-1]].mixer
    if shape != (own.kv_heads, own.head_dim, own.window):
        raise _misfit(
            f"layer {i}, which reads {mixer.kv_heads} KV heads of {mixer.head_dim}, window {mixer.window}",
            f"{own.kv_heads} KV heads of {own.head_dim}, window {own.window}, as layer {producers[-1]} has",
        )
    return producers[-1]


def _outside(
    config: Config, hidden: int, vocab: int, backbone: int
) -> tuple[tuple[LinearSpec, ...], tuple[TensorSpec, ...], int]:
    """(linears, tensors, clusters to be scored) outside layers; where clusters are scored, rows of the head are looked
    up."""
    ordered = config.get("use_ordered_embeddings", bool, False)
    centroids, top = config.get("num_centroids", int, 2048), config.get("centroid_intermediate_top_k", int, 32)
    linears = (
        LinearSpec("head", (("model.embed_tokens", vocab),), hidden, op="embed" if ordered else "linear"),
        LinearSpec("pre_projection", (("pre_projection", hidden),), 2 * backbone),
        LinearSpec("post_projection", (("post_projection", backbone),), hidden),
    )
    if not ordered:
        return linears, (), 0
    if not 1 <= top <= centroids or vocab % centroids:
        raise _misfit(f"{top} of {centroids} centroids over {vocab} tokens", "centroids with equally many tokens each")
    at = "masked_embedding"
    order = TensorSpec(f"{at}.token_ordering", "token_ordering", (vocab,), "index")
    return (*linears, LinearSpec("centroids", ((f"{at}.centroids", centroids),), hidden)), (order,), top


class Gemma4Assistant:
    """The forward pass over bound ops; the head scores the tokens of `clusters` clusters, 0: all tokens."""

    def __init__(self, clusters: int) -> None:
        self.clusters = clusters

    def forward(self, rows: Rows, hidden: torch.Tensor, ops: Ops) -> torch.Tensor:
        """Normed states behind the tokens of `rows`, [tokens, hidden of the drafter]. `hidden` [tokens, hidden]: the
        model's normed states before them, or what stands in for those. The embedding comes first in what is read."""
        residual = ops.drafter.linear("pre_projection", torch.cat((ops.embed(rows.ids), hidden), dim=-1))
        h = ops.layers[0].norm("input_norm", residual)
        for layer in ops.layers:
            h = layer.attention_block(h, rows)
            h, residual = layer.add_norm(h, residual, layer.tensors["mlp_norm"], layer.tensors["post_attention_norm"])
            h = layer.linear("down", layer.gated_linear(h))
            residual = (residual + layer.norm("post_mlp_norm", h)) * layer.tensors["scalar"].to(residual.dtype)
            h = layer.next_norm(residual)
        return h

    def after(self, state: torch.Tensor, ops: Ops) -> torch.Tensor:
        """What stands in for the model's state behind a draft; [n, hidden of the drafter] -> [n, hidden]."""
        return ops.drafter.linear("post_projection", state)

    def logits(self, state: torch.Tensor, ops: Ops) -> torch.Tensor:
        """fp32 logits [n, vocab]; -inf for tokens of clusters that are not scored."""
        own = ops.drafter
        if not self.clusters:
            return own.linear("head", state).float()
        scores, order = own.linear("centroids", state), own.tensors["token_ordering"]
        best = scores.topk(self.clusters, dim=-1).indices
        ids = order.view(scores.shape[1], -1)[best].flatten(1)
        rows = own.bounds["embed:head"](ids.flatten(), own.linears["head"], 1.0, state.dtype)
        found = (rows.view(*ids.shape, -1) @ state[..., None])[..., 0].float()
        return torch.full((len(state), len(order)), -torch.inf, device=state.device).scatter_(1, ids, found)
