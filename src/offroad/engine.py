"""The engine: loads a model by its plan, then turns requests into token events, one step at a time.

No text and no HTTP here. It runs in the caller's process (`LLM`, tests) or in its own (`execute/`).
"""

from __future__ import annotations

import gc
import json
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace

import torch
from msgspec import structs

from offroad.cache.spec import CacheConfig
from offroad.device.probe import resolve_device, runnable
from offroad.device.profile import DeviceProfile
from offroad.errors import EngineDead, PlanError, RequestError
from offroad.execute.messages import EngineInfo
from offroad.models.registry import Resolved
from offroad.models.spec import AttentionSpec
from offroad.ops.cpu_kernels import configure
from offroad.ops.plan import Plan, plan
from offroad.ops.registry import default_registry, packers
from offroad.run import warm
from offroad.run.bind import prepare
from offroad.run.guides import Guides
from offroad.run.runner import Runner
from offroad.sample.grammar import Grammars
from offroad.sample.guided import TOO_SLOW
from offroad.schedule.request import Request, SequenceState, Stats, TokenEvent
from offroad.schedule.scheduler import Scheduler
from offroad.schedule.standing import standings
from offroad.schedule.step import Step
from offroad.schedule.turns import Turns
from offroad.settings import Settings
from offroad.speculate.attach import attach
from offroad.speculate.config import drafting
from offroad.weights import kv_scales
from offroad.weights.load import load, verify_headers
from offroad.weights.locate import open_source
from offroad.weights.source import Source, TokenizerFiles

Progress = Callable[[str, float, str], None]


def _silent(phase: str, fraction: float, note: str) -> None:
    """Nobody watches the loading."""


def make_plan(settings: Settings, source: Source, device: DeviceProfile | None = None) -> Plan:
    """The plan of a checkpoint under these settings; reads headers only. `device` None: the one that the settings name.
    Raises ModelError, PlanError."""
    return _plan(settings, *attach(settings, source), device or resolve_device(settings))


def _plan(settings: Settings, resolved: Resolved, source: Source, device: DeviceProfile) -> Plan:
    """The plan of a checkpoint, its drafter attached."""
    verify_headers(resolved.spec, source)
    config = {**source.config.get("text_config", {}), **source.config}
    dtype = config.get("torch_dtype") or config.get("dtype")
    spec = replace(resolved.spec, notes=(*resolved.spec.notes, *source.notes))
    scaled = len(kv_scales.names(source, spec))
    return plan(settings.names[0], spec, source.headers, device, settings, default_registry(), dtype, scaled)


def _share_cores(plan: Plan, threads: int) -> None:
    """Gives the cores to whoever does the work: torch's threads spin when they wait, and would take them from the C
    kernels' own, so torch gets one where those are used. Changes the number of torch threads of the whole process."""
    threads = threads or plan.device.units
    if plan.device.kind == "cpu":
        compiled = any(name.startswith("cpu.") for name in plan.kernels())
        torch.set_num_threads(1 if compiled else threads)
        if compiled:
            configure(threads)


