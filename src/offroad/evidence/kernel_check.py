"""Every kernel of a plan, or of a standard set, against its reference on the device that is here, with times."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

import torch

from offroad.device.profile import DeviceProfile
from offroad.evidence.block_trials import Parts, block_trials
from offroad.evidence.kernel_trials import Trial, trials
from offroad.ops.block_kernels import PartsKernel
from offroad.ops.cells import DRAFTER, MODEL, Cell, Choice
from offroad.ops.plan import Plan
from offroad.ops.spec import Bound, Problem, Registry, Tolerance

# Rows of caches: one step of an 8-bit float; states go through sums of their own.
_STEPS = {torch.float8_e5m2: 0.26, torch.float8_e4m3fn: 0.13}
_STATE = Tolerance(2e-3, 2e-3)
_TIMED, _SECONDS = 20, 0.3


@dataclass(frozen=True)
class Result:
    """One kernel on one shape. `error`: the largest difference as a part of what the tolerance allows, at most 1 if it
    passes; `milliseconds`: the median of some calls; `repeats`: a second run gave the same bits; `problem`: what was
    wrong, or why it was not run by itself (`passed` None)."""

    kernel: str
    op: str
    phase: str
    shape: str
    passed: bool | None
    error: float | None = None
    milliseconds: float | None = None
    repeats: bool | None = None
    problem: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Subject:
    """A kernel and a problem that it takes, with the layout of weights that it reads."""

    kernel: str
    problem: Problem
    layout: str
    parts: Parts = ()  # of a block


def of_plan(plan: Plan) -> list[Subject]:
    """The kernels of a plan's cells, each once for equal problems."""

    def parts(cell: Cell, choice: Choice) -> Parts:
        found = []
        for name, _ in choice.problem.parts:
            op, _, phase = name.partition(".")
            places = (Cell(layer, op, phase or cell.phase) for layer in (cell.layer, MODEL, DRAFTER))
            found.append((name, next(plan.cells[place] for place in places if place in plan.cells)))
        return tuple(found)

    found = {
        Subject(choice.kernel, choice.problem, choice.layout, parts(cell, choice)): None
        for cell, choice in plan.cells.items()
    }
    return sorted(found, key=lambda subject: (subject.problem.op, subject.problem.phase, subject.kernel))


def standard(registry: Registry, device: DeviceProfile) -> list[Subject]:
    """Every kernel of the device but the references, on usual problems that it takes."""
    dtypes = (
        ("float32",) if device.kind == "cpu" else ("bfloat16", "float16") if device.has("mma_bf16") else ("float16",)
    )
    found = []
    for problem in (problem for dtype in dtypes for problem in usual_problems(dtype, device)):
        for kernel in registry.candidates(problem.op):
            verdict = kernel.check(device, problem)
            if verdict.ok and not kernel.reference:
                found.append(Subject(kernel.name, problem, verdict.layout))
    return found


def usual_problems(dtype: str, device: DeviceProfile) -> Iterator[Problem]:
    """Heads, groups and ways of storing weights as models have them; sizes for seconds rather than minutes."""
    k, n = (1024, 1024) if device.kind == "cpu" else (5120, 4096)
    kinds = ("bf16", "affine4.x-g128", "affine4.x-g32", "affine8.x-g128", "fp8.block128x128", "fp4.nvfp4", "fp4.mxfp4")
    kinds += ("gguf.q4_k", "gguf.q6_k")
    eight_bits = ("float8_e4m3fn",) if device.has("cvt_e4m3") else ("float8_e5m2",)
    caches = (dtype,) if device.kind == "cpu" else (dtype, *eight_bits)
    delta = {"key_heads": 4, "value_heads": 12, "key_dim": 128, "value_dim": 128, "kernel": 4}
    heads = ((64, 8, 2), (128, 8, 2), (256, 12, 2), (512, 8, 1))
    for phase in ("prefill", "decode"):

        def made(op: str, features: tuple[str, ...] = (), kv: str = "", stored: tuple[str, ...] = (), **sizes: int):
            return Problem(op, phase, dtype, kv, tuple(sorted(sizes.items())), frozenset(features), stored)  # noqa: B023

        yield replace(made("linear", stored=("bf16",), k=k, n=n), invariant=True)
        for kind in kinds:
            yield made("linear", stored=(kind,), k=k, n=n)
            yield made("embed", stored=(kind,), k=k, n=n)
            yield made("grouped_linear", stored=(kind,), k=k, n=8 * 512, experts=8)
        for dim, q, kv_heads in heads:
            for cache in caches:
                sizes = dict(head_dim=dim, heads=q, kv_heads=kv_heads, block=64)
                yield made("attention", kv=cache, **sizes)
                yield made("attention", ("window",), kv=cache, window=100, **sizes)
        yield made("qkv_rope", ("qk_norm",), heads=8, kv_heads=2, head_dim=128, rope_dim=128)
        yield made("qkv_rope", ("qk_norm", "output_gate", "mrope"), heads=6, kv_heads=1, head_dim=256, rope_dim=64)
        yield made("qkv_rope", ("qk_norm", "v_norm"), heads=8, kv_heads=2, head_dim=256, rope_dim=256)
        for op in ("norm", "add_norm", "sandwich_norm"):
            yield made(op, hidden=k)
        for kind in ("silu", "gelu_tanh"):
            yield made("gated_activation", (kind,), size=n)
        yield made("output_gate", heads=6, head_dim=256)
        yield made("gated_delta", ("silu",), **delta)
        yield made("route", experts=128, top_k=8)
        for features in ((), ("shared",)):
            yield made("moe_combine", features, hidden=k, top_k=8)


