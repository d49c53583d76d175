"""Damaged or unknown compressed-tensors checkpoints: errors that name the tensor or the field."""

from __future__ import annotations

import re

import pytest
import torch
from ct_files import compress, prefixed, scheme
from test_ct_traps import normal, opened

from offroad.errors import ModelError


def parts_of(name: str) -> dict[str, torch.Tensor]:
    return compress(normal(16, 64), scheme(name))


def fails(tmp_path, what: str, found: str, name: str, parts: dict[str, torch.Tensor | None], **config) -> ModelError:
    """Opening, or reading the weight, of a module with some of its tensors changed (None: absent) fails so."""
    tensors = {part: value for part, value in (parts_of(name) | parts).items() if value is not None}
    with pytest.raises(ModelError) as caught:
        opened(tmp_path, prefixed("m", tensors), {"a": scheme(name)}, **config).read("m.weight")
    assert caught.value.what == what
    assert re.search(found, str(caught.value.found)), caught.value
    assert caught.value.accepted
    return caught.value


def spoilt(name: str, part: str, value: float) -> torch.Tensor:
    tensor = parts_of(name)[part].clone()
    tensor.view(-1)[-1] = value
    return tensor


NOT_FINITE = [
    ("w4-g32", "weight_scale", torch.nan),
    ("w4-g32-asym", "weight_scale", torch.inf),
    ("int8-channel", "weight_scale", torch.nan),
    ("fp8-channel", "weight_scale", torch.nan),
    ("fp8-block32x32", "weight_scale", torch.inf),
    ("nvfp4", "weight_scale", torch.nan),
    ("nvfp4", "weight_global_scale", torch.nan),
    ("mxfp4", "weight_scale", 255),
    ("mxfp8", "weight_scale", 255),
]


@pytest.mark.parametrize(("name", "part", "value"), NOT_FINITE)
def test_scales_that_are_not_finite(name, part, value, tmp_path):
    fails(tmp_path, f"tensor m.{part}", "not finite", name, {part: spoilt(name, part, value)})


@pytest.mark.parametrize("value", [0.0, -1.0])
def test_a_global_scale_that_cannot_divide(value, tmp_path):
    fails(tmp_path, "tensor m.weight_global_scale", str(value), "nvfp4", {"weight_global_scale": torch.tensor([value])})


SHAPES = [
    ("w4-g32", "weight_packed", torch.zeros(16, 9, dtype=torch.int32), r"shape \[16, 9\]"),
    ("w4-g32", "weight_packed", torch.zeros(16, 7, dtype=torch.int32), r"shape \[16, 7\]"),
    ("w3-g32", "weight_packed", torch.zeros(16, 7, dtype=torch.int32), "3-bit weights, 10 to a word"),
    ("w6-channel", "weight_packed", torch.zeros(16, 13, dtype=torch.int32), "6-bit weights, 5 to a word"),
    ("w6-channel", "weight_packed", torch.zeros(16, 14, dtype=torch.int32), "16, 64"),
    ("w4-g32", "weight_packed", torch.zeros(128, dtype=torch.int32), r"shape \[128\]"),
    ("w4-g32", "weight_packed", torch.zeros(16, 8, dtype=torch.int64), "stored as i64"),
    ("w4-g32", "weight_scale", torch.ones(15, 2), r"shape \[15, 2\]"),
    ("w4-channel", "weight_scale", torch.ones(16, 2), r"shape \[16, 2\]"),
    ("w4-tensor", "weight_scale", torch.ones(2), r"shape \[2\]"),
    ("w4-g32", "weight_scale", torch.ones(16, 2, dtype=torch.int32), "stored as i32"),
    ("w4-g32", "weight_scale", None, "absent"),
    ("w4-g32-asym", "weight_zero_point", torch.zeros(16, 2, dtype=torch.int32), r"shape \[16, 2\]"),
    ("w4-g32-asym", "weight_zero_point", torch.zeros(2, 2, dtype=torch.int8), "stored as i8"),
    ("w4-g32-asym", "weight_zero_point", None, "absent"),
    ("w4-g32", "weight_g_idx", torch.zeros(63, dtype=torch.int32), r"shape \[63\]"),
    ("w4-g32", "weight_shape", torch.tensor([16, 64, 1, 1]), r"shape \[4\]"),
    ("int8-channel", "weight_scale", torch.ones(1, 16), r"shape \[1, 16\]"),
    ("int8-channel-asym", "weight_zero_point", None, "absent"),
    ("int8-g32", "weight_scale", None, "absent"),
    ("fp8-channel", "weight_scale", torch.ones(64, 1), r"shape \[64, 1\]"),
    ("fp8-tensor", "weight_scale", torch.ones(16, 1), r"shape \[16, 1\]"),
    ("fp8-block32x32", "weight_scale", torch.ones(2, 2), r"shape \[2, 2\]"),
    ("fp8-channel", "weight_scale", None, "absent"),
    ("mxfp8", "weight_scale", torch.zeros(16, 4, dtype=torch.uint8), r"shape \[16, 4\]"),
    ("nvfp4", "weight_packed", torch.zeros(16, 33, dtype=torch.uint8), "66 columns"),
    ("nvfp4", "weight_scale", torch.ones(16, 4), "stored as f32"),
    ("nvfp4", "weight_scale", torch.ones(16, 2).to(torch.float8_e4m3fn), r"shape \[16, 2\]"),
    ("nvfp4", "weight_global_scale", torch.ones(2), r"shape \[2\]"),
    ("mxfp4", "weight_packed", torch.zeros(16, 24, dtype=torch.uint8), "48 columns"),
    ("mxfp4", "weight_scale", torch.zeros(16, 4, dtype=torch.uint8), r"shape \[16, 4\]"),
    ("mxfp4", "weight_scale", None, "absent"),
]


