"""Single behaviours of the scheduler: refusals, budget, fairness, preemption, siblings, aborts, ends and costs."""

from __future__ import annotations

import time
from collections import defaultdict

import numpy as np
import pytest
from simdevice import FAMILIES, Family, config_of
from simengine import FULL, Sim

from offroad.cache.spec import CacheConfig
from offroad.errors import QueueFull, RequestError
from offroad.sample.params import SamplingParams
from offroad.schedule.job import Job, sequence_seed
from offroad.schedule.request import Request
from offroad.schedule.scheduler import Scheduler
from offroad.schedule.standing import standings
from offroad.schedule.step import Kind, StepResult, Want


def small(family=FULL, **sizes) -> CacheConfig:
    return config_of(family, **({"history": 40, "k": 0, "window": 16, "interval": 0} | sizes))


def test_a_refused_prompt_is_looked_up_again_only_when_there_is_more_room():
    sim = Sim(small(history=12), FULL)
    sim.add([1] * 20, max_tokens=12)
    sim.step()
    sim.add([2] * 30, max_tokens=2)
    cache, looked = sim.scheduler.cache, []
    resume_point = cache.resume_point
    cache.resume_point = lambda job: looked.append(job) or resume_point(job)
    for _ in range(8):
        sim.step()
    assert len(looked) == 1
    assert len(sim.scheduler.running) == 1
    sim.run()
    assert len(looked) == 2
    sim.verify()


def test_a_prompt_that_cannot_fit_is_refused_with_both_numbers():
    sim = Sim(small(history=60), FULL)
    with pytest.raises(RequestError, match=r"200 \+ 1 tokens.*at most 200 tokens") as error:
        sim.add(range(200))
    assert error.value.code == "context_length_exceeded"
    with pytest.raises(RequestError, match=r"161 \+ 1 tokens in 41 blocks.*at most 40 blocks"):
        Sim(small(), FULL).add([0] * 161)
    with pytest.raises(RequestError, match="no token"):
        sim.add([])
    name = sim.add([1] * 199)
    sim.run()
    assert sim.ended[name, 0].finish_reason == "length"
    assert len(sim.tokens[name, 0]) == 1


def test_too_many_waiting_requests_are_refused():
    sim = Sim(small(slots=3), FULL, max_waiting=2)
    for n in (1, 4, 1, 1, 1):  # all before a step: three of them will not have waited
        sim.add([1], n=n)
    with pytest.raises(QueueFull, match="found: 5; accepted: fewer than 5"):
        sim.add([1])
    sim.run()
    sim.add([1])
    sim.run()


def test_an_id_in_use_is_refused():
    sim = Sim(small(), FULL)
    sim.add([1])
    sim.count = 0
    with pytest.raises(RequestError, match="id"):
        sim.add([1])


def test_the_last_chunk_samples_and_each_verify_row_samples_one():
    sim = Sim(small(), FULL, budget=8)
    sim.add(range(20), max_tokens=3, logprobs=2)
    sim.run()
    assert [s.width.tolist() for s in sim.steps] == [[8], [8], [4], [1], [1]]
    assert [int(s.kind[0]) for s in sim.steps] == [Kind.CHUNK] * 3 + [Kind.VERIFY] * 2
    assert [int(s.wants[0]) for s in sim.steps] == [0, 0] + [Want.SAMPLE | Want.LOGPROBS] * 3
    assert sim.steps[0].starts[0].prompt_len == 20
    assert sim.first["r1", 0].logprobs[0].logprob == -0.5
    assert len(sim.first["r1", 0].logprobs[0].top) == 2
    sim.verify()


def test_the_device_is_told_what_ends_a_sequence():
    sim = Sim(small(), FULL)
    sim.add([1, 2], eos=(3, 5), seed=9, max_tokens=1)
    sim.run()
    (start,) = sim.steps[0].starts
    assert (start.eos_ids, start.seed, start.length, start.tokens.tolist()) == ((3, 5), 9, 0, [1, 2])


def test_chunks_can_be_bounded_apart_from_the_budget():
    sim = Sim(small(), FULL, budget=16)
    sim.scheduler.max_chunk = 3
    sim.add(range(8), max_tokens=1)
    sim.run()
    assert [s.width.tolist() for s in sim.steps] == [[3], [3], [2]]
    sim.verify()


def test_decode_goes_on_while_a_long_prompt_is_read():
    sim = Sim(small(history=80), FULL, budget=8)
    for _ in range(3):
        sim.add([1, 2], max_tokens=20)
    sim.step()
    sim.add([3] * 60, max_tokens=2)
    for _ in range(10):
        sim.step()
        assert sim.steps[-1].kind.tolist() == [0, 0, 0, 1]
        assert sim.steps[-1].width.tolist()[:3] == [1, 1, 1]
        assert sim.steps[-1].width.sum() == 8
    sim.run()
    sim.verify()


