"""Gemma-3 (text): five sliding layers to one full, two RoPE bases, norms with 1 + w on both sides of each block.

`h += post(attention(norm(h))); h += post(mlp(norm(h)))`, q and k normed per head, embeddings scaled by sqrt(hidden)
rounded to the checkpoint's dtype as in Hugging Face, gated GELU (tanh).
"""

from __future__ import annotations

from typing import Any

import torch

from offroad.models import parts
from offroad.models.config import Config
from offroad.models.spec import (
    AttentionSpec,
    FfnSpec,
    LayerSpec,
    ModelSpec,
    Paged,
    Plane,
    RopeSpec,
    TensorSpec,
)
from offroad.ops.bound import Ops
from offroad.run.rows import Rows

ARCHITECTURES = {"Gemma3ForCausalLM": "gemma3_text"}


def model_spec(values: dict[str, Any]) -> ModelSpec:
    """The spec of a Gemma-3 text checkpoint. Raises ModelError for variants that are not implemented."""
    config = Config(values, "gemma3_text")
    hidden, count = config.get("hidden_size", int), config.get("num_hidden_layers", int)
    config.expect("hidden_activation", "gelu_pytorch_tanh")
    config.expect("hidden_act", "gelu_pytorch_tanh")
    config.only(attention_bias=False, use_bidirectional_attention=False, tie_word_embeddings=True)
    config.expect("final_logit_softcapping")
    softcap = config.get("attn_logit_softcapping", float, None)
    window = config.get("sliding_window", int)
    full, sliding = _ropes(config)
    heads, dim = config.get("num_attention_heads", int), config.get("head_dim", int, 256)
    scale = float(config.get("query_pre_attn_scalar", float, 256.0)) ** -0.5
    kv_heads = config.get("num_key_value_heads", int)
    pattern = config.get("sliding_window_pattern", int, config.get("_sliding_window_pattern", int, 6))
    kinds = config.get(
        "layer_types", list, ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(count)]
    )
    layers = []
    for i, kind in enumerate(kinds):
        local = kind == "sliding_attention"
        rope = RopeSpec(dim, *(sliding if local else full))
        attention = AttentionSpec(
            heads, kv_heads, dim, scale, rope, window if local else None, qk_norm=True, softcap=softcap
        )
        layers.append(_layer(i, hidden, attention, FfnSpec(config.get("intermediate_size", int), "gelu_tanh")))
    spec = ModelSpec(
        family="gemma3_text",
        hidden=hidden,
        vocab=config.get("vocab_size", int, 262208),
        max_len=config.get("max_position_embeddings", int, 131072),
        norm_eps=config.get("rms_norm_eps", float, 1e-6),
        layers=tuple(layers),
        embed="model.embed_tokens",
        tensors=(TensorSpec("model.norm.weight", "norm", (hidden,), "plus_one"),),
        embed_scale=hidden**0.5,
        ignored=(r"lm_head\.weight",),
    )
    config.done()
    return spec


def _ropes(config: Config) -> tuple[tuple, tuple]:
    """(base, scaling) of the full and of the sliding layers, from either spelling of the config."""
    local = config.get("rope_local_base_freq", float, 10000.0)
    parameters = config.values.get("rope_parameters") or {}
    if "full_attention" in parameters:
        config.read |= {"rope_parameters", "rope_theta", "rope_scaling"}
        full, sliding = dict(parameters["full_attention"]), dict(parameters["sliding_attention"])
        return (
            (float(full.pop("rope_theta")), config.scaling(full)),
            (float(sliding.pop("rope_theta")), config.scaling(sliding)),
        )
    return config.rope(1_000_000.0), (local, ())


def _layer(i: int, hidden: int, mixer: AttentionSpec, ffn: FfnSpec) -> LayerSpec:
    at = f"model.layers.{i}"
    linears = parts.attention(f"{at}.self_attn", mixer, hidden) + parts.mlp(f"{at}.mlp", ffn.size, hidden)
    norms = {
        "input_layernorm": "input_norm",
        "post_attention_layernorm": "post_attention_norm",
        "pre_feedforward_layernorm": "mlp_norm",
        "post_feedforward_layernorm": "post_mlp_norm",
    }
    tensors = parts.norms(at, norms, hidden, "plus_one") + parts.qk_norms(f"{at}.self_attn", mixer, "plus_one")
    row, window = (mixer.kv_heads, mixer.head_dim), mixer.window
    items = (("kv", Paged((Plane("k", row), Plane("v", row)), window, window - 1 if window else 0)),)
    return LayerSpec(mixer, ffn, items, linears, tensors)


class Gemma3:
    """The forward pass over bound ops."""

    def forward(self, rows: Rows, ops: Ops) -> torch.Tensor:
        """Normed hidden states of the wanted tokens, [wanted, hidden]."""
        residual = ops.embed(rows.ids)
        h = ops.layers[0].norm("input_norm", residual)
        last = len(ops.layers) - 1
        for i, layer in enumerate(ops.layers):
            h = layer.attention_block(h, rows)
            if i == last and len(rows.wanted) < rows.tokens:  # nothing is stored after this: only those go on
                h, residual = h[rows.wanted], residual[rows.wanted]
            h, residual = layer.mlp_block(h, residual)
            ops.observe(i, residual)
        return h
