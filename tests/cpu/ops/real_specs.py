"""Specs and headers of real checkpoints, for plans that need no weights."""

from __future__ import annotations

from offroad.models.registry import resolve_model
from offroad.models.spec import ModelSpec
from offroad.weights.source import Headers, TensorHeader

CONFIGS = {
    "smollm2-135m": dict(
        architectures=["LlamaForCausalLM"],
        model_type="llama",
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        vocab_size=49152,
        rms_norm_eps=1e-5,
        max_position_embeddings=8192,
        rope_theta=100000.0,
        tie_word_embeddings=True,
        hidden_act="silu",
    ),
    "gemma3-270m": dict(
        architectures=["Gemma3ForCausalLM"],
        model_type="gemma3_text",
        hidden_size=640,
        intermediate_size=2048,
        num_hidden_layers=18,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        vocab_size=262144,
        rms_norm_eps=1e-6,
        max_position_embeddings=32768,
        rope_theta=1e6,
        rope_local_base_freq=1e4,
        sliding_window=512,
        query_pre_attn_scalar=256,
        hidden_activation="gelu_pytorch_tanh",
    ),
    "qwen3-8b": dict(
        architectures=["Qwen3ForCausalLM"],
        model_type="qwen3",
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151936,
        rms_norm_eps=1e-6,
        max_position_embeddings=40960,
        rope_theta=1e6,
        tie_word_embeddings=False,
        hidden_act="silu",
    ),
}


def real_spec(name: str) -> ModelSpec:
    return resolve_model(CONFIGS[name]).spec


def headers_of(spec: ModelSpec, kind: str = "bf16", width: float = 2) -> Headers:
    """Headers as a checkpoint of this spec would have them, every linear stored as `kind` at `width` bytes a weight."""
    headers: Headers = {}

    def add(name: str, *shape: int, stored: str = kind, size: float = width) -> None:
        numel = 1
        for dim in shape:
            numel *= dim
        headers[name] = TensorHeader(name, shape, stored, int(numel * size))

    draft = spec.draft
    outside = [spec.embedding, *spec.linears, *([spec.head] if spec.head else []), *(draft.linears if draft else ())]
    layers = [*spec.layers, *(draft.layers if draft else ())]
    for linear in outside + [linear for layer in layers for linear in layer.linears]:
        if linear.fused:
            add(linear.fused, linear.experts, linear.n // linear.experts, linear.k)
            continue
        for module, rows in linear.parts:
            add(f"{module}.weight", rows, linear.k)
    tensors = [*spec.tensors, *(draft.tensors if draft else ())]
    for tensor in tensors + [t for layer in layers for t in layer.tensors]:
        add(tensor.name, *tensor.shape, stored="f32", size=4)
    return headers
