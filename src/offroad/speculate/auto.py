"""How many drafts pay: from the acceptance and the cost of steps as they are measured while serving.

A step over T tokens of R sequences takes about `a + b T` seconds, and a draft at some place is accepted with some
probability. Tokens per second are largest if drafts are taken, the likeliest first, as long as one more gives more
tokens for its time than the step gives without it.
"""

from __future__ import annotations

import numpy as np

_DECAY = 0.97  # weight of an observation after the next one of its kind
_OWN_DECAY = 0.85  # a sequence's own record moves faster: text turns from quoting to prose
_PRIOR = 4.0  # trials that a record begins with: a class with even odds, a sequence with the rates of its class
_PROBE = 48  # steps after which a sequence that gets no drafts is given some, to see whether that still is right
_TRIAL = 6  # steps of each number of rows that are used to learn what a token costs


class Cost:
    """Seconds of a step as a line over its tokens, for one number of sequences: weighted least squares."""

    def __init__(self) -> None:
        self.sums = np.zeros(5)  # of 1, T, T^2, t, T t
        self.seen = 0

    def observe(self, tokens: int, seconds: float) -> None:
        if self.seen > _TRIAL and seconds > 4 * self.of(tokens):
            return  # an interruption, which says nothing about tokens
        self.seen += 1
        self.sums = self.sums * _DECAY + (1, tokens, tokens * tokens, seconds, tokens * seconds)

    def line(self) -> tuple[float, float]:
        """(a, b) with b at least 0; a single number of tokens leaves b at 0."""
        n, x, xx, y, xy = self.sums
        spread = n * xx - x * x
        slope = max(0.0, (n * xy - x * y) / spread) if spread > 1e-9 * n * n else 0.0
        return max(0.0, (y - slope * x) / n), slope

    def of(self, tokens: float) -> float:
        a, b = self.line()
        return a + b * tokens


class Record:
    """Trials and successes by place: a place is tried where all drafts before it were accepted."""

    def __init__(self, rates: np.ndarray, decay: float) -> None:
        self.decay, self.tried = decay, np.full(len(rates), _PRIOR)
        self.right = rates * _PRIOR

    def observe(self, drafted: int, accepted: int) -> None:
        tried = min(drafted, accepted + 1)
        self.tried[:tried] *= self.decay
        self.right[:tried] *= self.decay
        self.tried[:tried] += 1
        self.right[:accepted] += 1

    @property
    def rates(self) -> np.ndarray:
        return self.right / self.tried


class Auto:
    """Gives each sequence its number of drafts. `k`: the most; `slots`: how many sequences there may be.

    Classes of requests, small integers, share what is known of acceptance; a new sequence begins with its class's.
    """

    def __init__(self, k: int, slots: int) -> None:
        self.k = k
        self.costs: dict[int, Cost] = {}
        self.classes: dict[int, Record] = {}
        self.own: list[Record | None] = [None] * slots
        self.class_of = np.zeros(slots, np.int64)
        self.without = np.zeros(slots, np.int64)  # steps since the sequence was last given a draft

    def start(self, slot: int, kind: int) -> None:
        """A sequence of class `kind` begins in a slot."""
        known = self.classes.setdefault(kind, Record(np.full(self.k, 0.5), _DECAY))
        self.own[slot], self.class_of[slot], self.without[slot] = Record(known.rates, _OWN_DECAY), kind, 0

    def took(self, slots: np.ndarray, drafted: np.ndarray, seconds: float) -> None:
        """What a step of verify rows alone took, the making of its drafts included."""
        self._cost(len(slots)).observe(len(slots) + int(drafted.sum()), seconds)

    def observe(self, slots: np.ndarray, drafted: np.ndarray, accepted: np.ndarray) -> None:
        """Drafts of verify rows that a step looked at, and those that it accepted, int [rows] each."""
        for slot, looked, right in zip(slots.tolist(), drafted.tolist(), accepted.tolist(), strict=True):
            record = self.own[slot]
            if looked and record is not None:
                record.observe(looked, right)
                self.classes[int(self.class_of[slot])].observe(looked, right)

    def counts(self, slots: np.ndarray) -> np.ndarray:
        """How many drafts each sequence may have in the next step, int64 [n]."""
        count = np.zeros(len(slots), np.int64)
        cost = self._cost(len(slots))
        if cost.seen < (self.k + 1) * _TRIAL:  # learn the line: every width in turn
            count[:] = cost.seen % (self.k + 1)
            return count
        a, b = cost.line()
        chances = np.stack([self._record(slot).rates.cumprod() for slot in slots.tolist()])
        tokens, seconds = float(len(slots)), a + b * len(slots)
        for index in np.argsort(-chances, axis=None, kind="stable"):
            chance = chances.flat[index]
            if chance * seconds <= tokens * b:
                break
            tokens, seconds = tokens + chance, seconds + b
            count[index // self.k] += 1  # chances fall with the place, so places come in order
        self.without[slots] = np.where(count > 0, 0, self.without[slots] + 1)
        probing = self.without[slots] >= _PROBE
        self.without[slots[probing]] = 0
        count[probing] = 1
        return count

    def _record(self, slot: int) -> Record:
        record = self.own[slot]
        assert record is not None, "a slot begins before it drafts"
        return record

    def _cost(self, rows: int) -> Cost:
        """Of a number of sequences, up to a quarter of it."""
        size = 1
        while size < rows:
            size += max(1, size // 4)
        return self.costs.setdefault(size, Cost())
