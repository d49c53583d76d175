"""Dummy drafts: accepted at the set rate, through the same steps as other drafts, and only where speed is measured."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from draft_play import readable, spoil
from engine_runs import engine_of, tokens
from hypothesis import given
from hypothesis import strategies as st

from offroad import LLM
from offroad.engine import Engine
from offroad.errors import SettingsError
from offroad.evidence.engine_bench import BenchSettings
from offroad.ops import states
from offroad.ops.capture import GraphPlan
from offroad.run.graphs import Graphs
from offroad.run.rows import ReplayView
from offroad.sample.params import SamplingParams
from offroad.schedule.request import Request
from offroad.settings import Settings
from offroad.speculate import dummy
from offroad.speculate.config import speculation

K, RATE = 3, 0.7
SEEDS = st.integers(0, 2**62)


def config(k: int = K, acceptance: float = RATE) -> str:
    return json.dumps({"method": "dummy", "num_speculative_tokens": k, "acceptance": acceptance})


def measured(folder, drafts: str, **more) -> Engine:
    values = (
        dict(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=256, threads=1, checkpoint_interval=64) | more
    )
    chosen = dict(model=str(folder), device="cpu", dtype="float32", speculative_config=drafts)
    return Engine(BenchSettings.of(**chosen, **values))


class Watched:
    """An engine whose verify rows are noted: (slot, tokens run, length before, length after, told tokens)."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.rows = engine, []
        self.answers: dict[str, list[int]] = {}
        self.cached: dict[str, int] = {}
        runner, launch = engine.runner, engine.runner.launch
        spoil(runner.arrays)

        def noted(step) -> None:
            launch(step)
            result = runner.results[-1]()
            count = int((step.kind == 0).sum())
            for row in range(count):
                drafts, moved = int(result.drafted[row]), int(result.accepted[row])
                told = result.tokens[row, :moved].tolist()
                slot = int(step.slot[row])
                self.rows.append((slot, drafts, int(runner.arrays.length[slot]) - moved, moved, told))
            engine.check()

        runner.launch = noted

    def submit(self, name: str, ids: list[int], count: int, seed: int) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
        self.answers[name] = []
        self.engine.submit(Request(id=name, prompt_ids=ids, params=params, seed=seed, marks=(64,)))

    def step(self) -> None:
        for event in self.engine.step():
            assert event.finish_reason in (None, "length")
            self.answers[event.request_id] += event.token_ids
            self.cached[event.request_id] = max(event.cached, self.cached.get(event.request_id, 0))

    def finish(self) -> None:
        while self.engine.has_work():
            self.step()


@given(seed=SEEDS, first=st.integers(0, 2**33), acceptance=st.floats(0, 1))
def test_trials_have_the_set_rate(seed, first, acceptance):
    count = 2000
    seeds, positions = np.full(count, seed), first + np.arange(count)
    right = dummy.accepted(seeds, positions, acceptance)
    assert abs(right.sum() - count * acceptance) <= 6 * math.sqrt(count * acceptance * (1 - acceptance)) + 1
    ids = dummy.drafted(seeds, positions, 300)
    assert 0 <= ids.min() <= ids.max() < 300
    picked = np.flatnonzero(positions % 3 == 0)  # whoever else is asked for
    assert (dummy.accepted(seeds[picked], positions[picked], acceptance) == right[picked]).all()
    assert (dummy.drafted(seeds[picked], positions[picked], 300) == ids[picked]).all()


def test_trials_of_neighbours_are_independent():
    """Pairs of positions, and of seeds, of which both are accepted: the square of the rate."""
    positions, count = np.arange(40000), 40000
    spread = 6 * math.sqrt(RATE**2 * (1 - RATE**2) / count) * 1.5
    one = dummy.accepted(np.full(count, 5), positions, RATE)
    other = dummy.accepted(np.full(count, 6), positions, RATE)
    assert abs((one[1:] & one[:-1]).mean() - RATE**2) < spread
    assert abs((one & other).mean() - RATE**2) < spread
    assert dummy.expected_tokens(3, 0.7) == pytest.approx((1 - 0.7**4) / 0.3)
    assert dummy.expected_tokens(3, 1.0) == 4


