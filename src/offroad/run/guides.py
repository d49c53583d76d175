"""The guided sequences among the rows of a step: one mask for each token that they draw."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from offroad.sample.guide import Grammar
from offroad.sample.guided import Guided, Matcher, words
from offroad.sample.masks import Masks
from offroad.schedule.step import Start


class Guides:
    """Guided sequences by slot. What one allows is a function of its generated tokens, so that a sequence that comes
    back after a preemption goes on where it was."""

    def __init__(self, vocab: int, matcher: Callable[[Grammar], Matcher]) -> None:
        self._words, self._matcher = words(vocab), matcher
        self._by_slot: dict[int, Guided] = {}

    def start(self, start: Start) -> None:
        """A sequence begins in a slot, guided or not; what it has said already is taken."""
        self._by_slot.pop(start.slot, None)
        if (guide := start.guide) is None:
            return
        matcher = None if guide.grammar is None else self._matcher(guide.grammar)
        guided = Guided(guide, matcher, {*start.eos_ids, *start.params.stop_token_ids})
        for token in start.tokens[start.prompt_len :].tolist():
            guided.accept(token)
        self._by_slot[start.slot] = guided

    def among(self, slots: np.ndarray) -> bool:
        """Whether one of the slots has a guide."""
        return bool(self._by_slot) and not self._by_slot.keys().isdisjoint(slots.tolist())

    def masks(self, slots: np.ndarray, place: np.ndarray | int, before: np.ndarray | None) -> Masks | None:
        """Masks for rows of logits of `slots` [n]; None: none is limited. A row at a `place` [n] above 0 comes behind
        the one of the same sequence before it and the draft `before` [n] it; None: there are no drafts.

        Drafts are followed and taken back again. Behind one that may not come nothing is limited: it is not what will
        be drawn, so the rest is not told.
        """
        rows = [i for i, slot in enumerate(slots.tolist()) if slot in self._by_slot]
        if not rows:
            return None
        bits, kept, depth, guided = np.zeros((len(rows), self._words), np.int32), [], 0, None
        places = np.broadcast_to(place, slots.shape)
        for n, i in enumerate(rows):
            if places[i] == 0:
                if guided is not None:
                    guided.rollback(max(depth, 0))
                guided, depth = self._by_slot[int(slots[i])], 0
            elif depth >= 0:
                assert before is not None
                assert guided is not None
                if guided.accept(int(before[i])):
                    depth += 1
                else:
                    guided.rollback(depth)
                    depth = -1
            if depth >= 0 and guided.fill(bits[n]):
                kept.append(n)
        guided.rollback(max(depth, 0))
        return Masks(np.array(rows, np.int64)[kept], bits[kept]) if kept else None

    def told(self, slots: np.ndarray, ids: np.ndarray) -> None:
        """Tokens that were drawn for `slots` and stay, in order; int64 [n] each."""
        for slot, id in zip(slots.tolist(), ids.tolist(), strict=True):
            if (guided := self._by_slot.get(slot)) is not None:
                guided.accept(id)

    def given_up(self) -> list[int]:
        """The slots, each once, of sequences whose grammar takes too long: what they say next is not guided."""
        slots = [slot for slot, guided in self._by_slot.items() if guided.slow]
        for slot in slots:
            del self._by_slot[slot]
        return slots
