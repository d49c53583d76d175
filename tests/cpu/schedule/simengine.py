"""A scheduler driven as the engine drives it, on a simulated device, with random requests around."""

from __future__ import annotations

from collections import defaultdict, deque
from itertools import pairwise
from random import Random

import numpy as np
import pytest
from simdevice import FAMILIES, Family, SimDevice, config_of, plain

from offroad.cache.spec import CacheConfig
from offroad.sample.params import SamplingParams
from offroad.schedule.job import sequence_seed
from offroad.schedule.request import Request
from offroad.schedule.scheduler import Scheduler
from offroad.schedule.step import Kind, StepResult
from offroad.schedule.turns import Turns

VOCAB = 7


class Sim:
    """A scheduler, a device and what the events said, driven as the engine drives them."""

    def __init__(
        self,
        config: CacheConfig,
        family: Family,
        *,
        budget=16,
        depth=1,
        max_waiting=64,
        turns=Turns(),
        seed=0,
        scheduler=Scheduler,
    ):
        self.family, self.depth, self.budget = family, depth, budget
        self.scheduler = scheduler(
            config, max_num_batched_tokens=budget, max_waiting=max_waiting, depth=depth, turns=turns
        )
        self.salts: dict[int, str] = {}
        self.device = SimDevice(config, family, Random(seed), lambda start: self.salts[id(start.params)], VOCAB)
        self.flying: deque[tuple] = deque()
        self.tokens: dict[tuple[str, int], list[int]] = defaultdict(list)
        self.ended: dict[tuple[str, int], object] = {}
        self.first: dict[tuple[str, int], object] = {}
        self.requests: dict[str, Request] = {}
        self.steps: list = []
        self.bad: dict[int, int] = {}  # slot -> layer
        self.count = 0

    def add(self, prompt, *, seed=0, salt="", eos=(), marks=(), **params) -> str:
        self.count += 1
        request = Request(
            id=f"r{self.count}",
            prompt_ids=list(prompt),
            params=SamplingParams(**params),
            seed=seed,
            salt=salt,
            eos_ids=tuple(eos),
            marks=tuple(marks),
        )
        self.scheduler.submit(request)
        self.salts[id(request.params)] = salt
        self.requests[request.id] = request
        return request.id

    def step(self) -> None:
        scheduler = self.scheduler
        step = scheduler.build()
        if step is not None:
            assert int(step.width.sum()) <= self.budget, "token budget"
            assert (np.diff(step.kind.astype(int)) >= 0).all(), "verify rows first"
            self.steps.append(step)
            self.flying.append((step, self.poisoned(step, self.device.launch(step))))
        self.take(scheduler.drain_events())
        if self.flying and (step is None or len(self.flying) >= self.depth):
            done, result = self.flying.popleft()
            self.take(scheduler.commit(done, result))
        scheduler.check()

    def poisoned(self, step, result: StepResult) -> StepResult:
        for i, slot in enumerate(step.slot.tolist()):
            result.bad_layer[i] = self.bad.get(slot, -1)
        return result

    def take(self, events) -> None:
        for event in events:
            key = event.request_id, event.index
            assert key not in self.ended, "no event after the last"
            self.first.setdefault(key, event)
            self.tokens[key] += event.token_ids
            if event.finish_reason:
                self.ended[key] = event

    def run(self, limit: int = 20_000) -> None:
        for _ in range(limit):
            if not (self.flying or self.scheduler.has_work()):
                break
            self.step()
        else:
            pytest.fail("I8: no progress")
        self.scheduler.check()
        assert self.scheduler.stats().kv_blocks_used == 0

    def expected(self, request: Request, index: int, limit: int) -> list[int]:
        """The plain run's tokens: no batch, no cache, no drafts."""
        p, prompt = request.params, tuple(request.prompt_ids)
        most = min(limit - len(prompt), p.max_tokens or limit)
        tokens = plain(self.family, request.salt, prompt, sequence_seed(request.seed, index), most, VOCAB)[
            len(prompt) :
        ]
        stops = set(p.stop_token_ids) | (set() if p.ignore_eos else set(request.eos_ids))
        end = next((i + 1 for i, t in enumerate(tokens) if t in stops and i + 1 >= p.min_tokens), most)
        return list(tokens[:end])

    def verify(self) -> None:
        limit = self.scheduler.config.max_len
        for (name, index), event in self.ended.items():
            want, got = self.expected(self.requests[name], index, limit), self.tokens[name, index]
            whole = event.finish_reason == "stop" or (event.finish_reason == "length" and event.error is None)
            assert got == (want if whole else want[: len(got)]), f"I9: {name}/{index}"


FULL = Family(False, False)
SEEN = defaultdict(int)
STATS = ("preemptions", "prefix_resumed_tokens", "steps")


def random_run(seed: int, depth: int, scheduler=Scheduler) -> None:
    random = Random(seed)
    family = random.choice(FAMILIES)
    config = config_of(
        family,
        history=random.choice((8, 14, 30)),
        window=random.choice((8, 16)),
        slots=random.choice((1, 2, 4)),
        checkpoints=random.choice((1, 6)),
        k=random.choice((0, 0, 3)),
        interval=random.choice((0, 8)),
    )
    budget, turns = (
        random.choice((2, 5, 16)),
        Turns(*(Random(f"turns {seed}").choice(((0, 0), (4, 0), (16, 0), (4, 8), (0, 2), (0, 16))))),
    )
    sim = Sim(config, family, budget=budget, depth=depth, turns=turns, seed=seed, scheduler=scheduler)
    texts = [[random.randrange(VOCAB) for _ in range(20)] for _ in range(2)]
    for _ in range(random.randint(20, 60)):
        if random.random() < 0.4:
            prompt = random.choice(texts)[: random.randint(0, 16)] + [
                random.randrange(VOCAB) for _ in range(random.randint(1, 4))
            ]
            if random.random() < 0.3 and sim.tokens:
                name, index = random.choice(list(sim.tokens))
                prompt = (sim.requests[name].prompt_ids + sim.tokens[name, index] + [1])[:24]
            most = random.choice((1, 3, 12, 12, 30)) if seed % 8 else None
            sim.add(
                prompt,
                seed=random.randrange(3),
                salt=random.choice(("", "A")),
                eos=random.choice(((), (3,))),
                n=random.choice((1, 1, 3)),
                max_tokens=most,
                min_tokens=random.choice((0, 1)),
                marks=(random.randint(0, 12),),
                logprobs=random.choice((None, None, 2)),
            )
        if random.random() < 0.06 and sim.requests:
            sim.scheduler.abort(random.choice(list(sim.requests)))
        sim.step()
    sim.run()
    sim.verify()
    stats = sim.scheduler.stats()
    for name in STATS:
        SEEN[name] += getattr(stats, name)
    for event in sim.ended.values():
        SEEN[event.finish_reason] += 1
    kinds = [step.kind.tolist() for step in sim.steps]
    chunk, both = int(Kind.CHUNK), {int(Kind.CHUNK), int(Kind.VERIFY)}
    alone = [len(one) for one, two in pairwise(kinds) if set(one) == {chunk} and two and chunk not in two]
    SEEN["turns"] += alone.count(1) if turns.short else 0
    SEEN["large turns"] += sum(count > 1 for count in alone) if turns.long else 0
    SEEN["shared steps"] += sum(set(one) == both for one in kinds)
    assert len(sim.ended) == sum(request.params.n for request in sim.requests.values())
