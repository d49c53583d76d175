"""Mistakes seeded into the cache or the device: each must be caught by an invariant, or those are toothless."""

from __future__ import annotations

from dataclasses import replace

import pytest
from simdevice import SimDevice
from world import World, play

from offroad.cache.hybrid import HybridCache
from offroad.cache.pages import Pages
from offroad.cache.prefix import root_key
from offroad.cache.sequence import Resume
from offroad.cache.spec import CacheConfig
from offroad.schedule.step import Kind, Table


class PublishesBeforeCommit(HybridCache):
    def reserve(self, seq, kind, width):
        row = super().reserve(seq, kind, width)
        if row is not None and kind == Kind.CHUNK:
            committed, seq.committed = seq.committed, seq.high
            self._publish(seq)
            seq.committed = committed
        return row


class RetiresByReservedLength(HybridCache):
    def reserve(self, seq, kind, width):
        row = super().reserve(seq, kind, width)
        if row is not None and self.keep:
            committed, seq.committed = seq.committed, seq.high
            if self._first_column(seq.committed) > seq.retired:
                self._retire(seq)
            seq.committed = committed
        return row


class CountsBlocksFromCommitted(HybridCache):
    def reserve(self, seq, kind, width):
        if kind == Kind.CHUNK:
            return super().reserve(seq, kind, width)
        flying, seq.fly_high = seq.fly_high, 0
        row = super().reserve(seq, kind, width)
        seq.fly_high += flying
        return row


class NoBlocksForTheDrafter(HybridCache):
    def reserve(self, seq, kind, width):
        reach, self.config = self.config, CacheConfig(**{**vars(self.config), "k": 0})
        row = super().reserve(seq, kind, width)
        self.config = reach
        return row


class FreesUnderAStepInFlight(HybridCache):
    def release(self, seq, *, forget=False):
        seq.dead = True
        self._free(seq)
        return True


class UntaggedSalt(HybridCache):
    def root(self, salt):
        return root_key(self.config.namespace, salt and "salted")


class KeepsTheKeyOfAnEvictedBlock(HybridCache):
    def __init__(self, config):
        super().__init__(config)

        class Stale(Pages):
            def _unkey(self, block):
                key = self.key_of[block]
                self.key_of[block] = None
                return key

        self.history = Stale(config.history_blocks, self._broken)


class FilesUnderTheBoundaryBefore(HybridCache):
    def _settle(self, row, start, length):
        for ticket in row.tickets:
            if start < ticket.boundary <= length and ticket.boundary > self.block:
                self.checkpoints.forget(row.seq.keys[ticket.boundary // self.block - 2])
                self.checkpoints.file(ticket, row.seq.keys[ticket.boundary // self.block - 2])
            else:
                super()._settle(replace(row, tickets=(ticket,)), start, length)


class RestoresWithoutAPin(HybridCache):
    def admit(self, seq, leave=0, leave_window=0):
        done = super().admit(seq, leave, leave_window)
        if done and seq.restored is not None:
            seq.restored.pins -= 1
            self.unpinned = [*getattr(self, "unpinned", []), seq.restored]
        return done


class AbortLosesTickets(HybridCache):
    def abort(self, row):
        row.tickets = ()
        super().abort(row)


class SkippedColumnsAreNotTold(HybridCache):
    def reserve(self, seq, kind, width):
        row = super().reserve(seq, kind, width)
        for (table, column), b in list(seq.edits.items()):
            if row is not None and table == Table.WINDOW and not b:
                del seq.edits[table, column]
        return row

    def collect(self, rows):
        tables, *rest = super().collect(rows)
        return (tables[(tables[:, 1] == Table.HISTORY) | (tables[:, 3] > 0)], *rest)


class ResumesWithoutAWindow(HybridCache):
    def _first_column(self, length):
        return length // self.block

    def resume_point(self, seq):
        found = super().resume_point(seq)
        return Resume(found.matched, found.matched if not self.config.rings else found.resumed)


class ResumesWithoutACheckpointOfItsOwn(HybridCache):
    def resume_point(self, seq):
        found = super().resume_point(seq)
        return Resume(found.matched, max(0, found.resumed - self.block))


class EvictsFromTheRoot(HybridCache):
    def _free(self, seq):
        seq.history.reverse()
        super()._free(seq)


class AdoptsWithoutHolding(HybridCache):
    @staticmethod
    def _name(seq, table, pages, blocks, column, key):
        own = blocks[column]
        named = pages.publish(own, key)
        if named != own and pages.refs[named]:
            pages.drop(own)
            blocks[column] = seq.edits[table, column] = named


class EvictionTellsNobody(HybridCache):
    def _broken(self, key):
        pass


class ZeroDraftsReadVersionZero(SimDevice):
    def run(self, slot, kind, width, wanted):
        if kind == Kind.VERIFY and width == 1 and self.family.rings and self.config.k:
            at = (self.length[slot] - 1) % self.capacity["state"]
            self.rings[slot]["state"][at] = self.rings[slot]["state"][0]
        return super().run(slot, kind, width, wanted)


class RingOneRowShort(SimDevice):
    def __init__(self, *args, **more):
        super().__init__(*args, **more)
        if self.config.k:
            self.capacity["state"] -= 1


class CapturesAtTheEnd(SimDevice):
    def capture(self, place, slot, boundary):
        super().capture(place, slot, self.length[slot])


BUGS = [
    PublishesBeforeCommit,
    RetiresByReservedLength,
    CountsBlocksFromCommitted,
    NoBlocksForTheDrafter,
    FreesUnderAStepInFlight,
    UntaggedSalt,
    KeepsTheKeyOfAnEvictedBlock,
    FilesUnderTheBoundaryBefore,
    RestoresWithoutAPin,
    AbortLosesTickets,
    SkippedColumnsAreNotTold,
    ResumesWithoutAWindow,
    ResumesWithoutACheckpointOfItsOwn,
    EvictsFromTheRoot,
    AdoptsWithoutHolding,
    EvictionTellsNobody,
    ZeroDraftsReadVersionZero,
    RingOneRowShort,
    CapturesAtTheEnd,
]


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_a_seeded_bug_is_caught(bug):
    device = issubclass(bug, SimDevice)
    world = type("Buggy", (World,), {"device_class" if device else "cache_class": bug})
    for seed in range(400):
        try:
            play(seed, world)
        except AssertionError:
            return
    pytest.fail("no invariant has seen it")
