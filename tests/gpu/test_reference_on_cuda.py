"""The reference path on a CUDA device: every family gives transformers' greedy tokens there too, in fp32."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "cpu"))
from tiny_models import FAMILIES, write_tiny  # noqa: E402

from offroad import LLM, SamplingParams  # noqa: E402
from offroad.quant.write import quantise  # noqa: E402
from offroad.sample.sampler import Sampler  # noqa: E402
from offroad.schedule.step import Start  # noqa: E402
from offroad.weights.locate import open_path  # noqa: E402

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@torch.inference_mode()
def greedy(reference, ids: list[int], count: int) -> list[int]:
    out = list(ids)
    for _ in range(count):
        out.append(int(reference(torch.tensor([out])).logits[0, -1].argmax()))
    return out[len(ids) :]


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str, tmp_path: Path):
    reference = write_tiny(family, tmp_path)
    llm = LLM(
        str(tmp_path), device="cuda", dtype="float32", allow_reference=True, max_num_seqs=4, max_num_batched_tokens=48
    )
    rng = random.Random(0)
    prompts = [[rng.randrange(3, 290) for _ in range(length)] for length in (1, 19, 65, 130, 200)]
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    for _ in range(2):  # the second time after prefix hits
        results = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params)
        for ids, result in zip(prompts, results, strict=True):
            assert result.outputs[0].token_ids == greedy(reference, ids, 16)
    assert llm.engine.stats().prefix_resumed_tokens > 0
    llm.engine.check()


@pytest.mark.parametrize("kind", ["fp8_e5m2", "fp8_e4m3"])
@pytest.mark.parametrize("family", ["llama", "gemma4_e"])
def test_an_8_bit_cache_gives_the_tokens_that_it_gives_on_the_cpu(family: str, kind: str, tmp_path: Path):
    if kind == "fp8_e4m3" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("GPUs convert e4m3 from compute capability 8.9 on")
    write_tiny(family, tmp_path)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    prompts = [{"prompt_token_ids": [3 + i * 7 % 280 for i in range(length)]} for length in (5, 70, 150)]
    answers = []
    for device in ("cpu", "cuda"):
        llm = LLM(str(tmp_path), device=device, dtype="float32", allow_reference=True, kv_cache_dtype=kind)
        answers.append([result.outputs[0].token_ids for result in llm.generate(prompts, params)])
    assert answers[0] == answers[1]


@pytest.mark.parametrize("family", ["llama", "qwen3_5", "gemma4"])
def test_quantised_weights_give_the_tokens_that_they_give_on_the_cpu(family: str, tmp_path: Path):
    write_tiny(family, tmp_path / "plain")
    quantise(open_path(tmp_path / "plain"), tmp_path / "fp8", "fp8-block", lambda fraction, note: None)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    answers, layouts = [], []
    for device in ("cpu", "cuda"):
        llm = LLM(str(tmp_path / "fp8"), device=device, dtype="float32", allow_reference=True)
        layouts.append(llm.engine.plan.layout(0, "linear:gate_up"))
        answers.append(llm.generate({"prompt_token_ids": list(range(3, 90))}, params)[0].outputs[0].token_ids)
    assert answers[0] == answers[1]
    assert layouts[1] == "triton.w8"  # stays packed on a GPU, in its kernels' order


def test_the_sampler_draws_the_same_tokens_as_on_the_cpu():
    torch.manual_seed(0)
    vocab, rows = 5000, 24
    logits = torch.randn(rows, vocab) * 3
    cases = [
        SamplingParams(temperature=0.8, top_p=0.9),
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.7, top_k=40, min_p=0.02, repetition_penalty=1.2, frequency_penalty=0.5),
        SamplingParams(temperature=0.0, presence_penalty=1.0),
    ]
    import numpy as np

    drawn = []
    for device in ("cpu", "cuda"):
        sampler = Sampler(rows, vocab, device)
        tokens = (torch.arange(rows * 64).reshape(rows, 64) * 7 % vocab).to(device)
        for slot in range(rows):
            known = np.arange(10, dtype=np.int64)
            sampler.start(Start(slot, known, 0, 5, cases[slot % len(cases)], seed=slot * 31 + 1))
        slots = np.arange(rows, dtype=np.int32)
        drawn.append(
            [
                sampler.draw(logits.to(device), slots, np.full(rows, position), tokens).cpu()
                for position in range(10, 30)
            ]
        )
    assert torch.equal(torch.stack(drawn[0]), torch.stack(drawn[1]))
