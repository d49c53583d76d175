"""AWQ, GEMM version: what its words mean, by an encoder that shares no code with the reader."""

from __future__ import annotations

import encoders
import pytest
import torch
from checkpoints import meaning, named, opened, random_weight

from offroad.errors import ModelError

W = random_weight(64, 96)
CONFIG = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
X = "model.layers.0.mlp.gate_proj"


def checkpoint(tensors: dict, module: str = X, **config):
    return opened(named(f"{module}.", tensors), CONFIG | config)


@pytest.mark.parametrize(
    ("group", "kind"), [(32, "affine4.awq-g32"), (-1, "affine4.awq-channel"), (24, "affine8.awq-g24")]
)
def test_weights_are_what_the_format_says(group, kind):
    tensors, expected = encoders.awq(W, group=group)
    source = checkpoint(tensors, group_size=group)
    assert {name: header.kind for name, header in source.headers.items()} == {f"{X}.weight": kind}
    assert torch.equal(meaning(source, f"{X}.weight"), expected)


def test_the_other_names_of_settings_are_read():
    tensors, expected = encoders.awq(W, group=48)
    source = opened(
        named(f"{X}.", tensors),
        {"quant_method": "awq", "w_bit": 4, "q_group_size": 48, "zero_point": True, "version": "GEMM"},
    )
    assert torch.equal(meaning(source, f"{X}.weight"), expected)


@pytest.mark.parametrize(
    ("listed", "noted"),
    [(["mlp.gate"], True), (["visual", "lm_head"], False), ([X], True), (["mlp*"], False), (None, False)],
)
def test_lists_name_parts_of_paths_and_the_file_decides(listed, noted):
    tensors, expected = encoders.awq(W)
    source = checkpoint(tensors, modules_to_not_convert=listed)
    assert torch.equal(meaning(source, f"{X}.weight"), expected)
    assert len(source.notes) == noted
    assert not noted or source.notes[0].startswith(f"{X} is listed as not quantised")


@pytest.mark.parametrize(
    ("change", "config", "message"),
    [
        ({}, {"version": "gemv"}, "version .awq.; found: gemv; accepted: gemm; next: convert"),
        ({}, {"version": "GEMV_FAST"}, "version .awq.; found: gemv_fast"),
        ({}, {"bits": 8}, "bits .awq.; found: 8; accepted: 4"),
        ({"qweight": torch.zeros(96, 8, 1, dtype=torch.int32)}, {}, r"gate_proj.qweight; found: shape \[96, 8, 1\]"),
        ({}, {"group_size": 64}, "group_size of .*gate_proj; found: 64, for 96 columns.*divides 96; next: quantise"),
        ({"scales": torch.ones(3, 32)}, {}, r"gate_proj.scales; found: shape \[3, 32\]; accepted: shape \[3, 64\]"),
        ({"qzeros": torch.ones(2, 8, dtype=torch.int32)}, {}, r"gate_proj.qzeros; found: shape \[2, 8\]"),
        ({"qweight": torch.zeros(96, 8)}, {}, "gate_proj.qweight; found: stored as f32"),
        (
            {"qweight": torch.zeros(64, 12, dtype=torch.int32)},
            {},
            r"gate_proj.scales; found: shape \[3, 64\]; accepted",
        ),
        ({"qzeros": None}, {}, "gate_proj.qzeros; found: absent"),
        ({"scales": None}, {}, "gate_proj.scales; found: absent"),
        ({"qweight": None}, {}, "gate_proj.qzeros; found: no weight that it belongs to"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(change, config, message):
    tensors = {name: t for name, t in (encoders.awq(W)[0] | change).items() if t is not None}
    with pytest.raises(ModelError, match=message) as caught:
        checkpoint(tensors, **config)
    assert caught.value.next


def test_scales_that_are_not_finite():
    tensors, _ = encoders.awq(W)
    tensors["scales"][0, 0] = float("nan")
    with pytest.raises(ModelError, match=f"{X}.scales; found: a scale that is not finite"):
        checkpoint(tensors).read(f"{X}.weight")
