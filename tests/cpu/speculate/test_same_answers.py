"""Drafts never change an answer: right ones, wrong ones and none, in batches, over prefix hits and preemptions."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
from tiny_models import HYBRIDS

from offroad import LLM, SamplingParams
from offroad.speculate import ngram

DRAFTS = '{"method": "ngram", "num_speculative_tokens": 3}'
GREEDY = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
SAMPLED = SamplingParams(
    temperature=0.8, seed=7, max_tokens=30, ignore_eos=True, presence_penalty=0.4, repetition_penalty=1.1
)
STOPPED = SamplingParams(temperature=0.0, max_tokens=30, stop_token_ids=list(range(3, 60)))


def prompts() -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(3, 290) for _ in range(n)] for n in (1, 14, 63, 64, 65, 100)]


def engine(folder, drafts: bool, **settings) -> LLM:
    values = dict(device="cpu", dtype="float32", max_num_seqs=4, max_num_batched_tokens=48) | settings
    return LLM(str(folder), speculative_config=DRAFTS if drafts else "", **values)


def answers(llm: LLM, params: SamplingParams) -> list[list[int]]:
    found = llm.generate([{"prompt_token_ids": ids} for ids in prompts()], params)
    llm.engine.check()
    return [result.outputs[0].token_ids for result in found]


def oracle(known_answers: list[list[int]], seed: int) -> Callable:
    """A drafter that knows the answers and tells a part of them, with a mistake at a random place in half the cases."""
    rng = random.Random(seed)
    listed = [ids + answer for ids, answer in zip(prompts(), known_answers, strict=True)]

    def propose(known: np.ndarray, count: int, shortest: int, longest: int) -> np.ndarray:
        whole = next((ids for ids in listed if ids[: len(known)] == known.tolist()), None)
        if whole is None:
            return known[:0]
        drafts = np.array(whole[len(known) : len(known) + rng.randrange(count + 1)], np.int64)
        if len(drafts) and rng.random() < 0.5:
            drafts[rng.randrange(len(drafts))] = rng.randrange(3, 290)
        return drafts

    return propose


@pytest.mark.parametrize("family", ["llama", "gemma3", *HYBRIDS])
def test_drafts_do_not_change_answers(family: str, tiny, monkeypatch):
    folder, _ = tiny(family)
    plain = engine(folder, drafts=False)
    for params in (GREEDY, SAMPLED, STOPPED):
        expected = answers(plain, params)
        monkeypatch.setattr(ngram, "propose", oracle(expected, seed=1))
        drafted = engine(folder, drafts=True)
        for _ in range(2):  # the second time after prefix hits
            assert answers(drafted, params) == expected
        stats = drafted.engine.stats()
        assert 0 < stats.accepted_draft_tokens < stats.draft_tokens
        if params is GREEDY:
            assert stats.steps < 1.6 * plain.engine.stats().steps  # for twice the work
    assert drafted.engine.stats().prefix_resumed_tokens > 0


@pytest.mark.parametrize("family", ["qwen3_5", "gemma4_e"])
def test_preempted_sequences_with_drafts_answer_alike(family: str, tiny, monkeypatch):
    folder, _ = tiny(family)
    expected = answers(engine(folder, drafts=False), GREEDY)
    monkeypatch.setattr(ngram, "propose", oracle(expected, seed=2))
    memory = engine(folder, drafts=True).engine.plan.memory
    few = 8 * memory.history_block_bytes + memory.window_block_bytes * memory.window_blocks
    few += memory.checkpoints * memory.checkpoint_bytes
    small = engine(folder, drafts=True, kv_cache_memory_bytes=few, max_model_len=256)
    assert answers(small, GREEDY) == expected
    assert small.engine.stats().accepted_draft_tokens > 0


def test_log_probabilities_are_of_plain_steps(tiny, monkeypatch):
    folder, _ = tiny("llama")
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=2)
    plain = engine(folder, drafts=False)
    [expected] = plain.generate({"prompt_token_ids": prompts()[1]}, params)
    monkeypatch.setattr(ngram, "propose", oracle([[0]] + [expected.outputs[0].token_ids] + [[0]] * 4, seed=3))
    [found] = engine(folder, drafts=True).generate({"prompt_token_ids": prompts()[1]}, params)
    assert found.outputs[0].token_ids == expected.outputs[0].token_ids
    assert [entry.logprob for entry in found.outputs[0].logprobs] == [e.logprob for e in expected.outputs[0].logprobs]


def test_the_longest_context_has_room_for_no_drafts(tiny, monkeypatch):
    folder, _ = tiny("llama")
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=None)
    ids = prompts()[2]
    plain = engine(folder, drafts=False, max_model_len=80).generate({"prompt_token_ids": ids}, params)
    expected = plain[0].outputs[0].token_ids
    monkeypatch.setattr(ngram, "propose", oracle([[0], [0], expected, [0], [0], [0]], seed=4))
    [found] = engine(folder, drafts=True, max_model_len=80).generate({"prompt_token_ids": ids}, params)
    assert found.outputs[0].token_ids == expected
    assert (len(expected), found.outputs[0].finish_reason) == (17, "length")
