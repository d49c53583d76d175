"""Rules of compressed-tensors that are easy to get wrong, one at a time, on single modules."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ct_files import compress, folder_of, oracle, prefixed, scheme

from offroad.quant.formats.ct_config import KvScheme, kv_scheme
from offroad.quant.packed import dequantise
from offroad.quant.scheme import canonical, fuse
from offroad.weights.quantised import quantised
from offroad.weights.safetensors_source import SafetensorsSource
from offroad.weights.source import Source


def opened(folder: Path, tensors: dict[str, torch.Tensor], groups: dict, **config) -> Source:
    return quantised(SafetensorsSource(folder_of(folder, tensors, groups, **config)))


def weight(source: Source, name: str = "m.weight") -> torch.Tensor:
    return dequantise(canonical(source.read(name)))


def normal(n: int, k: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed))


SIZES = [
    ("w4-g64", 16, 192),
    ("w4-g128-asym", 13, 256),  # zero points are packed along n: the last word holds 5
    ("w4-channel-asym", 9, 44),  # 176 bits a row
    ("w3-channel-asym", 5, 50),  # codes that straddle words, in both directions
    ("w8-channel-asym", 6, 49),
    ("w5-g64", 3, 128),
    ("w7-g32-asym", 3, 64),
    ("w1-g32-asym", 3, 64),
    ("w6-g32", 3, 64),
    ("w4-tensor", 4, 40),
    ("w4-tensor-asym", 4, 40),
    ("int8-g128-asym", 3, 256),
    ("int4-g32-asym", 3, 64),  # 4-bit numbers, a byte each
    ("int8-tensor", 3, 24),
    ("fp8-g64", 3, 128),
    ("fp8-block32x64", 70, 100),
]


@pytest.mark.parametrize(("name", "n", "k"), SIZES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sizes_and_groups(name, n, k, dtype, tmp_path):
    made = scheme(name)
    parts = compress(normal(n, k), made, dtype)
    source = opened(tmp_path, prefixed("m", parts), {"a": made})
    assert source.headers["m.weight"].shape == (n, k)
    assert torch.equal(weight(source), oracle(parts, made))


def test_scales_in_fp32_are_within_their_rounding(tmp_path):
    """The library rounds (u - z) s once; u s + m is rounded three times. What has no m is exact all the same."""
    no_m = ("w4-g16-asym", "w6-g32-asym", "w8-g32", "int8-g32")
    for name, exact in [("w4-g32-asym", False), ("w4-g32", False), *((name, True) for name in no_m)]:
        made = scheme(name)
        parts = compress(normal(64, 256), made, torch.float32)
        difference = (weight(opened(tmp_path / name, prefixed("m", parts), {"a": made})) - oracle(parts, made)).abs()
        assert bool((difference == 0).all()) == exact
        assert (difference <= 3 * 15 * 2**-24 * parts["weight_scale"].max()).all()


def ordered(n: int, k: int, group: int, seed: int = 0, **options) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """A module whose groups stand apart: columns of a plain one, shuffled; and its weight."""
    made = scheme(f"w4-g{group}-asym")
    plain = compress(normal(n, k, seed), made)
    whole = oracle(plain, made)
    shuffle = torch.randperm(k, generator=torch.Generator().manual_seed(seed))
    codes = torch.stack([plain["weight_packed"] >> 4 * i & 15 for i in range(8)], -1).flatten(1)[:, shuffle]
    words = sum(codes[:, i::8].long() << 4 * i for i in range(8))
    words = torch.where(words >= 2**31, words - 2**32, words).int()
    return plain | {"weight_packed": words, "weight_g_idx": (shuffle // group).int()}, whole[:, shuffle]


@pytest.mark.parametrize("actorder", ["group", "dynamic"])
def test_groups_that_stand_apart_are_sorted_stably(actorder, tmp_path):
    parts, expected = ordered(24, 128, 32)
    group = scheme("w4-g32-asym").model_dump(mode="json")
    group["weights"]["actorder"] = actorder
    source = opened(tmp_path, prefixed("m", parts), {"a": group})
    packed = canonical(source.read("m.weight"))
    assert source.headers["m.weight"].kind == "affine4.w4a16-g32-asym+order"
    assert torch.equal(packed.perm, torch.argsort(parts["weight_g_idx"], stable=True))
    assert packed.group == 32
    assert torch.equal(dequantise(packed), expected)


def test_parts_of_one_order_stay_packed_when_fused(tmp_path):
    """q, k and v see the same input, so their columns are sorted alike; others become dense with the same values."""
    parts, expected = zip(*(ordered(16, 64, 32, seed) for seed in (0, 0, 1)), strict=True)
    tensors = {name: value for i, part in enumerate(parts) for name, value in prefixed(f"m{i}", part).items()}
    source = opened(tmp_path, tensors, {"a": scheme("w4-g32-asym")})
    packed = [canonical(source.read(f"m{i}.weight")) for i in range(3)]
    alike, unlike = fuse(packed[:2]), fuse(packed[1:])
    assert (alike.layout, unlike.layout) == ("affine4", "dense")
    assert torch.equal(dequantise(alike), torch.cat(expected[:2]))
    assert torch.equal(dequantise(unlike), torch.cat(expected[1:]))


@pytest.mark.parametrize("actorder", ["weight", "static", None, False])
def test_orders_of_calibration_change_nothing(actorder, tmp_path):
    made = scheme("w4-g32")
    parts, group = compress(normal(8, 64), made), made.model_dump(mode="json")
    group["weights"]["actorder"] = actorder
    source = opened(tmp_path, prefixed("m", parts), {"a": group})
    assert canonical(source.read("m.weight")).perm is None
    assert torch.equal(weight(source), oracle(parts, made))


@pytest.mark.parametrize("index", [torch.full((64,), -1), torch.arange(64) // 32])
def test_an_order_that_is_none_leaves_columns_where_they_are(index, tmp_path):
    made = scheme("w4-g32")
    parts = compress(normal(8, 64), made)
    source = opened(tmp_path, prefixed("m", parts | {"weight_g_idx": index.int()}), {"a": made})
    assert canonical(source.read("m.weight")).perm is None
    assert torch.equal(weight(source), oracle(parts, made))


@pytest.mark.parametrize("name", ["w4-g32", "w4-channel-asym", "w8-g32-asym", "int8-channel", "fp8-channel"])
def test_experts_in_one_tensor_are_slices(name, tmp_path):
    made = scheme(name)
    states = [compress(normal(12, 64, seed), made) for seed in range(3)]
    parts = {part: torch.stack([state[part] for state in states]) for part in states[0]}
    if "weight_shape" in parts:
        parts["weight_shape"] = torch.tensor([3, 12, 64])
    source = opened(tmp_path, prefixed("x.experts.down_proj", parts), {"a": made})
    assert source.headers["x.experts.down_proj"].shape == (3, 12, 64)
    expected = torch.cat([oracle(state, made) for state in states])
    assert torch.equal(weight(source, "x.experts.down_proj"), expected)
    assert not source.notes or "activations" in source.notes[0]


@pytest.mark.parametrize("shape", [(3,), (3, 1), (3, 1, 1), (3, 2)])
def test_global_scales_of_experts(shape, tmp_path):
    """One for each expert, or one for each half of its rows (gate and up)."""
    made, each = scheme("nvfp4"), shape[-1] if len(shape) == 2 else 1
    pieces = [compress(normal(12 // each, 32, seed) * (seed + 1), made) for seed in range(3 * each)]
    parts = {
        part: torch.cat([piece[part] for piece in pieces]).unflatten(0, (3, 12))
        for part in ("weight_packed", "weight_scale")
    }
    parts["weight_global_scale"] = torch.cat([piece["weight_global_scale"] for piece in pieces]).reshape(shape)
    source = opened(tmp_path, prefixed("experts.gate_up_proj", parts), {"a": made})
    expected = torch.cat([oracle(piece, made) for piece in pieces])
    assert torch.equal(weight(source, "experts.gate_up_proj"), expected)


def test_a_global_scale_divides_and_shards_keep_their_own(tmp_path):
    made = scheme("nvfp4")
    q, k = compress(normal(4, 32), made), compress(normal(4, 32, 1) * 50, made)
    assert q["weight_global_scale"] > 10 * k["weight_global_scale"]
    source = opened(tmp_path, prefixed("q", q) | prefixed("k", k), {"a": made})
    both = fuse([canonical(source.read(f"{name}.weight")) for name in ("q", "k")])
    assert both.layout == "fp4"
    assert torch.equal(dequantise(both), torch.cat([oracle(q, made), oracle(k, made)]))


@pytest.mark.parametrize("kind", ["mxfp4", "mxfp8"])
def test_exponents_of_all_bytes_but_255(kind, tmp_path):
    """Byte 0 is 2^-127, a subnormal of fp32, and not 0."""
    made = scheme(kind)
    parts = compress(normal(255, 32).sign(), made)
    parts["weight_scale"] = torch.arange(255).reshape(-1, 1).to(torch.uint8)
    source = opened(tmp_path, prefixed("m", parts), {"a": made})
    packed = canonical(source.read("m.weight"))
    expected = torch.ldexp(torch.ones(255, dtype=torch.float64), torch.arange(255) - 127)
    assert torch.equal(packed.tensors["s"].double().flatten(), expected)
    assert packed.group == 32


def test_exponents_in_their_own_dtype(tmp_path):
    made = scheme("mxfp4")
    parts = compress(normal(4, 64), made)
    parts["weight_scale"] = parts["weight_scale"].view(torch.float8_e8m0fnu)
    source = opened(tmp_path, prefixed("m", parts), {"a": made})
    parts["weight_scale"] = parts["weight_scale"].view(torch.uint8)
    assert torch.equal(weight(source), oracle(parts, made))


def test_static_scales_of_activations_are_accepted_and_noted(tmp_path):
    made = scheme("fp8-tensor")
    parts = compress(normal(4, 32), made)
    group = made.model_dump(mode="json")
    group["input_activations"] = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
    source = opened(tmp_path, prefixed("m", parts | {"input_scale": torch.ones(1)}), {"a": group})
    assert list(source.headers) == ["m.weight"]
    assert torch.equal(weight(source), oracle(parts, made))
    assert source.notes == (
        "a: made for activations in 8-bit float; they stay in the plan's precision",
        "m.input_scale: not used, since activations are not quantised",
    )


KV = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
KV_NAMES = [("k_scale", "v_scale"), ("k_proj.output_scale", "v_proj.output_scale")]


@pytest.mark.parametrize("names", KV_NAMES)
def test_kv_scales_are_no_weights(names, tmp_path):
    made = scheme("fp8-tensor")
    parts = compress(normal(4, 32), made)
    tensors = prefixed("self_attn.k_proj", parts) | prefixed("self_attn.v_proj", parts)
    tensors |= {f"self_attn.{name}": torch.ones(1) for name in names}
    source = opened(tmp_path, tensors, {"a": made}, kv_cache_scheme=KV)
    assert set(source.headers) == {"self_attn.k_proj.weight", "self_attn.v_proj.weight"}
    assert set(source.kv) == {f"self_attn.{name}" for name in names}
    assert source.notes == ()


def test_kv_cache_scheme_null_means_none(tmp_path):
    assert kv_scheme({"kv_cache_scheme": None}) is None
    assert kv_scheme({}) is None
    assert kv_scheme({"kv_cache_scheme": KV}) == KvScheme("float", 8, "tensor", False)
    made = scheme("fp8-tensor")
    source = opened(tmp_path, prefixed("m", compress(normal(4, 32), made)), {"a": made}, kv_cache_scheme=None)
    assert source.notes == ()