def check(
    subjects: list[Subject],
    registry: Registry,
    device: DeviceProfile,
    report: Callable[[Result], None] = lambda result: None,
    place: str = "",
) -> list[Result]:
    """A result for every trial of every subject, told to `report` as they come; tensors are at `place`, or else on the
    device."""
    results = []
    for subject in subjects:
        for result in _results(subject, registry, device, torch.device(place or device.kind)):
            results.append(result)
            report(result)
    return results


def _results(subject: Subject, registry: Registry, device: DeviceProfile, place: torch.device) -> Iterator[Result]:
    problem, kernel = subject.problem, registry.kernels[subject.kernel]
    blank = Result(subject.kernel, problem.op, problem.phase, "", None)
    if kernel.reference:
        yield replace(blank, problem="is the reference")
        return
    count = 0
    with torch.inference_mode():
        try:
            bound: Bound | None = None
            tried = trials(problem, subject.layout, place)
            if subject.parts and not isinstance(kernel, PartsKernel):
                tried = block_trials(problem, subject.parts, registry, device, place)
            for trial in tried:
                bound = bound or kernel.prepare(device, problem)
                count += 1
                yield _result(blank, trial, bound, registry, problem.dtype)
        except Exception as error:  # a kernel that does not compile or run is what this is here to find
            yield replace(blank, passed=False, problem=f"{type(error).__name__}: {error}")
            return
    if not count:
        yield replace(blank, problem="is made of kernels that are tried by themselves")


def _result(blank: Result, trial: Trial, bound: Bound, registry: Registry, dtype: str) -> Result:
    op, reference = registry.ops[blank.op], registry.computes(blank.kernel)
    assert reference is not None, op.name
    found, again = trial.run(bound, False), trial.run(bound, False)
    wanted = trial.run(reference, True)
    limit = op.tolerance[dtype]
    errors = [
        _error(ours, theirs, _limit(limit, ours, number >= len(found) - trial.stored))
        for number, (ours, theirs) in enumerate(zip(found, wanted, strict=True))
    ]
    worst = max(errors)
    return replace(
        blank,
        shape=trial.shape,
        passed=worst <= 1,
        error=worst,
        milliseconds=_milliseconds(lambda: trial.bare(bound), found[0].device),
        repeats=all(torch.equal(_bits(a), _bits(b)) for a, b in zip(found, again, strict=True)),
        problem="" if worst <= 1 else f"output {errors.index(worst)} is {worst:.3g} times what is allowed away",
    )


def _limit(limit: Tolerance, ours: torch.Tensor, stored: bool) -> Tolerance:
    if ours.dtype in _STEPS:
        return Tolerance(2**-6, _STEPS[ours.dtype])
    return _STATE if stored and ours.dtype == torch.float32 and limit.absolute < _STATE.absolute else limit


def _error(ours: torch.Tensor, theirs: torch.Tensor, limit: Tolerance) -> float:
    """The largest difference over what is allowed there; infinite for numbers that are not finite, or another shape."""
    if ours.shape != theirs.shape:
        return float("inf")
    if not ours.numel():
        return 0.0
    step = 1e-30  # or of the numbers next to 0, which are too coarse for a relative limit
    if ours.is_floating_point():
        step = torch.finfo(ours.dtype).smallest_normal * torch.finfo(ours.dtype).eps
    ours, theirs = ours.float(), theirs.float()
    apart = (ours - theirs).abs() / (limit.absolute + limit.relative * theirs.abs() + step)
    worst = float(apart.max())
    return worst if worst == worst and bool(torch.isfinite(ours).all()) else float("inf")


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


def _milliseconds(call: Callable[[], object], device: torch.device) -> float:
    """The median of up to _TIMED calls, by the device's own clock; the kernel has run before."""
    times: list[float] = []
    began = time.perf_counter()
    while len(times) < _TIMED and time.perf_counter() - began < _SECONDS:
        if device.type == "cuda":
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            call()
            last.record()
            last.synchronize()
            times.append(first.elapsed_time(last))
        else:
            start = time.perf_counter()
            call()
            times.append(1e3 * (time.perf_counter() - start))
    return median(times)
