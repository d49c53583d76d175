"""Two checkpoints as one: each keeps its formats, its KV scales and its notes."""

from __future__ import annotations

import json

import torch
from safetensors.torch import load_file, save_file

from offroad import LLM, SamplingParams
from offroad.quant.write import quantise
from offroad.weights.joined import Joined
from offroad.weights.locate import open_path
from offroad.weights.quantised import quantised

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
IDS = {"prompt_token_ids": list(range(3, 40))}


def scaled(folder, to, scales: dict[str, float]):
    """The checkpoint in 8 bits, with scales of its KV cache."""
    quantise(open_path(folder), to, "fp8-block", lambda fraction, note: None)
    found = load_file(to / "model.safetensors") | {name: torch.tensor(value) for name, value in scales.items()}
    save_file(found, to / "model.safetensors", metadata={"format": "pt"})
    return to


def test_a_quantised_drafter_with_scales_of_its_own(tiny, tmp_path):
    scales = {f"model.layers.{i}.self_attn.{plane}_scale": 2.0 + i for i in range(3) for plane in "kv"}
    drafter = scaled(tiny("llama")[0], tmp_path / "drafter", scales)
    chosen = json.dumps({"method": "draft_model", "model": str(drafter), "num_speculative_tokens": 2})
    settings = dict(device="cpu", dtype="float32", threads=1, kv_cache_dtype="fp8_e4m3", max_model_len=128)
    plain = LLM(str(tiny("llama")[0]), **settings)
    llm = LLM(str(tiny("llama")[0]), speculative_config=chosen, **settings)
    scales_of = [layer["kv"].k_scale for layer in llm.engine.runner.arrays.views]
    assert scales_of[:3] == [None] * 3
    assert [scale.tolist() for scale in scales_of[3:]] == [[2.0 + i] * 2 for i in range(3)]
    [expected], [found] = plain.generate(IDS, GREEDY), llm.generate(IDS, GREEDY)
    assert found.outputs[0].token_ids == expected.outputs[0].token_ids
    assert llm.engine.stats().accepted_draft_tokens > 0


def test_what_the_other_says_is_told_as_the_drafters(tiny, tmp_path):
    folder = tiny("llama")[0]
    base, other = open_path(folder), quantised(open_path(scaled(folder, tmp_path / "other", {})))
    joined = Joined(base, other, "draft.")
    assert joined.config == base.config
    assert joined.notes == (*base.notes, *(f"drafter: {note}" for note in other.notes))
    assert joined.headers.keys() == base.headers.keys() | {f"draft.{name}" for name in other.headers}
    for name in ("model.norm.weight", "draft.model.norm.weight"):
        stored = joined.read(name)
        assert stored.header.name == name
        assert torch.equal(stored.data.float(), base.read("model.norm.weight").data.float())
