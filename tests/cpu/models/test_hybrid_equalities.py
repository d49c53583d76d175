"""Cold = warm = preempted = batched = chunked: tokens are equal, states and keys are equal up to rounding.

Tokens alone would not do: a state that is slightly wrong often gives the same ones.
"""

from __future__ import annotations

import msgspec
import pytest
import torch
from engine_runs import Answer, ask, assert_same, engine_of, run, small_engine, tokens
from tiny_models import HYBRIDS

from offroad.run.rows import RingView
from offroad.schedule.job import sequence_seed

# (prompt, answer): shorter than a convolution, around blocks of 64, answers that cross a block's end
SIZES = (
    (1, 7),
    (2, 11),
    (60, 9),
    (64, 4),
    (65, 12),
    (130, 3),
    (200, 6),
    (127, 5),
    (33, 14),
    (190, 6),
    (3, 5),
    (90, 2),
)
CHUNKED = (0, 1, 4, 6, 7)


# Every other one samples.
MIXED = [
    ask(str(i), tokens(f"mixed {i}", prompt), answer, temperature=0.8 * (i % 2))
    for i, (prompt, answer) in enumerate(SIZES)
]


@pytest.fixture(scope="module", params=("gemma3", *HYBRIDS))
def folder(request, tiny):
    return tiny(request.param)[0]


@pytest.fixture(scope="module")
def cold(folder) -> dict[str, Answer]:
    """Each request by itself on an engine without a prefix cache."""
    engine = engine_of(folder, max_num_seqs=1, enable_prefix_caching=False)
    answers = {}
    for request in MIXED:
        answers |= run(engine, [request])
    assert [len(answer.tokens) for answer in answers.values()] == [size for _, size in SIZES]
    return answers


def spoil(engine) -> None:
    """What no sequence has written must never be read: pages, rings and checkpoints hold NaN before anything runs."""
    arrays = engine.runner.arrays
    for view in (view for views in arrays.views for view in views.values()):
        for plane in (view.data,) if isinstance(view, RingView) else (view.k, view.v):
            plane.fill_(torch.nan)
    for _, kept in arrays.checkpoints:
        kept.fill_(torch.nan)


def test_in_a_batch_of_8_in_which_requests_come_and_go(folder, cold):
    engine = engine_of(folder, max_num_seqs=8)
    spoil(engine)
    assert_same(run(engine, MIXED, later=5), cold)


def test_after_a_prefix_hit_and_in_slots_used_before(folder, cold):
    engine = engine_of(folder, max_num_seqs=8)
    spoil(engine)
    run(engine, MIXED)
    answers = run(engine, MIXED)
    assert_same(answers, cold)
    # All of a prompt but its last token is known; what is resumed is the last boundary below it.
    assert [answers[str(i)].cached for i in (3, 4, 5, 6, 7, 9)] == [0, 64, 128, 192, 64, 128]


@pytest.mark.parametrize("chunk", [7, 64, 512])
def test_in_chunks(folder, cold, chunk):
    engine = engine_of(folder, max_num_seqs=4, max_num_batched_tokens=chunk)
    spoil(engine)
    assert_same(run(engine, [MIXED[i] for i in CHUNKED]), cold)


def test_siblings_go_on_from_one_prompt(folder):
    """Three answers to one prompt: two resume at its last boundary, and all differ as their seeds do."""
    one = MIXED[5]
    params = msgspec.structs.replace(one.params, temperature=0.8, max_tokens=8)
    alone = engine_of(folder, max_num_seqs=1, enable_prefix_caching=False)
    expected = []
    for i in range(3):
        request = msgspec.structs.replace(one, id=f"{i}", params=params, seed=sequence_seed(one.seed, i))
        expected.append(run(alone, [request])[f"{i}"].tokens)
    engine = engine_of(folder, max_num_seqs=4)
    spoil(engine)
    engine.submit(msgspec.structs.replace(one, params=msgspec.structs.replace(params, n=3)))
    found = [[], [], []]
    while engine.has_work():
        for event in engine.step():
            found[event.index] += event.token_ids
    assert found == expected
    assert len({tuple(tokens) for tokens in found}) == 3
    assert engine.stats().prefix_resumed_tokens == 2 * 128


@pytest.fixture(scope="module")
def long(folder):
    """Requests whose known tokens come to need a block more in decode, and their answers alone."""
    requests = [ask(f"long {i}", tokens(f"long {i}", 118 + i), 18, temperature=0.8 * (i % 2)) for i in range(3)]
    alone = engine_of(folder, max_num_seqs=1, enable_prefix_caching=False)
    answers = {}
    for request in requests:
        answers |= run(alone, [request])
    return requests, answers


@pytest.mark.parametrize("caching", [True, False], ids=["resumed", "from the start"])
def test_after_preemption(folder, long, caching):
    """5 blocks, where each sequence needs 3 in the end: the younger one loses its blocks and comes again later."""
    requests, expected = long
    engine = small_engine(folder, blocks=5, places=4, max_num_seqs=3, max_model_len=256, enable_prefix_caching=caching)
    spoil(engine)
    answers = run(engine, requests)
    assert engine.stats().preemptions > 0
    restarts = [length for answer in answers.values() for length in answer.restarts]
    assert restarts
    assert all((length > 0) == caching for length in restarts)
    assert_same(answers, expected)
