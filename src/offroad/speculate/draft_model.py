"""Draft-model speculation: a small model of the same tokenizer, in the same blocks and slots as the model.

What it stores at p is a function of the tokens up to p, as the model's own rows are, so prefix hits, checkpoints and
preemptions hold for it too. It has run the pending token before it proposes; of its own drafts it keeps the rows of
those that were accepted.
"""

from __future__ import annotations

import numpy as np
import torch

from offroad.models.registry import Model
from offroad.ops.bound import Ops
from offroad.run.rows import Rows
from offroad.speculate.proposer import Device, Turn, Twin, chain, rows_of_slots


class DraftModelProposer:
    """`ops` are the drafter's by phase, with its own embedding and head. It drafts for positions below `limit`, its
    context; None: for all."""

    def __init__(self, device: Device, model: Model, ops: dict[str, Ops], limit: int | None) -> None:
        self.device, self.arrays = device, device.arrays
        self.model, self.ops, self.limit = model, ops, limit
        self.last: torch.Tensor | None = None  # of every row that wants: the state behind its pending token

    def follow(self, turn: Turn) -> None:
        """Runs what the model ran and the drafter did not, up to the pending token. It runs also where nothing is
        proposed, else pages would have holes.

        A verify row's pending token was run by the last call, and all drafts but the last by `propose`: what is left is
        the new pending token, and before it the last draft if that was accepted. A chunk's pending token is a row of
        its own, since a chunk leaves no recurrent state but its last, which a checkpoint needs.
        """
        rows, verify = turn.rows, turn.rows.verify
        start, slot = rows.start.astype(np.int64), rows.slot.astype(np.int64)
        wants = turn.step.samples
        known, pending = np.zeros(len(slot), np.int64), np.zeros(len(slot), np.int64)
        known[:verify] = 1 + np.minimum(turn.moved[:verify] - 1, np.maximum(rows.width[:verify] - 2, 0))
        pending[:verify] = 1
        first, end = start + known, start + turn.moved + pending
        own = self.arrays.rows_of(slot, first, end - first, verify, wants * pending)
        self.last = self.model.forward(own, self.ops["decode" if verify == len(slot) else "prefill"])
        if len(begun := slot[wants & (pending == 0)]):
            self.last = torch.cat((self.last, self._advance(begun, self.arrays.length[begun])))

    def rehearse(self, phase: str, rows: Rows, twin: Twin) -> None:
        """A pass of the model, and its head."""
        ops = twin(self.ops[phase])
        ops.logits(self.model.forward(rows, ops))

    def propose(self, turn: Turn, slots: np.ndarray, counts: np.ndarray) -> None:
        """Drafts one after the other. Their rows lie past the length; the next `follow` writes over those of drafts
        that were not accepted."""
        assert self.last is not None, "a step is followed before it proposes"
        if self.limit is not None:
            counts = np.minimum(counts, np.maximum(self.limit - 1 - self.arrays.length[slots], 0))
        place = np.cumsum(turn.step.samples) - 1
        picked = torch.from_numpy(place[rows_of_slots(turn, slots)]).to(self.last.device)
        chain(self.device, slots, counts, self.last[picked], self.ops["decode"].logits, self._advance)

    def _advance(self, slots: np.ndarray, at: np.ndarray, state: torch.Tensor | None = None) -> torch.Tensor:
        """Runs one token of each slot, and gives the states behind them."""
        one = np.ones(len(slots), np.int64)
        return self.model.forward(self.arrays.rows_of(slots, at, one, len(slots), one), self.ops["decode"])
