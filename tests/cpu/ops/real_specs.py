"""Specs and headers of real checkpoints, for plans that need no weights."""

from __future__ import annotations

import json
from pathlib import Path

from offroad.models.registry import resolve_model
from offroad.models.spec import ModelSpec
from offroad.weights.source import Headers, TensorHeader

BENCHMARKS = Path(__file__).parents[3] / "benchmarks" / "configs"
_QWEN3_5 = dict(  # the text part of 27B, as 3.5 publishes it
    model_type="qwen3_5_text",
    attention_bias=False,
    attention_dropout=0.0,
    attn_output_gate=True,
    dtype="bfloat16",
    eos_token_id=248044,
    full_attention_interval=4,
    head_dim=256,
    hidden_act="silu",
    hidden_size=5120,
    initializer_range=0.02,
    intermediate_size=17408,
    linear_conv_kernel_dim=4,
    linear_key_head_dim=128,
    linear_num_key_heads=16,
    linear_num_value_heads=48,
    linear_value_head_dim=128,
    mamba_ssm_dtype="float32",
    max_position_embeddings=262144,
    mlp_only_layers=[],
    mtp_num_hidden_layers=1,
    mtp_use_dedicated_embeddings=False,
    num_attention_heads=24,
    num_hidden_layers=64,
    num_key_value_heads=4,
    rms_norm_eps=1e-6,
    rope_parameters=dict(
        mrope_interleaved=True,
        mrope_section=[11, 11, 10],
        partial_rotary_factor=0.25,
        rope_theta=10000000,
        rope_type="default",
    ),
    use_cache=True,
    vocab_size=248320,
)


def qwen3_5(architecture: str = "Qwen3_5ForConditionalGeneration", *, tied: bool = False, **text) -> dict:
    """A multimodal config whose text part is that of 27B with changes; None takes a field out."""
    values = _QWEN3_5 | text
    layers = range(values["num_hidden_layers"])
    values["layer_types"] = ["linear_attention" if (i + 1) % 4 else "full_attention" for i in layers]
    kind = values["model_type"].removesuffix("_text")
    return dict(
        architectures=[architecture],
        model_type=kind,
        image_token_id=248056,
        video_token_id=248057,
        vision_start_token_id=248053,
        vision_end_token_id=248054,
        tie_word_embeddings=tied,
        transformers_version="4.57.0.dev0",
        text_config={name: value for name, value in values.items() if value is not None},
        vision_config=dict(depth=27, hidden_size=1152, intermediate_size=4304, model_type=kind, num_heads=16),
    )


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
    "qwen3-8b": json.loads((BENCHMARKS / "qwen3-8b.json").read_text()),
    "qwen3_5-27b": qwen3_5(),
    "qwen3_5-35b-a3b": qwen3_5(
        "Qwen3_5MoeForConditionalGeneration",
        model_type="qwen3_5_moe_text",
        hidden_size=2048,
        intermediate_size=None,
        linear_num_value_heads=32,
        moe_intermediate_size=512,
        num_attention_heads=16,
        num_experts=256,
        num_experts_per_tok=8,
        num_hidden_layers=40,
        num_key_value_heads=2,
        router_aux_loss_coef=0.001,
        shared_expert_intermediate_size=512,
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
