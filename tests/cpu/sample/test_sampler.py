import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offroad.errors import RequestError
from offroad.sample.params import SamplingParams
from offroad.sample.sampler import Sampler
from offroad.schedule.step import Start

VOCAB, LENGTH = 97, 40
GREEDY = {"temperature": 0.0}
KINDS = [
    GREEDY,
    {},
    {"temperature": 0.6, "top_p": 0.9},
    {"top_k": 7, "min_p": 0.02},
    {**GREEDY, "repetition_penalty": 1.5, "frequency_penalty": 0.4},
    {"presence_penalty": -1.0, "frequency_penalty": 1.1, "repetition_penalty": 0.8, "top_p": 0.95},
    {"logit_bias": {3: 50.0, 4: 50.5}},
    {"min_tokens": 30, "max_tokens": 50, "stop_token_ids": (5, 6)},
]


def start(slot, prompt_len=10, seed=0, eos_ids=(), **params):
    tokens = np.zeros(prompt_len, np.int64)
    given = SamplingParams(**params)
    return Start(slot, tokens, 0, prompt_len, given, seed, eos_ids)


@pytest.fixture(scope="module")
def tokens():
    return torch.randint(0, VOCAB, (len(KINDS), LENGTH), generator=torch.Generator().manual_seed(2))


@pytest.fixture(scope="module")
def sampler():
    made = Sampler(len(KINDS), VOCAB, "cpu")
    for slot, params in enumerate(KINDS):
        made.start(start(slot, seed=slot * 1000 - 3, eos_ids=(9,), **params))
    return made


def noisy(rows, seed=0, dtype=torch.float32):
    return (torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_row_depends_on_nothing_but_itself(sampler, tokens, data):
    rows = data.draw(
        st.lists(st.tuples(st.integers(0, len(KINDS) - 1), st.integers(10, LENGTH)), min_size=1, max_size=12)
    )
    slots, positions = (np.array(c) for c in zip(*rows, strict=True))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    logits = noisy(len(rows), data.draw(st.integers(0, 99)), dtype)
    before = logits.clone()
    drawn = sampler.draw(logits, slots, positions, tokens)
    assert drawn.dtype == torch.int64
    assert torch.equal(logits, before)
    alone = [sampler.draw(logits[i : i + 1], slots[i : i + 1], positions[i : i + 1], tokens) for i in range(len(rows))]
    assert drawn.tolist() == torch.cat(alone).tolist()
    order = data.draw(st.permutations(range(len(rows))))
    again = sampler.draw(logits[order], slots[order], positions[order], tokens)
    assert again.tolist() == drawn[list(order)].tolist()


def plain_adjusted(logits, known, prompt_len, params, eos_ids):
    """vLLM's adjustments as loops over the vocabulary."""
    row = [float(x) for x in logits]
    output = known[prompt_len:]
    for token in range(len(row)):
        if len(output) < params.min_tokens and token in {*eos_ids, *params.stop_token_ids}:
            row[token] = -math.inf
        row[token] += (params.logit_bias or {}).get(token, 0.0)
        if token in known:
            row[token] *= 1 / params.repetition_penalty if row[token] > 0 else params.repetition_penalty
        row[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty * (token in output)
    return row


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_greedy_takes_the_best_adjusted_logit(data):
    number = st.sampled_from
    params = {
        **GREEDY,
        "repetition_penalty": data.draw(number([1.0, 0.5, 1.7])),
        "frequency_penalty": data.draw(number([0.0, -1.3, 0.9])),
        "presence_penalty": data.draw(number([0.0, -1.9, 1.9])),
        "logit_bias": data.draw(st.none() | st.dictionaries(st.integers(0, 7), st.integers(-9, 9), max_size=3)),
        "min_tokens": data.draw(number([0, 3])),
        "stop_token_ids": (1,),
    }
    prompt = data.draw(st.lists(st.integers(0, 7), min_size=1, max_size=6))
    output = data.draw(st.lists(st.integers(0, 7), max_size=6))
    known = prompt + output
    # What lies behind the position must not be read.
    tokens = torch.tensor([[7] * 20, known + [0] * (20 - len(known))])
    logits = torch.randn(1, 8, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 999)))) * 2
    sampler = Sampler(2, 8, "cpu")
    sampler.start(start(1, prompt_len=len(prompt), eos_ids=(0,), **params))
    drawn = int(sampler.draw(logits, np.array([1]), np.array([len(known)]), tokens))
    expected = plain_adjusted(logits[0], known, len(prompt), SamplingParams(**params), (0,))
    assert expected[drawn] == pytest.approx(max(expected), abs=1e-5)


