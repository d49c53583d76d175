"""The hybrid cache against a simulated device: invariants I1 .. I9 after every move, and seeded bugs that they catch."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from simdevice import BLOCK, KEEP, Family, SimDevice
from world import FAMILIES, World, config_of, play, random_world

from offroad.cache.hybrid import HybridCache
from offroad.cache.pages import Pages
from offroad.cache.prefix import root_key
from offroad.cache.sequence import Resume, Sequence
from offroad.cache.spec import CacheConfig
from offroad.errors import SettingsError
from offroad.schedule.step import Kind, Table


class DataChooser:
    """Choices that Hypothesis makes."""

    def __init__(self, data) -> None:
        self.data = data

    def integer(self, low: int, high: int) -> int:
        return self.data.draw(st.integers(low, high))

    def pick(self, items):
        return self.data.draw(st.sampled_from(list(items)))


class CacheMachine(RuleBasedStateMachine):
    @initialize(
        family=st.sampled_from(FAMILIES), history=st.sampled_from([9, 14, 24]), window=st.sampled_from([8, 12]),
        slots=st.sampled_from([2, 4]), checkpoints=st.sampled_from([1, 3, 8]), k=st.sampled_from([0, 3]),
        interval=st.sampled_from([0, 8]), seed=st.integers(0, 999),
    )
    def begin(self, family, history, window, slots, checkpoints, k, interval, seed):
        sizes = dict(history=history, window=window, slots=slots, checkpoints=checkpoints, k=k, interval=interval)
        self.world = World(config_of(family, **sizes), family, seed)

    @rule(data=st.data())
    def submit(self, data):
        self.world.move("submit", DataChooser(data))

    @precondition(lambda self: self.world.past)
    @rule(data=st.data())
    def submit_related(self, data):
        self.world.move("submit_related", DataChooser(data))

    @precondition(lambda self: self.world.waiting)
    @rule(data=st.data())
    def admit(self, data):
        self.world.move("admit", DataChooser(data))

    @precondition(lambda self: self.world.running)
    @rule(data=st.data(), name=st.sampled_from(["turn", "turn", "turn", "reserve_then_abort", "leave"]))
    def run(self, data, name):
        self.world.move(name, DataChooser(data))

    @precondition(lambda self: self.world.steps)
    @rule(data=st.data())
    def commit(self, data):
        self.world.move("commit", DataChooser(data))

    @rule(data=st.data())
    def reset(self, data):
        self.world.move("reset", DataChooser(data))

    @invariant()
    def invariants(self):
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self):
        if hasattr(self, "world"):
            self.world.finish()


TestCacheMachine = CacheMachine.TestCase
# At least 40 examples; more by `--hypothesis-profile` (register one with a larger max_examples).
TestCacheMachine.settings = settings(
    max_examples=max(40, settings().max_examples // 2), stateful_step_count=40, deadline=None, print_blob=True,
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.parametrize("first", range(0, 120, 40))
def test_random_worlds_hold_the_invariants(first):
    seen = sum((play(seed).seen for seed in range(first, first + 40)), start=random_world(0).seen)
    for what in ("resumed", "restores", "captures", "rejections", "rows of dead sequences", "launched on top of another"):
        assert seen[what], f"the worlds do not exercise: {what}"


# --- seeded bugs: each must be caught by an invariant -------------------------------------------------------------------


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
        if seq.flying:
            for b in reversed(seq.history):
                self.history.drop(b)
            seq.history = []
            return False
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
    PublishesBeforeCommit, RetiresByReservedLength, CountsBlocksFromCommitted, NoBlocksForTheDrafter,
    FreesUnderAStepInFlight, UntaggedSalt, KeepsTheKeyOfAnEvictedBlock, FilesUnderTheBoundaryBefore,
    RestoresWithoutAPin, AbortLosesTickets, SkippedColumnsAreNotTold, ResumesWithoutAWindow,
    ResumesWithoutACheckpointOfItsOwn, EvictsFromTheRoot, AdoptsWithoutHolding, EvictionTellsNobody,
    ZeroDraftsReadVersionZero, RingOneRowShort, CapturesAtTheEnd,
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


# --- lookups and metrics ------------------------------------------------------------------------------------------------


def run_prompt(cache: HybridCache, seq: Sequence, chunk: int = 1000, decode: int = 0) -> None:
    """Prefill in chunks that end on marks, then `decode` tokens, all accepted."""
    assert cache.admit(seq)
    while seq.committed < seq.goal:
        end = min(seq.goal, seq.committed + chunk)
        mark = seq.next_mark(seq.committed, cache.config.interval if cache.config.marked else 0)
        end = min(end, mark) if mark else end
        row = cache.reserve(seq, Kind.CHUNK, end - seq.committed)
        cache.collect([row])
        cache.commit(row, row.width, [7] if row.final else [])
    for token in range(decode):
        row = cache.reserve(seq, Kind.VERIFY, 1)
        cache.collect([row])
        cache.commit(row, 1, [token])


def sequence(cache: HybridCache, tokens, salt: str = "", marks=()) -> Sequence:
    return Sequence(list(tokens), cache.root(salt), tuple(marks))


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_the_second_turn_of_a_chat_resumes_at_the_last_boundary_of_the_first(family):
    cache = HybridCache(config_of(family, history=60, window=20, checkpoints=9, k=0, interval=0))
    first = sequence(cache, range(18))
    run_prompt(cache, first, decode=20)
    assert first.committed == 38
    cache.release(first)
    cache.check()
    found = cache.resume_point(sequence(cache, [*first.tokens, 1, 2, 3]))
    assert found == Resume(36, 36)
    # and another question after the same prompt resumes at the last boundary of the prompt
    assert cache.resume_point(sequence(cache, [*range(18), 99, 98, 97])) == Resume(16, 16)


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_the_last_token_always_runs(family):
    cache = HybridCache(config_of(family, history=60, window=20, k=0, interval=0))
    run_prompt(cache, seq := sequence(cache, range(16)))
    cache.release(seq)
    assert cache.resume_point(sequence(cache, range(16))).resumed == 12


def test_a_mark_of_the_request_is_resumable_and_other_boundaries_are_not():
    cache = HybridCache(config_of(Family(True, True), history=60, window=30, checkpoints=9, k=0, interval=0))
    run_prompt(cache, seq := sequence(cache, range(40), marks=(14,)))
    cache.release(seq)
    assert cache.resume_point(sequence(cache, [*range(13), *range(100, 110)])) == Resume(12, 12)
    assert cache.resume_point(sequence(cache, [*range(25), *range(100, 110)])) == Resume(24, 12)


@pytest.mark.parametrize("family", FAMILIES[:3], ids=str)
def test_where_a_match_exceeded_a_resume_the_next_request_resumes(family):
    cache = HybridCache(config_of(family, history=60, window=30, checkpoints=9, k=0, interval=0))
    run_prompt(cache, seq := sequence(cache, range(40)))
    cache.release(seq)
    branch = sequence(cache, [*range(21), *range(100, 120)])
    run_prompt(cache, branch)
    assert branch.resume == Resume(20, 0)
    assert 20 in branch.marks
    cache.release(branch)
    assert cache.resume_point(sequence(cache, [*range(21), *range(200, 220)])) == Resume(20, 20)


def test_marks_at_the_interval_are_resumable():
    cache = HybridCache(config_of(Family(True, True), history=60, window=30, checkpoints=9, k=0, interval=16))
    run_prompt(cache, seq := sequence(cache, range(60)))
    cache.release(seq)
    assert cache.resume_point(sequence(cache, [*range(39), 500, 501])) == Resume(36, 32)


def test_a_chunk_gets_window_blocks_for_what_stays_visible_only():
    cache = HybridCache(config_of(Family(True, False), history=60, window=20, k=0, interval=0))
    seq = sequence(cache, range(100))
    assert cache.admit(seq)
    row = cache.reserve(seq, Kind.CHUNK, 99)
    assert len(seq.history) == 25
    assert [bool(b) for b in seq.window] == [False] * 22 + [True] * 3  # positions 96-5 and later
    cache.abort(row)
    cache.check()


def test_a_window_never_holds_more_than_the_plan_gave_it():
    for prompt in range(1, 60):
        for block in (4, 8):
            config = CacheConfig(
                block=block, history_blocks=60, window_blocks=2 * (-(-(KEEP + 2) // block) + 1) + 1, keep=KEEP, slots=2,
                checkpoints=0, rings=False, k=0, max_len=200, namespace="test", checkpoint_interval=0,
            )
            cache = HybridCache(config)
            run_prompt(cache, seq := sequence(cache, range(prompt)), chunk=13, decode=20)
            cache.release(seq)
            cache.check()


def test_salts_do_not_share():
    cache = HybridCache(config_of(Family(False, False), k=0))
    run_prompt(cache, seq := sequence(cache, range(18), "alice"))
    cache.release(seq)
    assert cache.resume_point(sequence(cache, range(18), "alice")).resumed == 16
    assert cache.resume_point(sequence(cache, range(18), "bob")) == Resume(0, 0)
    assert cache.resume_point(sequence(cache, range(18))) == Resume(0, 0)


def test_two_that_computed_the_same_prefix_end_up_sharing_it():
    cache = HybridCache(config_of(Family(True, False), history=20, window=20, k=0, interval=0))
    a, b = sequence(cache, range(18)), sequence(cache, range(18))
    run_prompt(cache, a)
    cache.release(a)
    cache.reset_prefixes()
    assert cache.admit(a)
    assert cache.admit(b)
    rows = [cache.reserve(s, Kind.CHUNK, s.goal) for s in (a, b)]
    cache.collect(rows)
    for row in rows:
        cache.commit(row, row.width, [1])
    assert a.history[:4] == b.history[:4]
    assert a.history[4] != b.history[4]
    row = cache.reserve(b, Kind.VERIFY, 1)
    told = {(int(t), int(c)): int(block) for _, t, c, block in cache.collect([row])[0]}
    assert [told[0, column] for column in range(4)] == a.history[:4]
    cache.check()


def test_a_failed_sequence_leaves_no_prefix_behind():
    cache = HybridCache(config_of(Family(True, True), k=0, interval=0))
    run_prompt(cache, seq := sequence(cache, range(18)))
    cache.release(seq, forget=True)
    cache.check()
    assert cache.resume_point(sequence(cache, range(18))) == Resume(0, 0)
    assert not cache.checkpoints.index


def test_without_prefix_caching_nothing_is_named():
    config = CacheConfig(**{**vars(config_of(Family(True, True), k=0)), "prefix_caching": False})
    cache = HybridCache(config)
    run_prompt(cache, seq := sequence(cache, range(18)), decode=9)
    cache.release(seq)
    assert not cache.history.index
    assert not cache.checkpoints.index
    assert cache.resume_point(sequence(cache, range(18))) == Resume(0, 0)
    cache.check()


def test_a_rolling_checkpoint_follows_the_sequence_and_takes_one_place():
    cache = HybridCache(config_of(Family(False, True), history=60, checkpoints=8, k=0, interval=0))
    run_prompt(cache, seq := sequence(cache, range(5)), decode=40)
    assert sorted(c.boundary for c in cache.checkpoints.index.values()) == [4, 44]
    cache.release(seq)
    cache.check()


def test_sizes_that_cannot_run_one_sequence_are_refused():
    with pytest.raises(SettingsError, match="window_blocks"):
        config_of(Family(True, False), window=5)
    with pytest.raises(SettingsError, match="slots"):
        config_of(Family(False, False), slots=0)
    assert config_of(Family(True, False)).window_span == -(-KEEP // BLOCK)
