"""Every family against transformers on tiny random models: greedy tokens, logits, batches, windows and prefix hits."""

from __future__ import annotations

import random

import pytest
import torch
from tiny_models import FAMILIES

from offroad import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


def prompts(seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, 290) for _ in range(length)] for length in (1, 5, 19, 64, 65, 130, 200)]


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request, tiny):
    folder, reference = tiny(request.param)
    llm = LLM(
        str(folder),
        device="cpu",
        dtype="float32",
        max_num_seqs=4,
        max_num_batched_tokens=48,
        served_model_name=("tiny",),
    )
    yield llm, reference
    llm.close()


@torch.inference_mode()
def greedy(reference, ids: list[int], count: int) -> list[int]:
    out = list(ids)
    for _ in range(count):
        out.append(int(reference(torch.tensor([out])).logits[0, -1].argmax()))
    return out[len(ids) :]


def test_greedy_tokens_equal_transformers(pair):
    llm, reference = pair
    listed = prompts(0)
    results = llm.generate([{"prompt_token_ids": ids} for ids in listed], GREEDY)
    for ids, result in zip(listed, results, strict=True):
        assert result.outputs[0].token_ids == greedy(reference, ids, 24)
    llm.engine.check()


def test_logprobs_equal_transformers(pair):
    llm, reference = pair
    ids = prompts(1)[3]
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=5)
    [result] = llm.generate({"prompt_token_ids": ids}, params)
    out = result.outputs[0]
    with torch.inference_mode():
        expected = reference(torch.tensor([ids + out.token_ids])).logits[0, len(ids) - 1 : -1].log_softmax(-1)
    for i, entry in enumerate(out.logprobs):
        best = expected[i].topk(5)
        assert [token for token, _ in entry.top[:5]] == best.indices.tolist()
        torch.testing.assert_close(torch.tensor([lp for _, lp in entry.top[:5]]), best.values, atol=1e-4, rtol=0)
        assert entry.logprob == pytest.approx(expected[i, out.token_ids[i]].item(), abs=1e-4)


def test_second_turn_resumes_and_gives_the_same_tokens(pair):
    llm, reference = pair
    first = prompts(2)[5]
    [turn] = llm.generate({"prompt_token_ids": first}, GREEDY)
    second = first + turn.outputs[0].token_ids + prompts(3)[1]
    [result] = llm.generate({"prompt_token_ids": second}, GREEDY)
    assert result.usage.cached_tokens >= 64
    assert result.outputs[0].token_ids == greedy(reference, second, 24)
