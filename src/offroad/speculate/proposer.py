"""What drafters have in common: they follow what the model has run, then propose what may come next."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from offroad.run.arrays import Arrays
from offroad.run.rows import Rows
from offroad.sample.sampler import Sampler
from offroad.schedule.step import Step


@dataclass(frozen=True)
class Turn:
    """A step as it ended: `moved` [rows] is by how much each row's length moved, `hidden` [wanted, hidden] what left
    the model. Lengths and pending tokens are those after the step."""

    step: Step
    rows: Rows
    moved: np.ndarray
    hidden: torch.Tensor


@dataclass(frozen=True)
class Device:
    """What a drafter works on: known tokens, lengths and drafts by slot, and the sampler whose noise drafts are drawn
    with, so that a draft is what the model would draw if it thought like the drafter."""

    arrays: Arrays
    sampler: Sampler


Twin = Callable[[Any], Any]


class Proposer(Protocol):
    """A drafter. Wrong drafts cost time and nothing else: what is told never depends on them."""

    def follow(self, turn: Turn) -> None:
        """Brings what the drafter remembers up to the lengths, from what the model itself ran."""

    def propose(self, turn: Turn, slots: np.ndarray, counts: np.ndarray) -> None:
        """Puts up to `counts` drafts behind the pending tokens of `slots`, int64 [n] each; counts may be 0."""

    def rehearse(self, phase: str, rows: Rows, twin: Twin) -> None:
        """Runs its forward passes of a phase over `rows` without memory, and no others: `twin` makes such copies of
        what it has. What they would launch is compiled before it is needed."""


def rows_of_slots(turn: Turn, slots: np.ndarray) -> np.ndarray:
    """The step's rows of `slots`, int64 [n]."""
    row_of = {int(slot): row for row, slot in enumerate(turn.rows.slot)}
    return np.array([row_of[int(slot)] for slot in slots], np.int64)


Logits = Callable[[torch.Tensor], torch.Tensor]
Advance = Callable[[np.ndarray, np.ndarray, torch.Tensor], torch.Tensor]


def chain(
    device: Device, slots: np.ndarray, counts: np.ndarray, state: torch.Tensor, logits: Logits, advance: Advance
) -> None:
    """Draws `counts` drafts for `slots` one after the other, each from the state behind the one before.

    `state` [n, hidden] is what `logits` scores for the position behind the pending token; `advance(slots, positions,
    state)` runs the drafts at positions of slots and gives the states behind them.
    """
    arrays, sampler = device.arrays, device.sampler
    arrays.drafted[slots] = counts
    for depth in range(1, int(counts.max(initial=0)) + 1):
        going = np.flatnonzero(counts >= depth)
        if len(going) < len(slots):
            state = state[torch.from_numpy(going).to(state.device)]
            slots, counts = slots[going], counts[going]
        at = arrays.length[slots] + depth
        arrays.put(slots, at, sampler.draw(logits(state), slots, at, arrays.tokens))
        if depth < counts.max():
            state = advance(slots, at, state)
