"""A cache with a simulated device, the moves that an engine can make, and the invariants I1 .. I9 of the design.

A *chooser* decides what a move does: Hypothesis in the state machine, a seeded generator where a bug is to be found.
"""

from __future__ import annotations

from collections import Counter
from random import Random

import numpy as np
from simdevice import BLOCK, KEEP, RATE, RESUME, ZERO, Family, SimDevice, oracle, plain

from offroad.cache.hybrid import HybridCache
from offroad.cache.sequence import Sequence
from offroad.cache.spec import CacheConfig
from offroad.sample.params import SamplingParams
from offroad.schedule.step import Kind, Start, Step, Table, Want

SALTS = ("", "A", "B")
TEXTS = ((0, 1, 1, 0, 1, 0, 0, 1, 1, 1, 0, 1, 0, 0, 1, 0, 1, 1), (0, 1, 1, 0, 0, 0, 1, 0, 1, 1, 0, 0, 1, 1, 0, 1, 0, 0))
DEPTH = 2
PARAMS = SamplingParams()


class RandomChooser:
    """Choices from a seeded generator."""

    def __init__(self, random: Random) -> None:
        self.random = random

    def integer(self, low: int, high: int) -> int:
        return self.random.randint(low, high)

    def pick(self, items):
        return self.random.choice(list(items))


def config_of(family: Family, *, history=14, window=12, slots=4, checkpoints=4, k=3, interval=8, block=BLOCK) -> CacheConfig:
    return CacheConfig(
        block=block, history_blocks=history + 1, window_blocks=window + 1 if family.window else 0,
        keep=KEEP if family.window else 0, slots=slots + 1, checkpoints=checkpoints if family.rings else 0,
        rings=family.rings, k=k, max_len=200, namespace="test", checkpoint_interval=interval,
    )


