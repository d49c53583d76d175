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
    oldest: tuple[int, int] | None = None  # compute capability from which on it is for all, in place of `capabilities`
    dtypes: frozenset[str] = frozenset({"float16"})
    reason: str = "CUDA C++ kernel, compiled by NVRTC"
    kept: Callable[[DeviceProfile, Problem], int] = lambda device, problem: 0

    def check(self, device: DeviceProfile, problem: Problem) -> Verdict:
        if device.kind != "cuda":
            return refuse(f"runs on CUDA devices; device: {device.kind}")
        if reason := self._wrong_device(device):
            return refuse(reason)
        if problem.dtype not in self.dtypes:
            return refuse(f"needs activations in {' or '.join(sorted(self.dtypes))}; asked: {problem.dtype}")
        if lacks := sorted(problem.features - self.features):
            return refuse(f"has no {', '.join(lacks)}")
        if reason := self.limits(problem):
            return refuse(reason)
        needed, there = self.shared(problem), device.shared_per_block
        if needed > there:
            return refuse(f"needs {needed:,} bytes of shared memory a block; {device.name} has {there:,}")
        memory = self.kept(device, problem), self.workspace(problem)
        return Verdict(True, self.reason, self.cost, self.layout, *memory)

    def _wrong_device(self, device: DeviceProfile) -> str | None:
        has = device.compute_capability or (0, 0)
        if self.oldest is not None:
            if has < self.oldest:
                return f"needs compute capability {self.oldest[0]}.{self.oldest[1]}; device: {device.name}"
            if device.source == "probe" and (device.tool("cuda-cxx") is None or device.tool("triton") is None):
                return "needs NVRTC, cuda-bindings and Triton, which are not all installed: pip install cuda-bindings"
        elif has not in self.capabilities:
            known = ", ".join(f"{major}.{minor}" for major, minor in sorted(self.capabilities))
            return f"is for compute capability {known}; device: {device.name}"
        elif device.source == "probe" and device.tool("nvrtc") is None:
            return "needs NVRTC 12, which is not installed: pip install 'offroad[sm70]'"
        return None

    def prepare(self, device: DeviceProfile, problem: Problem) -> Bound:
        return self.bind(device, problem)