class Engine:
    """Requests in, token events out. `step()` does the work; nothing happens between calls.

    `source` stands in for the checkpoint that `settings.model` names."""

    def __init__(self, settings: Settings, progress: Progress | None = None, source: Source | None = None) -> None:
        began, report = time.perf_counter(), progress or _silent
        self.settings = settings
        report("pull", 0.0, settings.model)
        source = source or open_source(settings, lambda done, note: report("pull", done, note))
        report("plan", 0.0, "")
        resolved, source = attach(settings, source)
        self.plan = _plan(settings, resolved, source, runnable(resolve_device(settings)))
        if self.plan.ranks > 1:
            raise PlanError(
                "--tensor-parallel-size",
                found=self.plan.ranks,
                accepted="1: only plans are made for more so far",
                next="use `offroad plan`, or one GPU",
            )
        assert resolved.model is not None, "a family that is planned only has cells without a kernel, and no plan"
        report("prepare", 0.0, f"{len(self.plan.kernels())} kernels")
        _share_cores(self.plan, settings.threads)
        bounds = prepare(self.plan, default_registry())
        device = torch.device(self.plan.device.kind)
        report("load", 0.0, "")
        spec = drafting(resolved.spec, source.headers, self.plan.drafter).storing(self.plan.store, self.plan.lag)
        weights = load(
            spec,
            source,
            self.plan.layout,
            getattr(torch, self.plan.dtype),
            device,
            packers(),
            lambda done, note: report("load", done, note),
        )
        self.runner = Runner(
            self.plan,
            spec,
            resolved.model(),
            weights,
            bounds,
            device,
            progress=lambda done, note: report("prepare", done, note),
        )
        self.grammars = Grammars(source.tokenizer(), resolved.spec.vocab)
        self.guides = self.runner.guides = Guides(resolved.spec.vocab, self.grammars.matcher)
        mixers = [layer.mixer for layer in resolved.spec.layers]
        self._shares_keys = any(isinstance(mixer, AttentionSpec) and not mixer.own_kv for mixer in mixers)
        self.scheduler = self._scheduler()
        self.in_flight: deque[Step] = deque()
        self._broken = False  # a step has failed, or was interrupted: what the device did of it is not known
        self.source_tokenizer: TokenizerFiles = source.tokenizer()
        self.info = self._info(time.perf_counter() - began, resolved.spec.vocab)
        warm.begin(self.runner)
        report("load", 1.0, "ready")

    def _scheduler(self) -> Scheduler:
        p = self.plan
        config = CacheConfig(
            block=p.block,
            history_blocks=p.memory.history_blocks,
            window_blocks=p.memory.window_blocks,
            keep=p.keep,
            slots=p.memory.slots,
            checkpoints=p.memory.checkpoints,
            rings=p.memory.checkpoint_bytes > 0,
            k=p.k,
            max_len=p.max_len,
            namespace=p.fingerprint,
            prefix_caching=self.settings.enable_prefix_caching,
            checkpoint_interval=self.settings.checkpoint_interval,
            invariant=p.batch_invariant,
        )
        return Scheduler(
            config,
            max_num_batched_tokens=p.chunk,
            max_waiting=self.settings.max_waiting,
            depth=p.depth,
            drafter=p.drafter.method if p.drafter else "",
            turns=Turns(p.graphs.turn_tokens, p.graphs.turn_from),
        )

    def _info(self, seconds: float, vocab: int) -> EngineInfo:
        p, m = self.plan, self.plan.memory
        gib = 1024**3
        memory = (
            f"weights {m.weights / gib:.2f} GiB, KV {m.kv / gib:.2f} GiB ({(m.history_blocks - 1) * p.block:,} tokens)"
        )
        if (graphs := self.runner.graphs) is not None:
            chunks = self.runner.chunk_graphs
            nbytes = graphs.nbytes + (chunks.nbytes if chunks is not None else 0)
            memory += f", graphs {nbytes / gib:.2f} GiB (planned {p.graphs.nbytes / gib:.2f})"
        return EngineInfo(
            model=p.model,
            family=p.family,
            max_model_len=p.max_len,
            max_num_seqs=p.max_num_seqs,
            vocab=vocab,
            dtype=p.dtype,
            device=p.device.name,
            plan_summary=p.summary(),
            plan_fingerprint=p.fingerprint,
            memory_summary=memory,
            load_seconds=seconds,
            compiled=self.runner.compiled,
            plan_json=json.dumps(p.to_json()),
        )

    def validate(self, request: Request) -> None:
        """Raises RequestError if the request can never run; queues nothing."""
        vocab = self.info.vocab
        if (outside := next((i for i in request.prompt_ids if not 0 <= i < vocab), None)) is not None:
            raise RequestError(
                "prompt", param="prompt", found=f"token id {outside}", accepted=f"ids of 0 to {vocab - 1}"
            )
        request.params.check_vocab(vocab)
        if request.params.prompt_logprobs is not None and self._shares_keys:
            raise RequestError(
                "prompt_logprobs is not supported for this model",
                param="prompt_logprobs",
                code="unsupported_field",
                found="layers that read the keys of others, which run the last tokens of a prompt alone",
                accepted="no prompt_logprobs, and no echo with logprobs",
            )
        self.prepare(request)
        self.scheduler.validate(request)

    def teach(self, tokens: list[bytes], ends: tuple[int, ...]) -> None:
        """Tells the bytes of all tokens, which grammars are compiled over; else they are read from the tokenizer."""
        self.grammars.teach(tokens, ends)

    def prepare(self, request: Request) -> None:
        """Does what takes long before a request can be submitted, and may be called from any thread: compiles its
        grammar. Raises RequestError if that is not one."""
        if request.guide is not None and request.guide.grammar is not None:
            self.grammars.compile(request.guide.grammar, request.guide.param)

    def submit(self, request: Request) -> None:
        """Queues a request. Raises RequestError if it can never run, QueueFull if too many wait."""
        self.validate(request)
        self.scheduler.submit(request)

    def abort(self, request_id: str) -> None:
        """Ends a request; unknown or finished ids are ignored, since an abort may cross a finish."""
        self.scheduler.abort(request_id)

    def has_work(self) -> bool:
        return bool(self.in_flight) or self.scheduler.has_work()

    def step(self) -> list[TokenEvent]:
        """Launches a step if one can be built, and commits the oldest once `depth` are in flight. Raises EngineDead
        behind a step that has not come to its end."""
        if self._broken:
            raise EngineDead(
                "the engine has ended", found="a step that failed or was interrupted", next="load it again"
            )
        began, self._broken = time.perf_counter(), True
        step = self.scheduler.build()
        if step is not None:
            self.runner.launch(step)
            self.in_flight.append(step)
        events = self.scheduler.drain_events()
        if self.in_flight and (step is None or len(self.in_flight) >= self.plan.depth):
            done = self.in_flight.popleft()
            events += self.scheduler.commit(done, self.runner.result())
        for slot in self.guides.given_up():
            self.scheduler.refuse(slot, TOO_SLOW)
        self.scheduler.seconds += time.perf_counter() - began
        self._broken = False
        return events

    def stats(self) -> Stats:
        return structs.replace(self.scheduler.stats(), late_compilations=warm.late(self.plan))

    def sequences(self) -> list[SequenceState]:
        """How far sequences are that have not ended, the oldest first."""
        return standings(self.scheduler)

    def check(self) -> None:
        """Raises AssertionError if the cache's books do not balance (I1, I2; when idle, nothing may be held)."""
        self.scheduler.check()

    def reset_prefix_cache(self) -> None:
        """Forgets every cached prefix that no running request holds."""
        self.scheduler.reset_prefix_cache()

    def close(self) -> None:
        """Frees weights and caches now, for whoever comes next; what kernels share for sums stays with the process. The
        engine cannot be used afterwards."""
        del self.runner
        gc.collect()  # graphs and what they are made of refer to one another
        if self.plan.device.kind == "cuda" and torch.cuda.is_available():
            torch.cuda.empty_cache()
