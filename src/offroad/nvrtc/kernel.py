"""CUDA C++ kernels as entries of the registry: what each needs, as data, and how it is bound."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from offroad.device.profile import DeviceProfile
from offroad.ops.spec import Bound, Problem, Verdict, refuse

VOLTA, TURING = (7, 0), (7, 5)
Limits = Callable[[Problem], str | None]


@dataclass(frozen=True)
class CudaKernel:
    """A kernel of this package for one op.

    `limits` says why a problem is not for it (None: it is), `shared` gives the bytes of shared memory of its largest
    tile, `bind` the callable for a problem, `layout` the packed layout of weights that it reads, `cost` orders it among
    candidates. `capabilities` are those whose instructions it is written for, `workspace` gives the bytes that a call
    takes besides its output, `kept` those of the memory that all kernels share.
    """

    name: str
    op: str
    bind: Callable[[DeviceProfile, Problem], Bound]
    limits: Limits = lambda problem: None
    shared: Callable[[Problem], int] = lambda problem: 0
    features: frozenset[str] = frozenset()
    capabilities: frozenset[tuple[int, int]] = frozenset({VOLTA, TURING})
    layout: str = ""
    cost: float = 1.0
    reference: bool = False
    workspace: Callable[[Problem], int] = lambda problem: 0
    capturable: bool = True  # lengths are read on the device, grids depend on a step's shape

    def check(self, device: DeviceProfile, problem: Problem) -> Verdict:
        if device.kind != "cuda":
            return refuse(f"runs on CUDA devices; device: {device.kind}")
        if device.compute_capability not in self.capabilities:
            known = ", ".join(f"{major}.{minor}" for major, minor in sorted(self.capabilities))
            return refuse(f"is for compute capability {known}; device: {device.name}")
        if device.source == "probe" and not (device.tool("nvrtc") or "").startswith("12."):
            found = device.tool("nvrtc") or "nothing"
            return refuse(f"needs NVRTC 12 with cuda-bindings 12 (found: {found}): pip install 'offroad[sm70]'")
        if problem.dtype != "float16":
            return refuse(f"needs activations in float16; asked: {problem.dtype}")
        if lacks := sorted(problem.features - self.features):
            return refuse(f"has no {', '.join(lacks)}")
        if reason := self.limits(problem):
            return refuse(reason)
        needed, there = self.shared(problem), device.shared_per_block
        if needed > there:
            return refuse(f"needs {needed:,} bytes of shared memory a block; {device.name} has {there:,}")
        reason = "CUDA C++ kernel, compiled by NVRTC"
        return Verdict(True, reason, self.cost, self.layout, temporary=self.workspace(problem))

    def prepare(self, device: DeviceProfile, problem: Problem) -> Bound:
        return self.bind(device, problem)
