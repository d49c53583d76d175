"""Mistakes seeded into the engine: each is caught by comparing with clean runs, or the comparison is toothless.

They are those of designs that keep an accepted count or a head of a ring, put where this one has only a length, and
those that any design can have. A block that is published before it is committed is not among them: with one step in
flight nothing can look it up before it has run (the simulated device has it, see tests/cpu/cache/test_hybrid_bugs.py).
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import pytest
import torch
from draft_play import NONE, RIGHT, Play, Truth
from engine_runs import ask, tokens
from mtp_files import with_drafter

from offroad.cache.hybrid import HybridCache
from offroad.models.spec import Ring
from offroad.ops import gated_delta
from offroad.run.arrays import Arrays
from offroad.run.rows import ReplayView, RingView
from offroad.run.runner import Runner
from offroad.speculate.mtp import MtpProposer


class Patches:
    """A bug: what is patched while it is entered. `original` has what was there. `shows`: in which item it shows."""

    shows = "state"

    def __init__(self, *places: tuple[object, str]) -> None:
        self.places = places
        self.original = {name: getattr(owner, name) for owner, name in places}

    @contextmanager
    def __call__(self):
        with pytest.MonkeyPatch.context() as patch:
            for owner, name in self.places:
                patch.setattr(owner, name, self.wrapped(name))
            yield

    def wrapped(self, name: str):
        original, method = self.original[name], getattr(self, name)

        def call(*args, **more):
            return method(original, *args, **more)

        return call


class StateReadAt(Patches):
    """The state before a step is read by a count of tokens that the slot's last step accepted, not by the length."""

    def __init__(self) -> None:
        super().__init__((gated_delta, "_states"), (gated_delta, "_verify"), (Runner, "_finish"))
        self.accepted, self.width = Counter(), None

    def _finish(self, original, runner, step, ran):
        result = original(runner, step, ran)
        rows = ran.rows
        for row, slot in enumerate(rows.slot.tolist()):
            self.accepted[slot] = int(result().accepted[row]) if row < rows.verify else 0
        return result

    def _verify(self, original, *args):
        self.width = torch.from_numpy(args[-1].width[: args[-1].verify])
        out = original(*args)
        self.width = None
        return out

    def _states(self, original, ring, slots, start):
        if self.width is not None:
            accepted = torch.tensor([self.accepted[slot] for slot in slots.tolist()])
            start = start + torch.where(accepted > 0, self.read(accepted) - accepted, 0)
        return original(ring, slots, start)


class ZeroDraftsReadVersionZero(StateReadAt):
    def read(self, accepted):
        return torch.where(self.width == 1, 1, accepted)


class ClampedCount(StateReadAt):
    def read(self, accepted):
        return accepted.clamp(max=2)


class CountsOfOtherRows(StateReadAt):
    def read(self, accepted):
        return accepted.roll(1)


class NoRollback(StateReadAt):
    """The state is that behind all drafts."""

    def _finish(self, original, runner, step, ran):
        result = super()._finish(original, runner, step, ran)
        rows = ran.rows
        self.ran = getattr(self, "ran", {}) | dict(zip(rows.slot.tolist(), rows.width.tolist(), strict=True))
        return result

    def _verify(self, original, *args):
        self.rows = args[-1].slot[: args[-1].verify].tolist()
        return super()._verify(original, *args)

    def read(self, accepted):
        return torch.tensor([self.ran.get(slot, 0) for slot in self.rows])


class AsManyVersionsAsDrafts(Patches):
    def __init__(self) -> None:
        super().__init__((Ring, "capacity"), (Ring, "replayed"))

    def capacity(self, original, ring, k):
        return original(ring, k) - (bool(ring.records) and ring.store == "rows")

    def replayed(self, original, ring, k):
        return original(ring, max(1, k) - 1)


class ConvolutionTwoColumnsShort(Patches):
    shows = "conv"

    def __init__(self) -> None:
        super().__init__((Ring, "capacity"))

    def capacity(self, original, ring, k):
        return original(ring, k) - 2 * (ring.back == 3)


