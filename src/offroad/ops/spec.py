"""Ops, problems, kernels and verdicts: choosing a kernel is data, and every refusal has a reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from offroad.device.profile import DeviceProfile


@dataclass(frozen=True)
class Tolerance:
    """Largest allowed difference to the reference in fp32 or wider: `|a - b| <= absolute + relative * |b|`."""

    absolute: float
    relative: float


@dataclass(frozen=True)
class OpSpec:
    """An op: what it computes (`doc`), its plain-PyTorch `reference`, and the tolerance by activation dtype.

    `reference` None: the op is specified and nothing computes it yet, not even slowly. A model that needs it can be
    planned, and its plan says so.
    """

    name: str
    doc: str
    reference: Callable[..., Any] | None
    tolerance: dict[str, Tolerance]


@dataclass(frozen=True)
class Load:
    """The most that a step holds: rows, tokens of a verify row, tokens, and positions of a sequence."""

    rows: int = 0
    width: int = 1
    tokens: int = 0
    length: int = 0


@dataclass(frozen=True)
class Problem:
    """What a cell needs of a kernel: sizes by name, dtypes, and flags such as "window" or "qk_norm"."""

    op: str
    phase: str  # "prefill", "decode", "verify", "draft"
    dtype: str  # activations
    kv_dtype: str = ""
    sizes: tuple[tuple[str, int], ...] = ()
    features: frozenset[str] = frozenset()
    stored: tuple[str, ...] = ()  # linear: how the checkpoint stores each part
    parts: tuple[tuple[str, str], ...] = ()  # a block: its parts and the kernel that the plan has for each
    invariant: bool = False  # a row's result must not depend on the rows beside it (--batch-invariant)
    load: Load = Load()

    def size(self, name: str) -> int:
        return dict(self.sizes)[name]


@dataclass(frozen=True)
class Verdict:
    """Whether a kernel takes a problem on a device. `cost` orders candidates (estimated seconds, or a rank).

    `workspace`: bytes of the memory that all kernels share, which is there from the start; `temporary`: bytes that it
    asks for when it is called, beside its result. Both for the problem's load."""

    ok: bool
    reason: str
    cost: float = 0.0
    layout: str = ""  # linear: the packed layout it reads
    workspace: int = 0
    temporary: int = 0

    def __post_init__(self) -> None:
        assert self.reason, "a verdict needs a reason"


def refuse(reason: str) -> Verdict:
    return Verdict(False, reason)


Bound = Callable[..., Any]


class Kernel(Protocol):
    """A kernel's needs are data: `check` imports no toolchain and touches no device; `prepare` may compile.

    A kernel may have `capturable`, which says that a CUDA graph can hold its calls: of a step's values it reads what
    lies on the device only, and it waits for nothing. Without it, it is not.

    It may have `invariant`, which says that for a problem that asks so a row's result is bit for bit the same whatever
    rows are beside it, however many they are, and wherever a prompt is cut at a multiple of a block. Without it, it is
    not.

    It may have `asked`: why a plan takes it only where --kernel names it; and `computes`: what stands for its op's
    reference where it computes something else.
    """

    name: str
    op: str
    reference: bool

    def check(self, device: DeviceProfile, problem: Problem) -> Verdict: ...

    def prepare(self, device: DeviceProfile, problem: Problem) -> Bound: ...


@dataclass(frozen=True)
class Registry:
    """Ops and kernels by name."""

    ops: dict[str, OpSpec] = field(default_factory=dict)
    kernels: dict[str, Kernel] = field(default_factory=dict)

    def add_op(self, op: OpSpec) -> None:
        assert op.name not in self.ops, op.name
        self.ops[op.name] = op

    def add(self, kernel: Kernel) -> None:
        assert kernel.name not in self.kernels, kernel.name
        assert kernel.op in self.ops, kernel.op
        self.kernels[kernel.name] = kernel

    def capturable(self, name: str) -> bool:
        """Whether a CUDA graph can hold the kernel."""
        return getattr(self.kernels[name], "capturable", False)

    def invariant(self, name: str) -> bool:
        """Whether the kernel can keep rows apart: see `Kernel`."""
        return getattr(self.kernels[name], "invariant", False)

    def asked(self, name: str) -> str:
        """Why the kernel is taken only where --kernel names it; "": it is not so."""
        return getattr(self.kernels[name], "asked", "")

    def computes(self, name: str) -> Bound | None:
        """What the kernel computes, in plain PyTorch: its op's reference, unless it says otherwise."""
        kernel = self.kernels[name]
        return getattr(kernel, "computes", None) or self.ops[kernel.op].reference

    def candidates(self, op: str) -> list[Kernel]:
        return [kernel for kernel in self.kernels.values() if kernel.op == op]
