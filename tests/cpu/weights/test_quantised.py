"""A quantised checkpoint seen as a plain one: where its settings stand, and what must not pass in silence."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from offroad.errors import ModelError
from offroad.models.registry import resolve_source
from offroad.weights.load import verify_headers
from offroad.weights.quantised import FORMATS, quantisation, quantised
from offroad.weights.safetensors_source import SafetensorsSource

GPTQ = {"bits": 4, "group_size": 128, "desc_act": False, "sym": True}
AWQ = {"zero_point": True, "q_group_size": 128, "w_bit": 4, "version": "GEMM"}
MODELOPT = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}}


@pytest.fixture
def folder(tiny, tmp_path) -> Path:
    return Path(shutil.copytree(tiny("llama")[0], tmp_path / "model"))


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        ("quantize_config.json", GPTQ, {"quant_method": "gptq"} | GPTQ),
        ("quantize_config.json", GPTQ | {"quant_method": "awq"}, GPTQ | {"quant_method": "awq"}),
        ("quant_config.json", AWQ, {"quant_method": "awq"} | AWQ),
        ("quantize_config.json", AWQ, {"quant_method": "awq"} | AWQ),
        (
            "hf_quant_config.json",
            MODELOPT,
            {"quant_method": "modelopt", "quant_algo": "NVFP4", "exclude_modules": ["lm_head"]},
        ),
    ],
)
def test_settings_in_a_file_of_their_own(name, values, expected, folder):
    (folder / name).write_text(json.dumps(values))
    source = SafetensorsSource(folder)
    assert source.config["quantization_config"] == expected
    assert "none that are" in quantised(source).notes[0]  # the file is that of a plain model


@pytest.mark.parametrize("inner", [False, True])
def test_the_config_s_own_settings_come_first(inner, folder):
    own = {"quantization_config": {"quant_method": "fp8"}}
    config = json.loads((folder / "config.json").read_text()) | ({"text_config": own} if inner else own)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "hf_quant_config.json").write_text(json.dumps(MODELOPT))
    assert quantisation(SafetensorsSource(folder).config) == {"quant_method": "fp8"}


def test_without_settings_nothing_is_looked_for(folder):
    source = SafetensorsSource(folder)
    assert quantisation(source.config) is None
    assert quantised(source) is source


def changed(folder: Path, change: dict[str, torch.Tensor], method: str | None = None) -> SafetensorsSource:
    save_file(load_file(folder / "model.safetensors") | change, folder / "model.safetensors")
    if method:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": method}}))
    return SafetensorsSource(folder)


def test_an_unknown_method_names_the_known_ones(folder):
    with pytest.raises(ModelError, match=f"quant_method; found: bitsandbytes; accepted: {', '.join(FORMATS)}"):
        quantised(changed(folder, {}, "bitsandbytes"))


@pytest.mark.parametrize("method", ["gptq", "awq", "fp8", "modelopt", "mxfp4"])
def test_a_scale_for_a_tensor_that_is_not_there(method, folder):
    end = {"gptq": ".scales", "awq": ".qzeros", "mxfp4": "_scales"}.get(method, ".weight_scale")
    name = f"model.layers.7.mlp.up_proj{end}"
    with pytest.raises(ModelError, match=f"tensor {name}; found: no weight that it belongs to .1 of them.*{method}"):
        quantised(changed(folder, {name: torch.ones(4)}, method))


def test_a_bias_of_zeros_that_the_model_has_not(folder):
    """AutoGPTQ writes one for every linear; any other value would change what the model computes."""
    name = "model.layers.0.self_attn.q_proj.bias"
    resolved, source = resolve_source(changed(folder, {name: torch.zeros(64)}))
    verify_headers(resolved.spec, source)
    bias = torch.zeros(64)
    bias[63] = -1e-4
    with pytest.raises(ModelError, match=f"does not use; found: {name}"):
        verify_headers(resolved.spec, changed(folder, {name: bias}))
    with pytest.raises(ModelError, match="does not use; found: other.bias"):
        verify_headers(resolved.spec, changed(folder, {name: torch.zeros(64), "other.bias": torch.zeros(64)}))