class BaseStaysWithoutDrafts(Patches):
    def __init__(self) -> None:
        super().__init__((Arrays, "settle"))

    def settle(self, original, arrays, rows):
        kept = arrays.base.clone()
        original(arrays, rows)
        for slot in rows.slot[: rows.verify][rows.width[: rows.verify] == 1].tolist():
            arrays.base[slot] = kept[slot]


class BaseOfWhoHadTheSlot(Patches):
    def __init__(self) -> None:
        super().__init__((Arrays, "apply"))

    def apply(self, original, arrays, step):
        kept = arrays.base.clone()
        original(arrays, step)
        arrays.base.copy_(kept)


class CopiesACheckpointAfterTheNextStep(Patches):
    shows = "conv"

    def __init__(self) -> None:
        super().__init__((Arrays, "capture"))
        self.late = None

    def capture(self, original, arrays, copies, before):
        if self.late is not None:
            copied, lengths, after = self.late
            now = arrays.length
            arrays.length = after
            original(arrays, copied, lengths)
            arrays.length = now
        self.late = copies, before.copy(), arrays.length.copy()


class CopiesTheEndOfTheStep(Patches):
    """A checkpoint is named by a boundary that the state is past."""

    shows = "conv"

    def __init__(self) -> None:
        super().__init__((RingView, "before"), (ReplayView, "before"), (Arrays, "capture"))
        self.ends = None

    def capture(self, original, arrays, copies, before):
        self.ends = arrays.length
        original(arrays, copies, before)
        self.ends = None

    def before(self, original, view, slot, boundary, count):
        # Both classes' methods come here, and `original` is of the one that was named last.
        return BEFORE[type(view)](view, slot, boundary if self.ends is None else int(self.ends[slot]), count)


BEFORE = {RingView: RingView.before, ReplayView: ReplayView.before}


class NoBlocksForTheDrafter(Patches):
    shows = "kv: .* lies in the bin"

    def __init__(self) -> None:
        super().__init__((HybridCache, "reserve"))

    def reserve(self, original, cache, seq, kind, width):
        reach, cache.config = cache.config, replace(cache.config, k=0)
        row = original(cache, seq, kind, width)
        cache.config = reach
        return row


class CarryIsNotRestored(Patches):
    shows = "kv"

    def __init__(self) -> None:
        super().__init__((Arrays, "restore"))

    def restore(self, original, arrays, copies):
        kept, arrays.checkpoints = arrays.checkpoints, arrays.checkpoints[:-1]
        original(arrays, copies)
        arrays.checkpoints = kept


class PairsAreNotFollowedWithoutDrafts(Patches):
    """The drafter's pages have holes."""

    shows = "kv"

    def __init__(self) -> None:
        super().__init__((MtpProposer, "follow"))

    def follow(self, original, proposer, turn):
        if turn.rows.verify and (turn.rows.width[: turn.rows.verify] == 1).all():
            tables = proposer.arrays.tables.values()
            kept = [table.clone() for table in tables]
            for table in tables:
                table.zero_()
            original(proposer, turn)
            for table, old in zip(tables, kept, strict=True):
                table.copy_(old)
        else:
            original(proposer, turn)


class RetiresByReservedLength(Patches):
    shows = "kv"

    def __init__(self) -> None:
        super().__init__((HybridCache, "reserve"))

    def reserve(self, original, cache, seq, kind, width):
        row = original(cache, seq, kind, width)
        if row is not None and cache.keep:
            committed, seq.committed = seq.committed, seq.high
            if cache._first_column(seq.committed) > seq.retired:
                cache._retire(seq)
            seq.committed = committed
        return row


class PairsLieOnePositionEarlier(Patches):
    """The pair of p lies at p - 1, with the same angles."""

    def __init__(self) -> None:
        super().__init__((Arrays, "rows_of"))

    def rows_of(self, original, arrays, *args, late=0):
        rows = original(arrays, *args, late=late)
        return replace(rows, start=rows.start - late, start_t=rows.start_t - late)


@pytest.fixture(scope="module")
def truths(tiny, tmp_path_factory):
    """Clean runs by name."""
    made: dict[str, Truth] = {}

    def make(name: str) -> Truth:
        if name not in made:
            to = tmp_path_factory.mktemp("bugs") / name
            if name == "mtp":
                with_drafter(tiny("qwen3_5")[0], to)
            else:  # a window of which a block's end can cut something off
                shutil.copytree(tiny("gemma3")[0], to)
                config = json.loads((to / "config.json").read_text())
                (to / "config.json").write_text(json.dumps(config | {"sliding_window": 65}))
            made[name] = Truth(to, name)
        return made[name]

    return make


