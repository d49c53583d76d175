"""GPTQ: what its words mean, by encoders that share no code with the reader."""

from __future__ import annotations

import encoders
import numpy as np
import pytest
import torch
from checkpoints import meaning, named, opened, random_weight, read

from offroad.errors import ModelError

W = random_weight(64, 96)
ORDER = np.random.default_rng(1).permutation(96)
CONFIG = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
X = "model.layers.0.mlp.down_proj"


def checkpoint(tensors: dict, module: str = X, **config):
    return opened(named(f"{module}.", tensors), CONFIG | config)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("sym", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("group", "order"), [(32, None), (-1, None), (16, None), (32, ORDER), (16, ORDER)])
def test_weights_are_what_the_format_says(bits, sym, version, group, order):
    tensors, expected = encoders.gptq(W, bits=bits, group=group, sym=sym, version=version, order=order)
    form = "gptq" if version == 1 else "gptq_v2"
    config = dict(bits=bits, group_size=group, sym=sym, desc_act=order is not None, checkpoint_format=form)
    source = checkpoint(tensors, **config)
    assert set(source.headers) == {f"{X}.weight"}
    kind = "affine4.gptq" if bits == 4 and group != 16 else "affine8.gptq" if bits == 4 else "affine8.gptq8"
    group_name = "channel" if group == -1 else f"g{group}"
    assert source.headers[f"{X}.weight"].kind == f"{kind}-{group_name}{'' if order is None else '+order'}"
    assert torch.equal(meaning(source, f"{X}.weight"), expected)


def test_a_zero_of_nothing_does_not_change_its_neighbours():
    """Version 1 subtracts one from whole words: a stored zero of 0 has borrowed from the next row's."""
    w = W.clone()
    w[1::3] = w[1::3].abs()
    w[8:16] = w[8:16].abs()
    for bits in (4, 8):
        tensors, expected = encoders.gptq(w, bits=bits, sym=False)
        source = checkpoint(tensors, bits=bits, sym=False)
        assert torch.equal(meaning(source, f"{X}.weight"), expected)


def test_symmetric_zeros_are_not_read():
    tensors, expected = encoders.gptq(W)
    tensors["qzeros"][:] = 0x1234567
    assert torch.equal(meaning(checkpoint(tensors), f"{X}.weight"), expected)
    del tensors["qzeros"]
    assert torch.equal(meaning(checkpoint(tensors), f"{X}.weight"), expected)


def test_order_of_columns_is_stable_by_group():
    tensors, _ = encoders.gptq(W, order=ORDER)
    perm = read(checkpoint(tensors, desc_act=True), f"{X}.weight").perm
    groups = tensors["g_idx"].tolist()
    assert perm.tolist() == [column for g in range(3) for column in range(96) if groups[column] == g]


@pytest.mark.parametrize("desc_act", [True, False])
def test_columns_in_order_have_no_permutation(desc_act):
    """Whether `desc_act` is set or not; and `g_idx` may be absent."""
    tensors, expected = encoders.gptq(W)
    source = checkpoint(tensors, desc_act=desc_act)
    assert source.headers[f"{X}.weight"].kind == "affine4.gptq-g32" + ("+order" if desc_act else "")
    packed = source.read(f"{X}.weight").packed
    assert packed.perm is None
    del tensors["g_idx"]
    source = checkpoint(tensors, desc_act=desc_act)
    assert source.headers[f"{X}.weight"].kind == "affine4.gptq-g32"
    assert torch.equal(meaning(source, f"{X}.weight"), expected)


@pytest.mark.parametrize(("size", "name"), [(-1, "channel"), (96, "g96")])
def test_one_group_has_no_order(size, name):
    tensors, expected = encoders.gptq(W, group=-1)
    source = checkpoint(tensors, group_size=size, desc_act=True)
    assert source.headers[f"{X}.weight"].kind == f"affine4.gptq-{name}"
    assert torch.equal(meaning(source, f"{X}.weight"), expected)


def test_columns_out_of_order_need_desc_act():
    tensors, _ = encoders.gptq(W, order=ORDER)
    with pytest.raises(ModelError, match=f'{X}.g_idx; found: groups of columns.*set "desc_act": true'):
        checkpoint(tensors).read(f"{X}.weight")


@pytest.mark.parametrize("bad", [-1, 3, 0])
def test_groups_of_unequal_size(bad):
    tensors, _ = encoders.gptq(W, order=ORDER)
    tensors["g_idx"][int(ORDER[-1])] = bad
    with pytest.raises(ModelError, match=f"{X}.g_idx; found: groups {min(bad, 0)} to .* of unequal size"):
        checkpoint(tensors, desc_act=True).read(f"{X}.weight")


