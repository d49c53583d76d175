"""Triton kernels as entries of the registry: what each needs, as data, and how it is bound.

Modules with `@triton.jit` functions are imported by `bind` only: a plan is made without Triton.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from offroad.device.profile import DeviceProfile
from offroad.ops.spec import Bound, Problem, Verdict, refuse

OLDEST = (8, 0)  # below it Triton has no tensor cores and no bf16
Limits = Callable[[DeviceProfile, Problem], str | None]


@dataclass(frozen=True)
class TritonKernel:
    """A Triton kernel for one op.

    `features` are those of a problem that it has; `limits` says why a problem is not for it (None: it is); `shared`
    gives the bytes of shared memory of its largest tile, a constant of the compiled code, never of a context;
    `bind` gives the callable for a device and a problem; `layout` the packed layout of weights that it reads;
    `reason` is what the plan says of it, of this problem if it is a function; `cost` orders it among candidates;
    `capturable`: a CUDA graph can hold it, `invariant`: it can keep rows apart (see ops/spec.py), and `bind` minds
    whether the problem asks for it; `workspace`, `temporary`: bytes, as in a verdict; `asked`: it is for those who
    name it with --kernel, and why; `computes`: what it computes, where that is not what its op's reference does.
    """

    name: str
    op: str
    bind: Callable[[DeviceProfile, Problem], Bound]
    limits: Limits = lambda device, problem: None
    shared: Callable[[DeviceProfile, Problem], int] = lambda device, problem: 0
    features: frozenset[str] = frozenset()
    dtypes: frozenset[str] = frozenset({"bfloat16", "float16", "float32"})
    layout: str = ""
    reason: str | Callable[[DeviceProfile, Problem], str] = "Triton kernel"
    cost: float = 1.0
    reference: bool = False
    capturable: bool = True
    invariant: bool = True
    workspace: Callable[[DeviceProfile, Problem], int] = lambda device, problem: 0
    temporary: Callable[[DeviceProfile, Problem], int] = lambda device, problem: 0
    asked: str = ""
    computes: Bound | None = None

    def check(self, device: DeviceProfile, problem: Problem) -> Verdict:
        if device.kind != "cuda":
            return refuse(f"runs on CUDA devices; device: {device.kind}")
        if device.compute_capability is None or device.compute_capability < OLDEST:
            return refuse(f"needs compute capability 8.0; device: {device.name}")
        if device.source == "probe" and device.tool("triton") is None:
            return refuse("needs Triton, which is not installed: pip install triton")
        if problem.dtype not in self.dtypes:
            return refuse(f"needs activations in {', '.join(sorted(self.dtypes))}; asked: {problem.dtype}")
        if lacks := sorted(problem.features - self.features):
            return refuse(f"has no {', '.join(lacks)}")
        if reason := self.limits(device, problem):
            return refuse(reason)
        needed, there = self.shared(device, problem), device.shared_per_block
        if needed > there:
            return refuse(f"needs {needed:,} bytes of shared memory a block; {device.name} has {there:,}")
        memory = self.workspace(device, problem), self.temporary(device, problem)
        reason = self.reason if isinstance(self.reason, str) else self.reason(device, problem)
        return Verdict(True, reason, self.cost, self.layout, *memory)

    def prepare(self, device: DeviceProfile, problem: Problem) -> Bound:
        return self.bind(device, problem)