class World:
    """Requests, a cache and a device; every move may be followed by every other."""

    cache_class, device_class = HybridCache, SimDevice

    def __init__(self, config: CacheConfig, family: Family, seed: int = 0) -> None:
        self.config, self.family = config, family
        self.cache = self.cache_class(config)
        self.device = self.device_class(config, family, Random(seed), lambda start: self.salt_of[start.slot])
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.leaving: list[tuple[Sequence, bool]] = []
        self.steps: list[tuple] = []
        self.past: list[Sequence] = []
        self.prompt: dict[Sequence, tuple] = {}
        self.about: dict[Sequence, tuple[str, int]] = {}  # salt, seed
        self.salt_of: dict[int, str] = {}
        self.names: dict[bytes, tuple[str, tuple]] = {}
        self.seen: Counter = Counter()
        self.number = 0

    # --- requests -----------------------------------------------------------------------------------------------------
    def enqueue(self, salt: str, tokens: tuple, seed: int, marks: tuple = (), front: bool = False) -> Sequence:
        seq = Sequence(list(tokens), self.cache.root(salt), marks)
        self.prompt[seq], self.about[seq] = tuple(tokens), (salt, seed)
        self.past = [*self.past[-5:], seq]
        self.waiting.insert(0 if front else len(self.waiting), seq)
        return seq

    def submit(self, c) -> None:
        text = c.pick(TEXTS)[: c.integer(0, 18)]
        tail = tuple(c.integer(0, 1) for _ in range(c.integer(1, 3)))
        self.enqueue(c.pick(SALTS), text + tail, c.integer(0, 2), (c.integer(0, 12),))

    def submit_related(self, c) -> None:
        base = c.pick(self.past)
        salt, seed = self.about[base]
        if c.integer(0, 1):  # n > 1: the same prompt with another seed; a fork is an admission
            self.enqueue(salt, self.prompt[base], seed + 3, front=True)
        else:  # the next turn of a chat
            self.enqueue(salt, tuple(base.tokens) + tuple(c.integer(0, 1) for _ in range(c.integer(1, 8))), seed)

    def admit(self) -> bool:
        seq = self.waiting[0]
        if not self.cache.admit(seq):
            return False
        self.running.append(self.waiting.pop(0))
        self.salt_of[seq.slot] = self.about[seq][0]
        self.seen["admitted"] += 1
        self.seen["resumed"] += seq.committed > 0
        self.seen["matched more than resumed"] += seq.resume.matched > seq.resume.resumed
        return True

    def leave(self, seq: Sequence, again: bool) -> None:
        self.seen["left with a step in flight"] += bool(seq.flying)
        self.running.remove(seq)
        self.leaving.append((seq, again))
        self.cache.release(seq)
        self.requeue()

    def requeue(self) -> None:
        for seq, again in [pair for pair in self.leaving if not pair[0].slot]:
            self.leaving.remove((seq, again))
            if again:
                self.waiting.insert(0, seq)

    # --- steps --------------------------------------------------------------------------------------------------------
    def plan(self, seq: Sequence, width: int) -> tuple[Kind, int]:
        """A chunk ends on a mark if it can; a row decodes once its prefill is launched."""
        if seq.high >= seq.goal:
            return Kind.VERIFY, min(width, self.config.k + 1)
        end = min(seq.high + width, seq.goal)
        mark = seq.next_mark(seq.high, self.config.interval if self.config.marked else 0)
        if mark is not None and mark < end and (self.config.rings or width % 2):
            end = mark
        return Kind.CHUNK, end - seq.high

    def launch(self, c, only: Sequence | None = None) -> None:
        rows = []
        for seq in list(self.running) if only is None else [only]:
            if only is None and not c.integer(0, 3):
                continue
            row = self.cache.reserve(seq, *self.plan(seq, c.integer(1, 9)))
            if row is not None:
                rows.append(row)
            elif (self.steps or rows) and c.integer(0, 1):
                self.seen["sat out"] += 1
            else:
                self.seen["preempted for want of blocks"] += 1
                self.leave(seq, again=True)
        if not rows:
            return
        self.seen["launched on top of another"] += bool(self.steps)
        rows.sort(key=lambda row: row.kind)
        step = self.step(rows)
        self.poison()
        self.seen["restores"] += len(step.restores)
        self.seen["captures"] += len(step.captures)
        self.steps.append((step, rows, self.device.launch(step)))

    def step(self, rows) -> Step:
        self.number += 1
        tables, restores, captures, begin = self.cache.collect(rows)
        wants = [Want.SAMPLE if row.final or row.kind == Kind.VERIFY else Want.NOTHING for row in rows]
        starts = tuple(Start(s.slot, np.array(s.tokens), s.committed, len(self.prompt[s]), PARAMS, self.about[s][1]) for s in begin)
        slots, kinds, widths = zip(*((row.seq.slot, row.kind, row.width) for row in rows), strict=True)
        return Step(self.number, np.array(slots), np.array(kinds), np.array(widths), np.array(wants), tables, restores, captures, starts)

    def commit(self) -> None:
        step, rows, result = self.steps.pop(0)
        for i, row in enumerate(rows):
            seq, accepted = row.seq, int(result.accepted[i])
            self.seen["verify rows"] += row.kind == Kind.VERIFY
            self.seen["rejections"] += row.kind == Kind.VERIFY and accepted < row.width
            self.seen["rows of dead sequences"] += seq.dead
            sampled = [t for t in result.tokens[i].tolist() if t >= 0]
            self.cache.commit(row, accepted, sampled)
            salt, seed = self.about[seq]
            for column, key in enumerate(seq.keys):
                self.names[key] = salt, tuple(seq.tokens[: (column + 1) * BLOCK])
            prompt = self.prompt[seq]
            count = len(seq.tokens) - len(prompt)
            assert tuple(seq.tokens) == plain(self.family, salt, prompt, seed, count, self.device.vocab), "I9"
        self.requeue()

    def turn(self, c) -> None:
        """The engine's loop: launch, and commit the oldest step once DEPTH are in flight."""
        for _ in range(c.integer(1, 5)):
            if len(self.steps) == DEPTH:
                self.commit()
            if self.waiting and c.integer(0, 1):
                self.admit()
            self.launch(c)

    def reserve_then_abort(self, c) -> None:
        seq, cache = c.pick(self.running), self.cache

        def look():
            free = len(cache.checkpoints.free) + len(cache.checkpoints.index)
            edits = dict(seq.edits)
            return list(seq.history), list(seq.window), cache.history.free, cache.window.free, free, edits, seq.low, seq.high

        before = look()
        row = cache.reserve(seq, *self.plan(seq, c.integer(1, 9)))
        if row is not None:
            assert seq.high == before[-1] + row.width
            cache.abort(row)
        assert look() == before, "I7"

    MOVES = ("submit", "submit", "submit_related", "admit", "admit", "turn", "turn", "turn", "commit", "reserve_then_abort", "leave", "reset")

    def move(self, name: str, c) -> None:
        """One move, if it is possible now."""
        if name in ("submit", "submit_related") and len(self.waiting) < 4 and (name == "submit" or self.past):
            getattr(self, name)(c)
        elif name == "admit" and self.waiting:
            self.admit()
        elif name == "turn" and self.running:
            self.turn(c)
        elif name == "commit" and self.steps:
            self.commit()
        elif name == "reserve_then_abort" and self.running:
            self.reserve_then_abort(c)
        elif name == "leave" and self.running:
            self.leave(c.pick(self.running), bool(c.integer(0, 1)))
        elif name == "reset" and not c.integer(0, 9):
            self.cache.reset_prefixes()
        self.poison()

    def poison(self) -> None:
        """Freed memory holds rubbish, and different rubbish each time."""
        for table, pages in ((Table.HISTORY, self.cache.history), (Table.WINDOW, self.cache.window)):
            for block in pages.plain:
                self.device.poison(table, block)
        for place in self.cache.checkpoints.free:
            self.device.places[place] = {n: ["poison"] * r for n, r in RESUME.items()}

    # --- invariants ---------------------------------------------------------------------------------------------------
    def check(self) -> None:
        self.cache.check()  # I1, I2
        for seq in self.cache.live.values():
            if seq.begun and not seq.dead:
                self.check_entries(seq)
                self.check_rings(seq)
        self.check_published()
        self.check_resume()

    def check_entries(self, seq: Sequence) -> None:
        """I3: every entry that a running sequence can read equals the oracle's."""
        cell, family = self.device.cell, self.family
        truth = oracle(family, self.about[seq][0], tuple(seq.tokens[: seq.committed]))
        for p, (_, row, kv, mtp) in enumerate(truth):
            assert seq.history[p // BLOCK], f"I3 no history block at {p}"
            if (Table.HISTORY, p // BLOCK) not in seq.edits:
                here = cell(Table.HISTORY, seq.slot, p)
            else:
                here = self.device.memory[Table.HISTORY][seq.history[p // BLOCK]][p % BLOCK]
            assert here.get("kv") == kv, f"I3 history kv at {p}"
            assert (p + 1) % RATE or here.get("row") == row, f"I3 compressed row at {p}"
            if self.config.k and family.rings and p:
                assert here.get("mtp") == mtp, f"I3 mtp at {p}"
        if family.window:
            for p in range(max(0, seq.committed - KEEP), seq.committed):
                here = self.device.memory[Table.WINDOW][seq.window[p // BLOCK]][p % BLOCK]
                assert here.get("kv") == truth[p][2], f"I3 window kv at {p}"

    def check_rings(self, seq: Sequence) -> None:
        """I4: the rings hold the rows before the device's length, as the plain run would."""
        length = self.device.length[seq.slot]
        assert seq.committed <= length <= seq.high, "I4 bounds"
        if not self.family.rings:
            return
        truth = oracle(self.family, self.about[seq][0], tuple(self.device.tokens[seq.slot][:length]))
        for name, column, first in (("state", 2, length - 1), ("carry", 2, length - 1), ("raw", 0, length - length % RATE - RATE)):
            for p in range(first, length):
                want = truth[p][column] if p >= 0 else ZERO
                assert self.device.ring(seq.slot, name, p) == want, f"I4 {name} at {p}"

    def check_published(self) -> None:
        """I5: what is found under a key is a function of the key alone."""
        cache, memory, family = self.cache, self.device.memory, self.family
        for index in (cache.history.index, cache.window.index, cache.checkpoints.index):
            for key in index:
                assert key in self.names, "I5: a key of tokens that are not committed"
                salt, tokens = self.names[key]
                assert len(tokens) % BLOCK == 0, "I5 name"
                truth, base = oracle(family, salt, tokens), len(tokens) - BLOCK
                if index is cache.checkpoints.index:
                    want = {"state": [truth[-1][2]], "carry": [truth[-1][2]], "raw": [e[0] for e in truth[-RESUME["raw"] :]]}
                    assert self.device.places[index[key].place] == want, "I5 checkpoint"
                    continue
                cells = memory[Table.HISTORY if index is cache.history.index else Table.WINDOW][index[key]]
                for i, cell in enumerate(cells):
                    assert cell.get("kv") == truth[base + i][2], "I5 kv"
                    if index is cache.history.index and self.config.k and family.rings and base + i:
                        assert cell.get("mtp") == truth[base + i][3], "I5 mtp"

    def check_resume(self) -> None:
        """I6: the one-pass lookup equals the definition, by brute force over every boundary."""
        cache, config = self.cache, self.config
        for seq in self.waiting:
            found = cache.resume_point(seq)
            keys = seq.keys[: (len(seq.tokens) - 1) // BLOCK]

            def resumable(blocks: int, keys=keys) -> bool:
                visible = range(max(0, blocks * BLOCK - config.keep) // BLOCK, blocks) if config.keep else ()
                return (
                    all(k in cache.history.index for k in keys[:blocks])
                    and all(keys[i] in cache.window.index for i in visible)
                    and (not config.rings or keys[blocks - 1] in cache.checkpoints.index)
                )

            best = max((b * BLOCK for b in range(1, len(keys) + 1) if resumable(b)), default=0)
            assert found.resumed == best, "I6"
            missing = next((i for i, k in enumerate(keys) if k not in cache.history.index), len(keys))
            assert found.matched == missing * BLOCK >= best, "I6 matched"
            if config.marked and missing:  # leaf-first eviction: nothing is keyed beyond a hole
                assert not any(k in cache.window.index or k in cache.checkpoints.index for k in keys[missing:]), "broken chain"

    def finish(self) -> None:
        """I8: the oldest running sequence reaches its end if it fits alone; then nothing is held."""
        c = RandomChooser(Random(1))
        while self.steps:
            self.commit()
        self.requeue()
        assert not self.leaving, "I8 released and still held"
        while self.running:
            oldest, turns = self.running[0], 0
            aim = max(oldest.goal, oldest.committed) + 3
            fits = aim + 3 * (self.config.k + 1) <= (self.config.history_blocks - 1) * BLOCK
            while fits and oldest.committed < aim:
                turns += 1
                assert turns < 100, "I8 no progress"
                row = self.cache.reserve(oldest, *self.plan(oldest, 4))
                if row is None:
                    assert len(self.running) > 1, "I8 alone and stuck"
                    self.leave(self.running[-1], again=True)
                    continue
                self.cache.abort(row)
                self.launch(c, only=oldest)
                self.commit()
            self.leave(oldest, again=False)
        self.check()
        assert not self.cache.live and not self.cache.history.held and not self.cache.window.held, "I1 leak"


FAMILIES = tuple(Family(window, rings) for window in (True, False) for rings in (True, False))


def random_world(seed: int, world: type[World] = World) -> World:
    """A world of a size that the seed decides."""
    random = Random(seed)
    family = random.choice(FAMILIES[:1] * 3 + FAMILIES)
    config = config_of(
        family, history=random.choice((9, 14, 24)), window=random.choice((8, 12)), slots=random.choice((2, 4)),
        checkpoints=random.choice((1, 3, 8)), k=random.choice((0, 3, 3)), interval=random.choice((0, 8)),
    )
    return world(config, family, seed)


def play(seed: int, world: type[World] = World, moves: int = 60) -> World:
    """Random moves with all invariants after each; raises AssertionError where one does not hold."""
    it, random = random_world(seed, world), Random(seed)
    for _ in range(moves):
        it.move(random.choice(it.MOVES), RandomChooser(random))
        it.check()
    it.finish()
    return it
