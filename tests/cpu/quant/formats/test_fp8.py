"""Native FP8, and what DeepSeek-V4 stores under its name: what the scales mean, and which weights there are."""

from __future__ import annotations

from types import SimpleNamespace

import encoders
import pytest
import torch
from checkpoints import experts, meaning, named, opened, random_weight
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

from offroad.errors import ModelError

CONFIG = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
BLOCKS = CONFIG | {"weight_block_size": [128, 128]}
X = "model.layers.0.mlp.down_proj"
INVERSE = {"name": "weight_scale_inv"}
POWERS = torch.float8_e8m0fnu


def one(encoded, config=CONFIG, stem: str = X):
    """The source of one weight, and whether it means what it should."""
    tensors, expected = encoded
    source = opened(named(f"{stem}.", tensors), config)
    assert set(source.headers) == {f"{stem}.weight"}
    return source, torch.equal(meaning(source, f"{stem}.weight"), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, POWERS, torch.uint8])
@pytest.mark.parametrize(("n", "k"), [(256, 256), (200, 130), (64, 96), (129, 384)])
def test_scales_by_block_multiply_whatever_the_sizes(n, k, dtype):
    """Rows and columns that are no multiple of 128 have a scale for what is left."""
    source, equal = one(encoders.fp8(random_weight(n, k), 128, 128, dtype=dtype, **INVERSE), BLOCKS)
    assert source.headers[f"{X}.weight"].kind == "fp8.block128x128"
    assert equal


@pytest.mark.parametrize("powers", [False, True])
def test_what_transformers_writes_is_what_transformers_reads(powers):
    settings = SimpleNamespace(weight_block_size=[32, 48], scale_fmt="ue8m0" if powers else "float")
    quantizer = SimpleNamespace(quantization_config=settings)
    for name, w in (
        (f"{X}.weight", random_weight(64, 96)),
        ("m.experts.down_proj", random_weight(192, 48).view(3, 64, 48)),
    ):
        tensors = Fp8Quantize(quantizer).convert({name: w})
        [scale] = (tensor for end, tensor in tensors.items() if end != name)
        assert scale.dtype == (POWERS if powers else torch.float32)
        expected = Fp8Dequantize(quantizer)._dequantize_one(tensors[name], scale, torch.float32)
        assert torch.equal(meaning(opened(tensors, BLOCKS | {"weight_block_size": [32, 48]}), name), expected)


@pytest.mark.parametrize(
    ("rows", "shape", "dtype", "kind"),
    [
        (64, (), torch.float32, "tensor"),
        (64, (1,), torch.bfloat16, "tensor"),
        (1, (64,), torch.float32, "channel"),
        (1, (64, 1), torch.bfloat16, "channel"),
    ],
)
def test_scales_by_tensor_and_by_row(rows, shape, dtype, kind):
    for name in ("weight_scale", "weight_scale_inv"):
        source, equal = one(encoders.fp8(random_weight(64, 192), rows, 192, shape=shape, dtype=dtype, name=name))
        assert source.headers[f"{X}.weight"].kind == f"fp8.{kind}"
        assert equal
        assert source.notes == ()


@pytest.mark.parametrize("name", ["input_scale", "activation_scale"])
def test_static_scales_of_activations_are_set_aside(name):
    tensors, expected = encoders.fp8(random_weight(64, 96), 64, 96, shape=())
    source, equal = one((tensors | {name: torch.tensor(0.5)}, expected), CONFIG | {"activation_scheme": "static"})
    assert equal
    assert source.notes == ("static scales of activations are not used: activations keep their dtype",)


