"""Scales of an 8-bit KV cache: every spelling reaches its layer, and what is stored is divided by them."""

from __future__ import annotations

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from offroad import LLM, SamplingParams
from offroad.errors import ModelError
from offroad.quant.write import quantise
from offroad.weights.locate import open_path

SPELLINGS = [
    ("k_scale", "v_scale"),
    ("k_proj.k_scale", "v_proj.v_scale"),
    ("k_proj.output_scale", "v_proj.output_scale"),
    ("kv_scale", "kv_scale"),
]
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


def checkpoint(folder, to, scales: dict[str, torch.Tensor]):
    quantise(open_path(folder), to, "fp8-block", lambda fraction, note: None)
    tensors = load_file(to / "model.safetensors")
    save_file(tensors | scales, to / "model.safetensors", metadata={"format": "pt"})
    return to


def load(folder, kind: str = "fp8_e4m3") -> LLM:
    return LLM(str(folder), device="cpu", dtype="float32", kv_cache_dtype=kind)


@pytest.mark.parametrize(("k", "v"), SPELLINGS)
def test_each_layer_stores_x_over_its_scale(k: str, v: str, tiny, tmp_path):
    scales = {}
    for i in range(3):
        at = f"model.layers.{i}.self_attn"
        scales |= {f"{at}.{v}": torch.tensor(0.5 * (i + 1)), f"{at}.{k}": torch.tensor(2.0 * (i + 1))}
    llm = load(checkpoint(tiny("llama")[0], tmp_path / "m", scales))
    plain = load(checkpoint(tiny("llama")[0], tmp_path / "n", {}))
    views = [layer["kv"] for layer in llm.engine.runner.arrays.views]
    assert [view.k_scale.tolist() for view in views] == [[2.0 * (i + 1)] * 2 for i in range(3)]
    wanted = [[(2.0 if v == "kv_scale" else 0.5) * (i + 1)] * 2 for i in range(3)]
    assert [view.v_scale.tolist() for view in views] == wanted
    ids = {"prompt_token_ids": list(range(3, 40))}
    for each in (llm, plain):
        each.generate(ids, GREEDY)
    # Layer 0 sees the same inputs in both: its stored keys differ by the scale of 2, up to rounding to 8 bits.
    slot_rows = [e.engine.runner.arrays.views[0]["kv"] for e in (llm, plain)]
    block = next(b for b in range(1, 5) if slot_rows[1].k[b, :37].float().abs().sum() > 0)
    stored, unscaled = (view.k[block, :37].float() for view in slot_rows)
    torch.testing.assert_close(stored * 2.0, unscaled, rtol=0.13, atol=0.05)
    assert any("of 3 layers" in note for note in llm.engine.plan.notes)
    assert any("none there, 1 is taken" in note for note in plain.engine.plan.notes)


def test_scales_a_head_and_shared_layers(tiny, tmp_path):
    scales = {f"model.layers.{i}.self_attn.k_scale": torch.tensor([1.5 + i]) for i in (3, 4)}
    llm = load(checkpoint(tiny("gemma4_e")[0], tmp_path / "m", scales))
    views = [layer["kv"] for layer in llm.engine.runner.arrays.views]
    assert [None if view.k_scale is None else view.k_scale.tolist() for view in views[3:]] == [
        [4.5],
        [5.5],
        *[[4.5]] * 4,  # readers take their producer's
        [5.5],
    ]
    assert views[3].v_scale.tolist() == [1.0]
    by_head = {"model.layers.0.self_attn.v_scale": torch.tensor([0.25, 4.0])}
    llm = load(checkpoint(tiny("llama")[0], tmp_path / "n", by_head))
    assert llm.engine.runner.arrays.views[0]["kv"].v_scale.tolist() == [0.25, 4.0]


def test_e5m2_needs_no_scales_and_says_so(tiny, tmp_path):
    folder = checkpoint(tiny("llama")[0], tmp_path / "m", {"model.layers.0.self_attn.k_scale": torch.tensor(3.0)})
    llm = load(folder, "fp8_e5m2")
    assert llm.engine.runner.arrays.views[0]["kv"].k_scale is None
    assert any("for e4m3, not used" in note for note in llm.engine.plan.notes)


@pytest.mark.parametrize(
    ("scale", "message"),
    [(torch.tensor(float("nan")), "finite"), (torch.tensor(0.0), "above 0"), (torch.ones(3), "3 scales")],
)
def test_bad_scales_are_named(scale: torch.Tensor, message: str, tiny, tmp_path):
    folder = checkpoint(tiny("llama")[0], tmp_path / "m", {"model.layers.1.self_attn.k_scale": scale})
    with pytest.raises(ModelError, match=rf"layers\.1\.self_attn\.k_scale.*{message}"):
        load(folder)


def test_names_of_multimodal_checkpoints(tiny, tmp_path):
    folder = checkpoint(tiny("gemma4")[0], tmp_path / "m", {"model.layers.0.self_attn.k_scale": torch.tensor(3.0)})
    tensors = load_file(folder / "model.safetensors")
    renamed = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    shutil.copytree(folder, tmp_path / "n")
    save_file(renamed, tmp_path / "n" / "model.safetensors", metadata={"format": "pt"})
    assert load(tmp_path / "n").engine.runner.arrays.views[0]["kv"].k_scale.tolist() == [3.0, 3.0]
