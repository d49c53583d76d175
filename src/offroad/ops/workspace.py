"""Bytes that a step takes beside weights and caches: an upper bound, near enough to plan by."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from offroad.device.profile import DeviceProfile
from offroad.models.spec import HyperLayerSpec, ModelSpec
from offroad.ops.cells import Cell, Choice
from offroad.settings import Settings

SAMPLER_BYTES = 100 * 1024**2  # sorted logits and noise: see `sample.sampler`
LIBRARY_BYTES = 2 * 32 * 1024**2  # torch's GEMMs keep as much for each stream: that of steps, and that of captures
FP32 = 4
_MIXERS = ("attention", "gated_delta")  # ops that run while the layer's projections live, but not what follows


@dataclass(frozen=True)
class Workspace:
    """Bytes of a step beside weights and caches, and who asks for most: `activations` and what the sampler sorts;
    `kept` for `keeper`, which kernels share; `temporary`, what calls of `taker` add; and what libraries keep."""

    activations: int = 0
    kept: int = 0
    keeper: str = ""
    temporary: int = 0
    taker: str = ""
    libraries: int = 0

    @property
    def total(self) -> int:
        return self.activations + self.kept + self.temporary + self.libraries

    def describe(self) -> str:
        """The parts for a person."""
        mib = 1024**2
        parts = [f"{self.activations / mib:.0f} MiB of activations"]
        parts += [f"{self.kept / mib:.1f} MiB kept for {self.keeper}"] if self.kept else []
        parts += [f"{self.temporary / mib:.1f} MiB in calls of {self.taker}"] if self.temporary else []
        parts += [f"{self.libraries / mib:.0f} MiB of torch's libraries"] if self.libraries else []
        return ", ".join(parts)


@dataclass(frozen=True)
class Live:
    """Bytes of a token that live at once: `base` in the whole step (the residual stream and what a layer makes of it),
    and beside it `mixer` or `rest`, what follows the mixer."""

    base: int
    mixer: int
    rest: int

    @property
    def most(self) -> int:
        return self.base + max(self.mixer, self.rest)

    def beside(self, tokens: int, choices: Collection[tuple[str, int]]) -> int:
        """Bytes beyond `most` of as many tokens, where kernels take bytes for a call, `choices` as (op, bytes).
        Embeddings come before all layers."""
        named = [(op.partition(":")[0], taken) for op, taken in choices]
        before = max((taken for op, taken in named if op == "embed"), default=0)
        mixing = max((taken for op, taken in named if op in _MIXERS), default=0)
        anywhere = max((taken for op, taken in named if op not in (*_MIXERS, "embed")), default=0)
        peaks = before, tokens * self.rest + anywhere, tokens * self.mixer + max(mixing, anywhere)
        return max(peaks) - tokens * max(self.mixer, self.rest)


def live(spec: ModelSpec, device: DeviceProfile, settings: Settings, itemsize: int) -> Live:
    """Bytes of a token of a model whose activations have `itemsize` bytes. Kernels of a CPU, and references, widen: all
    have four bytes there, and what an activation reads lives beside its copy."""
    widens = device.kind != "cuda" or settings.allow_reference
    if widens:
        itemsize = FP32
    linears = [(linear.name, linear.n) for layer in spec.layers for linear in layer.linears if not linear.experts]
    # What the model's own linears make is held while layers read it, and is made of two more of the kind.
    held = sum(linear.n for linear in spec.linears if linear.op == "linear")
    # A gated activation makes half as many numbers of what it reads; other ops at most as many.
    gated = max((3 * n // 2 for name, n in linears if name.endswith("gate_up")), default=0)
    others = max([3 * held, *(2 * n for name, n in linears if not name.endswith("gate_up"))])
    # Of experts: what gate_up gives, its activation, what down makes of it (on CPUs in fp32, and twice more), the
    # pair's weight and number; and beside them what the router read, a shared expert's output and the sum.
    wide = (3 if widens else 1) * spec.hidden + 12 // itemsize
    experts = ((3 * layer.moe.size + wide) * layer.moe.top_k for layer in spec.layers if layer.moe)
    pairs = max((each + 2 * spec.hidden for each in experts), default=0)
    if widens:
        gated = gated * 4 // 3
    streams = max(layer.hyper.streams if isinstance(layer, HyperLayerSpec) else 1 for layer in spec.layers)
    base = (3 + streams) * spec.hidden + held
    return Live(itemsize * base, itemsize * others, itemsize * max(gated, pairs))


def workspace_of(
    spec: ModelSpec,
    device: DeviceProfile,
    settings: Settings,
    itemsize: int,
    cells: dict[Cell, Choice] | None = None,
) -> Workspace:
    """What a step takes: its tokens' activations of `itemsize` bytes a number, and the logits; of kernels what the
    neediest asks for, since they run in turn."""
    tokens, each = settings.max_num_batched_tokens, live(spec, device, settings, itemsize)
    found = cells or {}
    keeper = max(found.values(), key=lambda choice: choice.workspace, default=None)
    taker = max(found.values(), key=lambda choice: choice.temporary, default=None)
    cuda = device.kind == "cuda"
    return Workspace(
        tokens * each.most + FP32 * 3 * settings.max_num_seqs * spec.vocab + cuda * SAMPLER_BYTES,
        keeper.workspace if keeper else 0,
        keeper.kernel if keeper else "",
        each.beside(tokens, [(cell.op, choice.temporary) for cell, choice in found.items()]),
        taker.kernel if taker else "",
        cuda * LIBRARY_BYTES,
    )