@pytest.mark.parametrize(
    ("rows", "columns", "shape", "kind"),
    [
        (128, 128, (3, 1, 2), "block128x128"),
        (128, 192, (3,), "tensor"),
        (128, 192, (3, 1, 1), "tensor"),
        (64, 192, (3, 2, 1), "tensor"),
        (64, 192, (3, 2), "tensor"),
        (1, 192, (3, 128), "channel"),
        (1, 192, (3, 128, 1), "channel"),
    ],
)
@pytest.mark.parametrize("ending", ["_scale_inv", "_weight_scale", "_scale"])
def test_all_experts_in_one_tensor(ending, rows, columns, shape, kind):
    tensors, expected = experts(lambda w: encoders.fp8(w, rows, columns, name="s"), 128, 192)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    held = {name: tensors["weight"], name + ending: tensors["s"].reshape(shape), f"{name}_input_scale": torch.ones(3)}
    source = opened(held, BLOCKS if columns == 128 else CONFIG)
    assert {n: h.kind for n, h in source.headers.items()} == {name: f"fp8.{kind}"}
    assert source.headers[name].shape == (3, 128, 192)
    assert torch.equal(meaning(source, name), expected)


def test_one_scale_for_all_experts():
    w = random_weight(6, 32)
    tensors, expected = encoders.fp8(w, 6, 32, shape=(), name="s")
    source = opened({"e.down_proj": tensors["weight"].view(3, 2, 32), "e.down_proj_scale": tensors["s"]}, CONFIG)
    assert torch.equal(meaning(source, "e.down_proj"), expected.view(3, 2, 32))


def test_deepseek_v4_has_powers_of_two_and_mxfp4_in_one_file():
    """`.scale` in both; int8 bytes are two E2M1 codes in the experts, which blocks of 128 x 128 do not concern."""
    attention, of_attention = encoders.fp8(random_weight(256, 192), 128, 128, dtype=POWERS, name="scale")
    flash, of_flash = encoders.fp8(random_weight(128, 128), 128, 128, name="scale")
    expert, of_expert = encoders.mxfp4(random_weight(48, 96), dtype=POWERS)
    tensors = named("layers.0.attn.wq_b.", attention) | named("layers.1.attn.wq_b.", flash)
    tensors |= {k: v for i in (1, 2, 3) for k, v in named(f"layers.0.ffn.experts.0.w{i}.", expert).items()}
    source = opened(tensors | {"layers.0.attn.attn_sink": torch.zeros(4)}, BLOCKS | {"scale_fmt": "ue8m0"})
    assert torch.equal(meaning(source, "layers.0.attn.wq_b.weight"), of_attention)
    assert torch.equal(meaning(source, "layers.1.attn.wq_b.weight"), of_flash)
    for i in (1, 2, 3):
        name = f"layers.0.ffn.experts.0.w{i}.weight"
        assert (source.headers[name].kind, source.headers[name].shape) == ("fp4.mxfp4", (48, 96))
        assert torch.equal(meaning(source, name), of_expert)
    assert set(source.headers) == {n for n in tensors if n.endswith("weight")} | {"layers.0.attn.attn_sink"}


def test_deepseek_v4_with_nvfp4_experts():
    tensors, expected = encoders.nvfp4(random_weight(32, 64))
    source, equal = one((tensors, expected), BLOCKS | {"moe_quant_algo": "NVFP4"}, "layers.0.ffn.experts.0.w1")
    assert source.headers["layers.0.ffn.experts.0.w1.weight"].kind == "fp4.nvfp4"
    assert equal


def test_the_smallest_power_is_not_nothing_and_255_is_no_number():
    tensors = {"weight": torch.full((1, 32), 0x22, dtype=torch.int8), "scale": torch.zeros(1, 2, dtype=torch.uint8)}
    source = opened(named(f"{X}.", tensors), BLOCKS)
    assert meaning(source, f"{X}.weight").double().unique().tolist() == [2.0**-127]
    tensors["scale"][0] = torch.tensor([254, 255])
    source = opened(named(f"{X}.", tensors), BLOCKS)
    with pytest.raises(ModelError, match=f"tensor {X}.scale; found: a scale that is not finite"):
        source.read(f"{X}.weight")


