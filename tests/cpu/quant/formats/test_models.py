"""Whole models: quantised checkpoints give the logits of transformers' model with the weights that they mean."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import encoders
import numpy as np
import pytest
import torch
from checkpoints import Encode, meaning, write
from transformers import AutoModelForCausalLM

from offroad import LLM, SamplingParams
from offroad.errors import ModelError
from offroad.models.registry import resolve_source
from offroad.weights.safetensors_source import SafetensorsSource

FP8_BLOCKS = {"quant_method": "fp8", "weight_block_size": [40, 48], "activation_scheme": "dynamic"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": False}


@dataclass(frozen=True)
class Scheme:
    """How a checkpoint is quantised. `change` rearranges the tensors once they are; `kind`: of most weights."""

    config: dict[str, Any]
    encode: Encode
    kind: str
    change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]] | None = None


def whole(encode: Callable, n: int, k: int) -> Encode:
    """Weights that divide; the others stay as they are."""
    return lambda name, w: None if w.shape[0] % n or w.shape[1] % k else encode(w)


def mixture(name: str, w: torch.Tensor):
    return encoders.nvfp4(w) if "mlp" in name else encoders.fp8(w, 128, 128, shape=(-(-len(w) // 128), 1, 1, 1))


def ordered(name: str, w: torch.Tensor):
    """As GPTQ does it, what reads the same input has one order; v has another, which no fused weight can have."""
    if w.shape[0] % 8 or w.shape[1] % 32:
        return None
    order = np.random.default_rng(w.shape[1] + name.endswith("v_proj")).permutation(w.shape[1])
    return encoders.gptq(w, sym=False, order=order)


def partly(name: str, w: torch.Tensor):
    """Parts of a fused weight that are quantised in several ways, or not at all."""
    if name.endswith(("up_proj", "lm_head")):
        return None
    return encoders.gptq(w, bits=8) if name.endswith("v_proj") else encoders.gptq(w, sym=False)


def together(tensors: dict[str, torch.Tensor], ends: dict[str, str], in_turns: bool) -> dict[str, torch.Tensor]:
    """The experts of each layer in one tensor; `ends` are the new ends of names. Rows of gate and up stand in turns, as
    gpt-oss has them, or all of gate comes first."""
    out = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for at in sorted({name.partition(".experts.")[0] for name in tensors if ".experts." in name}):
        for end, to in ends.items():
            gate, up, down = (
                torch.stack([tensors[f"{at}.experts.{e}.{p}_proj.{end}"] for e in range(8)])
                for p in ("gate", "up", "down")
            )
            rows = torch.stack((gate, up), dim=2).flatten(1, 2) if in_turns else torch.cat((gate, up), dim=1)
            for name, tensor in (("gate_up_proj", rows), ("down_proj", down)):
                shape = (*tensor.shape[:2], -1, 16) if to == "_blocks" else tensor.shape
                out[f"{at}.experts.{name}{to}"] = tensor.reshape(shape)
    return out


SCHEMES = {
    "gptq": Scheme(GPTQ, whole(lambda w: encoders.gptq(w, sym=False), 8, 32), "affine4.gptq-g32"),
    "gptq-order": Scheme(GPTQ | {"desc_act": True}, ordered, "affine4.gptq-g32+order"),
    "gptq-partly": Scheme(
        GPTQ | {"dynamic": {"-:.*up_proj": {}, "+:.*v_proj": {"bits": 8, "sym": True}}}, partly, "affine4.gptq-g32"
    ),
    "gptq8": Scheme(
        GPTQ | {"bits": 8, "sym": True, "group_size": -1, "lm_head": True},
        whole(lambda w: encoders.gptq(w, bits=8, group=-1), 4, 4),
        "affine8.gptq8-channel",
    ),
    "gptq-g16": Scheme(
        GPTQ | {"group_size": 16}, whole(lambda w: encoders.gptq(w, sym=False, group=16), 8, 16), "affine8.gptq-g16"
    ),
    "awq": Scheme(
        {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
        whole(encoders.awq, 8, 32),
        "affine4.awq-g32",
    ),
    "fp8": Scheme(FP8_BLOCKS, lambda name, w: encoders.fp8(w, 40, 48, name="weight_scale_inv"), "fp8.block40x48"),
    "fp8-tensor": Scheme(
        {"quant_method": "fp8", "activation_scheme": "static"},
        lambda name, w: encoders.fp8(w, *w.shape, shape=(), dtype=torch.bfloat16),
        "fp8.tensor",
    ),
    "nvfp4": Scheme({"quant_method": "modelopt", "quant_algo": "NVFP4"}, whole(encoders.nvfp4, 1, 16), "fp4.nvfp4"),
    "mixed": Scheme(
        {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": {}},
        mixture,
        "fp8.modelopt-block128x128",
    ),
    "mxfp4": Scheme(
        {"quant_method": "mxfp4"},
        lambda name, w: encoders.mxfp4(w) if ".experts." in name else None,
        "fp4.mxfp4",
        lambda tensors: together(tensors, {"weight": "_blocks", "scale": "_scales"}, True),
    ),
    "fp8-together": Scheme(
        {"quant_method": "fp8"},
        lambda name, w: encoders.fp8(w, 1, w.shape[1], dtype=torch.bfloat16),
        "fp8.channel",
        lambda tensors: together(tensors, {"weight": "", "weight_scale": "_weight_scale"}, False),
    ),
}
CASES = [("llama", scheme) for scheme in SCHEMES if scheme not in ("mxfp4", "fp8-together")]
CASES += [(family, s) for family in ("qwen3_5", "qwen3_5_moe", "gemma4") for s in ("gptq", "fp8", "nvfp4")]
CASES += [(family, s) for family in ("qwen3_5", "gemma4") for s in ("awq", "gptq8", "fp8-tensor", "mixed")]
CASES += [("qwen3_5_moe", scheme) for scheme in ("mxfp4", "fp8-together", "gptq-order")]
CASES += [("gemma4_moe", scheme) for scheme in ("nvfp4", "fp8")]


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def checkpoint(request, tiny, tmp_path_factory) -> tuple[Scheme, Path, dict[str, torch.Tensor]]:
    family, name = request.param
    scheme, folder = SCHEMES[name], tmp_path_factory.mktemp(name)
    return scheme, folder, write(tiny(family)[0], folder, scheme.config, scheme.encode, scheme.change)


def test_weights_are_bit_for_bit_what_they_mean(checkpoint):
    scheme, folder, means = checkpoint
    _, source = resolve_source(SafetensorsSource(folder / "quantised"))
    names = {name for name, header in source.headers.items() if "." in header.kind}
    assert scheme.kind in {source.headers[name].kind for name in names}
    assert not [note for note in source.notes if "listed" in note]
    for name in names:
        if name in means:
            expected = means[name]
        else:  # of all experts
            at, _, proj = name.rpartition(".")
            parts = ("gate_proj", "up_proj") if proj == "gate_up_proj" else (proj,)
            expected = torch.stack([torch.cat([means[f"{at}.{e}.{p}.weight"] for p in parts]) for e in range(8)])
        assert torch.equal(meaning(source, name), expected), name


@pytest.mark.parametrize("kernel", [(), ("linear=torch.reference_linear",)], ids=["usual", "reference"])
@torch.inference_mode()
def test_logits_are_those_of_the_weights_that_are_meant(checkpoint, kernel):
    _, folder, _ = checkpoint
    reference = AutoModelForCausalLM.from_pretrained(folder / "meaning", attn_implementation="eager").float().eval()
    llm = LLM(str(folder / "quantised"), device="cpu", dtype="float32", kernel=kernel)
    seen: list[torch.Tensor] = []
    sampler = llm.engine.runner.sampler
    draw = sampler.draw
    sampler.draw = lambda logits, *rest: (seen.append(logits.clone()), draw(logits, *rest))[1]
    rng = random.Random(0)
    ids = [rng.randrange(3, 290) for _ in range(40)]
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    [result] = llm.generate([{"prompt_token_ids": ids}], params)
    llm.close()
    expected = reference(torch.tensor([ids + result.outputs[0].token_ids])).logits[0, len(ids) - 1 : -1]
    assert expected.abs().max() > 0.5
    assert (torch.cat(seen) - expected).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("scheme", "end"),
    [("gptq", "scales"), ("awq", "scales"), ("fp8", "weight_scale_inv"), ("nvfp4", "weight_scale")],
)
def test_a_scale_that_is_no_number_stops_the_load(scheme, end, tiny, tmp_path):
    scheme, name = SCHEMES[scheme], f"model.layers.2.mlp.down_proj.{end}"

    def spoil(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        tensors[name].view(-1)[0] = float("nan")
        return tensors

    write(tiny("llama")[0], tmp_path, scheme.config, scheme.encode, spoil)
    with pytest.raises(ModelError, match=f"tensor {name}; found: a scale that is not finite"):
        LLM(str(tmp_path / "quantised"), device="cpu", dtype="float32")


def test_an_fp8_weight_that_is_no_number_stops_the_load(tiny, tmp_path):
    scheme, name = SCHEMES["fp8"], "model.layers.2.mlp.down_proj.weight"

    def spoil(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        tensors[name].view(torch.uint8)[3, 5] = 0xFF
        return tensors

    write(tiny("llama")[0], tmp_path, scheme.config, scheme.encode, spoil)
    with pytest.raises(ModelError, match=f"tensor {name}; found: a non-finite weight"):
        LLM(str(tmp_path / "quantised"), device="cpu", dtype="float32")
