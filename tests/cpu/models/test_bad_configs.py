"""Configs of Qwen3.5: what is accepted as published, and every variant that is not implemented refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from offroad import LLM, SamplingParams
from offroad.engine import make_plan
from offroad.errors import ModelError
from offroad.models.registry import resolve_model
from offroad.models.spec import AttentionSpec, GatedDeltaSpec, ModelSpec
from offroad.settings import Settings
from offroad.weights.safetensors_source import SafetensorsSource

ROPE = dict(
    mrope_interleaved=True,
    mrope_section=[11, 11, 10],
    rope_type="default",
    rope_theta=10000000,
    partial_rotary_factor=0.25,
)
DENSE = dict(
    model_type="qwen3_5_text",
    attention_bias=False,
    attention_dropout=0.0,
    attn_output_gate=True,
    dtype="bfloat16",
    eos_token_id=248044,
    full_attention_interval=4,
    head_dim=256,
    hidden_act="silu",
    hidden_size=1024,
    initializer_range=0.02,
    intermediate_size=3584,
    layer_types=(["linear_attention"] * 3 + ["full_attention"]) * 2,
    linear_conv_kernel_dim=4,
    linear_key_head_dim=128,
    linear_num_key_heads=16,
    linear_num_value_heads=16,
    linear_value_head_dim=128,
    max_position_embeddings=262144,
    mlp_only_layers=[],
    mtp_num_hidden_layers=1,
    mtp_use_dedicated_embeddings=False,
    num_attention_heads=8,
    num_hidden_layers=8,
    num_key_value_heads=2,
    rms_norm_eps=1e-6,
    tie_word_embeddings=True,
    use_cache=True,
    vocab_size=248320,
    mamba_ssm_dtype="float32",
    rope_parameters=ROPE,
)
MOE = {name: value for name, value in DENSE.items() if name != "intermediate_size"} | dict(
    model_type="qwen3_5_moe_text",
    moe_intermediate_size=512,
    num_experts=16,
    num_experts_per_tok=8,
    output_router_logits=False,
    router_aux_loss_coef=0.001,
    shared_expert_intermediate_size=512,
    tie_word_embeddings=False,
)


def spec_of(values: dict[str, Any], **changes: Any) -> ModelSpec:
    """The spec of a config with changes; None takes a field out."""
    return resolve_model({name: value for name, value in (values | changes).items() if value is not None}).spec


def refusal(values: dict[str, Any], **changes: Any) -> str:
    with pytest.raises(ModelError) as error:
        spec_of(values, **changes)
    return str(error.value)


def whole(text: dict[str, Any], **outside: Any) -> dict[str, Any]:
    """A multimodal config around a text config."""
    name = "Qwen3_5Moe" if "num_experts" in text else "Qwen3_5"
    return dict(
        architectures=[f"{name}ForConditionalGeneration"],
        model_type=text["model_type"].removesuffix("_text"),
        image_token_id=248056,
        video_token_id=248057,
        vision_start_token_id=248053,
        vision_end_token_id=248054,
        tie_word_embeddings=text["tie_word_embeddings"],
        transformers_version="4.57.0.dev0",
        text_config=text,
        vision_config=dict(depth=12, hidden_size=768, model_type="qwen3_5"),
        **outside,
    )


@pytest.mark.parametrize("text", [DENSE, MOE])
def test_a_multimodal_config_means_its_text_part(text: dict[str, Any]):
    plain, multimodal = spec_of(text), spec_of(whole(text))
    assert plain.layers == multimodal.layers
    assert plain.head == multimodal.head
    assert (plain.head is None) == text["tie_word_embeddings"]
    assert multimodal.notes
    assert not plain.notes
    assert spec_of(whole(text, language_model_only=False)) == multimodal  # as 3.6 and later have it


def test_fields_that_later_or_earlier_configs_lack_or_repeat():
    spec = spec_of(DENSE)
    assert spec_of(DENSE, mlp_only_layers=None, output_gate_type="swish", partial_rotary_factor=0.25) == spec
    assert spec_of(DENSE, layer_types=None) == spec
    assert spec_of(DENSE, full_attention_interval=None) == spec
    assert spec_of(MOE, norm_topk_prob=True, mlp_only_layers=None, decoder_sparse_step=1) == spec_of(MOE)
    assert spec_of(DENSE, rope_parameters=None) == spec  # the defaults of transformers
    flat = dict(rope_parameters=None, rope_theta=1e7, partial_rotary_factor=0.25)
    assert spec_of(DENSE, **flat) == spec


def test_what_the_fields_mean():
    full = spec_of(DENSE, rope_parameters=ROPE | dict(rope_theta=1e6, mrope_section=[16, 9, 7])).layers[3].mixer
    assert isinstance(full, AttentionSpec)
    assert (full.rope.dim, full.rope.base, full.rope.sections, full.output_gate) == (64, 1e6, (9, 7), True)
    delta = spec_of(DENSE, output_gate_type="sigmoid", linear_num_value_heads=48).layers[0].mixer
    assert isinstance(delta, GatedDeltaSpec)
    assert (delta.gate, delta.channels, delta.value_width) == ("sigmoid", 10240, 6144)
    assert [
        type(layer.mixer) is AttentionSpec
        for layer in spec_of(DENSE, full_attention_interval=2, layer_types=None).layers
    ] == [
        False,
        True,
    ] * 4
    assert spec_of(DENSE, mtp_num_hidden_layers=0).draft is None


def test_an_unknown_kind_of_layer():
    kinds = ["linear_attention", "mamba", *DENSE["layer_types"][2:]]
    text = refusal(DENSE, layer_types=kinds)
    assert all(part in text for part in ("layer_types[1]", "'mamba'", "linear_attention", "full_attention"))


def test_a_wrong_number_of_layer_types():
    text = refusal(DENSE, layer_types=DENSE["layer_types"][:-1])
    assert all(part in text for part in ("layer_types", "7 entries", "8"))


@pytest.mark.parametrize(
    ("values", "changes", "named"),
    [
        (DENSE, dict(attn_output_gate=False), ["attn_output_gate", "False"]),
        (DENSE, dict(attention_bias=True), ["attention_bias", "True"]),
        (DENSE, dict(hidden_act="gelu"), ["hidden_act", "'gelu'", "silu"]),
        (DENSE, dict(output_gate_type="tanh"), ["output_gate_type", "'tanh'", "swish", "sigmoid"]),
        (DENSE, dict(mtp_use_dedicated_embeddings=True), ["mtp_use_dedicated_embeddings", "True"]),
        (DENSE, dict(mamba_ssm_dtype="float8_e4m3"), ["mamba_ssm_dtype", "'float8_e4m3'", "float32"]),
        (DENSE, dict(mlp_only_layers=[0]), ["mlp_only_layers", "[0]"]),
        (MOE, dict(mlp_only_layers=[0]), ["mlp_only_layers", "[0]"]),
        (MOE, dict(norm_topk_prob=False), ["norm_topk_prob", "False"]),
        (MOE, dict(decoder_sparse_step=2), ["decoder_sparse_step", "2"]),
        (DENSE, dict(residual_multiplier=0.5), ["residual_multiplier", "0.5"]),
        (MOE, dict(routed_scaling_factor=2.5), ["routed_scaling_factor", "2.5"]),
        (DENSE, dict(num_experts=8), ["num_experts", "8"]),
        (DENSE, dict(sliding_window=4096), ["sliding_window", "4096"]),
        (DENSE, dict(rope_scaling={"type": "yarn", "factor": 4.0}), ["rope_scaling"]),
        (DENSE, dict(linear_num_value_heads=24), ["linear_num_value_heads", "24", "16"]),
        (DENSE, dict(linear_num_key_heads=None), ["linear_num_key_heads", "absent"]),
        (DENSE, dict(hidden_size="big"), ["hidden_size", "'big'"]),
        (whole(DENSE), dict(logit_scale=2.0), ["logit_scale", "2.0"]),
    ],
)
def test_other_variants_are_refused_by_name(values: dict[str, Any], changes: dict[str, Any], named: list[str]):
    spec_of(values)
    text = refusal(values, **changes)
    assert all(part in text for part in named), text


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=262144), ["rope", "'yarn'", "default"]),
        (dict(attention_factor=1.2), ["rope", "attention_factor=1.2"]),
        (dict(mrope_interleaved=False), ["rope_parameters.mrope_interleaved", "False"]),
        (dict(mrope_section=[11, 11]), ["rope_parameters.mrope_section", "[11, 11]"]),
        (dict(mrope_section="11"), ["rope_parameters.mrope_section", "'11'"]),
    ],
)
def test_other_ropes_are_refused_by_name(changes: dict[str, Any], named: list[str]):
    for values in (DENSE, whole(DENSE)):
        inner = values.get("text_config", values) | dict(rope_parameters=ROPE | changes)
        text = refusal(whole(inner) if "text_config" in values else inner)
        assert all(part in text for part in named), text


def changed(folder: Path, to: Path, **changes: Any) -> Path:
    """A copy of a checkpoint whose config has other fields."""
    for file in folder.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    config = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps(config | changes))
    return to


@pytest.mark.parametrize(("field", "size"), [(None, 4), ("float32", 4), ("bfloat16", 2), ("float16", 2)])
def test_the_state_is_stored_as_the_config_says_else_in_float32(tiny, tmp_path, field: str | None, size: int):
    """Three layers: 6 heads of 16 by 16 in the dtype of states, 4 columns of 160 channels in that of activations, of
    which checkpoints hold 3."""
    folder = changed(tiny("qwen3_5")[0], tmp_path, **({} if field is None else {"mamba_ssm_dtype": field}))
    settings = dict(model=str(folder), device="cpu")
    for dtype, activation in (("float32", 4), ("bfloat16", 2)):
        made = make_plan(Settings.of(**settings, dtype=dtype), SafetensorsSource(folder))
        assert made.memory.checkpoint_bytes == 3 * (6 * 16 * 16 * size + 3 * 160 * activation)
        assert made.memory.slot_bytes == made.state_bytes == 3 * (6 * 16 * 16 * size + 4 * 160 * activation)
    llm = LLM(**settings, max_num_seqs=2)
    assert llm.engine.runner.arrays.views[0]["state"].data.dtype == getattr(torch, field or "float32")
    [result] = llm.generate({"prompt_token_ids": [5, 6, 7]}, SamplingParams(max_tokens=3, ignore_eos=True))
    assert len(result.outputs[0].token_ids) == 3
    llm.close()