@pytest.mark.parametrize(
    ("key", "listed", "noted"),
    [
        ("ignored_layers", ["model.layers.0.mlp.down_proj"], True),
        ("modules_to_not_convert", ["model.layers.0.mlp.down_proj"], True),
        ("ignored_layers", ["layers.0.mlp.down_proj", "model.layers.0.mlp", "model.layers.0.mlp.down_proj.x"], False),
        ("ignored_layers", ["lm_head"], False),
    ],
)
def test_lists_name_whole_paths(key, listed, noted):
    source, equal = one(encoders.fp8(random_weight(64, 96), 64, 96, shape=()), CONFIG | {key: listed})
    assert equal
    assert len(source.notes) == noted
    assert not noted or source.notes[0].startswith(f"{X} is listed as not quantised")


@pytest.mark.parametrize(
    ("stem", "listed", "noted"),
    [
        ("l.0.self_attn.k_proj", "l.0.self_attn.qkv_proj", True),
        ("l.0.mlp.up_proj", "l.0.mlp.gate_up_proj", True),
        ("l.0.mlp.down_proj", "l.0.mlp.gate_up_proj", False),
        ("l.0.mlp.experts.7.up_proj", "l.0.mlp.experts", True),
        ("l.0.mlp.experts.7.up_proj", "l.0.mlp.experts.3.up_proj", True),
        ("l.0.mlp.experts.7.up_proj", "l.1.mlp.experts", False),
        ("l.0.mlp.shared_expert.up_proj", "l.0.mlp.experts", False),
    ],
)
def test_lists_may_name_fused_modules_and_experts(stem, listed, noted):
    source, _ = one(encoders.fp8(random_weight(8, 32), 8, 32, shape=()), CONFIG | {"ignored_layers": [listed]}, stem)
    assert len(source.notes) == noted


def test_scales_of_the_cache_are_set_aside():
    tensors, expected = encoders.fp8(random_weight(8, 32), 8, 32, shape=())
    cache = {f"l.self_attn.{name}": torch.tensor(1.0) for name in ("k_scale", "v_scale", "k_proj.output_scale")}
    source = opened(named(f"{X}.", tensors) | cache, CONFIG)
    assert set(source.headers) == {f"{X}.weight"}
    assert set(source.kv) == set(cache)


@pytest.mark.parametrize(
    ("change", "config", "message"),
    [
        ({"weight_scale_inv": None}, BLOCKS, "down_proj.weight_scale_inv; found: absent"),
        ({"weight_scale_inv": None}, CONFIG, "down_proj.weight_scale; found: absent"),
        ({"weight_scale_inv": torch.ones(2, 1)}, BLOCKS, r"scale_inv; found: shape \[2, 1\] for a weight \[64, 192\]"),
        ({"weight_scale_inv": torch.ones(63)}, BLOCKS, r"scale_inv; found: shape \[63\] for a weight"),
        ({"weight_scale_inv": torch.ones(1, 2).long()}, BLOCKS, "scale_inv; found: stored as i64; accepted: f32 or"),
        ({"weight": torch.ones(64, 192)}, BLOCKS, "weight_scale_inv; found: no weight that it belongs to"),
        ({"weight_scale": torch.ones(1)}, BLOCKS, "weight_scale; found: no weight that it belongs to"),
        ({}, BLOCKS | {"weight_block_size": [0, 128]}, r"weight_block_size; found: \[0, 128\]; accepted: \[128, 128\]"),
        ({}, BLOCKS | {"weight_block_size": 128}, "weight_block_size; found: 128; accepted"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(change, config, message):
    tensors = encoders.fp8(random_weight(64, 192), 128, 128, **INVERSE)[0] | change
    with pytest.raises(ModelError, match=message) as caught:
        opened(named(f"{X}.", {name: t for name, t in tensors.items() if t is not None}), config)
    assert caught.value.next


def test_scales_that_are_not_finite():
    tensors, _ = encoders.fp8(random_weight(64, 192), 128, 128, **INVERSE)
    tensors["weight_scale_inv"][0, 1] = float("nan")
    with pytest.raises(ModelError, match=f"{X}.weight_scale_inv; found: a scale that is not finite"):
        opened(named(f"{X}.", tensors), BLOCKS).read(f"{X}.weight")
