"""Chunks and decoding rows in turn: which chunks, in which order, who waits how long, and what shares a step."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import pytest
from simdevice import Family, config_of
from simengine import FULL, Sim

from offroad.schedule.step import Kind
from offroad.schedule.turns import Turns

HYBRID = Family(True, True)
BOTH, CHUNK, VERIFY = "both", "chunk", "verify"
EITHER = (Turns(16), Turns(0, 8))


def sim_of(family: Family = FULL, *, depth: int = 1, budget: int = 64, turns: Turns = Turns(16), **sizes) -> Sim:
    values = dict(history=120, k=0, window=40, slots=8, interval=0) | sizes
    return Sim(config_of(family, **values), family, budget=budget, depth=depth, turns=turns)


def decoding(sim: Sim, count: int = 3, most: int = 30) -> None:
    """Sequences that decode, all of them in the last step."""
    for seed in range(count):
        sim.add([1, 2, seed], seed=seed, max_tokens=most)
    while not sim.steps or sim.steps[-1].kind.tolist() != [Kind.VERIFY] * count:
        sim.step()
    sim.steps.clear()


def kinds(sim: Sim) -> list[str]:
    found = [set(step.kind.tolist()) for step in sim.steps]
    return [BOTH if len(seen) > 1 else CHUNK if seen == {Kind.CHUNK} else VERIFY for seen in found]


def widths(sim: Sim) -> list[list[int]]:
    """Of the chunks of each step that has some."""
    return [step.width[step.kind == Kind.CHUNK].tolist() for step in sim.steps if (step.kind == Kind.CHUNK).any()]


def steps(sim: Sim, count: int) -> list[str]:
    for _ in range(count):
        sim.step()
    return kinds(sim)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_short_prompt_has_the_next_step_and_rows_decode_in_the_one_behind(depth: int):
    sim = sim_of(depth=depth)
    decoding(sim)
    sim.add([5] * 9, max_tokens=4)
    assert steps(sim, 4) == [CHUNK, VERIFY, VERIFY, VERIFY]
    assert [len(step.slot) for step in sim.steps] == [1, 4, 4, 4]
    sim.run()
    sim.verify()


def test_without_graphs_of_chunks_all_rows_share_a_step():
    sim = sim_of(turns=Turns())
    decoding(sim)
    sim.add([5] * 9, max_tokens=4)
    assert steps(sim, 3) == [BOTH, VERIFY, VERIFY]
    sim.run()
    sim.verify()


@pytest.mark.parametrize(("length", "expected"), [(16, CHUNK), (17, BOTH)])
def test_a_chunk_that_no_graph_holds_shares_a_step(length: int, expected: str):
    sim = sim_of()
    decoding(sim)
    sim.add([5] * length, max_tokens=4)
    assert steps(sim, 1) == [expected]


@pytest.mark.parametrize("depth", [1, 2])
def test_the_rest_of_a_long_prompt_is_a_chunk_in_turn(depth: int):
    sim = sim_of(depth=depth, budget=32)
    decoding(sim)
    sim.add([5] * 64, max_tokens=2)
    found = steps(sim, 4)
    assert widths(sim) == [[29], [29], [6]]
    assert found == [BOTH, BOTH, CHUNK, VERIFY]
    sim.run()
    sim.verify()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("family", [FULL, HYBRID], ids=str)
def test_chunks_of_a_long_prompt_alternate_with_decode(depth: int, family: Family):
    """A budget that one graph holds. No chunk of them ends its prompt but the last."""
    sim = sim_of(family, depth=depth, budget=16)
    decoding(sim)
    sim.add([5] * 61, max_tokens=2)
    found = steps(sim, 8)
    assert found[:7] == [CHUNK, VERIFY] * 3 + [CHUNK]
    sim.run()
    sim.verify()


def test_two_chunks_go_one_after_the_other_and_the_older_is_first():
    sim = sim_of()
    decoding(sim)
    sim.add([5] * 9, max_tokens=4)
    sim.add([6] * 3, max_tokens=4)
    assert steps(sim, 4) == [CHUNK, VERIFY, CHUNK, VERIFY]
    assert widths(sim) == [[9], [3]]
    assert [len(step.slot) for step in sim.steps] == [1, 4, 1, 5]


@pytest.mark.parametrize("lengths", [(3, 3, 3), (9, 8)])
def test_many_chunks_or_too_many_tokens_share_a_step(lengths: tuple[int, ...]):
    sim = sim_of()
    decoding(sim)
    for length in lengths:
        sim.add([5 + length] * length, max_tokens=4)
    assert steps(sim, 2) == [BOTH, VERIFY]
    assert widths(sim) == [list(lengths)]


def test_what_waits_behind_a_step_s_budget_does_not_count():
    sim = sim_of(budget=16)
    decoding(sim)
    for seed in range(3):
        sim.add([5 + seed] * 40, max_tokens=2)
    assert steps(sim, 4) == [CHUNK, VERIFY] * 2
    assert widths(sim) == [[16], [16]]


def test_a_prompt_alone_does_not_wait():
    sim = sim_of(budget=16)
    sim.add([5] * 40, max_tokens=2)
    assert steps(sim, 4) == [CHUNK, CHUNK, CHUNK, VERIFY]
    assert widths(sim) == [[16], [16], [8]]


def test_prompts_that_are_scored_share_a_step():
    job = lambda: SimpleNamespace(fresh=False)  # noqa: E731 - as many as are wanted
    scored = SimpleNamespace(fresh=True)
    one, two = job(), job()
    turns = Turns(16)
    assert turns.chunks([one, two], lambda _, room: 4, 64) == [one]
    assert turns.chunks([one, scored], lambda _, room: 4, 64) == []
    assert turns.chunks([one, two], lambda job, room: 0 if job is one else 4, 64) == [two]
    assert turns.chunks([one], lambda _, room: 0, 64) == []


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(
    ("long", "expected"), [(24, [CHUNK, VERIFY, CHUNK, VERIFY]), (65, [BOTH, BOTH, VERIFY, VERIFY])]
)
def test_chunks_that_fill_a_large_step_do_without_rows_that_decode(depth: int, long: int, expected: list[str]):
    """All of them in one: two prompts and the beginning of a third, then what is left of it."""
    sim = sim_of(depth=depth, turns=Turns(0, long))
    decoding(sim)
    for seed in range(3):
        sim.add([5 + seed] * 30, max_tokens=9)
    assert steps(sim, 4) == expected
    assert widths(sim) == ([[30, 30, 4], [26]] if long == 24 else [[30, 30, 1], [29]])
    sim.run()
    sim.verify()


def test_what_is_left_of_a_large_step_shares_one_if_it_is_short():
    sim = sim_of(turns=Turns(0, 27))
    decoding(sim)
    for seed in range(3):
        sim.add([5 + seed] * 30, max_tokens=9)
    assert steps(sim, 4) == [CHUNK, BOTH, VERIFY, VERIFY]


@pytest.mark.parametrize("turns", EITHER, ids=str)
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("k", [0, 3])
def test_rows_that_decode_sit_out_one_step_at_most(depth: int, k: int, turns: Turns):
    """Prompts come all the time, of every length."""
    sim = sim_of(HYBRID, depth=depth, budget=32, k=k, history=400, turns=turns)
    decoding(sim, count=2, most=60)
    old = [job.slot for job in sim.scheduler.running]
    for number in range(40):
        if len(sim.requests) - len(sim.ended) < 7:
            sim.add([number % 7] * (1 + 5 * number % 23), max_tokens=3)
        sim.step()
        if sim.ended:
            break
    sat_out = [not set(old) <= set(step.slot.tolist()) for step in sim.steps]
    assert any(sat_out)
    assert not any(one and two for one, two in pairwise(sat_out[:-depth]))
    assert {CHUNK, VERIFY} <= set(kinds(sim))
    sim.run()
    sim.verify()


@pytest.mark.parametrize("turns", EITHER, ids=str)
@pytest.mark.parametrize("depth", [1, 2])
def test_a_turn_that_finds_no_memory_is_the_other_s(depth: int, turns: Turns):
    """Blocks for three sequences of four, which all grow: some are released, and come back as chunks."""
    for history in range(7, 16):
        sim = sim_of(depth=depth, budget=16, history=history, slots=5, turns=turns)
        for seed in range(4):
            sim.add([seed] * 6, seed=seed, max_tokens=14)
        sim.run()
        assert all(event.error is None for event in sim.ended.values())
        assert len(sim.ended) == 4
        sim.verify()


@pytest.mark.parametrize("turns", EITHER, ids=str)
@pytest.mark.parametrize("depth", [1, 2])
def test_an_abort_at_any_time_leaks_nothing(depth: int, turns: Turns):
    for at in range(8):
        sim = sim_of(HYBRID, depth=depth, budget=16, checkpoints=4, turns=turns)
        decoding(sim)
        name = sim.add([5] * 40, max_tokens=4)
        steps(sim, at)
        sim.scheduler.abort(name)
        sim.scheduler.check()
        sim.run()
        sim.verify()
