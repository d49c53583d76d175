"""A simulated device: what it stores are hashes, so that "the right state" is a comparison with an oracle.

It reads what a real one gets and nothing else: a `Step`. Memory, tables and rings are addressed as in the design, what
it reads by mistake (freed memory is poisoned by the harness) spreads into all later values, as in a model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from random import Random

import numpy as np

from offroad.cache.spec import CacheConfig
from offroad.schedule.step import Kind, Logprobs, Step, StepResult, Table, Want

BLOCK, KEEP, RATE = 4, 5, 2
BACK = {"state": 1, "carry": 1, "raw": 2 * RATE - 1}  # old rows that the next token needs, by ring
RESUME = {"state": 1, "carry": 1, "raw": RATE}  # rows before a boundary that a checkpoint must hold
ZERO = "zero"  # what any row before position 0 reads as


def digest(*parts: object) -> str:
    return blake2b("|".join(map(str, parts)).encode(), digest_size=8).hexdigest()


@dataclass(frozen=True)
class Family:
    """Which kinds of memory the model has besides history."""

    window: bool
    rings: bool


FAMILIES = tuple(Family(window, rings) for window in (True, False) for rings in (True, False))


def config_of(
    family: Family, *, history=14, window=12, slots=4, checkpoints=4, k=3, interval=8, block=BLOCK
) -> CacheConfig:
    return CacheConfig(
        block=block,
        history_blocks=history + 1,
        window_blocks=window + 1 if family.window else 0,
        keep=KEEP if family.window else 0,
        slots=slots + 1,
        checkpoints=checkpoints if family.rings else 0,
        rings=family.rings,
        k=k,
        max_len=200,
        namespace="test",
        checkpoint_interval=interval,
    )


def forward(namespace, token, state, carry, raw, window, old, row_of):
    """One token of a model: (raw, compressed row, kv, mtp) that it leaves. A closed row is visible to its closer."""
    raw_here = digest("raw", namespace, state, token)
    row_here = digest("row", *raw, raw_here)
    kv = digest("kv", namespace, state, token, *window, *old, row_of(row_here))
    return raw_here, row_here, kv, digest("mtp", carry, token)


def groups_end(p: int) -> int:
    """The closing position of a compressed row that position p reads."""
    return (p + 1) // RATE // 2 * RATE + RATE - 1


@lru_cache(maxsize=400_000)
def oracle(family: Family, namespace: str, tokens: tuple) -> tuple[tuple, ...]:
    """What each position leaves: a function of the tokens up to it and the namespace alone."""
    if not tokens:
        return ()
    past, p = oracle(family, namespace, tokens[:-1]), len(tokens) - 1
    kv = [entry[2] for entry in past]
    state = kv[-1] if past and family.rings else ZERO
    raw = [past[q][0] if q >= 0 and family.rings else ZERO for q in range(p - BACK["raw"], p)]
    window = kv[max(0, p - KEEP) :] if family.window else []
    group = groups_end(p)

    def row_of(here: str) -> str:
        return here if group == p else past[group][1] if group < p else ZERO

    old = (kv[p // 2], kv[p - 1]) if p else ()
    return (*past, forward(namespace, tokens[-1], state, state, raw, window, old, row_of))


def draw(kv: str, seed: int, position: int, vocab: int) -> int:
    return int(digest("draw", kv, seed, position), 16) % vocab


def plain(family: Family, namespace: str, prompt: tuple, seed: int, count: int, vocab: int) -> tuple:
    """What the same request gives token by token: no drafts, no batch, no cache."""
    tokens = prompt
    for _ in range(count):
        tokens += (draw(oracle(family, namespace, tokens)[-1][2], seed, len(tokens), vocab),)
    return tokens


class SimDevice:
    """Device arrays by slot and by block; `launch` runs a step at once and answers with its result."""

    def __init__(
        self, config: CacheConfig, family: Family, random: Random, namespace_of: Callable[[object], str], vocab: int = 2
    ) -> None:
        self.config, self.family, self.random, self.vocab, self.namespace_of = (
            config,
            family,
            random,
            vocab,
            namespace_of,
        )
        columns = -(-(config.max_len + config.k + 1) // config.block) + 8
        self.tables = np.zeros((2, config.slots, columns), np.int64)
        count = {Table.HISTORY: config.history_blocks, Table.WINDOW: config.window_blocks}
        self.memory = {t: [[{} for _ in range(BLOCK)] for _ in range(max(1, n))] for t, n in count.items()}
        self.capacity = {n: b + config.k + (n == "raw") for n, b in BACK.items()}  # raw is written before it is read
        self.rings = [{n: [""] * c for n, c in self.capacity.items()} for _ in range(config.slots)]
        self.places: list[dict | None] = [None] * config.checkpoints
        self.length = [0] * config.slots
        self.tokens: list[list[int]] = [[] for _ in range(config.slots)]
        self.seed = [0] * config.slots
        self.namespace = [""] * config.slots
        self.steps = 0

    def poison(self, table: Table, block: int) -> None:
        self.steps += 1
        for cell in self.memory[table][block]:
            cell.clear()
            cell.update(dict.fromkeys(("kv", "row", "mtp"), f"poison {self.steps}"))

    # --- a step -------------------------------------------------------------------------------------------------------
    def launch(self, step: Step) -> StepResult:
        for s in step.starts:
            self.tokens[s.slot], self.length[s.slot] = s.tokens.tolist(), s.length
            self.seed[s.slot], self.namespace[s.slot] = s.seed, self.namespace_of(s)
        seen = [tuple(edit[:3]) for edit in step.tables.tolist()]
        assert len(set(seen)) == len(seen), "one edit a table entry and step"
        for slot, table, column, block in step.tables.tolist():
            self.tables[table, slot, column] = block
        for place, slot, boundary in step.restores.tolist():
            self.restore(place, slot, boundary)
        count = len(step.slot)
        accepted = np.zeros(count, np.int32)
        tokens = np.full((count, self.config.k + 1), -1, np.int64)
        before = list(self.length)
        for i in range(count):
            slot, wanted = int(step.slot[i]), bool(step.wants[i] & Want.SAMPLE)
            sampled = self.run(slot, Kind(step.kind[i]), int(step.width[i]), wanted)
            accepted[i] = self.length[slot] - before[slot]
            tokens[i, : len(sampled)] = sampled
        for place, slot, boundary in step.captures.tolist():
            if before[slot] < boundary <= self.length[slot]:
                self.capture(place, slot, boundary)
        shape = tokens.shape
        logprobs = Logprobs(
            np.full(shape, -0.5, np.float32), np.zeros((*shape, 20), np.int64), np.zeros((*shape, 20), np.float32)
        )
        return StepResult(step.number, accepted, tokens, np.full(count, -1, np.int16), logprobs)

    def run(self, slot: int, kind: Kind, width: int, wanted: bool) -> list[int]:
        start, known, chunk = self.length[slot], self.tokens[slot], kind == Kind.CHUNK
        if not chunk:
            width = 1 + self.random.randint(0, width - 1)  # `width` is a bound: so many drafts there really are
        inputs = known[start : start + (width if chunk else 1)]
        state = self.ring(slot, "state", start - 1)
        hidden, raws = {start - 1: self.ring(slot, "carry", start - 1)}, {}
        for q in range(start, start if chunk else start + width):  # kernels may write all rows before they read
            self.rings[slot]["raw"][q % self.capacity["raw"]] = "overwritten"
        for i in range(width):
            p = start + i
            if i == len(inputs):  # a draft: what the model would draw, or not
                truth = draw(hidden[p - 1], self.seed[slot], p, self.vocab)
                inputs.append(truth if self.random.random() < 0.7 else (truth + 1) % self.vocab)
            raws[p], closed, hidden[p] = self.token(slot, p, inputs[i], state, hidden, raws, start)
            state = hidden[p] if self.family.rings else ZERO
            self.cell(Table.HISTORY, slot, p).update(
                {"kv": hidden[p]} | ({"row": closed} if (p + 1) % RATE == 0 else {})
            )
            if self.family.window:
                self.cell(Table.WINDOW, slot, p)["kv"] = hidden[p]
            if not chunk:
                self.write(slot, p, raws[p], hidden[p])
        for q in range(start, start + width if chunk else start):  # a chunk leaves the last rows of each ring
            self.write(slot, q, raws[q], hidden[q], until=start + width)
        sampled, length = self.sample(slot, start, width, inputs, hidden, chunk, wanted)
        self.length[slot] = length
        self.follow(slot, start, length, hidden, wanted)
        return sampled

    def token(self, slot, p, token, state, hidden, raws, start):
        group, family = groups_end(p), self.family
        rows = range(p - BACK["raw"], p)
        raw = [raws[q] if q in raws and family.rings else self.ring(slot, "raw", q) for q in rows]
        seen = range(max(0, p - KEEP), p) if family.window else ()
        window = [hidden[q] if q >= start else self.cell(Table.WINDOW, slot, q).get("kv") for q in seen]
        old = (
            (self.cell(Table.HISTORY, slot, p // 2).get("kv"), self.cell(Table.HISTORY, slot, p - 1).get("kv"))
            if p
            else ()
        )

        def row_of(here: str) -> str | None:
            return here if group == p else self.cell(Table.HISTORY, slot, group).get("row") if group < p else ZERO

        return forward(self.namespace[slot], token, state, ZERO, raw, window, old, row_of)[:3]

    def sample(self, slot, start, width, inputs, hidden, chunk, wanted):
        """(sampled tokens, new length); verify accepts the longest run equal to what the sampler draws."""
        known, end = self.tokens[slot], start + width
        if chunk:
            sampled = [draw(hidden[end - 1], self.seed[slot], end, self.vocab)] if wanted else []
            if wanted:
                known[end:] = sampled
            return sampled, end
        sampled = [draw(hidden[p], self.seed[slot], p + 1, self.vocab) for p in range(start, end)]
        accepted = 1 + next((i for i in range(width - 1) if inputs[i + 1] != sampled[i]), width - 1)
        known[start + 1 :] = sampled[:accepted]
        return sampled[:accepted], start + accepted

    def follow(self, slot, start, length, hidden, wanted):
        """The drafter: true pairs up to the pending token's, then scratch where its chain runs ahead."""
        if self.config.k == 0 or not self.family.rings:
            return
        for p in range(max(1, start), length + wanted):
            self.cell(Table.HISTORY, slot, p)["mtp"] = digest("mtp", hidden[p - 1], self.tokens[slot][p])
        for p in range(length + 1, length + self.config.k if wanted else 0):
            assert self.tables[Table.HISTORY, slot, p // BLOCK], f"I3 draft entry at {p} without a block"
            self.cell(Table.HISTORY, slot, p)["mtp"] = "scratch"

    # --- memory -------------------------------------------------------------------------------------------------------
    def cell(self, table: Table, slot: int, position: int) -> dict:
        block = self.tables[table, slot, position // BLOCK]
        return self.memory[table][block][position % BLOCK] if block else {}  # {}: the bin

    def ring(self, slot: int, name: str, position: int) -> str:
        if position < 0 or not self.family.rings:
            return ZERO
        return self.rings[slot][name][position % self.capacity[name]]

    def write(self, slot: int, position: int, raw: str, state: str, until: int = 0) -> None:
        for name, value in (("raw", raw), ("state", state), ("carry", state)):
            if position >= until - self.capacity[name]:
                self.rings[slot][name][position % self.capacity[name]] = value

    def capture(self, place: int, slot: int, boundary: int) -> None:
        self.places[place] = {
            n: [self.ring(slot, n, q) for q in range(boundary - r, boundary)] for n, r in RESUME.items()
        }

    def restore(self, place: int, slot: int, boundary: int) -> None:
        for name, rows in self.places[place].items():
            for i, value in enumerate(rows):
                self.rings[slot][name][(boundary - len(rows) + i) % self.capacity[name]] = value
