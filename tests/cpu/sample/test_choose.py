import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offroad.sample.choose import Filters, choose_compact, choose_dense
from offroad.sample.noise import gumbel_row


def filters(rows, vocab, *, temperature=1.0, min_p=0.0, top_p=1.0, top_k=0, seed=0, position=0):
    """Filters of `rows` equal rows that differ in position."""
    columns = (temperature, math.log(min_p) if min_p else -math.inf, top_p)
    full = [np.full(rows, c, np.float64) for c in columns]
    position = np.arange(position, position + rows)
    return Filters(*full, np.full(rows, min(top_k or vocab, vocab)), np.full(rows, seed), position)


def on_device(f):
    return Filters(
        *(torch.from_numpy(np.asarray(v)) for v in (f.temperature, f.low, f.top_p, f.top_k, f.seed, f.position))
    )


def kept_tokens(logits, temperature=1.0, min_p=0.0, top_p=1.0, top_k=0):
    """The straightforward filters, in fp64: (token, probability) of what is left."""
    x = np.asarray(logits, np.float64) / temperature
    p = np.exp(x - x.max())
    keep = p >= min_p
    if top_k:
        keep &= p >= np.sort(np.where(keep, p, 0))[::-1][min(top_k, len(p)) - 1]
    p = np.where(keep, p, 0)
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    last = order[np.searchsorted(np.cumsum(p[order]), top_p - 1e-12)] if top_p < 1 else order[-1]
    p = np.where(p >= p[last], p, 0)
    return p / p.sum()


CASES = [
    {},
    {"temperature": 0.5},
    {"temperature": 2.0},
    {"top_k": 3},
    {"top_p": 0.8},
    {"min_p": 0.2},
    {"temperature": 1.5, "min_p": 0.05, "top_k": 7, "top_p": 0.9},
]
LOGITS = np.array([2.0, 1.7, 1.1, 0.3, 0.2, -0.4, -1.0, -1.3, -2.5, -4.0, -9.0], np.float32)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dense", [False, True])
def test_draws_follow_the_exact_probabilities(case, dense):
    n, vocab = 6000, len(LOGITS)
    f = filters(n, vocab, seed=11, **case)
    if dense:
        drawn = choose_dense(torch.from_numpy(LOGITS).repeat(n, 1), on_device(f), True).numpy()
    else:
        drawn = np.array([choose_compact(LOGITS, f, i) for i in range(n)])
    expected = kept_tokens(LOGITS, **case)
    counts = np.bincount(drawn, minlength=vocab)
    assert counts[expected == 0].sum() == 0
    likely = expected * n >= 5
    chi = (((counts - expected * n) ** 2)[likely] / (expected * n)[likely]).sum()
    degrees = likely.sum() - 1
    assert chi < degrees + 4.5 * math.sqrt(2 * degrees) + 3


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_the_two_forms_agree(data):
    vocab = data.draw(st.integers(1, 300))
    spread = data.draw(st.sampled_from([0.1, 3.0, 12.0]))
    logits = torch.randn(5, vocab, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 999)))) * spread
    logits = logits.bfloat16().float()  # many equal ones
    f = filters(
        5,
        vocab,
        temperature=data.draw(st.sampled_from([1e-4, 0.3, 1.0, 5.0])),
        min_p=data.draw(st.sampled_from([0.0, 0.01, 0.3, 1.0])),
        top_p=data.draw(st.sampled_from([1e-9, 0.5, 0.95, 1.0])),
        top_k=data.draw(st.sampled_from([0, 1, 5, 40])),
        seed=data.draw(st.integers(-(2**63), 2**63 - 1)),
    )
    filtered = bool((f.top_p < 1).any() or (f.top_k < vocab).any())
    dense = choose_dense(logits, on_device(f), filtered).tolist()
    assert dense == [choose_compact(logits[i].numpy(), f, i) for i in range(5)]
    # Rows without filters are not changed by the part that others need.
    assert dense == choose_dense(logits, on_device(f), True).tolist()


@pytest.mark.parametrize("scale", [0.5, 4.0, 20.0])
def test_skipping_hopeless_tokens_changes_nothing(scale):
    # Many unlikely tokens: the winner is often far from the best logit.
    rng = np.random.default_rng(1)
    for position in range(60):
        logits = (rng.standard_normal(3000) * scale).astype(np.float32)
        f = filters(1, 3000, seed=3, position=position)
        x = logits - logits.max()
        expected = int((x + gumbel_row(3, position, np.arange(3000))).argmax())
        assert choose_compact(logits, f, 0) == expected


def test_ties_with_the_last_kept_are_kept():
    logits = np.array([3.0, 1.0, 1.0, 1.0, 0.0], np.float32)
    for case in ({"top_k": 2}, {"top_p": 0.8}):
        f = filters(500, 5, **case)
        assert {choose_compact(logits, f, i) for i in range(500)} == {0, 1, 2, 3}


def test_cold_is_greedy_and_extremes_are_finite():
    logits = np.array([1.0, 3.0, 2.0], np.float32)
    for temperature in (1e-3, 1e-300):
        assert choose_compact(logits, filters(1, 3, temperature=temperature), 0) == 1
        assert choose_dense(torch.tensor(logits)[None], on_device(filters(1, 3, temperature=temperature)), False) == 1
    masked = np.array([-np.inf, 0.0, -np.inf], np.float32)
    assert {choose_compact(masked, filters(50, 3), i) for i in range(50)} == {1}


@pytest.mark.parametrize("case", [{}, {"top_p": 0.5}, {"top_k": 2}, {"min_p": 0.5}])
def test_a_row_with_nan_gives_a_valid_id(case):
    logits = np.array([1.0, np.nan, 2.0], np.float32)
    assert choose_compact(logits, filters(1, 3, **case), 0) in range(3)
    assert int(choose_dense(torch.tensor(logits)[None], on_device(filters(1, 3, **case)), True)) in range(3)
