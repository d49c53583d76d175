"""ModelOpt's FP8 and NVFP4: what the scales mean, mixtures, lists, and what belongs to the cache."""

from __future__ import annotations

import encoders
import pytest
import torch
from checkpoints import experts, meaning, named, opened, random_weight

from offroad.errors import ModelError
from offroad.quant.packed import group_of

X = "model.layers.0.mlp.down_proj"
STATIC = "static scales of activations are not used: activations keep their dtype"


def config(algorithm: str, **more) -> dict:
    return {"quant_method": "modelopt", "quant_algo": algorithm} | more


def one(encoded, settings, stem: str = X):
    tensors, expected = encoded
    source = opened(named(f"{stem}.", tensors), settings)
    assert set(source.headers) == {f"{stem}.weight"}
    return source, torch.equal(meaning(source, f"{stem}.weight"), expected)


@pytest.mark.parametrize(
    ("algorithm", "rows", "columns", "shape"),
    [
        ("FP8", 200, 256, ()),
        ("FP8", 200, 256, (1,)),
        ("fp8_per_channel_per_token", 1, 256, (200,)),
        ("FP8_PB_WO", 128, 128, (2, 1, 2, 1)),
        ("fp8_pb_wo", 128, 128, (2, 2)),
    ],
)
def test_fp8(algorithm, rows, columns, shape):
    source, equal = one(encoders.fp8(random_weight(200, 256), rows, columns, shape=shape), config(algorithm))
    kind = source.headers[f"{X}.weight"].kind
    assert kind.startswith("fp8.modelopt-")
    assert group_of(kind, 256) == columns
    assert equal
    assert source.notes == ()


def test_mxfp8():
    """A power of two, as a byte, for 32 columns of a row."""
    source, equal = one(encoders.fp8(random_weight(24, 96), 1, 32, dtype=torch.uint8), config("MXFP8"))
    assert equal


@pytest.mark.parametrize("second", [(), (1,)])
@pytest.mark.parametrize(("algorithm", "static"), [("NVFP4", True), ("nvfp4", True), ("W4A16_NVFP4", False)])
def test_nvfp4(algorithm, static, second):
    """The scale of the scales multiplies; even columns are in low nibbles."""
    w = random_weight(24, 48)
    source, equal = one(encoders.nvfp4(w, second=second, static=static), config(algorithm, group_size=16))
    header = source.headers[f"{X}.weight"]
    assert (header.kind, header.shape) == ("fp4.nvfp4", (24, 48))
    assert equal
    assert source.notes == ((STATIC,) if static else ())
    assert (meaning(source, f"{X}.weight") - w).abs().max() < 0.2 * w.abs().max()


@pytest.mark.parametrize("shape", [(3,), (3, 1), (3, 1, 1)])
def test_nvfp4_of_all_experts_in_one_tensor(shape):
    tensors, expected = experts(encoders.nvfp4, 32, 48)
    tensors["weight_scale_2"] = tensors["weight_scale_2"].reshape(shape)
    name = "model.layers.0.mlp.experts.down_proj"
    held = {name: tensors.pop("weight")} | named(f"{name}_", tensors)
    source = opened(held, config("NVFP4"))
    assert set(source.headers) == {name}
    assert source.headers[name].shape == (3, 32, 48)
    assert torch.equal(meaning(source, name), expected)


@pytest.mark.parametrize("shape", [(2, 2), (2, 2, 1)])
def test_gate_and_up_may_have_a_scale_each(shape):
    """[experts, 2]: the first is of the first half of an expert's rows."""
    parts = [[encoders.nvfp4((1 + 3 * half) * random_weight(16, 32, e)) for half in (0, 1)] for e in (0, 1)]
    name = "model.layers.0.mlp.experts.gate_up_proj"
    held = {
        name: torch.stack([torch.cat([t["weight"] for t, _ in expert]) for expert in parts]),
        f"{name}_weight_scale": torch.stack([torch.cat([t["weight_scale"] for t, _ in expert]) for expert in parts]),
        f"{name}_weight_scale_2": torch.stack([t["weight_scale_2"] for expert in parts for t, _ in expert]).view(shape),
    }
    expected = torch.stack([torch.cat([m for _, m in expert]) for expert in parts])
    assert torch.equal(meaning(opened(held, config("NVFP4")), name), expected)


LAYERS = {
    "l.0.self_attn.q_proj": {"quant_algo": "FP8_PB_WO"},
    "l.0.mlp.experts": {"quant_algo": "nvfp4", "group_size": 16},
}


def mixed(layers: dict):
    attention, of_attention = encoders.fp8(random_weight(64, 256), 128, 128, shape=(1, 1, 2, 1))
    expert, of_expert = encoders.nvfp4(random_weight(16, 32))
    tensors = named("l.0.self_attn.q_proj.", attention) | named("l.0.mlp.experts.0.gate_proj.", expert)
    source = opened(
        tensors | {"l.0.mlp.gate.weight": random_weight(8, 8)}, config("mixed_precision", quantized_layers=layers)
    )
    assert torch.equal(meaning(source, "l.0.self_attn.q_proj.weight"), of_attention)
    assert torch.equal(meaning(source, "l.0.mlp.experts.0.gate_proj.weight"), of_expert)
    return source


