"""Runs requests on a real engine, and looks at what the device holds of each just before it is released."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path

import torch

from offroad.engine import Engine, make_plan
from offroad.run.arrays import Arrays
from offroad.run.rows import PagedView, RingView
from offroad.sample.params import SamplingParams
from offroad.schedule.request import Request
from offroad.schedule.step import Step, StepResult
from offroad.settings import Settings
from offroad.weights.locate import open_source


def tokens(seed: str, count: int) -> list[int]:
    """Random ids that are neither special tokens nor chat tags."""
    source = random.Random(seed)
    return [source.randrange(3, 290) for _ in range(count)]


def ask(name: str, ids: list[int], count: int, temperature: float = 0.0, marks: tuple[int, ...] = ()) -> Request:
    """A request for exactly `count` tokens."""
    params = SamplingParams(temperature=temperature, max_tokens=count, ignore_eos=True)
    return Request(id=name, prompt_ids=ids, params=params, seed=len(ids), marks=marks)


def engine_of(folder: Path, **settings) -> Engine:
    return Engine(Settings.of(model=str(folder), device="cpu", dtype="float32", **settings))


def small_engine(folder: Path, *, blocks: int, places: int, **settings) -> Engine:
    """An engine with `blocks` history blocks and, if its family has rings, `places` checkpoints."""
    wanted = Settings.of(model=str(folder), device="cpu", dtype="float32", **settings)
    memory = make_plan(wanted, open_source(wanted)).memory
    kept = places * memory.checkpoint_bytes if wanted.enable_prefix_caching else 0
    nbytes = (blocks + 1) * memory.history_block_bytes + memory.window_blocks * memory.window_block_bytes + kept
    engine = Engine(wanted.replace(kv_cache_memory_bytes=nbytes, checkpoint_memory_bytes=kept))
    memory = engine.plan.memory
    assert (memory.history_blocks - 1, memory.checkpoints) == (blocks, places if kept else 0)
    return engine


@dataclass
class Answer:
    """Tokens of a request, what it took from the prefix cache, lengths at which it went on after preemptions, and what
    the device held of it at its end."""

    tokens: list[int] = field(default_factory=list)
    matched: int = 0
    cached: int = 0
    restarts: list[int] = field(default_factory=list)
    ended: str | None = None
    held: dict[str, torch.Tensor] = field(default_factory=dict)


def held(arrays: Arrays, slot: int) -> dict[str, torch.Tensor]:
    """What a later token of the slot can read: all history rows, window rows that are still in the window, ring rows;
    by layer and item, in order of position. `k` is 0, so that a ring holds no rows of drafts."""
    length, found = int(arrays.length[slot]), {}
    for layer, views in enumerate(arrays.views):
        for name, view in views.items():
            if isinstance(view, RingView):
                at = torch.arange(max(0, length - view.capacity), length) % view.capacity
                found[f"{layer}.{name}"] = view.data[slot, at].clone()
            elif view.writable:
                found |= {f"{layer}.{name}.{plane}": rows for plane, rows in _paged(view, slot, length).items()}
    return found


def _paged(view: PagedView, slot: int, length: int) -> dict[str, torch.Tensor]:
    at = torch.arange(max(0, length + 1 - view.window) if view.window else 0, length)
    blocks = view.table[slot, at // view.block].long()
    assert (blocks > 0).all(), "a row that a token can see lies in the bin"
    return {"k": view.k[blocks, at % view.block], "v": view.v[blocks, at % view.block]}


class Watched:
    """Stands before an engine's runner and notes in `answers` what the events do not tell."""

    answers: dict[str, Answer]

    def __init__(self, engine: Engine) -> None:
        self.engine, self.runner, self.arrays = engine, engine.runner, engine.runner.arrays

    def launch(self, step: Step) -> None:
        self.runner.launch(step)
        arrays, live = self.arrays, self.engine.scheduler.cache.live
        for start in step.starts:
            if len(start.tokens) > start.prompt_len:
                self.answers[live[start.slot].request.id].restarts.append(start.length)
        for slot in step.slot.tolist():
            job = live[slot]
            if arrays.length[slot] + 1 == job.limit:  # it ends with this step
                self.answers[job.request.id].held = held(arrays, slot)

    def result(self) -> StepResult:
        return self.runner.result()


class Session:
    """Requests on an engine that nobody else steps, and their answers by id."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.answers: dict[str, Answer] = {}
        if not isinstance(engine.runner, Watched):
            engine.runner = Watched(engine)
        engine.runner.answers = self.answers

    def submit(self, request: Request) -> None:
        self.answers[request.id] = Answer()
        self.engine.submit(request)

    def step(self) -> None:
        for event in self.engine.step():
            answer = self.answers[event.request_id]
            answer.tokens += event.token_ids
            answer.matched, answer.cached = max(answer.matched, event.matched), max(answer.cached, event.cached)
            answer.ended = event.finish_reason
            assert event.error is None, event.error

    def finish(self) -> None:
        while self.engine.has_work():
            self.step()
        self.engine.check()


def run(engine: Engine, requests: list[Request], later: int = 0) -> dict[str, Answer]:
    """Answers by request id. The last `later` requests come one by one, two steps after one another."""
    session, coming, steps = Session(engine), list(reversed(requests)), 0
    while coming:
        while coming and len(coming) > later - steps // 2:
            session.submit(coming.pop())
        session.step()
        steps += 1
    session.finish()
    return session.answers


def assert_same(answers: dict[str, Answer], expected: dict[str, Answer]) -> None:
    """The same tokens, and the same states and keys up to rounding."""
    for name, answer in answers.items():
        assert answer.tokens == expected[name].tokens, name
        assert answer.held.keys() == expected[name].held.keys() != set()
        for item, rows in answer.held.items():
            assert rows.shape == expected[name].held[item].shape
            difference = (rows - expected[name].held[item]).abs().max()
            assert difference < 1e-4, f"request {name}, {item}: off by {difference}"
