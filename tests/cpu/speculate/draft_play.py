"""Sequences with forced drafts on a real engine with little memory, compared after each step with clean runs.

A clean run is a sequence alone in memory, in chunks of a block, with no prefix cache and no draft. After each step of
a `Play`, what its sequences can still read (keys and values, states, pairs and carries of a drafter) and what has gone
into checkpoints is what the clean run has at the same positions, and tokens are the same.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_runs import engine_of, small_engine

from offroad.ops import states
from offroad.run.arrays import Arrays
from offroad.run.rows import PagedView, ReplayView, RingView
from offroad.sample.params import SamplingParams
from offroad.schedule.job import sequence_seed
from offroad.schedule.request import Request
from offroad.schedule.step import Step

MAX_LEN = 256
LIMIT = 1e-4
# How many right drafts, then how many wrong ones, a round has; OWN: what the drafter itself says.
OWN, RIGHT, WRONG, NONE = (-1, 0), (9, 0), (0, 9), (0, 0)
MODES = (
    [RIGHT],
    [WRONG],
    [NONE],
    [OWN],
    [RIGHT, WRONG],
    [RIGHT, NONE],
    [(1, 9), (2, 9), (3, 9), (0, 9)],
    [(1, 0), RIGHT, (2, 0), (1, 1)],
    [RIGHT, OWN, WRONG, NONE, (2, 1)],
)


def drafts_of(method: str, k: int) -> str:
    return json.dumps({"method": method, "num_speculative_tokens": k})


def spoil(arrays: Arrays) -> None:
    """What no sequence has written must never be read."""
    for view in (view for views in arrays.views for view in views.values()):
        if isinstance(view, PagedView):
            planes = [view.k, view.v]
        else:
            planes = [view.data] if isinstance(view, RingView) else [view.state, view.key, view.delta, view.decay]
        for plane in planes:
            plane.fill_(torch.nan)
    for _, kept in arrays.checkpoints:
        kept.fill_(torch.nan)


def readable(arrays: Arrays, slot: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """(positions, rows) by item of what a later token of the slot can read. A drafter's pairs, which begin at position
    1, go up to the pending token's."""
    length, found = int(arrays.length[slot]), {}
    back = {id(view): kept.shape[1] for view, kept in arrays.checkpoints}
    for layer, views in enumerate(arrays.views):
        for name, view in views.items():
            if isinstance(view, PagedView):
                if view.writable:
                    begin = max(view.first, length + 1 - view.window if view.window else 0)
                    at = torch.arange(begin, max(begin, length + (view.first > 0)))
                    blocks = view.table[slot, at // view.block].long()
                    assert (blocks > 0).all(), f"{layer}.{name}: a row that a token can see lies in the bin"
                    found[f"{layer}.{name}.k"] = at, view.k[blocks, at % view.block]
                    found[f"{layer}.{name}.v"] = at, view.v[blocks, at % view.block]
            else:
                count = back[id(view)]
                at = torch.arange(max(0, length - count), length)
                found[f"{layer}.{name}"] = at, view.before(slot, length, count)[count - len(at) :]
    return found


@dataclass
class Clean:
    """Tokens of a sequence's answer, and rows by item and position; NaN: not seen."""

    tokens: list[int] = field(default_factory=list)
    rows: dict[str, torch.Tensor] = field(default_factory=dict)

    def note(self, arrays: Arrays, slot: int) -> None:
        for item, (at, rows) in readable(arrays, slot).items():
            if item not in self.rows:
                self.rows[item] = torch.full((MAX_LEN + 1, *rows.shape[1:]), torch.nan)
            self.rows[item][at] = rows
            assert rows.isfinite().all()

    def compare(self, item: str, at: torch.Tensor, rows: torch.Tensor) -> int:
        """Raises AssertionError if a row differs from one that the clean run had; how many were compared."""
        expected = self.rows[item][at]
        known = expected.flatten(1).isfinite().all(1)
        difference = (rows[known] - expected[known]).abs()
        if len(difference):
            assert difference.max() < LIMIT, (
                f"{item}: position {at[known][int(difference.flatten(1).amax(1).argmax())]}"
            )
        return len(difference)


class Truth:
    """Clean runs of one checkpoint: each is made once."""

    def __init__(self, folder: Path, method: str) -> None:
        self.folder, self.method = folder, method
        more = dict(speculative_config=drafts_of("mtp", 1)) if method == "mtp" else {}
        sizes = dict(max_num_seqs=1, max_num_batched_tokens=64, max_model_len=MAX_LEN, threads=1)
        self.engine = engine_of(folder, enable_prefix_caching=False, **sizes, **more)
        self.runner, self.known = self.engine.runner, {}
        if self.runner.drafting is not None:
            self.runner.drafting.proposer.propose = self._nothing

    def _nothing(self, turn, slots: np.ndarray, counts: np.ndarray) -> None:
        self.runner.arrays.drafted[slots] = 0

    def of(self, prompt: list[int], count: int, temperature: float, seed: int) -> Clean:
        key = (tuple(prompt), count, temperature, seed)
        if key not in self.known:
            self.known[key] = found = Clean()
            params = SamplingParams(temperature=temperature, max_tokens=count, ignore_eos=True)
            spoil(self.runner.arrays)
            self.engine.submit(Request(id="clean", prompt_ids=prompt, params=params, seed=seed))
            launch = type(self.runner).launch

            def noted(step: Step) -> None:
                launch(self.runner, step)
                found.note(self.runner.arrays, int(step.slot[0]))

            self.runner.launch = noted
            while self.engine.has_work():
                for event in self.engine.step():
                    found.tokens += event.token_ids
        return self.known[key]


@dataclass
class Told:
    """One sequence as it is told: its clean run, and how its rounds are drafted."""

    prompt: list[int]
    clean: Clean
    modes: list[tuple[int, int]]
    tokens: list[int] = field(default_factory=list)
    rounds: int = 0
    ended: str | None = None
    after: int = 0  # drafts that its last round accepted


Bug = Callable[[], AbstractContextManager]


class Play:
    """An engine under test. `bug` patches something while it is made and while it steps."""

    def __init__(
        self,
        truth: Truth,
        *,
        k: int,
        replay: bool = False,
        seen: Counter | None = None,
        bug: Bug = nullcontext,
        **sizes,
    ) -> None:
        self.truth, self.k, self.bug = truth, k, bug
        self.seen = Counter() if seen is None else seen
        method = truth.method if truth.method == "mtp" else "ngram"
        sizes = dict(threads=1, speculative_config=drafts_of(method, k)) | sizes
        settings = dict(max_model_len=MAX_LEN, checkpoint_interval=192) | sizes
        with pytest.MonkeyPatch.context() as patch, bug():
            patch.setattr(states, "ROWS_SHARE", 0 if replay else 1)
            self.engine = small_engine(truth.folder, **settings)
        self.arrays, self.told = self.engine.runner.arrays, {}
        self.replayed = any(isinstance(view, ReplayView) for view, _ in self.arrays.checkpoints)
        spoil(self.arrays)
        self.drafter = self.engine.runner.drafting.proposer
        self.drafter.propose = self._propose
        self.engine.runner.launch = self._launch

    # --- requests -----------------------------------------------------------------------------------------------------
    def submit(
        self,
        prompt: list[int],
        count: int,
        temperature: float = 0.0,
        modes: list[tuple[int, int]] = MODES[0],
        n: int = 1,
        marks: tuple[int, ...] = (),
    ) -> str:
        name = f"r{len(self.told)}"
        params = SamplingParams(temperature=temperature, max_tokens=count, ignore_eos=True, n=n)
        request = Request(id=name, prompt_ids=prompt, params=params, seed=len(prompt), marks=marks)
        for index in range(n):
            clean = self.truth.of(prompt, count, temperature, sequence_seed(request.seed, index))
            turned = modes[index % len(modes) :] + modes[: index % len(modes)]
            self.told[name, index] = Told(prompt, clean, turned)
        self.engine.submit(request)
        return name

    def history(self, name: str) -> list[int]:
        told = self.told[name, 0]
        return told.prompt + told.tokens

    def going(self) -> list[str]:
        return sorted({name for (name, _), told in self.told.items() if not told.ended})

    def abort(self, name: str) -> None:
        self.seen["aborted with tokens"] += bool(self.told[name, 0].tokens)
        self.engine.abort(name)

    # --- steps --------------------------------------------------------------------------------------------------------
    def step(self) -> None:
        with self.bug():
            events = self.engine.step()
        for event in events:
            told = self.told[event.request_id, event.index]
            assert event.error is None, event.error
            told.tokens += event.token_ids
            assert told.tokens == told.clean.tokens[: len(told.tokens)], f"{event.request_id}: tokens"
            told.ended = event.finish_reason
            self.seen["ended"] += told.ended == "length"
            self.seen["resumed"] += event.cached

    def finish(self) -> None:
        while self.engine.has_work():
            self.step()
        self.engine.check()
        self.seen["preempted"] += self.engine.stats().preemptions
        for told in self.told.values():
            assert told.ended in ("length", "abort")
            assert told.ended == "abort" or told.tokens == told.clean.tokens

    def _of(self, slot: int) -> Told:
        job = self.engine.scheduler.cache.live[slot]
        return self.told[job.request.id, job.index]

    def _propose(self, turn, slots: np.ndarray, counts: np.ndarray) -> None:
        """The drafter's own drafts, then those that the sequence's mode forces."""
        type(self.drafter).propose(self.drafter, turn, slots, counts)
        for slot, count in zip(slots.tolist(), counts.tolist(), strict=True):
            told = self._of(slot)
            right, wrong = told.modes[told.rounds % len(told.modes)]
            told.rounds += 1
            if right < 0:
                continue
            known = self.arrays.known(slot).tolist()
            true = (told.prompt + told.clean.tokens)[len(known) :][:count]
            drafts = true[:right]
            for token in [*true[right:], *[7] * count][:wrong]:
                drafts.append(3 + (token - 2) % 290)
            self.arrays.draft(slot, np.array(drafts[:count], np.int64))

    def _launch(self, step: Step) -> None:
        before, drafted = self.arrays.length.copy(), self.arrays.drafted.copy()
        for start in step.starts:
            before[start.slot], drafted[start.slot] = start.length, 0
        type(self.engine.runner).launch(self.engine.runner, step)
        width = self.engine.runner.results[-1]()
        for row, slot in enumerate(step.slot.tolist()):
            told = self._of(slot)
            for item, (at, rows) in readable(self.arrays, slot).items():
                self.seen["rows compared"] += told.clean.compare(item, at, rows)
            if self.replayed:
                assert 0 <= self.arrays.length[slot] - self.arrays.base[slot] <= self.k + 1
            if step.kind[row] == 0:
                self._count(told, int(width.accepted[row]) - 1, min(int(drafted[slot]), int(step.width[row]) - 1))
        for place, slot, boundary in step.captures.tolist():
            if before[slot] < boundary <= self.arrays.length[slot]:
                self._captured(place, slot, boundary)

    def _captured(self, place: int, slot: int, boundary: int) -> None:
        """A checkpoint has the rows before its boundary."""
        names = {id(view): f"{i}.{name}" for i, views in enumerate(self.arrays.views) for name, view in views.items()}
        for view, kept in self.arrays.checkpoints:
            at = torch.arange(boundary - kept.shape[1], boundary)
            self.seen["checkpoint rows"] += self._of(slot).clean.compare(names[id(view)], at, kept[place])
        self.seen["captured inside a step"] += boundary < self.arrays.length[slot]

    def _count(self, told: Told, accepted: int, drafted: int) -> None:
        self.seen["all accepted"] += accepted == drafted > 0
        self.seen["some accepted"] += 0 < accepted < drafted
        self.seen["none accepted"] += accepted == 0 < drafted
        self.seen["no drafts after accepted ones"] += told.after > 0 == drafted
        told.after = accepted
