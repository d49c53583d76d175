"""Prompt lookup: what followed the last tokens when they occurred before is proposed again. Needs no weights."""

from __future__ import annotations

import numpy as np

from offroad.run.rows import Rows
from offroad.speculate.config import Speculation
from offroad.speculate.proposer import Device, Turn, Twin


def propose(known: np.ndarray, count: int, shortest: int, longest: int) -> np.ndarray:
    """Up to `count` tokens that followed the longest n-gram (`shortest` to `longest` tokens) that ends `known` where it
    occurred last before; none if it never did. known int64 [tokens]."""
    for size in range(min(longest, len(known) - 1), shortest - 1, -1):
        pattern = known[-size:]
        # Ends of earlier occurrences: compare from the last token on, since most places differ there already.
        ends = np.flatnonzero(known[size - 1 : -1] == pattern[-1]) + size - 1
        for back in range(1, size):
            ends = ends[known[ends - back] == pattern[-1 - back]]
            if not len(ends):
                break
        if len(ends):
            return known[ends[-1] + 1 : ends[-1] + 1 + count]
    return known[:0]


class NgramProposer:
    """Proposes by prompt lookup; remembers nothing but the tokens."""

    def __init__(self, device: Device, config: Speculation) -> None:
        self.arrays, self.shortest, self.longest = device.arrays, config.shortest, config.longest

    def follow(self, turn: Turn) -> None:
        """Nothing: known tokens are all there is."""

    def rehearse(self, phase: str, rows: Rows, twin: Twin) -> None:
        """Nothing: it runs no model."""

    def propose(self, turn: Turn, slots: np.ndarray, counts: np.ndarray) -> None:
        for slot, count in zip(slots.tolist(), counts.tolist(), strict=True):
            known = self.arrays.known(slot)
            ids = propose(known, count, self.shortest, self.longest) if count else known[:0]
            self.arrays.draft(slot, ids)