@given(seed=SEEDS, acceptance=st.floats(0, 1), lucky=st.lists(st.booleans(), min_size=1, max_size=40), data=st.data())
def test_what_is_told(seed, acceptance, lucky, data):
    """The draft exactly where it is accepted, even where the model would have said the same or has no finite value."""
    count, vocab = len(lucky), 7
    arrays = SimpleNamespace(length=np.zeros(3, np.int64))
    proposer = dummy.DummyProposer(SimpleNamespace(arrays=arrays, sampler=SimpleNamespace(vocab=vocab)), acceptance)
    proposer.start(SimpleNamespace(slot=2, seed=seed))
    slots, positions = np.full(count, 2), 5 + np.arange(count)
    drafts = dummy.drafted(np.full(count, seed), positions, vocab)
    drawn = np.array(data.draw(st.lists(st.integers(0, vocab - 1), min_size=count, max_size=count)))
    answers = np.where(lucky, drafts, drawn)
    told = proposer.decide(slots, positions, answers)
    right = dummy.accepted(np.full(count, seed), positions, acceptance)
    assert ((told == drafts) == right).all()
    assert ((told >= 0) & (told < vocab)).all()
    kept = ~right & (answers != drafts)
    assert (told[kept] == answers[kept]).all()
    assert (proposer.decide(slots, positions, ~answers) == ~answers).all()


@pytest.mark.parametrize(("family", "replay"), [("llama", False), ("qwen3_5", False), ("qwen3_5", True)])
def test_steps_are_those_of_any_drafter(tiny, monkeypatch, family, replay):
    """Widths, accepted lengths and tokens as decided beforehand; what the caches hold in the end is what a run without
    drafts over the same tokens leaves."""
    folder, _ = tiny(family)
    monkeypatch.setattr(states, "ROWS_SHARE", 0 if replay else 1)
    watched = Watched(measured(folder, config()))
    arrays = watched.engine.runner.arrays
    assert any(isinstance(view, ReplayView) for view, _ in arrays.checkpoints) == replay
    seeds = {"a": 1, "b": 2, "c": 3}
    for name, size in (("a", 20), ("b", 70)):
        watched.submit(name, tokens(name, size), 200 - size, seeds[name])
    for _ in range(12):
        watched.step()
    shared = tokens("b", 70)[:64]  # resumes at a block that "b" has filled
    watched.submit("c", shared + tokens("c", 9), 100, seeds["c"])
    before = len(watched.rows)
    for _ in range(14):
        watched.step()
    assert watched.cached["c"] == 64
    live = {int(slot) for slot, *_ in watched.rows[before:]}
    assert len(live) == 3
    full = [row for row in watched.rows if row[1]]
    assert {drafts for _, drafts, *_ in full} == {K}
    of_slot = {slot: watched.engine.runner.drafting.dummy.seeds[slot] for slot in live}
    for slot, drafts, start, moved, told in full:
        at = start + 1 + np.arange(drafts)
        right = dummy.accepted(np.full(drafts, of_slot[slot]), at, RATE)
        ids = dummy.drafted(np.full(drafts, of_slot[slot]), at, watched.engine.info.vocab)
        assert moved - 1 == right.cumprod().sum()
        assert told[: moved - 1] == ids[: moved - 1].tolist()
        assert moved > drafts or told[-1] != ids[moved - 1]
    plain = engine_of(folder, max_num_seqs=1, max_num_batched_tokens=64, max_model_len=256, enable_prefix_caching=False)
    for slot in live:
        length = int(arrays.length[slot])
        clean = _states(plain, arrays.tokens[slot, :length].tolist())
        for item, (at, rows) in readable(arrays, slot).items():
            expected_at, expected = clean[item]
            both = np.intersect1d(at.numpy(), expected_at.numpy())
            assert len(both) == len(at)
            where = torch.from_numpy(np.searchsorted(expected_at.numpy(), both))
            assert (rows - expected[where]).abs().max() < 1e-4, item
    watched.finish()
    watched.engine.check()
    assert [len(answer) for answer in watched.answers.values()] == [180, 130, 100]