def test_more_decoding_sequences_than_budget_take_turns():
    sim = Sim(small(slots=6, history=80), FULL, budget=4)
    for _ in range(6):
        sim.add([1], max_tokens=9)
    gaps = defaultdict(int)
    for _ in range(200):
        if not sim.scheduler.has_work():
            break
        before = {key: len(tokens) for key, tokens in sim.tokens.items()}
        sim.step()
        for key, tokens in sim.tokens.items():
            gaps[key] = 0 if len(tokens) > before.get(key, 0) or key in sim.ended else gaps[key] + 1
            assert gaps[key] <= 2
    sim.verify()
    assert len(sim.ended) == 6


@pytest.mark.parametrize("depth", [1, 2])
def test_preemption_releases_the_youngest_and_gives_the_same_tokens(depth):
    sim = Sim(small(history=9), FULL, depth=depth)
    for seed in range(3):
        sim.add([seed] * 5, seed=seed, max_tokens=22)
    sim.run()
    stats = sim.scheduler.stats()
    assert stats.preemptions > 0
    assert [name for name, _ in sim.ended] == ["r1", "r2", "r3"]  # the oldest is never held up
    assert all(event.error is None for event in sim.ended.values())
    sim.verify()
    assert stats.prompt_tokens == 15
    assert stats.generated_tokens == 66
    restarted = [s for step in sim.steps for s in step.starts if len(s.tokens) > s.prompt_len]
    assert restarted
    assert all(s.prompt_len == 5 for s in restarted)


@pytest.mark.parametrize("depth", [1, 2])
def test_how_far_sequences_are_is_told_through_a_preemption(depth):
    sim = Sim(small(history=9), FULL, depth=depth)
    names = [sim.add([seed] * 5, seed=seed, max_tokens=22) for seed in range(3)]
    assert [(s.request_id, s.state, s.computed) for s in standings(sim.scheduler)] == [(n, "waiting", 0) for n in names]
    seen: dict[str, list] = {name: [] for name in names}
    while sim.flying or sim.scheduler.has_work():
        sim.step()
        for told in standings(sim.scheduler):
            seen[told.request_id].append(told)
    states = {name: {s.state for s in told} for name, told in seen.items()}
    assert states[names[0]] <= {"prefill", "decode"}, "the oldest goes on"
    assert {"decode", "preempted"} <= states[names[2]]
    for told in seen.values():
        generated = [s.generated for s in told]
        assert generated == sorted(generated), "what was said is kept"
        assert generated[-1] in (20, 21)
        assert all(s.computed < s.prompt + s.generated for s in told if s.state == "decode")
        assert all(s.generated and s.prompt == 5 for s in told if s.state == "preempted")
        assert all(s.computed == 0 for s in told if s.state == "preempted")


def test_a_sequence_that_fills_the_whole_cache_ends_with_a_reason():
    sim = Sim(small(history=4), FULL)
    sim.add([1, 2, 3], max_tokens=None)
    sim.run()
    end = sim.ended["r1", 0]
    assert end.finish_reason == "length"
    assert "16 tokens" in end.error
    assert len(sim.tokens["r1", 0]) == 14  # 3 + 13 run, and one more sampled
    sim.verify()


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_siblings_resume_at_the_last_boundary_of_the_prompt(family):
    sim = Sim(small(family, slots=4, checkpoints=8), family, budget=10)
    name = sim.add(list(range(5)) * 4, n=3, max_tokens=4, seed=5)
    sim.run()
    assert sim.first[name, 0].cached == 0
    assert [sim.first[name, i].cached for i in (1, 2)] == [16, 16]
    assert [sim.first[name, i].matched for i in (1, 2)] == [16, 16]
    sim.verify()
    assert len({tuple(sim.tokens[name, i]) for i in range(3)}) > 1
    assert sim.scheduler.stats().prompt_tokens == 20
    assert sim.scheduler.stats().prefix_resumed_tokens == 32


def test_siblings_do_not_hold_up_the_requests_behind_them():
    sim = Sim(small(slots=4), FULL, budget=8)
    sim.add([1] * 40, n=3, max_tokens=2)
    sim.add([2, 3], max_tokens=2)
    sim.step()
    assert {job.request.id for job in sim.scheduler.running} == {"r1", "r2"}
    sim.run()
    sim.verify()


def test_siblings_go_on_when_the_first_ends_early():
    sim = Sim(small(slots=4), FULL, budget=8)
    sim.add([1] * 40, n=3, max_tokens=2)
    sim.step()
    sim.bad = {int(sim.steps[0].slot[0]): 3}
    sim.step()
    sim.bad = {}
    sim.run()
    assert sim.ended["r1", 0].finish_reason == "error"
    assert {sim.ended["r1", i].finish_reason for i in (1, 2)} == {"length"}
    sim.verify()


@pytest.mark.parametrize("depth", [1, 2])
def test_aborts_at_any_time_leak_nothing(depth):
    for at in range(14):
        sim = Sim(small(Family(True, True), history=14, checkpoints=4), Family(True, True), budget=6, depth=depth)
        sim.add([1] * 18, n=2, max_tokens=6)
        sim.add([2] * 5, max_tokens=6)
        for _ in range(at):
            sim.step()
        sim.scheduler.abort("r1")
        sim.scheduler.abort("r1")
        sim.scheduler.abort("nobody")
        sim.scheduler.check()
        sim.run()
        assert all((("r1", i) in sim.ended) for i in range(2))
        assert sim.ended["r2", 0].finish_reason == "length"
        sim.verify()


