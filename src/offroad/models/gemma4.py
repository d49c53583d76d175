"""Gemma-4 (text): sliding and full layers with head sizes of their own, dense or with experts beside the mlp.

Norms with plain w on both sides of each block; attention of scale 1 over normed q, k and v. E2B and E4B add per-layer
embeddings, and their last layers read the keys and values of earlier ones. The residual stream is scaled after each
layer, the logits are soft-capped.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from offroad.errors import ModelError
from offroad.models import parts
from offroad.models.config import Config
from offroad.models.spec import (
    AttentionSpec,
    FfnSpec,
    Item,
    LayerSpec,
    LinearSpec,
    ModelSpec,
    MoeSpec,
    Paged,
    Plane,
    RopeSpec,
    Shared,
    TensorSpec,
)
from offroad.ops.bound import LayerOps, Ops
from offroad.run.rows import Rows

ARCHITECTURES = {
    "Gemma4ForCausalLM": "gemma4_text",
    "Gemma4ForConditionalGeneration": "gemma4",
    "Gemma4UnifiedForCausalLM": "gemma4_unified_text",
    "Gemma4UnifiedForConditionalGeneration": "gemma4_unified",
}
_PREFIXES = (("model.language_model.", "model."), ("language_model.model.", "model."))
_TOWERS = r"(model\.)?(vision_tower|vision_embedder|embed_vision|audio_tower|embed_audio|multi_modal_projector)\..*"
SLIDING, FULL = "sliding_attention", "full_attention"
_ROPES = {
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}


def model_spec(values: dict[str, Any]) -> ModelSpec:
    """The spec of a Gemma-4 checkpoint. Raises ModelError for variants that are not implemented."""
    config = Config.text(values, "gemma4")
    hidden, vocab = config.get("hidden_size", int), config.get("vocab_size", int, 262144)
    config.only(hidden_activation="gelu_pytorch_tanh", attention_bias=False, tie_word_embeddings=True)
    config.only(use_bidirectional_attention="vision")  # of image tokens; text is causal throughout
    width = config.get("hidden_size_per_layer_input", int, 0 if "unified" in values["model_type"] else 256)
    kinds = config.layer_types(SLIDING, FULL, 6)
    kinds[-1] = FULL  # as transformers has it, whatever is listed
    layers = _layers(config, hidden, kinds, width)
    linears, tensors = _per_layer(config, hidden, vocab, len(layers), width)
    towers = {"vision_config", "audio_config"} & values.keys()
    spec = ModelSpec(
        family="gemma4",
        hidden=hidden,
        vocab=vocab,
        max_len=config.get("max_position_embeddings", int, 131072),
        norm_eps=config.get("rms_norm_eps", float, 1e-6),
        layers=layers,
        embed="model.embed_tokens",
        tensors=(TensorSpec("model.norm.weight", "norm", (hidden,)), *tensors),
        linears=linears,
        embed_scale=hidden**0.5,
        logit_softcap=config.get("final_logit_softcapping", float, None),
        ignored=(r"lm_head\.weight", _TOWERS, *_redundant(layers)),
        prefixes=_PREFIXES,
        notes=("text only: towers for images and sound are not loaded",) if towers else (),
    )
    config.done()
    return spec


def _per_layer(config: Config, hidden: int, vocab: int, count: int, width: int):
    """Linears and tensors that make the per-layer embeddings; none without a width."""
    rows = config.get("vocab_size_per_layer_input", int, vocab)
    if not width:
        return (), ()
    if rows < vocab:
        raise ModelError(
            "config.json: vocab_size_per_layer_input", found=rows, accepted=f"vocab_size, {vocab}, or more"
        )
    at = "model.per_layer"
    embed = LinearSpec("per_layer", (("model.embed_tokens_per_layer", rows),), count * width, op="embed")
    projection = LinearSpec("per_layer_projection", ((f"{at}_model_projection", count * width),), hidden)
    return (embed, projection), (TensorSpec(f"{at}_projection_norm.weight", "per_layer_norm", (width,)),)


def _redundant(layers: tuple[LayerSpec, ...]) -> tuple[str, ...]:
    """What checkpoints may hold for layers without keys and values of their own, and nobody reads."""
    readers = "|".join(str(i) for i, layer in enumerate(layers) if not layer.mixer.own_kv)
    return (rf"model\.layers\.({readers})\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\.weight",) if readers else ()


def _layers(config: Config, hidden: int, kinds: list[str], width: int) -> tuple[LayerSpec, ...]:
    shared, size = config.get("num_kv_shared_layers", int, 0), config.get("intermediate_size", int)
    wide = config.get("use_double_wide_mlp", bool, False)
    moe, mixers = _moe(config), attention_specs(config, kinds)
    first = len(kinds) - shared
    layers = []
    for i, (kind, mixer) in enumerate(zip(kinds, mixers, strict=True)):
        row, window = (mixer.kv_heads, mixer.head_dim), mixer.window
        # One more than the window's old keys: readers of shared pages, and a drafter, come after the step's own rows.
        item: Item = Paged((Plane("k", row), Plane("v", row)), window, keep=window or 0)
        if i >= first:
            item, mixer = Shared(_producer(kinds, first, kind)), replace(mixer, own_kv=False)
        ffn = FfnSpec(size * (2 if wide and i >= first else 1), "gelu_tanh")
        layers.append(layer_spec(f"model.layers.{i}", hidden, mixer, item, ffn, moe, width))
    return tuple(layers)


def _producer(kinds: list[str], first: int, kind: str) -> int:
    """The layer whose keys and values the layers of a kind from `first` on read."""
    producers = [i for i in range(first) if kinds[i] == kind]
    if not producers:
        found = f"{len(kinds) - first}, which leaves no layer of type {kind} that has keys and values"
        raise ModelError("config.json: num_kv_shared_layers", found=found, accepted="layers of each type before them")
    return producers[-1]


def _moe(config: Config) -> MoeSpec | None:
    if not config.get("enable_moe_block", bool, False):
        config.read |= {"num_experts", "top_k_experts", "moe_intermediate_size"}
        return None
    experts, top_k = config.get("num_experts", int), config.get("top_k_experts", int)
    return MoeSpec(experts, top_k, config.get("moe_intermediate_size", int), "gelu_tanh")


def attention_specs(config: Config, kinds: list[str]) -> list[AttentionSpec]:
    """The attention of each layer, from either spelling of what full layers have of their own."""
    heads, kv_heads = config.get("num_attention_heads", int), config.get("num_key_value_heads", int)
    dim, window = config.get("head_dim", int, 256), config.get("sliding_window", int)
    k_eq_v = config.get("attention_k_eq_v", bool, False)
    own, count = (
        {"head_dim": config.get("global_head_dim", int, 512)},
        config.get("num_global_key_value_heads", int, None),
    )
    own |= {"num_key_value_heads": count} if count is not None and k_eq_v else {}
    listed = config.get("per_layer_config", dict, {str(i): own for i, kind in enumerate(kinds) if kind == FULL})
    ropes = config.get("rope_parameters", dict, _ROPES)
    mixers = []
    for i, kind in enumerate(kinds):
        override = dict(listed.get(str(i), {}))
        size, count = override.pop("head_dim", dim), override.pop("num_key_value_heads", kv_heads)
        if override:
            accepted = "head_dim, num_key_value_heads"
            raise ModelError(f"config.json: per_layer_config[{i}]", found=override, accepted=accepted)
        parameters = dict(ropes.get(kind) or _ROPES[kind])
        theta = float(parameters.pop("rope_theta", _ROPES[kind]["rope_theta"]))
        rope, full = RopeSpec(size, theta, config.scaling(parameters)), kind == FULL
        of = dict(qk_norm=True, v_norm=True, k_eq_v=k_eq_v and full)
        mixers.append(AttentionSpec(heads, count, size, 1.0, rope, None if full else window, **of))
    return mixers


def layer_spec(
    at: str, hidden: int, mixer: AttentionSpec, item: Item, ffn: FfnSpec, moe: MoeSpec | None, width: int
) -> LayerSpec:
    """One layer whose names begin with `at`; `width` of its per-layer embeddings, 0: it has none."""
    linears = parts.attention(f"{at}.self_attn", mixer, hidden) + parts.mlp(f"{at}.mlp", ffn.size, hidden)
    tensors = parts.qk_norms(f"{at}.self_attn", mixer)
    norms = {
        "input_layernorm": "input_norm",
        "post_attention_layernorm": "post_attention_norm",
        "pre_feedforward_layernorm": "mlp_norm",
        "post_feedforward_layernorm": "post_mlp_norm",
    }
    if moe is not None:
        linears += parts.experts(f"{at}.experts", moe, hidden)
        linears += (LinearSpec("router", ((f"{at}.router.proj", moe.experts),), hidden),)
        tensors += (
            TensorSpec(f"{at}.router.scale", "router_norm", (hidden,)),
            TensorSpec(f"{at}.router.per_expert_scale", "expert_scale", (moe.experts,)),
        )
        norms |= {
            "post_feedforward_layernorm_1": "post_dense_norm",
            "pre_feedforward_layernorm_2": "experts_norm",
            "post_feedforward_layernorm_2": "post_experts_norm",
        }
    if width:
        linears += (
            LinearSpec("input_gate", ((f"{at}.per_layer_input_gate", width),), hidden),
            LinearSpec("input_projection", ((f"{at}.per_layer_projection", hidden),), width),
        )
        norms["post_per_layer_input_norm"] = "post_input_norm"
    tensors += (*parts.norms(at, norms, hidden), TensorSpec(f"{at}.layer_scalar", "scalar", (1,)))
    return LayerSpec(mixer, ffn, (("kv", item),), linears, tensors, moe, ("attention_block",))


class Gemma4:
    """The forward pass over bound ops."""

    def forward(self, rows: Rows, ops: Ops) -> torch.Tensor:
        """Normed hidden states of the wanted tokens, [wanted, hidden]."""
        residual = ops.embed(rows.ids)
        inputs = self.per_layer_inputs(rows, ops, residual) if "per_layer" in ops.model.linears else None
        h = ops.layers[0].norm("input_norm", residual)
        last, narrowed = len(ops.layers) - 1, False
        for i, layer in enumerate(ops.layers):
            if not (narrowed or layer.mixer.own_kv):  # nothing is stored from here on, and all keys are in pages
                wanted, rows, narrowed = rows.wanted, rows.narrow(), True
                h, residual, inputs = (None if x is None else x[wanted] for x in (h, residual, inputs))
            h = layer.attention_block(h, rows)
            if i == last and not narrowed:
                h, residual = h[rows.wanted], residual[rows.wanted]
                inputs = None if inputs is None else inputs[rows.wanted]
            h, residual = layer.add_norm(h, residual, layer.tensors["mlp_norm"], layer.tensors["post_attention_norm"])
            h = layer.linear("down", layer.gated_linear(h))
            if layer.moe is not None:
                h = layer.norm("post_dense_norm", h) + self.experts(layer, residual)
            residual = residual + layer.norm("post_mlp_norm", h)
            if inputs is not None:
                gate_up = torch.cat((layer.linear("input_gate", residual), inputs[:, i]), dim=-1)
                h = layer.linear("input_projection", layer.gated_activation(gate_up))
                residual = residual + layer.norm("post_input_norm", h)
            residual = residual * layer.tensors["scalar"].to(residual.dtype)
            ops.observe(i, residual)
            h = layer.next_norm(residual)
        return h

    @staticmethod
    def per_layer_inputs(rows: Rows, ops: Ops, embedded: torch.Tensor) -> torch.Tensor:
        """What each layer adds for each token, from its id and its embedding; [tokens, layers, width]."""
        count, hidden = len(ops.layers), embedded.shape[1]
        context = (ops.model.linear("per_layer_projection", embedded) * hidden**-0.5).unflatten(1, (count, -1))
        width = context.shape[2]
        context = ops.model.norm("per_layer_norm", context.flatten(0, 1)).view_as(context)
        by_id = ops.embed_by("per_layer", rows.ids, width**0.5).view_as(context)
        return (context + by_id) * 2**-0.5

    @staticmethod
    def experts(layer: LayerOps, residual: torch.Tensor) -> torch.Tensor:
        """The experts' part, normed; the router sees the residual stream under a norm of its own."""
        routed = layer.norm("router_norm", residual) * residual.shape[1] ** -0.5
        weights, experts = layer.route(layer.linear("router", routed))
        mixed = layer.experts(layer.norm("experts_norm", residual), weights, experts)
        return layer.norm("post_experts_norm", mixed)