def test_greedy_ties_go_to_the_lowest_id(sampler, tokens):
    logits = torch.zeros(1, VOCAB)
    logits[0, [40, 20, 60]] = 1.0
    assert int(sampler.draw(logits, np.array([0]), np.array([12]), tokens)) == 20


def test_seeds_and_positions_decide(tokens):
    sampler = Sampler(3, VOCAB, "cpu")
    for slot, seed in enumerate((1, 1, 2)):
        sampler.start(start(slot, seed=seed))
    logits = torch.zeros(3 * 25, VOCAB)
    slots, positions = np.repeat([0, 1, 2], 25), np.tile(np.arange(10, 35), 3)
    first, same, other = sampler.draw(logits, slots, positions, tokens).view(3, 25).tolist()
    assert first == same
    assert first != other
    assert len(set(first)) > 5


def test_the_next_sequence_of_a_slot_forgets_the_last(tokens):
    sampler = Sampler(1, VOCAB, "cpu")
    logits = noisy(1, 4)
    for params in KINDS:
        sampler.start(start(0, **params))
    sampler.start(start(0, **GREEDY))
    assert int(sampler.draw(logits, np.array([0]), np.array([20]), tokens)) == int(logits.argmax())


def test_bias_forces_and_forbids(sampler, tokens):
    slots, positions = np.full(60, 6), np.arange(10, 40).repeat(2)
    drawn = sampler.draw(noisy(60, 5), slots, positions, tokens)
    assert set(drawn.tolist()) <= {3, 4}


def test_min_tokens_masks_eos_and_stop_ids_until_reached(tokens):
    sampler = Sampler(1, VOCAB, "cpu")
    sampler.start(start(0, eos_ids=(9,), stop_token_ids=(5,), min_tokens=4, max_tokens=9, **GREEDY))
    logits = torch.zeros(1, VOCAB)
    logits[0, 9], logits[0, 5], logits[0, 2] = 3.0, 2.0, 1.0
    drawn = [int(sampler.draw(logits, np.array([0]), np.array([p]), tokens)) for p in (10, 13, 14)]
    assert drawn == [2, 2, 9]


def test_drafts_of_a_slot_are_counted_up_to_their_position():
    sampler = Sampler(1, 4, "cpu")
    sampler.start(start(0, prompt_len=1, frequency_penalty=2.0, **GREEDY))
    tokens = torch.tensor([[0, 1, 1, 2, 0, 0]])
    logits = torch.tensor([[0.0, 3.0, 2.5, -9.0]]).repeat(3, 1)
    # Known before the draws: [], [1], [1, 1] of output.
    assert sampler.draw(logits, np.array([0, 0, 0]), np.array([1, 2, 3]), tokens).tolist() == [1, 2, 2]


def test_many_rows_are_drawn_in_chunks(monkeypatch, sampler, tokens):
    logits = noisy(16, 6)
    slots, positions = np.arange(16) % len(KINDS), np.full(16, 20)
    whole = sampler.draw(logits, slots, positions, tokens)
    monkeypatch.setattr("offroad.sample.sampler._DENSE_ELEMENTS", 2 * VOCAB)
    assert torch.equal(sampler.draw(logits, slots, positions, tokens), whole)


def test_ids_beyond_the_vocabulary_are_refused():
    for name, value in (("logit_bias", {8: 1.0}), ("stop_token_ids", (8,)), ("stop_token_ids", (-1,))):
        params = SamplingParams(**{name: value})
        with pytest.raises(RequestError) as e:
            params.check_vocab(8)
        assert e.value.param == name
    SamplingParams(logit_bias={7: 1.0}, stop_token_ids=[0]).check_vocab(8)
