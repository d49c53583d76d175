"""Slots: places on the device that hold what belongs to one running sequence."""

from __future__ import annotations


class Slots:
    """Slots 1 .. count-1; slot 0 is the bin."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.free = list(range(count - 1, 0, -1))

    def take(self) -> int:
        """A free slot; 0 if there is none."""
        return self.free.pop() if self.free else 0

    def give(self, slot: int) -> None:
        self.free.append(slot)
