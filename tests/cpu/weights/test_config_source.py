"""Plans without weights: a config.json alone, with and without a quantization_config."""

from __future__ import annotations

import json

import pytest

from offroad.cli.main import make_app
from offroad.device.profile import load_profile
from offroad.engine import make_plan
from offroad.errors import ModelError, PlanError
from offroad.settings import Settings
from offroad.weights.config_source import ConfigSource
from offroad.weights.locate import open_path

QWEN_27B = dict(
    architectures=["Qwen3_5ForConditionalGeneration"],
    model_type="qwen3_5",
    vision_config={},
    text_config=dict(
        hidden_size=5120,
        intermediate_size=17408,
        num_hidden_layers=64,
        num_attention_heads=24,
        num_key_value_heads=4,
        head_dim=256,
        linear_num_key_heads=16,
        linear_num_value_heads=48,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_conv_kernel_dim=4,
        mamba_ssm_dtype="float32",
        vocab_size=248320,
        max_position_embeddings=262144,
        tie_word_embeddings=False,
    ),
)
W4A16 = dict(
    quant_method="compressed-tensors",
    format="pack-quantized",
    config_groups={"group_0": {"weights": {"num_bits": 4, "type": "int", "group_size": 128}}},
)
GIB = 1024**3


def source(tmp_path, quant: dict | None = None) -> ConfigSource:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(QWEN_27B | ({"quantization_config": quant} if quant else {})))
    opened = open_path(path)
    assert isinstance(opened, ConfigSource)
    return opened


def planned(tmp_path, quant: dict | None, device: str, **settings):
    return make_plan(Settings.of(model="m", device=device, allow_reference=True, **settings), source(tmp_path, quant))


def test_a_27b_in_4_bits_fits_two_v100_with_177408_tokens(tmp_path):
    """What owners of two 32 GB V100 run today (volta.md): W4A16 with an e5m2 cache."""
    made = planned(
        tmp_path, W4A16, "v100-32gb", tensor_parallel_size=2, kv_cache_dtype="fp8", max_model_len=177408, max_num_seqs=1
    )
    assert made.max_len == 177408
    assert made.kv_dtype == "float8_e5m2"
    assert made.kv_bytes_per_token == 65536 // 2 // 2  # half the heads, half the bytes
    assert made.state_bytes == 48 * (48 * 128 * 128 * 4 + 4 * 10_240 * 2) // 2
    assert made.memory.headroom > 0
    assert any("assumed to be compressed-tensors" in note for note in made.notes)
    with pytest.raises(PlanError, match="memory for the weights"):
        planned(tmp_path, None, "v100-32gb", kv_cache_dtype="fp8", max_model_len=177408, max_num_seqs=1)


@pytest.mark.parametrize(
    ("quant", "gib"),
    [
        (None, 54.0),
        (W4A16, 19.0),
        (dict(quant_method="awq", bits=4, group_size=128), 19.0),
        (dict(quant_method="gptq", bits=8, group_size=32), 32.0),
        (dict(quant_method="fp8", weight_block_size=[128, 128]), 30.0),
        (dict(quant_method="modelopt", quant_algo="NVFP4"), 17.5),
    ],
)
def test_weights_take_what_the_format_takes(tmp_path, quant: dict | None, gib: float):
    made = planned(tmp_path, quant, "rtxpro6000", max_model_len=8192, max_num_seqs=2)
    assert made.memory.weights / GIB == pytest.approx(gib, rel=0.12)


def test_unknown_formats_and_missing_weights_are_named(tmp_path):
    with pytest.raises(ModelError, match="quantization_config"):
        source(tmp_path, dict(quant_method="spqr", bits=3))
    with pytest.raises(ModelError, match="a folder with weights"):
        source(tmp_path).read("model.norm.weight")


def test_the_command_prints_the_bound_and_the_room(tmp_path, capsys):
    source(tmp_path, W4A16)
    argv = ["plan", str(tmp_path / "config.json"), "--device", "h100-80gb", "--allow-reference"]
    make_app()(argv, standalone_mode=False)
    text = capsys.readouterr().out
    assert "bound           at best" in text
    assert "sequences of the whole context" in text
    make_app()([*argv, "--json"], standalone_mode=False)
    bound = json.loads(capsys.readouterr().out)["bound_tokens_per_second"]
    rates = load_profile("h100-80gb")
    # A step of one sequence reads the packed weights, but for the embedding, and its state twice.
    assert 0.8 < bound["decode"] / (rates.bandwidth / 16.5e9) < 1.25
    assert bound["decode_all"] > 4 * bound["decode"]