def test_overrides_by_module():
    """The first expression that matches from the start of the path; "-:" leaves the module as it is."""
    down, eight = encoders.gptq(W, bits=8, group=-1, sym=False)
    up, four = encoders.gptq(W)
    tensors = named(f"{X}.", down) | named("model.layers.10.mlp.up_proj.", up)
    dynamic = {
        r"+:mlp\.down_proj": {"bits": 2},
        r"model\.layers\.0\..*down": {"bits": 8, "group_size": -1, "sym": False},
        r"+:.*down_proj": {"bits": 4},
        r"-:.*gate_proj": {},
    }
    gate = {"model.layers.0.mlp.gate_proj.weight": W.bfloat16()}
    source = opened(tensors | gate, CONFIG | {"dynamic": dynamic})
    assert torch.equal(meaning(source, f"{X}.weight"), eight)
    assert torch.equal(meaning(source, "model.layers.10.mlp.up_proj.weight"), four)
    assert source.headers["model.layers.0.mlp.gate_proj.weight"].kind == "bf16"
    assert source.notes == ()


@pytest.mark.parametrize(
    ("module", "config", "noted"),
    [
        (X, {"dynamic": {r"-:.*\.down_proj": {}}}, True),
        (X, {"dynamic": {r"-:down_proj": {}}}, False),
        (X, {"modules_in_block_to_quantize": [["self_attn.q_proj"], ["mlp.up_proj"]]}, True),
        (X, {"modules_in_block_to_quantize": [["self_attn.q_proj"], ["mlp.down_proj"]]}, False),
        (X, {"modules_in_block_to_quantize": ["mlp.down_proj"]}, False),
        (X, {"modules_in_block_to_quantize": ["down"]}, True),
        ("lm_head", {}, True),
        ("lm_head", {"lm_head": True, "modules_in_block_to_quantize": ["mlp.down_proj"]}, False),
    ],
)
def test_the_file_decides_and_a_list_that_disagrees_is_noted(module, config, noted):
    tensors, expected = encoders.gptq(W)
    source = checkpoint(tensors, module, **config)
    assert torch.equal(meaning(source, f"{module}.weight"), expected)
    assert source.notes == (
        (f"{module} is listed as not quantised, and the file has it quantised: the file decides",) if noted else ()
    )


def test_a_bias_stays_a_tensor():
    tensors, _ = encoders.gptq(W)
    source = checkpoint(tensors | {"bias": torch.ones(64, dtype=torch.float16)})
    assert set(source.headers) == {f"{X}.weight", f"{X}.bias"}
    assert source.read(f"{X}.bias").packed is None


@pytest.mark.parametrize(
    ("change", "config", "message"),
    [
        ({}, {"bits": 3}, "bits .gptq, .*down_proj.; found: 3; accepted: 4, 8"),
        ({}, {"checkpoint_format": "marlin"}, "checkpoint_format .gptq.; found: marlin; accepted: gptq, gptq_v2"),
        ({}, {"dynamic": {"-:(": {}}}, "dynamic .gptq.; found: '-:.': .*accepted: regular expressions"),
        ({}, {"group_size": 64}, "group_size of .*down_proj; found: 64, for 96 columns.*divides 96; next: quantise"),
        ({}, {"group_size": 0}, "found: 0, for 96"),
        ({}, {"group_size": 48}, r"down_proj.scales; found: shape \[3, 64\]; accepted: shape \[2, 64\]"),
        ({"qweight": torch.zeros(6, 64, dtype=torch.int32)}, {}, r"group_size of .*found: 32, for 48 columns"),
        ({"qweight": torch.zeros(8, 64, dtype=torch.int32)}, {}, r"scales; found: shape \[3, 64\]; accepted.*\[2, 64"),
        ({"qweight": torch.zeros(12, 64, dtype=torch.int8)}, {}, "down_proj.qweight; found: stored as i8"),
        ({"qzeros": torch.zeros(3, 7, dtype=torch.int32)}, {"sym": False}, r"qzeros; found: shape \[3, 7\]"),
        ({"qzeros": None}, {"sym": False}, "down_proj.qzeros; found: absent"),
        ({"scales": None}, {}, "down_proj.scales; found: absent"),
        ({"g_idx": torch.zeros(95, dtype=torch.int32)}, {}, r"down_proj.g_idx; found: shape \[95\]"),
        ({"qweight": None}, {}, "down_proj.g_idx; found: no weight that it belongs to .3 of them"),
        ({"weight": W}, {}, "down_proj.weight; found: there, and made by .*down_proj.qweight"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(change, config, message):
    tensors = {name: t for name, t in (encoders.gptq(W)[0] | change).items() if t is not None}
    with pytest.raises(ModelError, match=message) as caught:
        checkpoint(tensors, **config)
    assert caught.value.next


def test_scales_that_are_not_finite():
    tensors, _ = encoders.gptq(W)
    tensors["scales"][1, 3] = float("inf")
    with pytest.raises(ModelError, match=f"{X}.scales; found: a scale that is not finite"):
        checkpoint(tensors).read(f"{X}.weight")