def test_mixed_precision():
    assert mixed(LAYERS).notes == (STATIC,)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (
            {},
            "l.0.self_attn.q_proj is stored as fp8.modelopt-block128x128, and the config has nothing for it: "
            "the file decides",
        ),
        (
            LAYERS | {"l.0.mlp.experts.0.gate_proj": {"quant_algo": "FP8"}},
            "l.0.mlp.experts.0.gate_proj is stored as fp4.nvfp4, and the config has FP8 for it: the file decides",
        ),
    ],
)
def test_the_file_decides_where_the_algorithm_is_another(layers, message):
    assert message in mixed(layers).notes


@pytest.mark.parametrize(
    ("entry", "noted"),
    [
        ("model.layers.0.mlp.down_proj", True),
        ("mlp.down", True),
        ("model.layers.0*", True),
        ("*mlp*", True),
        ("model.layers.0.mlp.[a-d]own_proj", True),
        ("layers.0*", False),
        ("lm_head", False),
        ("model.layers.1.*", False),
    ],
)
@pytest.mark.parametrize("key", ["ignore", "exclude_modules"])
def test_lists_name_parts_of_paths_and_wildcards(key, entry, noted):
    source, equal = one(encoders.nvfp4(random_weight(8, 32), static=False), config("NVFP4", **{key: [entry]}))
    assert equal
    assert len(source.notes) == noted
    assert not noted or source.notes[0].startswith(f"{X} is listed as not quantised")


@pytest.mark.parametrize("algorithm", ["FP8", None])
def test_scales_of_the_cache_are_set_aside(algorithm):
    """Also where nothing else is quantised."""
    tensors, _ = encoders.fp8(random_weight(8, 32), 8, 32, shape=())
    tensors = named(f"{X}.", tensors if algorithm else {"weight": random_weight(8, 32)})
    cache = {f"l.0.self_attn.{x}_proj.{x}_scale": torch.tensor(1.0) for x in "kv"}
    source = opened(tensors | cache, config(algorithm, kv_cache_quant_algo="FP8"))
    assert set(source.headers) == {f"{X}.weight"}
    assert set(source.kv) == set(cache)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (config("W4A16_AWQ"), "quant_algo .modelopt.; found: W4A16_AWQ; accepted: FP8, .*, W4A16_NVFP4, MIXED_PREC"),
        (
            config("MIXED_PRECISION", quantized_layers={X: {"quant_algo": "W4A8_AWQ"}}),
            r"quantized_layers\[.*down_proj\] .modelopt.; found: W4A8_AWQ; accepted: FP8, .*W4A16_NVFP4;",
        ),
        (config("MIXED_PRECISION", quantized_layers={X: {}}), "quantized_layers.*found: absent"),
    ],
)
def test_other_algorithms_are_refused(settings, message):
    with pytest.raises(ModelError, match=message) as caught:
        one(encoders.nvfp4(random_weight(8, 32)), settings)
    assert caught.value.next


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight_scale_2": None}, "down_proj.weight_scale_2; found: absent"),
        ({"weight_scale": None}, "down_proj.(weight_scale_2|input_scale); found: no weight that it belongs to"),
        ({"weight": None}, "down_proj.input_scale; found: no weight that it belongs to .3 of them"),
        ({"weight_scale": torch.ones(8, 1)}, "down_proj.weight_scale; found: stored as f32; accepted: f8_e4m3"),
        (
            {"weight_scale": torch.ones(8, 3).to(torch.float8_e4m3fn)},
            r"down_proj.weight_scale; found: shape \[8, 3\]; accepted: shape \[8, 2\]",
        ),
        ({"weight": torch.zeros(8, 20, dtype=torch.uint8)}, "down_proj.weight; found: 40 columns of 4-bit floats"),
        ({"weight_scale_2": torch.ones(8)}, r"weight_scale_2; found: shape \[8\]; accepted: one scale for each matrix"),
        ({"pre_quant_scale": torch.ones(32)}, "down_proj.pre_quant_scale; found: no weight that it belongs to"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(change, message):
    tensors = encoders.nvfp4(random_weight(8, 32))[0] | change
    with pytest.raises(ModelError, match=message) as caught:
        opened(named(f"{X}.", {name: t for name, t in tensors.items() if t is not None}), config("NVFP4"))
    assert caught.value.next


@pytest.mark.parametrize("name", ["weight_scale", "weight_scale_2"])
def test_scales_that_are_not_finite(name):
    tensors, _ = encoders.nvfp4(random_weight(8, 32), second=(1,))
    tensors[name].view(-1)[0] = float("nan")
    with pytest.raises(ModelError, match=f"{X}.{name}; found: a scale that is not finite"):
        opened(named(f"{X}.", tensors), config("NVFP4")).read(f"{X}.weight")