MIXED = [RIGHT, NONE, (1, 9), RIGHT, NONE, (2, 9), (0, 9), NONE]


def chats(truth: Truth, bug=nullcontext, replay: bool = False, k: int = 3) -> Play:
    """Three sequences around a block's end, drafted unlike; then, in the same slots, some that go on from what they
    have left and some that do not."""
    play = Play(truth, k=k, replay=replay, bug=bug, blocks=11, places=6, max_num_seqs=3, max_num_batched_tokens=50)
    for i, (size, modes) in enumerate([(60, MIXED), (58, MIXED[1:] + MIXED[:1]), (120, [RIGHT, (1, 9)])]):
        play.submit(tokens(f"bugs {i}", size), 18, 0.8 * (i % 2), modes)
    play.finish()
    for i in range(3):
        play.submit(play.history(f"r{i}")[: 70 + 60 * (i == 2)] + tokens(f"turn {i}", 9), 6, 0.0, MIXED)
        play.submit(tokens(f"new {i}", 20), 6, 0.0, MIXED)
    play.finish()
    return play


@pytest.mark.parametrize("replay", [False, True])
def test_without_a_bug_all_is_well_and_all_is_exercised(truths, replay: bool):
    seen = chats(truths("mtp"), replay=replay).seen
    for what in ("resumed", "all accepted", "some accepted", "none accepted", "no drafts after accepted ones"):
        assert seen[what], what
    assert seen["checkpoint rows"]
    assert seen["captured inside a step"]


BOTH = (
    ZeroDraftsReadVersionZero,
    ClampedCount,
    CountsOfOtherRows,
    NoRollback,
    AsManyVersionsAsDrafts,
    ConvolutionTwoColumnsShort,
    CopiesACheckpointAfterTheNextStep,
    CopiesTheEndOfTheStep,
)
PAIRS = (NoBlocksForTheDrafter, CarryIsNotRestored, PairsAreNotFollowedWithoutDrafts)
CASES = [(bug, replay) for bug in BOTH for replay in (False, True)]
CASES += [(bug, True) for bug in (BaseStaysWithoutDrafts, BaseOfWhoHadTheSlot)] + [(bug, False) for bug in PAIRS]


@pytest.mark.parametrize(("bug", "replay"), CASES)
def test_a_seeded_bug_is_caught(truths, bug, replay: bool):
    with pytest.raises(AssertionError, match=rf"\d\.{bug.shows}"):
        chats(truths("mtp"), bug(), replay)


def test_a_window_that_is_retired_by_the_reserved_length_is_caught(truths):
    chats(truths("window"))
    with pytest.raises(AssertionError, match=r"kv|tokens"):
        chats(truths("window"), RetiresByReservedLength())


def pairs_of(truth: Truth, prompt: list[int], bug) -> torch.Tensor:
    """The pairs of a prompt's first block, keys and values."""
    runner, found = truth.runner, []
    view = runner.arrays.views[-1]["kv"]

    def noted(step):
        type(runner).launch(runner, step)
        block = int(view.table[int(step.slot[0]), 0])
        found.append(torch.stack((view.k[block, 1:], view.v[block, 1:])))

    runner.launch = noted
    truth.engine.submit(ask("pairs", prompt, 1))
    with bug():
        while truth.engine.has_work():
            truth.engine.step()
    return found[-1]


@pytest.mark.parametrize("bug", [nullcontext, PairsLieOnePositionEarlier()])
def test_a_block_of_pairs_does_not_depend_on_the_token_after_it(truths, bug):
    """This is why a pair lies at its token's position: who shares a block's tokens can share its pairs."""
    shared = tokens("shared", 64)
    one, other = (pairs_of(truths("mtp"), [*shared, token, 9], bug) for token in (20, 21))
    assert one.isfinite().all()
    assert torch.allclose(one, other, atol=1e-5) == (bug is nullcontext)
