"""Where the time of a step goes, by op: CUDA events around every call, while the device is kept busy.

The device first sleeps for long enough that the host has queued the calls behind it, so that what lies between two
events is work and no waiting. Graphs are off meanwhile: what a launch costs without them is not seen either.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from offroad.engine import Engine
from offroad.ops.bound import LayerOps, Ops
from offroad.ops.spec import Bound
from offroad.run.runner import Runner
from offroad.sample.params import SamplingParams
from offroad.schedule.request import Request

_SLEEP = 400_000_000  # clock cycles, about 0.2 s
Mark = Callable[[], Any]  # notes a point in time


@dataclass
class Clock:
    """Notes begin and end of calls, which may be nested; `mark` notes a time, `between` gives seconds."""

    mark: Mark
    between: Callable[[Any, Any], float]
    calls: list[tuple[str, Any, Any, int]] = field(default_factory=list)  # op, begin, end, place of the outer call
    open: list[int] = field(default_factory=list)

    def timed(self, name: str, call: Bound) -> Bound:
        def timed_call(*args: Any) -> Any:
            place, outer = len(self.calls), self.open[-1] if self.open else -1
            self.calls.append((name, None, None, outer))
            self.open.append(place)
            begin = self.mark()
            result = call(*args)
            self.calls[place] = (name, begin, self.mark(), outer)
            self.open.pop()
            return result

        return timed_call

    def ops(self, ops: Ops) -> Ops:
        """The ops with every call timed."""
        model = self._layer(ops.model)
        return replace(ops, layers=[self._layer(layer) for layer in ops.layers], model=model)

    def _layer(self, layer: LayerOps) -> LayerOps:
        def attention(bound: Bound | None) -> Bound | None:
            return None if bound is None else self.timed("attention", bound)

        verify = attention(layer.attention_verify)
        same = layer.attention_verify is layer.attention_chunk
        return replace(
            layer,
            bounds={name: self.timed(name, bound) for name, bound in layer.bounds.items()},
            attention_verify=verify,
            attention_chunk=verify if same else attention(layer.attention_chunk),
            described={},
        )

    def totals(self) -> dict[str, tuple[int, float]]:
        """(calls, seconds) by op, without the time of ops inside."""
        own = [self.between(begin, end) for _, begin, end, _ in self.calls]
        for _, begin, end, outer in self.calls:
            if outer >= 0:
                own[outer] -= self.between(begin, end)
        found: dict[str, tuple[int, float]] = {}
        for (name, _, _, _), seconds in zip(self.calls, own, strict=True):
            count, total = found.get(name, (0, 0.0))
            found[name] = (count + 1, total + seconds)
        return found


def clock(device: torch.device) -> Clock:
    """Events of the device, or the host's clock on a CPU, whose calls end when they return."""
    if device.type != "cuda":
        return Clock(time.perf_counter, lambda begin, end: end - begin)

    def mark() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    return Clock(mark, lambda begin, end: begin.elapsed_time(end) * 1e-3)


def step_times(engine: Engine, rows: int, prompt: int) -> dict[str, Any]:
    """Times of one prefill step of a prompt and of one decode step of `rows` sequences (prompts of up to 1,024 tokens),
    by op. With a drafter that is a verify step, of up to `drafts` drafts a row."""
    runner, vocab = engine.runner, engine.info.vocab
    found: dict[str, Any] = {}
    _submit(engine, 1, prompt, vocab, "profile-warm", 2)
    _drain(engine)
    _submit(engine, 1, prompt, vocab, "profile-prefill", 1)
    found["prefill"] = {"tokens": min(prompt, engine.plan.chunk)} | _one_step(engine, runner)
    _drain(engine)
    tokens, k = min(prompt, 1024), engine.plan.k
    _submit(engine, rows, tokens, vocab, "profile-decode", min(64 * (k + 1), engine.plan.max_len - tokens))
    while not _decoding(engine, rows):
        assert engine.has_work(), "all rows decode at once for some steps"
    found["decode"] = {"rows": rows, "drafts": k} | _one_step(engine, runner)
    if runner.device.type == "cuda":
        found["decode_kernels"] = _kernels(engine)
    _drain(engine)
    return found


def _decoding(engine: Engine, rows: int) -> bool:
    """Whether the next step will have `rows` decode rows: takes one, in which as many had a token and none a chunk."""
    before = engine.stats()
    engine.step()
    after = engine.stats()
    if after.prompt_tokens > before.prompt_tokens:
        return False
    # A row with drafts gives several tokens, and without drafts one.
    return rows in (after.draft_rows - before.draft_rows, after.generated_tokens - before.generated_tokens)


def _submit(engine: Engine, rows: int, tokens: int, vocab: int, name: str, answer: int) -> None:
    source, params = random.Random(name), SamplingParams(temperature=0.0, max_tokens=answer, ignore_eos=True)
    for i in range(rows):
        ids = [source.randrange(32, vocab) for _ in range(tokens)]
        engine.submit(Request(id=f"{name}-{i}", prompt_ids=ids, params=params))


