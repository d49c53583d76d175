"""The Llama family: Llama, SmolLM2, Mistral-like layouts, Qwen2 (biases on q, k, v) and Qwen3 dense (norms on q and k).

Pre-norm blocks: `h += attention(norm(h)); h += mlp(norm(h))`, rotary halves, gated SiLU.
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
    LinearSpec,
    ModelSpec,
    Paged,
    Plane,
    RopeSpec,
    TensorSpec,
)
from offroad.ops.bound import Ops
from offroad.run.rows import Rows

ARCHITECTURES = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3"}


def model_spec(values: dict[str, Any]) -> ModelSpec:
    """The spec of a Llama-like checkpoint. Raises ModelError for variants that are not implemented."""
    family = values["model_type"]
    config = Config(values, family)
    hidden, heads = config.get("hidden_size", int), config.get("num_attention_heads", int)
    size, kv_heads = config.get("intermediate_size", int), config.get("num_key_value_heads", int, heads)
    dim = config.get("head_dim", int, hidden // heads)
    config.expect("hidden_act", "silu")
    config.expect("mlp_bias", False)
    # Hugging Face's Qwen2 has biases on q, k, v always; Llama and Qwen3 have them on all four or none.
    config.expect("attention_bias", *((True, False) if family == "qwen2" else (False,)))
    config.expect("use_sliding_window", False)
    config.get("sliding_window", int, None)
    config.expect("layer_types", ["full_attention"] * config.get("num_hidden_layers", int))
    base, scaling = config.rope(10000.0)
    attention = AttentionSpec(heads, kv_heads, dim, dim**-0.5, RopeSpec(dim, base, scaling), qk_norm=family == "qwen3")
    layers = tuple(
        _layer(i, hidden, attention, FfnSpec(size, "silu"), bias=family == "qwen2")
        for i in range(config.get("num_hidden_layers", int))
    )
    vocab, tied = config.get("vocab_size", int), config.get("tie_word_embeddings", bool, False)
    spec = ModelSpec(
        family=family,
        hidden=hidden,
        vocab=vocab,
        max_len=config.get("max_position_embeddings", int),
        norm_eps=config.get("rms_norm_eps", float, 1e-6),
        layers=layers,
        embed="model.embed_tokens",
        tensors=(TensorSpec("model.norm.weight", "norm", (hidden,)),),
        head=None if tied else LinearSpec("head", (("lm_head", vocab),), hidden),
        ignored=(r".*rotary_emb\.inv_freq", *((r"lm_head\.weight",) if tied else ())),
    )
    config.done()
    return spec


def _layer(i: int, hidden: int, mixer: AttentionSpec, ffn: FfnSpec, bias: bool) -> LayerSpec:
    at = f"model.layers.{i}"
    linears = parts.attention(f"{at}.self_attn", mixer, hidden, bias) + parts.mlp(f"{at}.mlp", ffn.size, hidden)
    norms = {"input_layernorm": "input_norm", "post_attention_layernorm": "mlp_norm"}
    tensors = parts.norms(at, norms, hidden) + (parts.qk_norms(f"{at}.self_attn", mixer) if mixer.qk_norm else ())
    row = (mixer.kv_heads, mixer.head_dim)
    return LayerSpec(mixer, ffn, (("kv", Paged((Plane("k", row), Plane("v", row)))),), linears, tensors)


class Llama:
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
