"""The Gemma-4 assistant: a drafter without memory, whose queries read the model's keys and values.

All drafts of a burst are made at one position, behind the last token that the model has stored, over the keys that it
has stored. What moves on is a hidden state: the model's own first, then what the drafter makes of it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import numpy as np
import torch

from offroad.ops.bound import Ops
from offroad.run.rows import Rows
from offroad.speculate.proposer import Device, Turn, Twin, chain, rows_of_slots


class AssistantModel(Protocol):
    """The drafter's forward pass, its head, and what follows a draft."""

    def forward(self, rows: Rows, hidden: torch.Tensor, ops: Ops) -> torch.Tensor: ...

    def logits(self, state: torch.Tensor, ops: Ops) -> torch.Tensor: ...

    def after(self, state: torch.Tensor, ops: Ops) -> torch.Tensor: ...


class AssistantProposer:
    """`ops` are the drafter's."""

    def __init__(self, device: Device, model: AssistantModel, ops: Ops) -> None:
        self.device, self.arrays = device, device.arrays
        self.model, self.ops = model, ops

    def follow(self, turn: Turn) -> None:
        """Nothing: it remembers nothing."""

    def rehearse(self, phase: str, rows: Rows, twin: Twin) -> None:
        """A pass over rows of single tokens, its head, and what follows."""
        if phase != "decode" or rows.width.max() > 1:
            return
        ops = twin(self.ops)
        hidden = ops.drafter.linears["post_projection"].n
        before = torch.empty((rows.tokens, hidden), dtype=ops.dtype, device=rows.ids.device)
        state = self.model.forward(rows, before, ops)
        self.model.logits(state, ops)
        self.model.after(state, ops)

    def propose(self, turn: Turn, slots: np.ndarray, counts: np.ndarray) -> None:
        """Drafts one after the other; stores nothing."""
        if not counts.any():
            self.arrays.drafted[slots] = 0
            return
        state = self._run(slots, self.arrays.length[slots], self._hidden(turn, slots))
        chain(self.device, slots, counts, state, lambda state: self.model.logits(state, self.ops), self._advance)

    def _hidden(self, turn: Turn, slots: np.ndarray) -> torch.Tensor:
        """The model's state at the last position that it has stored, [slots, hidden]: a verify row's behind the last
        accepted draft."""
        rows = turn.rows
        count = rows.wanted_width.astype(np.int64)
        last = count.cumsum() - 1
        last[: rows.verify] += turn.moved[: rows.verify] - count[: rows.verify]
        return turn.hidden[torch.from_numpy(last[rows_of_slots(turn, slots)]).to(turn.hidden.device)]

    def _advance(self, slots: np.ndarray, at: np.ndarray, state: torch.Tensor) -> torch.Tensor:
        return self._run(slots, at, self.model.after(state, self.ops))

    def _run(self, slots: np.ndarray, at: np.ndarray, hidden: torch.Tensor) -> torch.Tensor:
        """The states behind the tokens at positions `at`, all seen from the length: the last key is that of the
        position before it, whose angles are one lower."""
        one = np.ones(len(slots), np.int64)
        rows = self.arrays.rows_of(slots, self.arrays.length[slots] - 1, one, len(slots), one, late=-1)
        return self.model.forward(replace(rows, ids=self.arrays.ids(slots, at)), hidden, self.ops)
