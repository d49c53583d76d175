"""One sequence under a guide: thoughts, then an answer in a language. A function of the tokens it was given."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Protocol

import numpy as np

from offroad.sample.guide import Guide

BITS = 32
TOO_SLOW = "a grammar whose tokens take too long to find"


class Matcher(Protocol):
    """Follows a language token by token, or has given up: then it is `slow`, and allows everything."""

    slow: bool

    def fill(self, mask: np.ndarray) -> None:
        """Sets the bits of the tokens that may come next in a zeroed int32 `[words]`; all bits once it has ended."""

    def accept(self, token: int) -> bool:
        """Takes a token; False: it is none of the language, and nothing has changed."""

    def rollback(self, count: int) -> None:
        """Forgets the last `count` tokens."""


class _Phase(Enum):
    FIRST = "first"  # no token yet: thoughts may begin
    THINKING = "thinking"
    AFTER = "after"  # behind the thoughts: a line break may come before the answer
    BEGIN = "begin"  # of the answer, where it may be a call instead
    ANSWER = "answer"
    FREE = "free"


class Guided:
    """What may come next. `stops` end a sequence: they may not end its thoughts if a grammar waits behind them."""

    def __init__(self, guide: Guide, matcher: Matcher | None, stops: Sequence[int]) -> None:
        self._guide, self._matcher, self._stops = guide, matcher, np.array(sorted(stops), np.int64)
        thinking, self._thought = guide.thinking, 0
        answer = _Phase.BEGIN if matcher is not None else _Phase.FREE
        self._phase = answer if thinking is None else _Phase.THINKING if thinking.opened else _Phase.FIRST
        self._past: list[tuple[_Phase, int, bool]] = []  # before each token, and whether the matcher took it

    @property
    def slow(self) -> bool:
        """Whether the grammar takes too long, so that the sequence must end."""
        return self._matcher is not None and self._matcher.slow

    def fill(self, mask: np.ndarray) -> bool:
        """Sets the bits of the tokens that may come next in a zeroed int32 `[words]`; False: all may, none is set."""
        thinking, matcher = self._guide.thinking, self._matcher
        if self._phase == _Phase.FREE:
            return False
        if self._phase == _Phase.THINKING:
            assert thinking is not None
            if self._spent():
                _allow(mask, thinking.end_id)
                return True
            if matcher is None:
                return False
            mask[:] = -1
            for stop in self._stops:
                mask[stop // BITS] &= ~np.int32(_bit(stop))
            return True
        if matcher is None:
            return False  # the first token, and no grammar
        matcher.fill(mask)
        if self._phase == _Phase.FIRST and thinking is not None and thinking.start_id is not None:
            _allow(mask, thinking.start_id)
        if self._phase == _Phase.AFTER:
            _allow(mask, *self._guide.blanks)
        if self._phase != _Phase.ANSWER:
            _allow(mask, *self._guide.escapes)
        return True

    def accept(self, token: int) -> bool:
        """Takes a token; False: it may not come here, and nothing has changed."""
        phase, thought, took, thinking = self._phase, self._thought, False, self._guide.thinking
        answer = _Phase.FREE if self._matcher is None else _Phase.AFTER
        if phase == _Phase.THINKING:
            assert thinking is not None
            if token == thinking.end_id:
                self._phase = answer
            elif self._spent() or (self._matcher is not None and token in self._stops):
                return False
            self._thought += 1
        elif phase == _Phase.FIRST and thinking is not None and token == thinking.start_id:
            self._phase = _Phase.THINKING
        elif phase == _Phase.AFTER and token in self._guide.blanks:
            self._phase = _Phase.BEGIN
        elif phase in (_Phase.FIRST, _Phase.AFTER, _Phase.BEGIN) and token in self._guide.escapes:
            self._phase = _Phase.FREE
        elif phase != _Phase.FREE and self._matcher is not None:
            took = self._matcher.accept(token)
            if not took:
                return False
            self._phase = _Phase.ANSWER
        else:
            self._phase = _Phase.FREE
        self._past.append((phase, thought, took))
        return True

    def _spent(self) -> bool:
        thinking = self._guide.thinking
        return thinking is not None and thinking.budget is not None and self._thought >= thinking.budget

    def rollback(self, count: int) -> None:
        """Forgets the last `count` tokens."""
        taken = 0
        for _ in range(count):
            self._phase, self._thought, took = self._past.pop()
            taken += took
        if taken:
            assert self._matcher is not None
            self._matcher.rollback(taken)


def words(vocab: int) -> int:
    """Length of a mask in int32."""
    return -(-vocab // BITS)


def _bit(token: int) -> int:
    return int(np.uint32(1 << (int(token) % BITS)).astype(np.int32))


def _allow(mask: np.ndarray, *tokens: int) -> None:
    for token in tokens:
        mask[token // BITS] |= np.int32(_bit(token))
