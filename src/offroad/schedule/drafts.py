"""Counts of drafts, and the warning of a drafter that proposes for nothing."""

from __future__ import annotations

import logging

import numpy as np

_PATIENCE = 200  # steps with drafts, none of which was accepted, before the warning
_log = logging.getLogger("offroad")


class DraftCounts:
    """What became of drafts, in total and by their place behind the pending token (0: the first).

    `k`: most drafts of a row in a step; `method`: the drafter's, for the warning.
    """

    def __init__(self, k: int, method: str) -> None:
        self.method = method
        self.rows = self.idle_steps = 0  # verify rows with drafts, and steps whose verify rows had none
        self.drafted = np.zeros(k, np.int64)
        self.accepted = np.zeros(k, np.int64)
        self._in_vain = 0

    def take(self, drafted: np.ndarray, accepted: np.ndarray) -> None:
        """Counts a step: drafts that were looked at, and those that were what the model said, int [verify rows]."""
        if not len(drafted):
            return
        if not drafted.any():
            self.idle_steps += 1
            return
        self.rows += int(np.count_nonzero(drafted))
        for place in range(len(self.drafted)):
            self.drafted[place] += np.count_nonzero(drafted > place)
            self.accepted[place] += np.count_nonzero(accepted > place)
        if not self.accepted.any():
            self._in_vain += 1
            if self._in_vain == _PATIENCE:
                self._warn()

    def stats(self) -> dict[str, int | list[int]]:
        """The counters, by their names in `Stats`."""
        return {
            "draft_tokens": int(self.drafted.sum()),
            "accepted_draft_tokens": int(self.accepted.sum()),
            "draft_rows": self.rows,
            "undrafted_steps": self.idle_steps,
            "drafted_by_place": self.drafted.tolist(),
            "accepted_by_place": self.accepted.tolist(),
        }

    def _warn(self) -> None:
        _log.warning(
            "drafts of method %s: none of %d was accepted in %d steps; answers are right, but slower than without. "
            "Likely causes: the drafter's tensors are damaged or another model's, it has another tokenizer, or the "
            "requests sample at a high temperature. Serve without --speculative-config, or with another drafter.",
            self.method,
            int(self.drafted.sum()),
            _PATIENCE,
        )
