"""Drafts of no meaning, accepted at a set rate: what verify steps cost is measured without a model that drafts well.

The step is a real one: rows of a pending token and its drafts in the forward pass, lengths that move by what was
accepted, states and pages as any drafter leaves them. Only the comparison is decided beforehand: the draft at a
position is accepted with probability `acceptance`, given that those before it in its step were. (Other engines may mean
by such a rate the accepted share of all drafts, which is lower.) Every position is decided at most once, so trials are
independent, and a step of k drafts gives (1 - acceptance^(k + 1)) / (1 - acceptance) tokens on average. Drafts and
decisions are functions of the sequence's seed and the position, so that a run can be repeated.
"""

from __future__ import annotations

import numpy as np

from offroad.run.rows import Rows
from offroad.sample.noise import philox
from offroad.schedule.step import Start
from offroad.speculate.proposer import Device, Turn, Twin

_LOW = 0xFFFFFFFF
_STREAM = 1  # the last word of the counter, which is 0 for the noise of draws


def expected_tokens(k: int, acceptance: float) -> float:
    """Tokens that a step of k drafts gives on average: the sum of acceptance^i for i of 0 to k."""
    return sum(acceptance**place for place in range(k + 1))


def drafted(seeds: np.ndarray, positions: np.ndarray, vocab: int) -> np.ndarray:
    """The drafts of sequences with `seeds` at `positions`, int64 [n] each; ids below `vocab`."""
    return _words(seeds, positions)[1] % vocab


def accepted(seeds: np.ndarray, positions: np.ndarray, acceptance: float) -> np.ndarray:
    """Whether the drafts there are accepted if they are reached, bool [n]."""
    return _words(seeds, positions)[0] < acceptance * 2.0**32


def _words(seeds: np.ndarray, positions: np.ndarray) -> tuple[np.ndarray, ...]:
    zero = np.zeros_like(positions)
    counter = zero, positions & _LOW, (positions >> 32) & _LOW, zero + _STREAM
    return philox(counter, (seeds & _LOW, (seeds >> 32) & _LOW))


class DummyProposer:
    """Proposes without looking at anything, and decides what becomes of it."""

    def __init__(self, device: Device, acceptance: float) -> None:
        self.arrays, self.vocab, self.acceptance = device.arrays, device.sampler.vocab, acceptance
        self.seeds = np.zeros(len(device.arrays.length), np.int64)

    def start(self, start: Start) -> None:
        """A sequence begins in a slot."""
        self.seeds[start.slot] = start.seed

    def follow(self, turn: Turn) -> None:
        """Nothing: it remembers nothing."""

    def rehearse(self, phase: str, rows: Rows, twin: Twin) -> None:
        """Nothing: it runs no model."""

    def propose(self, turn: Turn, slots: np.ndarray, counts: np.ndarray) -> None:
        """All drafts of the step in one copy to the device."""
        self.arrays.drafted[slots] = counts
        if not counts.any():
            return
        of_slot = np.repeat(slots, counts)
        behind = np.arange(len(of_slot)) - np.repeat(counts.cumsum() - counts, counts) + 1
        positions = self.arrays.length[of_slot] + behind
        self.arrays.put(of_slot, positions, drafted(self.seeds[of_slot], positions, self.vocab))

    def decide(self, slots: np.ndarray, positions: np.ndarray, answers: np.ndarray) -> np.ndarray:
        """What is told at positions that have a draft, int64 [n], for the model's `answers`: the draft if it is
        accepted, else something else. Complements, which mark values that are not finite, stay."""
        seeds = self.seeds[slots]
        drafts = drafted(seeds, positions, self.vocab)
        others = np.where(answers == drafts, (drafts + 1) % self.vocab, answers)
        told = np.where(accepted(seeds, positions, self.acceptance), drafts, others)
        return np.where(answers < 0, answers, told)
