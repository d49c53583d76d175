"""Mixed load on one engine for some minutes: what runs beside a request may not change it, and nothing may leak.

    PYTHONPATH=src python benchmarks/soak.py --model hybrid --quantization w4a16-g128 --minutes 9 --seed 1

Prompts of 16 tokens to the longest, fresh ones, ones with a shared prefix and chats that go on; sampling of all kinds,
with drafts by prompt lookup; aborts at random moments; and a cache of keys too small for all. Random weights: answers
mean nothing, but with `--batch-invariant`, as here, each is a function of its request.

Before it, `--marked` requests are run one by one on an engine for one sequence, without drafts and prefix cache. In the
mixed load they come again and again, and tokens and log-probabilities must be the same to the last bit. The cache's
books are checked all the while (`Engine.check`), every number that a layer gives is checked on the device (an answer
that ends with "error" is a failure), and at the end nothing may be held, and memory of the device and of the process
must not have grown between the first and the last quarter.

`--model` is the name of one of the shapes below, or a config.json. The exit code is 1 if anything failed. On a CPU
take a model without recurrent layers (tiny), or `--plain`: without --batch-invariant, where nothing is compared, but
sequences are preempted. (With it they wait instead until there is room for all that they may become.)
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from soak_load import END, SHAPES, Load, config_of, marked_requests

from offroad.device.probe import resolve_device
from offroad.engine import Engine, make_plan
from offroad.errors import OffroadError
from offroad.models.registry import resolve_model
from offroad.schedule.request import Request, TokenEvent
from offroad.settings import Settings
from offroad.weights.dummy import DummySource

BEGAN = time.perf_counter()
MIB = 1024**2
DRAFTS = '{"method": "ngram", "num_speculative_tokens": 3}'


@dataclass
class Answer:
    """What must be the same: tokens, and log-probabilities to their last bit."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[str] = field(default_factory=list)

    def add(self, event: TokenEvent) -> None:
        self.tokens += event.token_ids
        self.logprobs += [repr(entry) for entry in event.logprobs or ()]


@dataclass
class Memory:
    """Bytes in use over time."""

    at: list[float] = field(default_factory=list)
    device: list[int] = field(default_factory=list)
    process: list[int] = field(default_factory=list)

    def look(self, now: float) -> None:
        self.at.append(now)
        self.device.append(torch.cuda.memory_allocated() if torch.cuda.is_available() else 0)
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        self.process.append(pages * os.sysconf("SC_PAGE_SIZE"))

    def growth(self, values: list[int], of: Callable[[list[int]], float]) -> float:
        """MiB between the first quarter and the last, by `of`; without the first 5 %, which fill caches."""
        first, last = 0.05 * self.at[-1], self.at[-1]
        early = [v for at, v in zip(self.at, values, strict=True) if first <= at <= 0.25 * last]
        late = [v for at, v in zip(self.at, values, strict=True) if at >= 0.75 * last]
        return (of(late) - of(early)) / MIB if early and late else 0.0


