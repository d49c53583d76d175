"""Checkpoints: places on the device for the ring rows that a resume at a boundary needs, found by the boundary's key."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass


@dataclass(eq=False)
class Checkpoint:
    """A place and the boundary whose rows it holds; a *ticket* (no key) until the step that may fill it is committed.

    `pins`: restores that have not been committed; a pinned place is not reused. `rolling`: it follows a sequence in
    decode and gives way to the next one of that sequence.
    """

    place: int
    boundary: int
    rolling: bool = False
    key: bytes | None = None
    pins: int = 0


class Checkpoints:
    """`count` places on the device, least recently used first to go.

    A slower tier would take what `_evict` drops and answer in `find`; nothing outside knows where a checkpoint lies.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.free = list(range(count - 1, -1, -1))
        self.index: OrderedDict[bytes, Checkpoint] = OrderedDict()

    def ticket(self, boundary: int, *, rolling: bool = False, displace: bool = True) -> Checkpoint | None:
        """A place that a step may fill, if need be (and `displace`) that of the oldest checkpoint. None: no place."""
        if not self.free and not (displace and self._evict()):
            return None
        return Checkpoint(self.free.pop(), boundary, rolling)

    def give_back(self, ticket: Checkpoint) -> None:
        """A ticket that did not fire."""
        self.free.append(ticket.place)

    def file(self, ticket: Checkpoint, key: bytes) -> bool:
        """A ticket that fired is found under `key` from now on; one that is known already gives its place back."""
        known = self.index.get(key)
        if known is not None:
            known.rolling &= ticket.rolling
            self.index.move_to_end(key)
            self.give_back(ticket)
            return False
        ticket.key = key
        self.index[key] = ticket
        return True

    def find(self, key: bytes) -> Checkpoint | None:
        return self.index.get(key)

    def pin(self, key: bytes) -> Checkpoint:
        """The checkpoint of `key`, kept until `unpin`: somebody is about to copy it."""
        found = self.index[key]
        self.index.move_to_end(key)
        found.pins += 1
        found.rolling = False
        return found

    def unpin(self, found: Checkpoint) -> None:
        found.pins -= 1
        if found.key is None and not found.pins:
            self.free.append(found.place)

    def forget(self, key: bytes) -> None:
        """Nothing is found under `key` any more; a pinned place is free after its last `unpin`."""
        found = self.index.pop(key, None)
        if found is None:
            return
        found.key = None
        if not found.pins:
            self.free.append(found.place)

    def forget_free(self) -> None:
        """Forgets all checkpoints that nobody is about to copy."""
        for key in [key for key, found in self.index.items() if not found.pins]:
            self.forget(key)

    def _evict(self) -> bool:
        key = next((key for key, found in self.index.items() if not found.pins), None)
        if key is not None:
            self.forget(key)
        return key is not None

    def check(self, outstanding: list[Checkpoint], pinned: list[Checkpoint]) -> None:
        """Raises AssertionError unless every place is free, promised to a ticket, filed or awaiting its last copy."""
        orphans = {c.place for c in pinned if c.key is None}
        used = sorted([*self.free, *(t.place for t in outstanding), *(c.place for c in self.index.values()), *orphans])
        assert used == list(range(self.count)), "I1: checkpoint places"
        assert all(key == c.key for key, c in self.index.items()), "I2: checkpoint keys"
        for found in self.index.values():
            assert found.pins == sum(c is found for c in pinned), "I1: checkpoint pins"