def _states(engine: Engine, ids: list[int]) -> dict:
    """What the caches hold after a prompt."""
    found, launch = {}, type(engine.runner).launch

    def noted(step) -> None:
        launch(engine.runner, step)
        found.update(readable(engine.runner.arrays, int(step.slot[0])))

    engine.runner.launch = noted
    engine.submit(Request(id="clean", prompt_ids=ids, params=SamplingParams(temperature=0.0, max_tokens=1)))
    while engine.has_work():
        engine.step()
    return found


@pytest.mark.parametrize("graphs", [False, True])
def test_counts_match_the_rate_and_runs_repeat(tiny, graphs):
    folder, _ = tiny("qwen3_5")
    found = []
    for _ in range(2):
        engine = measured(folder, config(), max_num_seqs=8)
        runner, replays = engine.runner, []
        if graphs:

            def record(body, replays=replays):
                return lambda: (replays.append(1), body())

            runner.graphs = Graphs(
                GraphPlan((8,), (1, K + 1), ""), runner.model, runner.ops["decode"], runner.arrays, record
            )
        watched = Watched(engine)
        for seed in range(8):
            watched.submit(str(seed), tokens(f"r{seed}", 10), 200, seed)
        watched.finish()
        engine.check()
        assert bool(replays) == graphs
        found.append((watched.answers, watched.rows))
        stats = engine.stats()
        tried = [stats.drafted_by_place[0], *stats.accepted_by_place[:-1]]
        for right, count in zip(stats.accepted_by_place, tried, strict=True):
            assert abs(right - count * RATE) < 4 * math.sqrt(count * RATE * (1 - RATE))
        mean = sum(moved for *_, moved, _ in watched.rows) / len(watched.rows)
        assert mean == pytest.approx(dummy.expected_tokens(K, RATE), rel=0.1)
        engine.close()
    assert found[0] == found[1]


@pytest.mark.parametrize(("acceptance", "moved"), [(0.0, {1}), (1.0, {K + 1})])
def test_none_and_all(tiny, acceptance, moved):
    watched = Watched(measured(tiny("llama")[0], config(acceptance=acceptance)))
    watched.submit("a", tokens("a", 10), 41, 0)
    watched.finish()
    assert {row[3] for row in watched.rows} == moved
    assert len(watched.answers["a"]) == 41


def test_only_speed_tests_take_them(tiny):
    folder, _ = tiny("llama")
    for make in (Settings.of, LLM):
        with pytest.raises(SettingsError, match="method") as caught:
            make(model=str(folder), speculative_config=config())
        assert "offroad bench engine" in caught.value.next
    with pytest.raises(SettingsError):
        BenchSettings.of(model="m", speculative_config='{"method": "dummy"}')
    assert BenchSettings.of(model="m", speculative_config=config()).drafter().acceptance == RATE


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ('{"method": "dummy"}', "acceptance"),
        ('{"method": "dummy", "acceptance": 1.5}', "acceptance"),
        ('{"method": "dummy", "acceptance": NaN}', "acceptance"),
        ('{"method": "dummy", "acceptance": true}', "acceptance"),
        ('{"method": "ngram", "acceptance": 0.5}', "acceptance"),
        ('{"method": "dummy", "model": "x", "acceptance": 0.5}', "model"),
    ],
)
def test_wrong_rates_are_named(text, key):
    with pytest.raises(SettingsError, match=key):
        speculation(text)
