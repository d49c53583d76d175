"""What the host knows of one sequence in the caches, and of its part in a step."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from dataclasses import dataclass, field

from offroad.cache.checkpoints import Checkpoint
from offroad.schedule.step import Kind


@dataclass(frozen=True)
class Resume:
    """How much of a sequence the caches hold: `matched` tokens by history blocks, of which `resumed` can be used.

    Their difference is lost to state: a window or a checkpoint that is gone.
    """

    matched: int
    resumed: int


@dataclass(eq=False, slots=True)
class Row:
    """A sequence's part of one step. `width` bounds by how much its length moves; the device decides.

    `low`: by how much it moves at least. `taken`: lengths of the two tables before, for `abort`.
    """

    seq: Sequence
    kind: Kind
    width: int
    low: int
    final: bool
    taken: tuple[int, int]
    tickets: tuple[Checkpoint, ...] = ()


@dataclass(eq=False)
class Sequence:
    """Known tokens and what the caches hold of them. `slot` 0: not admitted.

    `fresh`: it is to run all of its tokens, and resumes nothing. `tokens`: all that the host knows, the pending one
    last. `committed`: those whose entries are in the caches. `goal`:
    prefill ends here. Tables hold blocks by column; a window column without a block holds 0. `edits`: table changes
    that the device has not been told, by (table, column). `marks`: sorted boundaries worth resuming. Steps in flight
    are bounded by `fly_low` and `fly_high`.
    """

    tokens: list[int]
    root: bytes
    wanted_marks: tuple[int, ...] = ()
    keys: list[bytes] = field(default_factory=list)
    slot: int = 0
    committed: int = 0
    published: int = 0
    retired: int = 0
    goal: int = 0
    resume: Resume = Resume(0, 0)
    history: list[int] = field(default_factory=list)
    window: list[int] = field(default_factory=list)
    edits: dict[tuple[int, int], int] = field(default_factory=dict)
    marks: list[int] = field(default_factory=list)
    flying: deque[Row] = field(default_factory=deque)
    fly_low: int = 0
    fly_high: int = 0
    begun: bool = False
    dead: bool = False
    fresh: bool = False
    restored: Checkpoint | None = None
    rolling: Checkpoint | None = None

    @property
    def low(self) -> int:
        """The least length after the steps in flight."""
        return self.committed + self.fly_low

    @property
    def high(self) -> int:
        """The greatest length after the steps in flight."""
        return self.committed + self.fly_high

    def next_mark(self, after: int, interval: int) -> int | None:
        """The first boundary beyond `after` that is worth resuming; None: there is none."""
        at = bisect_right(self.marks, after)
        mark = self.marks[at] if at < len(self.marks) else None
        if interval:
            regular = (after // interval + 1) * interval
            return regular if mark is None else min(mark, regular)
        return mark
