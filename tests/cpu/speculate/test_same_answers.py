"""Drafts never change an answer: right ones, wrong ones and none, in batches, over prefix hits and preemptions."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
from msgspec.structs import replace
from tiny_models import HYBRIDS

from offroad import LLM, SamplingParams
from offroad.ops import states
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


@pytest.mark.parametrize("family", ["llama", "gemma3", *HYBRIDS, "qwen3_5, replayed"])
def test_drafts_do_not_change_answers(family: str, tiny, monkeypatch):
    family, _, replayed = family.partition(", ")
    monkeypatch.setattr(states, "ROWS_SHARE", 0 if replayed else 1)
    folder, _ = tiny(family)
    plain = engine(folder, drafts=False)
    for params in (GREEDY, SAMPLED, STOPPED):
        expected = answers(plain, params)
        monkeypatch.setattr(ngram, "propose", oracle(expected, seed=1))
        drafted = engine(folder, drafts=True)
        assert drafted.engine.plan.store == ("replay" if replayed else "rows")
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


def test_log_probabilities_are_those_of_plain_steps(tiny, monkeypatch):
    folder, _ = tiny("llama")
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=2)
    plain = engine(folder, drafts=False)
    [expected] = plain.generate({"prompt_token_ids": prompts()[1]}, params)
    monkeypatch.setattr(ngram, "propose", teller(prompts()[1] + expected.outputs[0].token_ids, wrong_every=4))
    drafted = engine(folder, drafts=True)
    [found] = drafted.generate({"prompt_token_ids": prompts()[1]}, params)
    assert found.outputs[0].token_ids == expected.outputs[0].token_ids
    pairs = list(zip(found.outputs[0].logprobs, expected.outputs[0].logprobs, strict=True))
    assert len(pairs) == 12
    for entry, other in pairs:
        assert entry.logprob == pytest.approx(other.logprob, abs=1e-5)
        assert [token for token, _ in entry.top] == [token for token, _ in other.top]
    assert 0 < drafted.engine.stats().accepted_draft_tokens < drafted.engine.stats().draft_tokens


def test_nothing_behind_a_stop_string_is_told(tiny, monkeypatch):
    folder, _ = tiny("llama")
    params = SamplingParams(temperature=0.9, seed=3, max_tokens=24, ignore_eos=True, logprobs=1, n=2)
    ids, plain = prompts()[1], engine(folder, drafts=False)
    [whole] = plain.generate({"prompt_token_ids": ids}, params)
    stop = plain.tokenizer.decode(whole.outputs[0].token_ids[8:10])
    stopped = replace(params, stop=(stop,))
    [expected] = plain.generate({"prompt_token_ids": ids}, stopped)
    assert len(expected.outputs[0].token_ids) <= 10
    monkeypatch.setattr(ngram, "propose", teller(ids + whole.outputs[0].token_ids, wrong_every=7))
    drafted = engine(folder, drafts=True)
    [found] = drafted.generate({"prompt_token_ids": ids}, stopped)
    for out, other in zip(found.outputs, expected.outputs, strict=True):
        assert (out.token_ids, out.text, out.stop_reason) == (other.token_ids, other.text, other.stop_reason)
        assert len(out.logprobs) == len(out.token_ids)
    assert found.usage.completion_tokens == expected.usage.completion_tokens
    assert drafted.engine.stats().accepted_draft_tokens > 0


def teller(whole: list[int], wrong_every: int) -> Callable:
    """A drafter that tells what follows in `whole`, but for every so many tokens."""

    def propose(known: np.ndarray, count: int, shortest: int, longest: int) -> np.ndarray:
        at = range(len(known), min(len(known) + count, len(whole)))
        return np.array([whole[i] if i % wrong_every else 3 for i in at], np.int64)

    return propose


def test_what_became_of_drafts_is_counted(tiny, monkeypatch):
    folder, _ = tiny("llama")
    params = SamplingParams(temperature=0.0, max_tokens=13, ignore_eos=True)
    ids = prompts()[1]
    [plain] = engine(folder, drafts=False).generate({"prompt_token_ids": ids}, params)
    whole = ids + plain.outputs[0].token_ids
    assert len(ids) == 14
    assert 3 not in whole
    monkeypatch.setattr(ngram, "propose", teller(whole, wrong_every=10))  # the draft at 20 is wrong
    llm = engine(folder, drafts=True)
    [found] = llm.generate({"prompt_token_ids": ids}, params)
    # Drafts at 15-17 (all right), 19-21 (one is), 21-23 (all) and 25: there is no place for one behind the last token.
    stats = llm.engine.stats()
    assert (stats.draft_rows, stats.draft_tokens, stats.accepted_draft_tokens) == (4, 10, 8)
    assert (stats.drafted_by_place, stats.accepted_by_place) == ([4, 3, 3], [4, 2, 2])
    assert (found.usage.drafts, found.usage.accepted_drafts) == (10, 8)


def test_a_drafter_that_is_never_right_is_warned_of_once(tiny, monkeypatch, caplog):
    folder, _ = tiny("llama")
    params = SamplingParams(temperature=0.0, max_tokens=210, ignore_eos=True)
    [plain] = engine(folder, drafts=False).generate({"prompt_token_ids": prompts()[1]}, params)
    never = next(token for token in range(300) if token not in plain.outputs[0].token_ids)
    monkeypatch.setattr(ngram, "propose", lambda known, count, *rest: np.full(count, never))
    llm = engine(folder, drafts=True)
    llm.generate({"prompt_token_ids": prompts()[1]}, params)
    [warning] = [record.getMessage() for record in caplog.records if "drafts" in record.getMessage()]
    assert "ngram" in warning
    assert "none of 600 was accepted in 200 steps" in warning


def test_steps_without_drafts_are_counted(tiny, monkeypatch):
    folder, _ = tiny("llama")
    monkeypatch.setattr(ngram, "propose", lambda known, count, *rest: known[:0])
    llm = engine(folder, drafts=True)
    llm.generate({"prompt_token_ids": prompts()[1]}, SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True))
    assert (llm.engine.stats().undrafted_steps, llm.engine.stats().draft_rows) == (8, 0)


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
