"""Two steps in flight, as on GPUs: the next one is launched before the host knows what the last one drew."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from offroad import LLM, SamplingParams, engine

PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=4, max_tokens=20, ignore_eos=True, repetition_penalty=1.2),
    SamplingParams(temperature=0.0, max_tokens=20, stop_token_ids=list(range(3, 50))),
    SamplingParams(temperature=0.8, seed=2, max_tokens=9, ignore_eos=True, logprobs=2),
]


def load(folder, **settings) -> LLM:
    values = dict(device="cpu", dtype="float32", max_num_seqs=3, max_num_batched_tokens=48, max_model_len=256)
    return LLM(str(folder), **(values | settings))


def answers(llm: LLM) -> list:
    rng = random.Random(1)
    prompts = [{"prompt_token_ids": [rng.randrange(3, 290) for _ in range(n)]} for n in (1, 30, 64, 70, 100, 130)]
    params = [PARAMS[i % len(PARAMS)] for i in range(len(prompts))]
    found = llm.generate(prompts, params)
    llm.engine.check()
    return [(r.outputs[0].token_ids, r.outputs[0].finish_reason) for r in found]


@pytest.mark.parametrize("family", ["llama", "gemma4_e", "qwen3_5"])
def test_answers_do_not_depend_on_steps_in_flight(family: str, tiny, monkeypatch):
    folder, _ = tiny(family)
    expected = answers(load(folder))
    planned = engine._plan
    monkeypatch.setattr(engine, "_plan", lambda *given: replace(planned(*given), depth=2))
    ahead = load(folder)
    assert ahead.engine.scheduler.depth == 2
    for _ in range(2):  # the second time after prefix hits
        assert answers(ahead) == expected
    assert ahead.engine.stats().prefix_resumed_tokens > 0
    memory = ahead.engine.plan.memory
    kept = 2 * memory.checkpoint_bytes
    few = 7 * memory.history_block_bytes + memory.window_block_bytes * memory.window_blocks + kept
    small = load(folder, kv_cache_memory_bytes=few, checkpoint_memory_bytes=kept)
    assert answers(small) == expected