@dataclass
class Soak:
    """The mixed load. `expected`: answers of the marked requests alone, by index."""

    engine: Engine
    load: Load
    marked: list[Request]
    expected: list[Answer]
    seconds: float
    failures: list[str] = field(default_factory=list)
    memory: Memory = field(default_factory=Memory)
    open: dict[str, int | None] = field(default_factory=dict)  # and the conversation
    answers: dict[str, Answer] = field(default_factory=dict)  # of marked requests under way
    doomed: dict[str, int] = field(default_factory=dict)  # and the step of the abort
    left: dict[str, int] = field(default_factory=dict)  # sequences that have not ended
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("ended", "aborted", "compared", "checks"), 0))
    order: list[int] = field(default_factory=list)  # in which marked requests come before one comes again
    asked: set[int] = field(default_factory=set)

    def run(self) -> None:
        began = time.perf_counter()
        marked, looked, told, wanted = 0.0, 0.0, 0.0, 8
        every = self.seconds / (2.2 * max(1, len(self.marked)))
        while (now := time.perf_counter() - began) < self.seconds and len(self.failures) < 20:
            if now >= marked and self.marked:
                marked += every
                self.mark()
            if len(self.open) < wanted:
                self.submit()
            self.abort()
            self.step()
            if now - looked >= min(1.0, self.seconds / 40):
                looked = now
                slots = self.engine.plan.max_num_seqs
                wanted = self.load.dice.choice((1, slots // 2, slots, 3 * slots // 2))
                self.check()
                self.memory.look(now)
            if now - told >= 30:
                told = now
                print(f"{now:5.0f} s  {self.tell()}", file=sys.stderr, flush=True)
        self.drain()

    def mark(self) -> None:
        """Submits the next marked request, all of them once before one comes again."""
        if not self.order:
            self.order = list(range(len(self.marked)))
            self.load.dice.shuffle(self.order)
        index = self.order.pop()
        self.asked.add(index)
        request = self.marked[index]
        again = Request(
            id=f"marked-{index}-{time.perf_counter_ns()}",
            prompt_ids=request.prompt_ids,
            params=request.params,
            seed=request.seed,
            eos_ids=request.eos_ids,
            marks=request.marks,
            guide=request.guide,
        )
        self.answers[again.id] = Answer()
        self.put(again, None)

    def submit(self) -> None:
        """Submits a request, and foretells the end of one in eight: at once, or some steps later."""
        request, chat = self.load.request(f"r{time.perf_counter_ns()}")
        self.put(request, chat)
        if self.load.dice.random() < 0.125:
            self.doomed[request.id] = self.engine.scheduler.number + self.load.dice.randrange(100)

    def put(self, request: Request, chat: int | None) -> None:
        self.engine.submit(request)
        self.open[request.id], self.left[request.id] = chat, request.params.n

    def abort(self) -> None:
        """Ends requests whose time has come; some have ended by themselves."""
        for name in [name for name, step in self.doomed.items() if step <= self.engine.scheduler.number]:
            del self.doomed[name]
            self.engine.abort(name)

    def step(self) -> None:
        for event in self.engine.step():
            self.take(event)

    def fail(self, what: str) -> None:
        """Said when it is found too: a run may be cut off before its verdict."""
        print(f"FAILED {what}", file=sys.stderr, flush=True)
        self.failures.append(what)

    def take(self, event: TokenEvent) -> None:
        name = event.request_id
        if event.error is not None:
            self.fail(f"{name}: {event.error}")
        if any(not math.isfinite(entry.logprob) for entry in event.logprobs or ()):
            self.fail(f"{name}: a log-probability that is not finite")
        if name in self.answers:
            self.answers[name].add(event)
        elif (chat := self.open.get(name)) is not None and event.index == 0:
            self.load.chats[chat] = self.load.chats[chat] + event.token_ids
        if event.finish_reason is None:
            return
        self.left[name] -= 1
        if self.left[name]:
            return
        del self.open[name], self.left[name]
        self.counts["aborted" if event.finish_reason == "abort" else "ended"] += 1
        if name in self.answers:
            self.compare(name, self.answers.pop(name))

    def compare(self, name: str, found: Answer) -> None:
        index = int(name.split("-")[1])
        if not self.expected:
            return
        self.counts["compared"] += 1
        if found != self.expected[index]:
            wanted = self.expected[index]
            at = next((i for i, (a, b) in enumerate(zip(found.tokens, wanted.tokens, strict=False)) if a != b), None)
            where = f"token {at} of {len(wanted.tokens)}" if at is not None else "log-probabilities alone"
            prompt = len(self.marked[index].prompt_ids)
            self.fail(f"{name} ({prompt} tokens of prompt): not what it is alone, in {where}")

    def check(self) -> None:
        self.counts["checks"] += 1
        try:
            self.engine.check()
        except AssertionError as error:
            self.fail(f"Engine.check: {error}")

    def drain(self) -> None:
        """Ends all, what is marked by itself, and looks for what is still held."""
        for name in set(self.open) - set(self.answers):
            self.engine.abort(name)
        while len(self.asked) < len(self.marked):
            self.mark()
        limit = time.perf_counter() + 60
        while self.engine.has_work() and time.perf_counter() < limit:
            self.step()
        self.check()
        scheduler, cache = self.engine.scheduler, self.engine.scheduler.cache
        self.engine.reset_prefix_cache()
        self.check()
        pools = (("history", cache.history), ("window", cache.window))
        held = {f"{name} blocks": pool.count - 1 - len(pool.plain) for name, pool in pools if pool.count}
        held |= {
            "slots": cache.slots.count - 1 - len(cache.slots.free),
            "checkpoints": cache.checkpoints.count - len(cache.checkpoints.free),
            "requests": len(scheduler.requests) + len(self.open),
            "steps in flight": len(self.engine.in_flight),
        }
        for what, count in held.items():
            if count:
                self.fail(f"left when all had ended: {count} {what}")

    def tell(self) -> str:
        s = self.engine.stats()
        return (
            f"{len(self.failures)} failures, {self.counts['ended']} requests ended, {self.counts['aborted']} aborted, "
            f"{self.counts['compared']} compared with themselves alone, {s.preemptions} preemptions, "
            f"{s.prefix_resumed_tokens} tokens resumed, {s.accepted_draft_tokens} of {s.draft_tokens} drafts accepted, "
            f"{s.generated_tokens} tokens in {s.steps} steps, {self.counts['checks']} checks, "
            f"{s.late_compilations} late compilations"
        )


def made(settings: Settings, source: DummySource, vocab: int) -> Engine:
    """An engine whose tokens are said to be numbers, so that a grammar has some."""
    engine = Engine(settings, source=source)
    engine.teach([b"" if i <= END else str(i).encode() for i in range(vocab)], (END,))
    return engine


def alone(settings: Settings, source: DummySource, vocab: int, requests: list[Request]) -> list[Answer]:
    """Their answers, one after the other on an engine that has nothing else."""
    engine, found = made(settings, source, vocab), []
    for request in requests:
        found.append(Answer())
        engine.submit(request)
        while engine.has_work():
            for event in engine.step():
                if event.error is not None:
                    raise OffroadError(f"request {request.id} alone", found=event.error)
                found[-1].add(event)
    engine.close()
    del engine
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return found


def pressed(settings: Settings, source: DummySource, contexts: float) -> Settings:
    """Settings whose keys have room for so many whole contexts, and 24 checkpoints."""
    plan = make_plan(settings, source)
    memory, kept = plan.memory, 24 * plan.memory.checkpoint_bytes
    blocks = int(contexts * settings.max_model_len / plan.block) + 2
    nbytes = (blocks + 1) * memory.history_block_bytes + memory.window_blocks * memory.window_block_bytes + kept
    return settings.replace(kv_cache_memory_bytes=nbytes, checkpoint_memory_bytes=kept)


def main() -> int:
    args = arguments()
    answer = max(300, args.longest // 6)
    values: dict[str, Any] = dict(model=f"soak {args.model}", device=args.device, max_model_len=args.longest + answer)
    values |= dict(memory_utilization=args.memory_utilization, batch_invariant=not args.plain)
    values |= dict(max_num_batched_tokens=args.chunk) | ({"dtype": args.dtype} if args.dtype else {})
    single = Settings.of(**values, max_num_seqs=1, enable_prefix_caching=False)
    source = DummySource(config_of(args.model), resolve_device(single).kind, args.quantization)
    vocab, guided = resolve_model(source.config).spec.vocab, find_spec("xgrammar") is not None
    load = Load(random.Random(args.seed), vocab, args.longest, answer, guided)
    marked = marked_requests(load, args.marked)
    expected = [] if args.plain else alone(single, source, vocab, marked)
    took = time.perf_counter() - BEGAN
    several = Settings.of(**values, max_num_seqs=args.max_num_seqs, speculative_config=DRAFTS)
    engine = made(pressed(several, source, args.contexts or (2 if args.plain else 6)), source, vocab)
    print(f"{len(expected)} marked requests alone: {took:.0f} s; {engine.info.memory_summary}", file=sys.stderr)
    seconds = max(1.0, 60 * args.minutes - (time.perf_counter() - BEGAN))
    soak = Soak(engine, load, marked, expected, seconds)
    try:
        soak.run()
    except Exception as error:  # whatever ends the engine is the finding; what was counted until then is told too
        soak.failures.append(f"{type(error).__name__}: {error}")
    return verdict(soak, args)


def verdict(soak: Soak, args: argparse.Namespace) -> int:
    """Prints one line, and what failed; gives the exit code."""
    memory, failures = soak.memory, soak.failures
    # On the device a step's own tensors come and go: what the least busy moments have is what stays.
    device = memory.growth(memory.device, min) if memory.at else 0.0
    process = memory.growth(memory.process, statistics.median) if memory.at else 0.0
    if device > args.device_growth:
        failures.append(f"device memory grew by {device:.1f} MiB between the first and the last quarter")
    if process > args.process_growth:
        failures.append(f"the process grew by {process:.1f} MiB between the first and the last quarter")
    if soak.expected and soak.counts["compared"] < len(soak.marked):
        failures.append(
            f"only {soak.counts['compared']} marked requests were compared: more --minutes, or fewer --marked"
        )
    for failure in failures:
        print(f"FAILED {failure}")
    what = f"{args.model} ({soak.engine.plan.dtype}, weights {args.quantization}) on {soak.engine.info.device}"
    guided = "some" if soak.load.guided else "none (no xgrammar)"
    ran = f"{soak.seconds / 60:.1f} min of mixed load, {what}, seed {args.seed}, guided answers: {guided}"
    print(
        f"soak {'FAILED' if failures else 'passed'}: {ran}: {soak.tell()}; "
        f"memory {device:+.1f} MiB on the device, {process:+.1f} MiB in the process"
    )
    return 1 if failures else 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", help=f"{', '.join(SHAPES)}, or a config.json")
    parser.add_argument("--quantization", default="none", help="w4a16-g32, w4a16-g128, fp8-block or none")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype")
    parser.add_argument("--minutes", type=float, default=9.0, help="of it all, loading and answers alone too")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--marked", type=int, default=50, help="requests that are compared with themselves alone")
    parser.add_argument("--longest", type=int, default=8192, help="tokens of the longest prompt")
    parser.add_argument("--chunk", type=int, default=2048, help="--max-num-batched-tokens")
    parser.add_argument("--max-num-seqs", type=int, default=32)
    parser.add_argument("--contexts", type=float, help="room for keys, in longest contexts (6; with --plain 2)")
    parser.add_argument("--memory-utilization", type=float, default=0.3)
    parser.add_argument("--plain", action="store_true", help="without --batch-invariant, and nothing is compared")
    parser.add_argument("--device-growth", type=float, default=8.0, help="MiB that are no leak")
    parser.add_argument("--process-growth", type=float, default=96.0, help="MiB that are no leak")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
