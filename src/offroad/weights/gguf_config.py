"""GGUF metadata as a Hugging Face config: the same fields, so that a model file reads one spelling."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from offroad.errors import ModelError
from offroad.weights.gguf_file import GgufFile

# GGUF architecture: (Hugging Face class, model type).
FAMILIES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "gemma3": ("Gemma3ForCausalLM", "gemma3_text"),
}
_GEMMA3_PATTERN = 6  # five sliding layers to one full, in every Gemma-3 (llama.cpp has it as a constant too)
_GEMMA3_27B_LAYERS = 62  # the one size whose queries are scaled by hidden / heads and not by the head's size
_HARMLESS = frozenset(
    ("vocab_size", "tensor_data_layout", "rope.scaling.finetuned", "rope.scaling.original_context_length")
)


class _Fields:
    """Typed reads of `<architecture>.*` keys that remember what was read."""

    def __init__(self, file: GgufFile, architecture: str) -> None:
        self.file, self.prefix = file, architecture + "."
        self.read: set[str] = set()

    def get(self, name: str, kind: type, default: Any = ...) -> Any:
        self.read.add(name)
        value = self.file.metadata.get(self.prefix + name)
        if value is None and default is not ...:
            return default
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or isinstance(value, bool) and kind is not bool:
            found = "absent" if value is None else f"{type(value).__name__} {str(value)[:60]}"
            raise ModelError(f"{self.file.where}: metadata {self.prefix + name!r}", found=found, accepted=kind.__name__)
        return value

    def expect(self, name: str, kind: type, accepted: Any) -> None:
        value = self.get(name, kind, accepted)
        if value != accepted:
            raise ModelError(
                f"{self.file.where}: metadata {self.prefix + name!r}",
                found=value,
                accepted=str(accepted),
                next="this variant is not implemented",
            )

    def done(self) -> None:
        names = {key.removeprefix(self.prefix) for key in self.file.metadata if key.startswith(self.prefix)}
        if unread := sorted(names - self.read - _HARMLESS):
            found = ", ".join(
                f"{self.prefix}{name}={str(self.file.metadata[self.prefix + name])[:40]}" for name in unread[:5]
            )
            raise ModelError(
                f"{self.file.where}: unknown metadata",
                found=found,
                accepted="keys that offroad implements",
                next="report the model; it may compute something else",
            )


def architecture_of(file: GgufFile) -> str:
    """`general.architecture`, one of FAMILIES. Raises ModelError that lists the known ones."""
    name = file.metadata.get("general.architecture")
    if name not in FAMILIES:
        raise ModelError(
            f"{file.where}: general.architecture",
            found=repr(name),
            accepted=", ".join(FAMILIES),
            next="serve a model of one of these families",
        )
    return name


def config_of(file: GgufFile) -> dict[str, Any]:
    """The config. Raises ModelError for a key that is absent, of another type, or not implemented."""
    architecture = architecture_of(file)
    name, model_type = FAMILIES[architecture]
    fields = _Fields(file, architecture)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelError(f"{file.where}: tensor token_embd.weight", found="absent", accepted="an embedding")
    heads, hidden = fields.get("attention.head_count", int), fields.get("embedding_length", int)
    if heads < 1 or hidden < 1:
        raise ModelError(f"{file.where}: sizes", found=f"{heads} heads, {hidden} hidden", accepted="1 or more of each")
    rotary = fields.get("rope.dimension_count", int, None)
    head_dim = fields.get("attention.key_length", int, rotary or (256 if architecture == "gemma3" else hidden // heads))
    fields.expect("attention.value_length", int, head_dim)
    fields.expect("rope.dimension_count", int, head_dim)
    fields.expect("attention.causal", bool, True)
    fields.expect("expert_count", int, 0)
    fields.expect("expert_used_count", int, 0)
    config: dict[str, Any] = {
        "architectures": [name],
        "model_type": model_type,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_hidden_layers": fields.get("block_count", int),
        "head_dim": head_dim,
        "vocab_size": embedding.shape[0],
        "num_key_value_heads": fields.get("attention.head_count_kv", int, heads),
        "intermediate_size": fields.get("feed_forward_length", int),
        "rms_norm_eps": fields.get("attention.layer_norm_rms_epsilon", float),
        "max_position_embeddings": fields.get("context_length", int),
        "tie_word_embeddings": "output.weight" not in file.tensors,
    }
    config |= _rope(fields, 1_000_000.0 if architecture == "gemma3" else 10_000.0, head_dim)
    config |= _gemma3(fields, config) if architecture == "gemma3" else {"hidden_act": "silu"}
    for field, key in (("bos_token_id", "bos"), ("eos_token_id", "eos"), ("pad_token_id", "padding")):
        if isinstance(value := file.metadata.get(f"tokenizer.ggml.{key}_token_id"), int):
            config[field] = value
    fields.done()
    return config


def _gemma3(fields: _Fields, config: dict[str, Any]) -> dict[str, Any]:
    count = config["num_hidden_layers"]
    full = fields.get("attention.sliding_window_pattern", int, _GEMMA3_PATTERN)
    if full < 1:
        raise ModelError("gemma3.attention.sliding_window_pattern", found=full, accepted="1 or more")
    scalar = (
        config["hidden_size"] // config["num_attention_heads"] if count == _GEMMA3_27B_LAYERS else config["head_dim"]
    )
    gemma = {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scalar,
        "sliding_window": fields.get("attention.sliding_window", int),
        "rope_local_base_freq": fields.get("rope.freq_base_swa", float, 10_000.0),
        "layer_types": ["sliding_attention" if (i + 1) % full else "full_attention" for i in range(count)],
    }
    if cap := fields.get("final_logit_softcapping", float, None):
        gemma["final_logit_softcapping"] = cap
    if cap := fields.get("attn_logit_softcapping", float, None):
        gemma["attn_logit_softcapping"] = cap
    return gemma


def _rope(fields: _Fields, base: float, dim: int) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_theta": fields.get("rope.freq_base", float, base)}
    kind, factor = fields.get("rope.scaling.type", str, "none"), fields.get("rope.scaling.factor", float, 1.0)
    fields.expect("rope.scaling.attn_factor", float, 1.0)
    if kind == "linear":
        rope["rope_scaling"] = {"rope_type": "linear", "factor": factor}
    elif kind != "none":
        raise ModelError(f"{fields.file.where}: rope.scaling.type", found=repr(kind), accepted="none, linear")
    if "rope_freqs.weight" in fields.file.tensors:
        rope["rope_scaling"] = _llama3(fields.file, rope["rope_theta"], dim)
    return rope


def _llama3(file: GgufFile, base: float, dim: int) -> dict[str, Any]:
    """Llama-3's scaling, of which a GGUF only holds the resulting factors: the parameters that reproduce them."""
    tensor = file.tensors["rope_freqs.weight"]
    if tensor.kind != "f32" or tensor.shape != (dim // 2,):
        raise ModelError(
            f"{file.where}: rope_freqs.weight", found=f"{tensor.kind} {tensor.shape}", accepted=f"f32 ({dim // 2},)"
        )
    factors = file.raw(tensor).view(np.float32)
    original = file.metadata.get("llama.rope.scaling.original_context_length", 8192)
    scaling = {
        "rope_type": "llama3",
        "factor": round(float(factors.max()), 4),  # fp32 noise of 1 / (1 / factor)
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": original,
    }
    length = 2 * math.pi * base ** (np.arange(0, dim, 2, dtype=np.float64) / dim)
    smooth = np.clip((original / length - 1.0) / 3.0, 0.0, 1.0)
    expected = 1.0 / ((1.0 - smooth) / scaling["factor"] + smooth)
    if not np.allclose(factors, expected, rtol=1e-3):
        raise ModelError(
            f"{file.where}: rope_freqs.weight",
            found=f"factors {factors.min():g} to {factors.max():g}",
            accepted=f"those of Llama-3 (low 1, high 4, original context {original})",
            next="use the safetensors checkpoint, whose config names the parameters",
        )
    return scaling


_LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NORMS = {
    "gemma3": {
        "ffn_norm": "pre_feedforward_layernorm",
        "post_attention_norm": "post_attention_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
}
_MODEL = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def renamer(architecture: str) -> Callable[[str], str]:
    """A function from a GGUF tensor name to Hugging Face's; a name that it does not know stays, so that the loader
    names it as left over."""
    layer = _LAYER | _NORMS.get(architecture, {"ffn_norm": "post_attention_layernorm"})

    def rename(name: str) -> str:
        stem, _, suffix = name.rpartition(".")
        if stem in _MODEL:
            return f"{_MODEL[stem]}.{suffix}"
        head, _, rest = stem.partition(".")
        number, _, part = rest.partition(".")
        if head == "blk" and number.isdigit() and part in layer:
            return f"model.layers.{int(number)}.{layer[part]}.{suffix}"
        return name

    return rename