@pytest.mark.parametrize(("name", "part", "value", "found"), SHAPES)
def test_shapes_and_dtypes(name, part, value, found, tmp_path):
    what = part if found != "16, 64" else "weight_shape"  # the metadata that it does not agree with
    fails(tmp_path, f"tensor m.{what}", found, name, {part: value})


SIZES = [
    ("w4-g32", [16, 96], "16, 96"),
    ("w4-g32", [15, 64], "15, 64"),
    ("w4-channel", [16, 56], "16, 56"),  # 7 words
    ("w4-channel", [16, 63], "16, 63"),  # 4-bit weights lie in pairs
]


@pytest.mark.parametrize(("name", "shape", "found"), SIZES)
def test_metadata_of_another_shape(name, shape, found, tmp_path):
    fails(tmp_path, "tensor m.weight_shape", found, name, {"weight_shape": torch.tensor(shape)})


@pytest.mark.parametrize("index", [torch.zeros(64), torch.arange(64) // 32 + 1, torch.arange(64) // 32 - 1])
def test_orders_whose_groups_are_not_of_one_size(index, tmp_path):
    error = fails(
        tmp_path, "tensor m.weight_g_idx", "not all of the same size", "w4-g32", {"weight_g_idx": index.int()}
    )
    assert error.accepted == "32 columns for each of 2 groups"


LEFT = ["weight_scale", "weight_packed", "weight_zero_point", "weight_shape", "weight_g_idx", "weight_global_scale"]
LEFT += ["input_scale", "input_global_scale", "output_scale", "self_attn.k_scale"]


@pytest.mark.parametrize("part", LEFT)
def test_a_tensor_of_a_weight_that_is_not_there(part, tmp_path):
    tensors = prefixed("m", parts_of("w4-g32")) | {f"other.{part}": torch.ones(16, 2)}
    with pytest.raises(ModelError) as caught:
        opened(tmp_path, tensors, {"a": scheme("w4-g32")})
    assert caught.value.what == f"tensor other.{part}"


def test_a_tensor_that_its_scheme_has_no_use_for(tmp_path):
    """A zero point beside FP8, say: the weight would be another."""
    fails(tmp_path, "tensor m.weight_zero_point", "no weight", "fp8-channel", {"weight_zero_point": torch.zeros(16, 1)})


def test_a_weight_that_is_there_twice(tmp_path):
    fails(tmp_path, "tensor m.weight", "made by m.weight_packed too", "w4-g32", {"weight": normal(16, 64)})


OTHERS = [("w4-g32", "fp8-channel"), ("nvfp4", "mxfp4"), ("int8-channel", "nvfp4"), ("mxfp8", "fp8-channel")]


@pytest.mark.parametrize(("made", "other"), OTHERS)
def test_tensors_that_no_scheme_describes(made, other, tmp_path):
    with pytest.raises(ModelError) as caught:
        opened(tmp_path, prefixed("m", parts_of(made)), {"b": scheme(other)})
    weight = "m.weight" if made in ("int8-channel", "mxfp8") else "m.weight_packed"
    assert (caught.value.what, caught.value.accepted) == (f"tensor {weight}", "one of b")


CONFIGS = [
    ("format", dict(format="marlin-24"), "marlin-24"),
    ("format", dict(format="mxfp6-pack-quantized"), "mxfp6"),
    ("sparsity_config", dict(sparsity_config={"format": "sparse-24-bitmask"}), "sparse-24"),
    ("transform_config", dict(transform_config={"config_groups": {"R1": {}}}), "transforms"),
    ("config_groups", dict(config_groups=None), "None"),
    ("config_groups.W4A16", dict(config_groups={"W4A16": ["Linear"]}), "Linear"),
    ("ignore", dict(ignore=["re:(("]), r"re:\(\("),
    ("ignore", dict(ignore=[3]), "3"),
    ("kv_cache_scheme", dict(kv_cache_scheme="fp8"), "fp8"),
]


@pytest.mark.parametrize(("field", "config", "found"), CONFIGS)
def test_configs_that_are_refused(field, config, found, tmp_path):
    fails(tmp_path, f"quantization_config: {field}", found, "w4-g32", {}, **config)


WEIGHTS = [
    ("num_bits", 16),
    ("type", "complex"),
    ("strategy", "token"),
    ("group_size", 0),
    ("group_size", -1),
    ("symmetric", "yes"),
]


@pytest.mark.parametrize(("field", "value"), WEIGHTS)
def test_schemes_that_are_refused(field, value, tmp_path):
    group = scheme("w4-g32").model_dump(mode="json")
    group["weights"][field] = value
    with pytest.raises(ModelError) as caught:
        opened(tmp_path, prefixed("m", parts_of("w4-g32")), {"a": group})
    assert caught.value.what == f"quantization_config: config_groups.a.weights.{field}"
    assert str(value) in str(caught.value.found)


def test_columns_that_groups_do_not_divide(tmp_path):
    made = scheme("int8-g32")
    parts = {"weight": torch.zeros(4, 40, dtype=torch.int8), "weight_scale": torch.ones(4, 2)}
    with pytest.raises(ModelError, match=r"tensor m\.weight; found: 40 columns"):
        opened(tmp_path, prefixed("m", parts), {"a": made})
