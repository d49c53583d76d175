"""The same request gives the same tokens alone, in a batch, in chunks of any size, after a hit and after preemption."""

from __future__ import annotations

import pytest

from offroad import LLM, SamplingParams

PARAMS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True),
    "sampled": SamplingParams(temperature=0.8, top_p=0.95, seed=1234, max_tokens=24, ignore_eos=True),
}


def tokens(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> list[list[int]]:
    results = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params)
    return [result.outputs[0].token_ids for result in results]


@pytest.fixture(scope="module")
def mixed(prompts) -> list[list[int]]:
    """12 prompts of 1 to 700 tokens, so that a batch of 8 sees requests come and go."""
    return [*prompts[:8], prompts[-1][:700], prompts[-1][100:333], prompts[-2][50:115], prompts[-2][5:69]]


@pytest.fixture(scope="module", params=sorted(PARAMS))
def params(request) -> SamplingParams:
    return PARAMS[request.param]


@pytest.fixture(scope="module")
def alone(llm: LLM, mixed, params) -> list[list[int]]:
    """What each prompt gives by itself, from cold caches."""
    out = []
    for ids in mixed:
        llm.engine.reset_prefix_cache()
        out += tokens(llm, [ids], params)
    return out


def test_in_a_batch(llm: LLM, mixed, params, alone):
    llm.engine.reset_prefix_cache()
    assert tokens(llm, mixed, params) == alone


def test_after_a_prefix_hit(llm: LLM, mixed, params, alone):
    llm.engine.reset_prefix_cache()
    for ids in mixed[8:]:
        tokens(llm, [ids], params)
    before = llm.engine.stats().prefix_resumed_tokens
    assert tokens(llm, mixed, params) == alone
    assert llm.engine.stats().prefix_resumed_tokens - before >= 640


@pytest.mark.parametrize("chunk", [7, 64, 512])
def test_with_chunks(llm: LLM, mixed, params, alone, chunk, monkeypatch):
    llm.engine.reset_prefix_cache()
    monkeypatch.setattr(llm.engine.scheduler, "max_chunk", chunk)
    assert tokens(llm, mixed, params) == alone


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_after_preemption(model_name, llm, prompts, temperature):
    """A history of few blocks, so that the youngest rows lose theirs and start again."""
    long = SamplingParams(temperature=temperature, top_k=50, seed=1234, max_tokens=100, ignore_eos=True)
    llm.engine.reset_prefix_cache()
    expected = [tokens(llm, [ids], long)[0] for ids in prompts[:6]]
    memory = llm.engine.plan.memory
    few = memory.history_block_bytes * 10 + memory.window_block_bytes * memory.window_blocks
    small = LLM(
        model_name,
        device="cpu",
        dtype="float32",
        max_model_len=512,
        max_num_seqs=8,
        max_num_batched_tokens=256,
        kv_cache_memory_bytes=few,
    )
    assert tokens(small, prompts[:6], long) == expected
    assert small.engine.stats().preemptions > 0
    small.engine.check()
    small.close()
