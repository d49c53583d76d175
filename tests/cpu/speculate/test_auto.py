"""How many drafts are taken, in a simulated engine whose costs and acceptance are known."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offroad import LLM, SamplingParams
from offroad.errors import SettingsError
from offroad.speculate import drafting as drafting_module
from offroad.speculate.auto import Auto
from offroad.speculate.config import speculation
from offroad.speculate.drafting import Drafting


def play(auto: Auto, chances: list[float], base: float, each: float, steps: int, seed: int = 0) -> tuple[float, float]:
    """(tokens per second, mean drafts in the last quarter) of sequences with these chances for each draft."""
    rng = np.random.default_rng(seed)
    slots = np.arange(1, len(chances) + 1)
    for slot in slots.tolist():
        auto.start(slot, 0)
    counts, tokens, seconds, late = auto.counts(slots), 0, 0.0, []
    for step in range(steps):
        right = np.array([int((rng.random(n) < p).cumprod().sum()) for n, p in zip(counts, chances, strict=True)])
        took = (base + each * (len(slots) + counts.sum())) * rng.uniform(0.9, 1.1)
        auto.observe(slots, counts, right)
        auto.took(slots, counts, took)
        tokens, seconds = tokens + len(slots) + int(right.sum()), seconds + took
        if step >= steps * 3 // 4:
            late.append(counts.mean())
        counts = auto.counts(slots)
    return tokens / seconds, float(np.mean(late))


def best_fixed(chances: list[float], base: float, each: float, k: int) -> float:
    """Tokens per second of the best number of drafts that is the same for all sequences and never changes."""
    rates = []
    for n in range(k + 1):
        tokens = sum(1 + sum(p**place for place in range(1, n + 1)) for p in chances)
        rates.append(tokens / (base + each * len(chances) * (1 + n)))
    return max(rates)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.floats(0.0, 0.98), min_size=1, max_size=4),
    st.floats(0.0, 1.0),
    st.integers(0, 5),
)
def test_it_comes_near_the_best_fixed_number(chances: list[float], share: float, seed: int):
    base, each = 1e-2 * (1 - share), 1e-2 * share + 1e-4
    rate, _ = play(Auto(4, 8), chances, base, each, steps=1500, seed=seed)
    assert rate > 0.87 * best_fixed(chances, base, each, 4)  # what it learns in 1,500 steps is a matter of luck too


def test_drafts_that_never_pay_cost_little():
    plain = 1 / (1e-3 + 4e-3)
    rate, late = play(Auto(4, 8), [0.02], 1e-3, 4e-3, steps=3000)
    assert rate > 0.95 * plain
    assert late < 0.1


def test_what_changes_is_noticed():
    auto = Auto(4, 8)
    assert play(auto, [0.05], 8e-3, 2e-3, steps=400)[1] < 0.2
    assert play(auto, [0.95], 8e-3, 2e-3, steps=800)[1] > 3.5
    assert play(auto, [0.05], 8e-3, 2e-3, steps=800)[1] < 0.2


def test_sequences_of_one_batch_differ():
    auto = Auto(4, 8)
    play(auto, [0.97, 0.03], 8e-3, 2e-3, steps=600)
    counts = auto.counts(np.array([1, 2]))
    assert counts[0] >= 3
    assert counts[1] <= 1


def test_making_drafts_is_part_of_the_step_that_looks_at_them(monkeypatch):
    """Also where a chunk has a step of its own between the two."""
    clock, took = [0.0], []

    def propose(turn, slots, counts):
        clock[0] += 3.0

    monkeypatch.setattr(drafting_module.time, "perf_counter", lambda: clock[0])
    auto = Auto(2, 4)
    auto.start(1, 0)
    monkeypatch.setattr(auto, "took", lambda slots, drafted, seconds: took.append(seconds))
    arrays = SimpleNamespace(room=lambda slots: np.full(len(slots), 2))
    drafting = Drafting(SimpleNamespace(propose=propose), arrays, auto)
    for verify in (1, 0, 1, 1):
        one, began = np.ones(1, np.int32), clock[0]
        clock[0] += 10.0  # of the step itself
        step = SimpleNamespace(slot=one, samples=one > 0)
        drafting.propose(SimpleNamespace(step=step, rows=SimpleNamespace(slot=one, width=one, verify=verify)), began)
    assert took == [10.0, 16.0, 13.0]


def test_settings():
    found = speculation('{"method": "ngram", "num_speculative_tokens": "auto"}')
    assert (found.method, found.tokens, found.auto) == ("ngram", 6, True)
    assert speculation("auto").auto
    assert not speculation('{"method": "ngram"}').auto
    with pytest.raises(SettingsError, match="num_speculative_tokens"):
        speculation('{"method": "ngram", "num_speculative_tokens": "many"}')


@pytest.mark.parametrize("text", ["auto", json.dumps({"method": "ngram", "num_speculative_tokens": "auto"})])
def test_answers_are_those_without_drafts(text: str, tiny):
    folder, _ = tiny("llama")
    values = dict(device="cpu", dtype="float32", max_num_seqs=4, max_num_batched_tokens=48)
    prompts = [{"prompt_token_ids": [5, 6, 7, 8] * n} for n in (2, 9, 16)]
    plain, drafted = LLM(str(folder), **values), LLM(str(folder), speculative_config=text, **values)
    assert drafted.engine.plan.drafter.method == "ngram"
    assert "as many as pay" in drafted.engine.plan.explain()
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature, seed=3, max_tokens=60, ignore_eos=True)
        expected = [result.outputs[0].token_ids for result in plain.generate(prompts, params)]
        assert [result.outputs[0].token_ids for result in drafted.generate(prompts, params)] == expected
    assert drafted.engine.stats().draft_tokens > 0