@pytest.mark.parametrize("depth", [1, 2])
def test_a_refused_sequence_ends_alone_at_any_time(depth):
    for steps in range(1, 7):
        sim = Sim(small(), FULL, depth=depth)
        sim.add([1] * 10, max_tokens=8)
        sim.add([2] * 10, max_tokens=8)
        for _ in range(steps):
            sim.step()
        [slot] = [job.slot for job in sim.scheduler.running if job.request.id == "r1"] or [0]
        sim.scheduler.refuse(slot, "too slow")
        sim.scheduler.refuse(slot, "too slow")  # it is gone already
        sim.run()
        ended = sim.ended["r1", 0]
        assert (ended.finish_reason, ended.error) == (("refused", "too slow") if slot else ("length", None))
        assert sim.ended["r2", 0].finish_reason == "length"
        sim.verify()


def test_a_bad_layer_ends_that_sequence_only_and_its_prefix_is_not_used_again():
    sim = Sim(small(), FULL)
    sim.add([1] * 10, max_tokens=8)
    sim.add([2] * 10, max_tokens=8)
    sim.step()
    sim.bad = {int(sim.steps[0].slot[0]): 5}
    sim.step()
    sim.bad = {}
    sim.run()
    assert sim.ended["r1", 0].finish_reason == "error"
    assert "layer 5" in sim.ended["r1", 0].error
    assert sim.ended["r2", 0].finish_reason == "length"
    again = sim.add([1] * 10, max_tokens=2)
    other = sim.add([2] * 10, max_tokens=2)
    sim.run()
    assert sim.first[again, 0].matched == 0
    assert sim.first[other, 0].cached == 8
    sim.verify()


def test_resetting_the_prefix_cache_forgets():
    sim = Sim(small(), FULL)
    sim.add([1] * 10, max_tokens=2)
    sim.run()
    sim.scheduler.reset_prefix_cache()
    name = sim.add([1] * 10, max_tokens=2)
    sim.run()
    assert sim.first[name, 0].matched == 0


@pytest.mark.parametrize(
    ("params", "eos", "sampled", "want"),
    [
        (dict(max_tokens=9), (5,), [1, 5, 2], ([1, 5], "stop", 5)),
        (dict(max_tokens=9, ignore_eos=True), (5,), [1, 5, 2], ([1, 5, 2], None, None)),
        (dict(max_tokens=9, ignore_eos=True, stop_token_ids=(2,)), (5,), [1, 5, 2], ([1, 5, 2], "stop", 2)),
        (dict(max_tokens=9, min_tokens=3), (5,), [1, 5, 5, 5], ([1, 5, 5], "stop", 5)),
        (dict(max_tokens=2), (5,), [1, 2, 5], ([1, 2], "length", None)),
        (dict(max_tokens=2), (5,), [1, 5, 5], ([1, 5], "stop", 5)),
        (dict(max_tokens=None), (5,), [1, 2, 3, 4, 6], ([1, 2, 3, 4], "length", None)),
    ],
)
def test_stop_conditions(params, eos, sampled, want):
    request = Request(id="x", prompt_ids=[0] * 6, params=SamplingParams(**params), eos_ids=eos)
    assert Job.of(request, 0, 0, b"", 10).accept(6, sampled) == want


def test_seeds_of_siblings():
    seeds = [sequence_seed(7, i) for i in range(50)]
    assert seeds[0] == 7
    assert len(set(seeds)) == 50
    assert all(-(2**63) <= s < 2**63 for s in seeds)
    assert sequence_seed(7, 1) != sequence_seed(8, 1)


def test_a_decode_step_of_8_rows_costs_little():
    """The aim is under 100 us on an idle machine; the limit here leaves room for a busy one."""
    config = CacheConfig(
        block=64,
        history_blocks=8 * 40,
        window_blocks=8 * 24 + 1,
        keep=511,
        slots=9,
        checkpoints=0,
        rings=False,
        k=0,
        max_len=2000,
        namespace="m",
        checkpoint_interval=1024,
    )
    scheduler = Scheduler(config, max_num_batched_tokens=512, max_waiting=64)
    for i in range(8):
        scheduler.submit(Request(id=str(i), prompt_ids=[i] * 60, params=SamplingParams(max_tokens=None)))
    times = []
    for n in range(800):
        began = time.perf_counter()
        step = scheduler.build()
        spent = time.perf_counter() - began
        rows = len(step.slot)
        result = StepResult(step.number, step.width, np.full((rows, 1), n % 1000), np.full(rows, -1, np.int16))
        began = time.perf_counter()
        assert len(scheduler.commit(step, result)) == 8
        times.append(spent + time.perf_counter() - began)
    typical = sorted(times[1:])[len(times) // 4]
    assert typical < 1e-3, f"{typical * 1e6:.0f} us"
