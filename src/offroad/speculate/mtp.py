"""Multi-token prediction: the checkpoint's own drafter, over pairs of a hidden state and the token after it.

The pair (hidden state of position p - 1, token p) is stored at p, so what lies at p depends on the tokens up to p and a
cached block of it is true for whoever shares those. Its angles are those of p - 1, and position 0 has no pair. A pair
at the start of a chunk needs the hidden state before the chunk: the *carry*, a row of the slot, also in checkpoints.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from offroad.ops.bound import Ops
from offroad.run.rows import RingView, Rows
from offroad.speculate.proposer import Device, Turn, Twin, chain, rows_of_slots


class MtpModel(Protocol):
    """The drafter's forward pass."""

    def forward(self, rows: Rows, hidden: torch.Tensor, ops: Ops) -> torch.Tensor: ...


class MtpProposer:
    """`ops` are the drafter's by phase; `carry` holds hidden states by position."""

    def __init__(self, device: Device, model: MtpModel, ops: dict[str, Ops], carry: RingView) -> None:
        self.device, self.arrays = device, device.arrays
        self.model, self.ops, self.carry = model, ops, carry
        self.last: torch.Tensor | None = None  # of every row of the step: the state that the first draft is read from

    def follow(self, turn: Turn) -> None:
        """Stores the pairs of what the model ran, up to the pending token's. It runs also where nothing is proposed,
        else pages would have holes."""
        rows, verify = turn.rows, turn.rows.verify
        start, slot = rows.start.astype(np.int64), rows.slot.astype(np.int64)
        carried = (np.arange(len(slot)) >= verify) & (start > 0)  # a verify row's first pair is there already
        first = start + 1 - carried
        width = start + turn.moved + 1 - first
        hidden = self._before(turn, slot, start, first, width)
        self._keep(turn, slot, start)
        pairs = self.arrays.rows_of(slot, first, width, verify, np.ones(len(slot), np.int64), late=1)
        self.last = self.model.forward(pairs, hidden, self.ops["decode" if verify == len(slot) else "prefill"])

    def _before(
        self, turn: Turn, slot: np.ndarray, start: np.ndarray, first: np.ndarray, width: np.ndarray
    ) -> torch.Tensor:
        """The hidden state before each pair's token, [pairs, hidden]: the step's own, or the carry."""
        carry = self.carry.data[torch.from_numpy(slot), torch.from_numpy((start - 1) % self.carry.capacity)]
        row = np.repeat(np.arange(len(slot)), width)
        behind = np.arange(len(row)) - np.repeat(width.cumsum() - width, width) + first[row] - 1 - start[row]
        index = np.where(behind >= 0, turn.rows.offset[row] + behind, len(turn.hidden) + row)
        return torch.cat((turn.hidden, carry.to(turn.hidden.dtype)))[torch.from_numpy(index).to(turn.hidden.device)]

    def _keep(self, turn: Turn, slot: np.ndarray, start: np.ndarray) -> None:
        """Stores the last hidden states of each row, for what begins there."""
        width, offset = turn.rows.width.astype(np.int64), turn.rows.offset
        count = np.minimum(width, self.carry.capacity)
        row = np.repeat(np.arange(len(slot)), count)
        back = np.repeat(count.cumsum(), count) - np.arange(len(row))  # 1 for a row's last token
        at = (start + width)[row] - back
        index = torch.from_numpy((offset + width)[row] - back).to(turn.hidden.device)
        where = torch.from_numpy(slot[row]), torch.from_numpy(at % self.carry.capacity)
        self.carry.data[where] = turn.hidden[index].to(self.carry.data.dtype)

    def rehearse(self, phase: str, rows: Rows, twin: Twin) -> None:
        """A pass over as many pairs, and the head."""
        ops = twin(self.ops[phase])
        hidden = torch.empty((rows.tokens, self.carry.data.shape[-1]), dtype=ops.dtype, device=rows.ids.device)
        ops.logits(self.model.forward(rows, hidden, ops))

    def propose(self, turn: Turn, slots: np.ndarray, counts: np.ndarray) -> None:
        """Drafts one after the other, each from the state behind the one before. The pairs of drafts lie past the
        length, where the next step's `follow` writes over them."""
        assert self.last is not None, "a step is followed before it proposes"
        picked = torch.from_numpy(rows_of_slots(turn, slots)).to(self.last.device)
        chain(self.device, slots, counts, self.last[picked], self.ops["decode"].logits, self._advance)

    def _advance(self, slots: np.ndarray, at: np.ndarray, hidden: torch.Tensor) -> torch.Tensor:
        one = np.ones(len(slots), np.int64)
        rows = self.arrays.rows_of(slots, at, one, len(slots), one, late=1)
        return self.model.forward(rows, hidden, self.ops["decode"])
