"""Perplexity and divergence are those that transformers' logits give."""

from __future__ import annotations

import pytest
import torch

from offroad import LLM, SamplingParams
from offroad.evidence.quality import log_probabilities, quality

IDS = [3 + i * 31 % 280 for i in range(100)]


@pytest.mark.parametrize("family", ["llama", "gemma4_e", "qwen3_5"])
def test_perplexity_equals_transformers(family: str, tiny):
    folder, reference = tiny(family)
    llm = LLM(str(folder), device="cpu", dtype="float32")
    with torch.inference_mode():
        parts = [IDS[at : at + 33] for at in range(0, 99, 32)]
        losses = [
            torch.nn.functional.cross_entropy(
                reference(torch.tensor([p[:-1]])).logits[0], torch.tensor(p[1:]), reduction="sum"
            )
            for p in parts
        ]
    found = quality(llm.engine, IDS, segment=32)
    assert found.tokens == 99
    assert found.perplexity == pytest.approx(float(torch.exp(sum(losses) / 99)), rel=1e-4)
    assert found.divergence is None


def test_divergence_is_zero_only_for_the_same_model(tiny):
    llama, other = (LLM(str(tiny(family)[0]), device="cpu") for family in ("llama", "qwen3"))
    assert quality(llama.engine, IDS, 32, llama.engine).divergence == pytest.approx(0.0, abs=1e-6)
    assert quality(llama.engine, IDS, 32, other.engine).divergence > 0.01


def test_the_engine_serves_as_before(tiny):
    llm = LLM(str(tiny("qwen3_5")[0]), device="cpu")
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    [before] = llm.generate({"prompt_token_ids": IDS}, params)
    log_probabilities(llm.engine, IDS[:50])
    [after] = llm.generate({"prompt_token_ids": IDS}, params)
    assert after.outputs[0].token_ids == before.outputs[0].token_ids
    llm.engine.check()
