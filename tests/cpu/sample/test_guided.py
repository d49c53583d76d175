"""One guided sequence: what may come next is a function of its tokens, whatever was tried and taken back."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offroad.sample.guide import Grammar, Guide, Thinking
from offroad.sample.guided import Guided, words
from offroad.sample.masks import Masks, unpacked
from offroad.sample.params import SamplingParams
from offroad.sample.sampler import Sampler
from offroad.schedule.step import Start

VOCAB = 70
A, B, C, EOS, START, END, BREAK, CALL = 1, 2, 3, 4, 64, 65, 31, 32
ANY = Grammar("regex", "ignored")


class Alternating:
    """A B A B ... and the end behind a B."""

    slow = False

    def __init__(self) -> None:
        self.taken: list[int] = []

    def _next(self) -> set[int]:
        if self.taken and self.taken[-1] == EOS:
            return set(range(VOCAB))
        return {B} if len(self.taken) % 2 else {A, EOS}

    def fill(self, mask) -> None:
        for token in self._next():
            mask[token // 32] |= np.uint32(1 << token % 32).astype(np.int32)

    def accept(self, token) -> bool:
        if token not in self._next():
            return False
        self.taken.append(token)
        return True

    def rollback(self, count) -> None:
        del self.taken[len(self.taken) - count :]


def guided(guide: Guide) -> Guided:
    return Guided(guide, None if guide.grammar is None else Alternating(), [EOS])


def allowed(sequence: Guided) -> set[int] | None:
    """None: anything."""
    mask = np.zeros(words(VOCAB), np.int32)
    if not sequence.fill(mask):
        assert not mask.any()
        return None
    return {token for token in range(VOCAB) if mask[token // 32] >> (token % 32) & 1}


def after(guide: Guide, *tokens: int) -> set[int] | None:
    sequence = guided(guide)
    for token in tokens:
        assert sequence.accept(token), token
    return allowed(sequence)


EVERYTHING = set(range(VOCAB))


def test_a_grammar_alone():
    assert after(Guide(ANY)) == {A, EOS}
    assert after(Guide(ANY), A) == {B}
    assert after(Guide(ANY), A, B, EOS) == EVERYTHING
    assert not guided(Guide(ANY)).accept(B)


def test_the_grammar_waits_for_the_end_of_the_thoughts():
    guide = Guide(ANY, Thinking(END, opened=True))
    assert after(guide) == after(guide, A, C, B) == EVERYTHING - {EOS}
    assert after(guide, C, END) == {A, EOS}
    assert after(guide, C, END, A) == {B}
    assert after(Guide(ANY, Thinking(END, opened=True), blanks=(BREAK,)), END) == {A, EOS, BREAK}
    assert after(Guide(ANY, Thinking(END, opened=True), blanks=(BREAK,)), END, BREAK) == {A, EOS}


def test_thoughts_may_begin_with_the_first_token_only():
    guide = Guide(ANY, Thinking(END, START))
    assert after(guide) == {A, EOS, START}
    assert after(guide, START, C) == EVERYTHING - {EOS}
    assert after(guide, START, C, END) == after(guide, A, B) == {A, EOS}


def test_a_budget_forces_the_end_of_the_thoughts():
    guide = Guide(thinking=Thinking(END, opened=True, budget=2))
    assert after(guide) is after(guide, C) is None
    assert after(guide, C, C) == {END}
    assert after(guide, C, C, END) is after(guide, END, A, A, A, A) is None
    assert after(Guide(thinking=Thinking(END, opened=True, budget=0))) == {END}
    opens = Guide(thinking=Thinking(END, START, budget=1))
    assert after(opens) is after(opens, C, C, C) is None
    assert after(opens, START, C) == {END}
    both = Guide(ANY, Thinking(END, opened=True, budget=1))
    assert after(both, C) == {END}
    assert after(both, C, END) == {A, EOS}


def test_a_call_may_stand_in_place_of_the_answer():
    guide = Guide(ANY, Thinking(END, opened=True), escapes=(CALL,), blanks=(BREAK,))
    assert after(guide, END) == {A, EOS, CALL, BREAK}
    assert after(guide, END, BREAK) == {A, EOS, CALL}
    assert after(guide, END, CALL) is after(guide, END, BREAK, CALL, C, A) is None
    assert after(guide, END, A) == {B}


THINKING = st.none() | st.builds(
    Thinking,
    st.just(END),
    st.none() | st.just(START),
    st.booleans(),
    st.none() | st.integers(0, 3),
)
GUIDES = st.builds(
    Guide, st.none() | st.just(ANY), THINKING, st.sampled_from([(), (CALL,)]), st.sampled_from([(), (BREAK,)])
)
TOKENS = st.lists(st.sampled_from([A, B, C, EOS, START, END, BREAK, CALL]), max_size=12)


@settings(max_examples=150, deadline=None)
@given(GUIDES, TOKENS, TOKENS, st.integers(0, 12))
def test_what_was_tried_and_taken_back_leaves_nothing(guide, told, tried, back):
    sequence, known = guided(guide), []
    for token in told:
        may = allowed(sequence)
        took = sequence.accept(token)
        assert took == (may is None or token in may)
        known += [token] if took else []
    count = sum(sequence.accept(token) for token in tried)
    sequence.rollback(count)
    back = min(back, len(known))
    sequence.rollback(back)
    fresh = guided(guide)
    for token in known[: len(known) - back]:
        assert fresh.accept(token)
    assert allowed(sequence) == allowed(fresh)


@pytest.mark.parametrize("vocab", [31, 32, 33, 97])
def test_bits_are_the_same_on_every_device(vocab):
    bits = np.random.default_rng(vocab).integers(-(2**31), 2**31, (5, words(vocab))).astype(np.int32)
    expected = [[bool(row[t // 32] >> (t % 32) & 1) for t in range(vocab)] for row in bits]
    assert unpacked(torch.from_numpy(bits), vocab).tolist() == expected
    logits = torch.zeros(5, vocab)
    Masks(np.arange(5), bits).apply(logits, np.arange(5))
    assert (logits == 0).tolist() == expected


def start(slot: int, **params) -> Start:
    return Start(slot, np.zeros(4, np.int64), 0, 4, SamplingParams(**params), 11 + slot)


@pytest.mark.parametrize(
    "params", [{"temperature": 0.0}, {}, {"top_p": 0.8, "temperature": 0.7}, {"presence_penalty": 1.0}]
)
def test_masks_bind_their_own_rows_and_no_other(params):
    sampler = Sampler(6, VOCAB, "cpu")
    for slot in range(6):
        sampler.start(start(slot, **params))
    logits = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(3)) * 4
    slots, positions, tokens = np.arange(6), np.full(6, 5), torch.zeros(6, 8, dtype=torch.int64)
    free = sampler.draw(logits, slots, positions, tokens)
    bits = np.zeros((2, words(VOCAB)), np.int32)
    bits[0, 1], bits[1, :] = 1 << 5, -1  # token 37 alone; everything
    masked = sampler.draw(logits, slots, positions, tokens, Masks(np.array([1, 4]), bits))
    assert masked[1] == 37
    rest = [0, 2, 3, 4, 5]
    assert masked[rest].tolist() == free[rest].tolist()
