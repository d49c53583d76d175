"""The runner: rows of a step as tensors, and a value that is not finite ends its row with the layer's number."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import write_tiny

from offroad import LLM, SamplingParams
from offroad.schedule.step import Kind, Step, Want

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


@pytest.mark.parametrize(("layer", "number"), [(1, "layer 1"), (2, "layer 2")])
@pytest.mark.parametrize("kernel", [[], ["attention=torch.sdpa", "linear=torch.linear", "embed=torch.embed"]])
def test_an_overflow_names_the_layer(tmp_path, layer: int, number: str, kernel: list[str]):
    write_tiny("llama", tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors[f"model.layers.{layer}.mlp.down_proj.weight"].fill_(3e38)
    save_file(tensors, path, metadata={"format": "pt"})
    llm = LLM(str(tmp_path), device="cpu", kernel=kernel)
    for result in llm.generate([{"prompt_token_ids": [5, 6, 7]}, {"prompt_token_ids": [9] * 70}], GREEDY):
        out = result.outputs[0]
        assert (out.finish_reason, out.token_ids) == ("error", [])
        assert number in out.error
    llm.engine.check()


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_torch_and_c_kernels_give_the_same_tokens(tiny, family: str):
    folder, _ = tiny(family)
    prompts = [{"prompt_token_ids": list(range(3, 3 + n))} for n in (1, 30, 140)]
    norm = "sandwich_norm" if family == "gemma3" else "add_norm"
    ops = ["linear", "embed", "norm", norm, "qkv_rope", "attention", "gated_activation"]
    answers = []
    for kernel in ([], [f"{op}=torch.reference_{op}" for op in ops]):
        llm = LLM(str(folder), device="cpu", kernel=kernel, max_num_batched_tokens=48)
        used = {choice.kernel.split(".")[0] for choice in llm.engine.plan.cells.values()}
        assert used == ({"torch", "parts"} if kernel else {"cpu"})
        answers.append([result.outputs[0].token_ids for result in llm.generate(prompts, GREEDY)])
    assert answers[0] == answers[1]


def test_rows_lie_where_the_step_says(tiny):
    folder, _ = tiny("llama")
    arrays = LLM(str(folder), device="cpu", max_num_seqs=4).engine.runner.arrays
    arrays.tokens[2, :6] = torch.arange(10, 16)
    arrays.tokens[3, :9] = torch.arange(20, 29)
    arrays.length[2], arrays.length[3] = 5, 2
    step = Step(
        number=1,
        slot=np.array([2, 3], np.int32),
        kind=np.array([Kind.VERIFY, Kind.CHUNK], np.uint8),
        width=np.array([1, 4], np.int32),
        wants=np.array([Want.SAMPLE, Want.NOTHING], np.uint8),
    )
    rows = arrays.rows(step)
    assert rows.ids.tolist() == [15, 22, 23, 24, 25]
    assert rows.positions.tolist() == [5, 2, 3, 4, 5]
    assert (rows.verify, rows.wanted.tolist()) == (1, [0])
    first, second, cut = rows.parts()
    assert cut == 1
    assert (first.ids.tolist(), second.ids.tolist()) == ([15], [22, 23, 24, 25])
    assert second.offset.tolist() == [0]
