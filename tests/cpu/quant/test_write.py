"""`offroad quantize`: what is written is read back, and what cannot be done leaves nothing behind."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from offroad import LLM, SamplingParams
from offroad.errors import ModelError, SettingsError
from offroad.models.registry import resolve_source
from offroad.quant import write
from offroad.quant.packed import dequantise
from offroad.quant.write import quantise
from offroad.weights.load import verify_headers
from offroad.weights.locate import open_path


def silent(fraction: float, note: str) -> None:
    """Nobody watches."""


def stacked(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The experts of each layer in the tensors that transformers' models have."""
    out = {name: tensor for name, tensor in state.items() if ".experts." not in name}
    for at in {name.partition(".experts.")[0] for name in state if ".experts." in name}:
        gate, up, down = (
            torch.stack([state[f"{at}.experts.{e}.{part}_proj.weight"] for e in range(8)])
            for part in ("gate", "up", "down")
        )
        out |= {f"{at}.experts.gate_up_proj": torch.cat((gate, up), dim=1), f"{at}.experts.down_proj": down}
    return out


@pytest.mark.parametrize("family", ["llama", "qwen3_5", "gemma4_e", "qwen3_5_moe", "gemma4_moe"])
def test_a_folder_in_fp8_answers_like_its_dequantised_weights(family: str, tiny, tmp_path):
    folder, reference = tiny(family)
    counts = quantise(open_path(folder), tmp_path / "q", "fp8-block", silent)
    written, state = load_file(tmp_path / "q" / "model.safetensors"), {}
    for name, tensor in written.items():
        scale = written.get(f"{name}_scale_inv")
        if scale is not None:
            n, k = tensor.shape
            tensor = tensor.float() * scale.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
        if not name.endswith("_scale_inv"):
            state[name] = tensor.float()
    assert counts == {"1": sum(name.endswith("_scale_inv") for name in written)}
    before = {name: tensor.clone() for name, tensor in reference.state_dict().items()}
    state = stacked(state)
    assert state.keys() <= before.keys()
    reference.load_state_dict(state, strict=False)
    try:
        llm = LLM(str(tmp_path / "q"), device="cpu", dtype="float32")
        ids = [3 + i * 7 % 280 for i in range(40)]
        params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
        answer = llm.generate({"prompt_token_ids": ids}, params)[0].outputs[0].token_ids
        with torch.inference_mode():
            logits = reference(torch.tensor([ids + answer])).logits[0, len(ids) - 1 : -1]
        assert logits.argmax(-1).tolist() == answer
    finally:
        reference.load_state_dict(before)


@pytest.mark.parametrize("scheme", ["nvfp4", "fp8-block"])
def test_experts_are_read_back_by_the_names_of_each(scheme: str, tiny, tmp_path):
    folder, reference = tiny("qwen3_5_moe")
    counts = quantise(open_path(folder), tmp_path / "q", scheme, silent)
    resolved, source = resolve_source(open_path(tmp_path / "q"))
    verify_headers(resolved.spec, source)
    state = reference.state_dict()
    modules = {li.name: li.parts for li in resolved.spec.layers[0].linears}
    assert len(modules["experts_gate_up"]) == 16
    assert sum(counts.values()) > 4 * 3 * 8
    for e in range(8):
        at = f"model.layers.0.mlp.experts.{e}"
        gate, up = state["model.layers.0.mlp.experts.gate_up_proj"][e].chunk(2)
        for part, expected in (("gate", gate), ("up", up), ("down", state["model.layers.0.mlp.experts.down_proj"][e])):
            read = dequantise(source.read(f"{at}.{part}_proj.weight").packed)
            # The nearest E2M1 number is within a sixth of the largest of its group, e4m3 within a sixteenth of a value.
            assert (read - expected).abs().max() < expected.abs().max() / 5


def test_shards_are_listed_in_an_index(tiny, tmp_path, monkeypatch):
    folder, _ = tiny("llama")
    monkeypatch.setattr(write, "SHARD_BYTES", 20_000)
    quantise(open_path(folder), tmp_path / "many", "fp8-block", silent)
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    assert open_path(tmp_path / "many").headers.keys() == index["weight_map"].keys()


@pytest.mark.parametrize(
    ("family", "scheme", "error", "message"),
    [
        ("llama", "int3", SettingsError, "w4a16-g128"),
        ("qwen3_5_moe", "w4a16-g128", ModelError, "48 columns; accepted: a multiple of 32"),
    ],
)
def test_what_cannot_be_done_leaves_nothing_behind(family: str, scheme: str, error, message: str, tiny, tmp_path):
    with pytest.raises(error, match=message):
        quantise(open_path(tiny(family)[0]), tmp_path / "q", scheme, silent)
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_run_leaves_nothing_behind(tiny, tmp_path):
    def stop(fraction: float, note: str) -> None:
        if fraction > 0.5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantise(open_path(tiny("llama")[0]), tmp_path / "q", "fp8-block", stop)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_holds_something_is_not_touched(tiny, tmp_path):
    (tmp_path / "mine").write_text("keep")
    with pytest.raises(SettingsError, match="not empty"):
        quantise(open_path(tiny("llama")[0]), tmp_path, "fp8-block", silent)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
