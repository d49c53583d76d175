"""A step's drafting: the drafter follows, then proposes as many drafts as are allowed or pay."""

from __future__ import annotations

import time

import numpy as np

from offroad.run.arrays import Arrays
from offroad.run.rows import Rows
from offroad.sample.params import SamplingParams
from offroad.schedule.step import Start
from offroad.speculate.auto import Auto
from offroad.speculate.dummy import DummyProposer
from offroad.speculate.proposer import Proposer, Turn

_CALM = 0.7  # sampling up to this temperature is a class of its own


class Drafting:
    """A drafter and, with `auto`, the choice of how many drafts it makes."""

    def __init__(self, proposer: Proposer, arrays: Arrays, auto: Auto | None) -> None:
        self.proposer, self.arrays, self.auto = proposer, arrays, auto
        self.dummy = proposer if isinstance(proposer, DummyProposer) else None
        self._making = 0.0  # seconds that the drafts of the next verify rows took

    def start(self, start: Start) -> None:
        """A sequence begins in a slot."""
        if self.auto is not None:
            self.auto.start(start.slot, _kind(start.params))
        if self.dummy is not None:
            assert start.guide is None, "a speed test asks for no grammar"
            self.dummy.start(start)

    def decide(self, rows: Rows, of_row: np.ndarray, positions: np.ndarray, answers: np.ndarray) -> np.ndarray:
        """The answers of wanted tokens that draw for `positions`, int64 [wanted]; dummy drafts replace the model's."""
        if self.dummy is None:
            return answers
        compared = (of_row < rows.verify) & (positions < (rows.start + rows.width)[of_row])
        told = answers.copy()
        told[compared] = self.dummy.decide(rows.slot[of_row][compared], positions[compared], answers[compared])
        return told

    def follow(self, turn: Turn) -> None:
        self.proposer.follow(turn)

    def propose(self, turn: Turn, began: float) -> None:
        """Puts drafts behind the pending tokens of the rows that have one; the step began at `began`."""
        slots = turn.step.slot[turn.step.samples].astype(np.int64)
        counts, now = self.arrays.room(slots), time.perf_counter()
        if self.auto is not None:
            self._learn(self.auto, turn, now - began + self._making)
            if len(slots):
                counts = np.minimum(counts, self.auto.counts(slots))
        self.proposer.propose(turn, slots, counts)
        self._making = time.perf_counter() - now + (0.0 if turn.rows.verify else self._making)

    @staticmethod
    def _learn(auto: Auto, turn: Turn, seconds: float) -> None:
        rows, verify = turn.rows, turn.rows.verify
        slots, drafted = rows.slot[:verify], rows.width[:verify] - 1
        if drafted.any():
            auto.observe(slots, drafted, turn.moved[:verify] - 1)
        if verify == len(rows.slot):
            auto.took(slots, drafted, seconds)


def _kind(params: SamplingParams) -> int:
    """The class of requests that a sequence's acceptance is like: greedy, calm or lively sampling."""
    return 0 if params.greedy else 1 if params.temperature <= _CALM else 2