def _drain(engine: Engine) -> None:
    while engine.has_work():
        engine.step()


def _one_step(engine: Engine, runner: Runner) -> dict[str, Any]:
    """One step of the engine with its ops timed."""
    plain, graphs, timer = runner.ops, (runner.graphs, runner.chunk_graphs), clock(runner.device)
    runner.ops = {phase: timer.ops(ops) for phase, ops in plain.items()}
    runner.graphs = runner.chunk_graphs = None
    if runner.device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda._sleep(_SLEEP)
    try:
        engine.step()
        if runner.device.type == "cuda":
            torch.cuda.synchronize()
    finally:
        runner.ops, (runner.graphs, runner.chunk_graphs) = plain, graphs
    totals = timer.totals()
    total = sum(seconds for _, seconds in totals.values())
    ordered = sorted(totals.items(), key=lambda entry: -entry[1][1])
    return {
        "seconds": total,
        "ops": [
            {"op": name, "calls": count, "seconds": seconds, "each_us": 1e6 * seconds / count, "share": seconds / total}
            for name, (count, seconds) in ordered
        ],
    }


def _kernels(engine: Engine) -> list[dict[str, Any]]:
    """CUDA kernels of one step as the engine runs it, by graphs if it has them: name, calls, seconds by `added`."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        engine.step()
        torch.cuda.synchronize()
    events = (event for event in profiler.events() if event.device_type == DeviceType.CUDA)
    times = added([(event.name, 1e-6 * event.time_range.start, 1e-6 * event.time_range.end) for event in events])
    found = [{"kernel": name, "calls": count, "seconds": seconds} for name, (count, seconds) in times.items()]
    return sorted(found, key=lambda entry: -entry["seconds"])


def added(spans: list[tuple[str, float, float]]) -> dict[str, tuple[int, float]]:
    """Calls and seconds of each kernel, of its spans' begins and ends. A kernel that starts early waits for the ones
    before it: what it takes is what is left when the last of those has ended."""
    found: dict[str, tuple[int, float]] = {}
    before = float("-inf")
    for name, begin, end in sorted(spans, key=lambda span: span[2]):
        count, seconds = found.get(name, (0, 0.0))
        found[name] = count + 1, seconds + end - max(begin, before)
        before = end
    return found


def add_kernels(engine: Engine, times: dict[str, Any], nbytes: dict[str, int]) -> None:
    """Puts the plan's kernel beside each op, and for decode the bytes a second at which its weights are read."""
    for phase in ("prefill", "decode"):
        kernels: dict[str, set[str]] = {}
        for cell, choice in engine.plan.cells.items():
            if cell.phase == phase:
                kernels.setdefault(cell.op, set()).add(choice.kernel)
        for entry in times[phase]["ops"]:
            entry["kernel"] = ", ".join(sorted(kernels.get(entry["op"], {"-"})))
            if phase == "decode" and (size := nbytes.get(entry["op"])):
                entry["gb_s"] = size / entry["seconds"] * 1e-9


def render(times: dict[str, Any]) -> str:
    """Both steps as tables."""
    from offroad.cli.table import table

    parts = []
    for phase, what in (("decode", "rows"), ("prefill", "tokens")):
        step = times[phase]
        rows = [
            (
                entry["op"],
                entry["calls"],
                round(1e3 * entry["seconds"], 3),
                round(entry["each_us"], 1),
                f"{100 * entry['share']:.1f} %",
                f"{entry['gb_s']:.0f}" if "gb_s" in entry else "-",
                entry.get("kernel", "-"),
            )
            for entry in step["ops"]
        ]
        drafts = f" of up to {step['drafts']} drafts" if step.get("drafts") else ""
        head = f"one {phase} step of {step[what]} {what}{drafts}: {1e3 * step['seconds']:.2f} ms in ops"
        parts.append(head + "\n" + table(("OP", "CALLS", "ms", "us EACH", "SHARE", "GB/s", "KERNEL"), rows))
    if kernels := times.get("decode_kernels"):
        total = 1e3 * sum(entry["seconds"] for entry in kernels)
        rows = [(round(1e3 * k["seconds"], 3), k["calls"], k["kernel"][:90]) for k in kernels[:25]]
        head = f"one decode step as it runs: {total:.2f} ms in kernels, each from when those before it had ended"
        parts.append(head + "\n" + table(("ms", "CALLS", "KERNEL"), rows))
    return "\n\n".join(parts)


def weight_bytes(packed: dict[Any, int]) -> dict[str, int]:
    """Bytes of weights by op, over all layers, of bytes by cell."""
    found: dict[str, int] = {}
    for cell, size in packed.items():
        found[cell.op] = int(np.int64(found.get(cell.op, 0)) + size)
    return found
