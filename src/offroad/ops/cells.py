"""The cells of a plan and how each is resolved: every (layer, op, phase) gets a kernel, and every refusal a reason."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from math import gcd

from offroad.device.profile import DeviceProfile
from offroad.errors import SettingsError
from offroad.models.spec import (
    AttentionSpec,
    HyperLayerSpec,
    LayerSpec,
    LinearSpec,
    ModelSpec,
    Paged,
    Ring,
    ScoredMoeSpec,
    SparseMlaSpec,
)
from offroad.ops.spec import Kernel, Load, Problem, Registry, Verdict
from offroad.quant.packed import FP8_BLOCKS, PER_BYTE
from offroad.quant.scheme import layout_of
from offroad.settings import Settings
from offroad.weights.source import Headers

PHASES = ("prefill", "decode")
MODEL = -1  # the layer number of what stands outside layers
DRAFTER = -2  # the same of the drafter
LAYOUTS = ("dense", *PER_BYTE)  # what weights are kept as: "linear@fp8" names the linears over such
_SPECIFIED = "none is written: the op is specified, and nothing computes it yet"


@dataclass(frozen=True, order=True)
class Cell:
    """One thing to be computed: `op` of layer `layer` (MODEL, DRAFTER: outside layers) in `phase`; "op:name" where a
    layer has several, as "linear:qkv"."""

    layer: int
    op: str
    phase: str


@dataclass(frozen=True)
class Refusal:
    kernel: str
    reason: str


@dataclass(frozen=True)
class Choice:
    """The kernel of a cell, why it can, and why each other one was not taken. `kernel` "" means unresolved."""

    kernel: str
    reason: str
    problem: Problem
    layout: str = ""
    refused: tuple[Refusal, ...] = ()
    workspace: int = 0  # bytes, as in Verdict
    temporary: int = 0


@dataclass(frozen=True)
class Group:
    """Cells that must agree on one packed layout (all uses of one weight), or a cell that stands alone."""

    cells: tuple[tuple[Cell, Problem], ...]


def groups(spec: ModelSpec, headers: Headers, dtype: str, kv_dtype: str, block: int) -> Iterator[Group]:
    """Every group of the model. `headers` say how each weight is stored."""

    def problem(
        op: str, phase: str, sizes: dict[str, int], features: tuple[str, ...] = (), stored: tuple[str, ...] = ()
    ) -> Problem:
        return Problem(op, phase, dtype, kv_dtype, tuple(sorted(sizes.items())), frozenset(features), stored)

    def both(layer: int, use: str, sizes: dict[str, int], features: tuple[str, ...] = ()) -> Iterator[Group]:
        op = use.partition(":")[0]
        for phase in PHASES:
            yield Group(((Cell(layer, use, phase), problem(op, phase, sizes, features)),))

    def weight(layer: int, linear: LinearSpec, uses: tuple[str, ...] = ()) -> Group:
        stored = tuple(headers[name].kind for name in linear.tensors(headers) if name in headers)
        sizes = {"n": linear.n, "k": linear.k} | ({"experts": linear.experts} if linear.experts else {})
        if set(stored) == {FP8_BLOCKS} and (part := gcd(*(rows for _, rows in linear.parts))) % 128:
            sizes["part"] = part  # blocks of the parts do not lie below each other in steps of 128
        if linear.op == "block_linear":
            sizes["blocks"] = spec.layers[layer].mixer.out_groups
        cells = []
        for use in uses or (linear.use,):
            op = use.partition(":")[0]
            features = ("bias",) if linear.bias else ()
            cells += [(Cell(layer, use, phase), problem(op, phase, sizes, features, stored)) for phase in PHASES]
        return Group(tuple(cells))

    yield weight(MODEL, spec.embedding, ("embed", "linear:head") if spec.head is None else ())
    for linear in ((spec.head,) if spec.head else ()) + spec.linears:
        yield weight(MODEL, linear)
    for i, layer in enumerate(spec.layers):
        for linear in layer.linears:
            yield weight(i, linear)
        for cell, sizes, features in _layer_ops(layer, block):
            yield from both(i, cell, sizes, features)
        if isinstance(layer, HyperLayerSpec):
            sizes = {"hidden": spec.hidden, "streams": layer.hyper.streams}
            yield from both(i, "hyper_pre", sizes | {"iterations": layer.hyper.iterations})
            yield from both(i, "hyper_post", sizes)
    if isinstance(first := spec.layers[0], HyperLayerSpec):
        yield from both(MODEL, "hyper_head", {"hidden": spec.hidden, "streams": first.hyper.streams})
    for op in _norms(spec.layers[0]):
        yield from both(MODEL, op, {"hidden": spec.hidden})
    if spec.drafted and spec.draft is not None:
        for linear in spec.draft.linears:
            both_ends = spec.draft.tied and linear.name == "embed"
            yield weight(DRAFTER, linear, ("embed", "linear:head") if both_ends else ())
        for op in _norms(spec.layers[-1]):
            yield from both(DRAFTER, op, {"hidden": spec.draft.hidden})


def outside(spec: ModelSpec, layer: int) -> int:
    """Where the ops stand that a layer shares with others: MODEL or DRAFTER."""
    return MODEL if layer < spec.own else DRAFTER


def _norms(layer: LayerSpec) -> tuple[str, ...]:
    if isinstance(layer, HyperLayerSpec):  # what a block gives is added to the streams by hyper_post
        return ("norm",)
    sandwich = any(tensor.target == "post_mlp_norm" for tensor in layer.tensors)
    return "norm", "sandwich_norm" if sandwich else "add_norm"


Needs = tuple[str, dict[str, int], tuple[str, ...]]  # a cell's op, its sizes and its features


def _layer_ops(layer: LayerSpec, block: int) -> Iterator[Needs]:
    mixer, moe = layer.mixer, layer.moe
    if isinstance(mixer, SparseMlaSpec):
        yield from _sparse_mla(mixer, block)
    elif isinstance(mixer, AttentionSpec):
        yield "attention", *_attention(layer, block)
        yield _qkv_rope(mixer)
        if mixer.output_gate:
            yield "output_gate", {"heads": mixer.heads, "head_dim": mixer.head_dim}, ()
    else:
        names = ("key_heads", "value_heads", "key_dim", "value_dim", "kernel")
        replay = any(isinstance(item, Ring) and item.store == "replay" for _, item in layer.items)
        features = (mixer.gate, "replay") if replay else (mixer.gate,)
        yield "gated_delta", {name: getattr(mixer, name) for name in names}, features
    if isinstance(moe, ScoredMoeSpec):
        yield "clamped_activation", {"size": layer.ffn.size}, (layer.ffn.activation,)
        yield "score_route", {"experts": moe.experts, "top_k": moe.top_k}, ("hashed" if moe.hashed else "bias",)
        yield "clamped_activation:experts", {"size": moe.size}, (moe.activation,)
        return
    yield "gated_activation", {"size": layer.ffn.size}, (layer.ffn.activation,)
    if moe is not None:
        scaled = any(tensor.target == "expert_scale" for tensor in layer.tensors)
        yield "route", {"experts": moe.experts, "top_k": moe.top_k}, ("expert_scale",) if scaled else ()
        yield "gated_activation:experts", {"size": moe.size}, (moe.activation,)
        router = next(linear for linear in layer.linears if linear.name == "router")
        shared = router.n > moe.experts  # a row more: its gate
        yield "moe_combine", {"hidden": router.k, "top_k": moe.top_k}, ("shared",) if shared else ()


def _sparse_mla(mixer: SparseMlaSpec, block: int) -> Iterator[Needs]:
    row = {"heads": mixer.heads, "head_dim": mixer.head_dim, "rope_dim": mixer.rope.dim}
    yield "norm:q", {"hidden": mixer.q_rank}, ()
    yield "mla_rope", row, tuple(value for name, value in mixer.rope.scaling if name == "rope_type")
    seen = row | {"window": mixer.window}
    if not mixer.rate:
        yield "sparse_mla", seen, ("sink",)
        return
    pages, overlap = {"rate": mixer.rate, "block": block}, ("overlap",) if mixer.overlap else ()
    yield "compress", {"head_dim": mixer.head_dim, "rope_dim": mixer.rope.dim} | pages, overlap
    if mixer.index is None:
        yield "sparse_mla", seen | pages, ("sink",)
        return
    index = {"heads": mixer.index.heads, "head_dim": mixer.index.dim, "rope_dim": mixer.rope.dim} | pages
    yield "compress:index", {name: size for name, size in index.items() if name != "heads"}, overlap
    yield "index_select", index | {"top_k": mixer.index.top_k}, ()
    yield "sparse_mla", seen | pages | {"top_k": mixer.index.top_k}, ("sink",)


def _qkv_rope(mixer: AttentionSpec) -> Needs:
    sizes = {"heads": mixer.heads, "kv_heads": mixer.kv_heads, "head_dim": mixer.head_dim, "rope_dim": mixer.rope.dim}
    has = {
        "qk_norm": mixer.qk_norm,
        "v_norm": mixer.v_norm,
        "k_eq_v": mixer.k_eq_v,
        "q_only": not mixer.own_kv,
        "output_gate": mixer.output_gate,
        "mrope": mixer.rope.sections is not None,
    }
    return "qkv_rope", sizes, tuple(name for name, there in has.items() if there)


def _attention(layer: LayerSpec, block: int) -> tuple[dict[str, int], tuple[str, ...]]:
    mixer = layer.mixer
    sizes = {"heads": mixer.heads, "kv_heads": mixer.kv_heads, "head_dim": mixer.head_dim, "block": block}
    features = []
    if mixer.window:
        sizes["window"] = mixer.window
        features.append("window")
    if mixer.softcap:
        features.append("softcap")
    if not mixer.own_kv:
        features.append("pages_only")
    if any(isinstance(item, Paged) and item.first for _, item in layer.items):
        features.append("first")
    return sizes, tuple(features)


def block_groups(spec: ModelSpec, dtype: str, cells: dict[Cell, Choice]) -> Iterator[Group]:
    """The blocks of every layer, each problem with the kernels that its parts have got in `cells`.

    Chunks' attention stands beside a step's verify rows, so a prefill block needs both attention kernels.
    """
    for i, layer in enumerate(spec.layers):
        residual = _norms(layer)[-1:]
        shared = outside(spec, i)
        gate = ("output_gate",) if isinstance(layer.mixer, AttentionSpec) and layer.mixer.output_gate else ()
        parts_of = {
            "attention_block": ("linear:qkv", "qkv_rope", "attention", *gate, "linear:o"),
            "mlp_block": (*residual, "linear:gate_up", "gated_activation", "linear:down"),
        }
        for phase in PHASES:
            for op in layer.blocks:
                parts = [(part, phase) for part in parts_of[op]]
                if (op, phase) == ("attention_block", "prefill"):
                    parts.append(("attention", "decode"))
                found = tuple(
                    (part if at == phase else f"{part}.{at}", _kernel(cells, i, shared, part, at)) for part, at in parts
                )
                yield Group(((Cell(i, op, phase), Problem(op, phase, dtype, parts=found)),))
            yield from _rope_attention(i, phase, cells)
            yield from _gated_linear(i, phase, cells)
            yield from _experts(i, phase, cells)


def _rope_attention(i: int, phase: str, cells: dict[Cell, Choice]) -> Iterator[Group]:
    """The rotation and attention behind it as one op for rows that decode, where the rotation is Triton's: no other
    kernel could do both, and chunks have keys beside those in pages."""
    parts = "qkv_rope", "attention"
    rope, attention = (cells.get(Cell(i, part, phase)) for part in parts)
    if phase == "prefill" or not rope or not attention or rope.kernel != "triton.qkv_rope":
        return
    if "q_only" not in rope.problem.features:
        problem = replace(
            attention.problem,
            op="rope_attention",
            sizes=tuple((dict(rope.problem.sizes) | dict(attention.problem.sizes)).items()),
            features=rope.problem.features | attention.problem.features,
            parts=tuple(zip(parts, (rope.kernel, attention.kernel), strict=True)),
        )
        yield Group(((Cell(i, "rope_attention", phase), problem),))


def _gated_linear(i: int, phase: str, cells: dict[Cell, Choice]) -> Iterator[Group]:
    """The linear and the gated activation behind it as one op, where the activation is Triton's: no other kernel could
    do both, and layers call the two as they are."""
    parts = "linear:gate_up", "gated_activation"
    linear, activation = (cells.get(Cell(i, part, phase)) for part in parts)
    if linear and activation and activation.kernel.startswith("triton."):
        problem = replace(
            linear.problem,
            op="gated_linear",
            features=linear.problem.features | activation.problem.features,
            parts=tuple(zip(parts, (linear.kernel, activation.kernel), strict=True)),
        )
        yield Group(((Cell(i, "gated_linear", phase), problem),))


def _experts(i: int, phase: str, cells: dict[Cell, Choice]) -> Iterator[Group]:
    """All that a layer's experts do as one op, where the activation between their linears is Triton's: no other kernel
    could."""
    parts = "grouped_linear:experts_gate_up", "gated_activation:experts", "grouped_linear:experts_down", "moe_combine"
    chosen = [cells.get(Cell(i, part, phase)) for part in parts]
    gate_up, activation, _, combine = chosen
    if gate_up and activation and combine and activation.kernel.startswith("triton."):
        problem = replace(
            gate_up.problem,
            op="experts",
            sizes=tuple((dict(gate_up.problem.sizes) | dict(combine.problem.sizes)).items()),
            features=activation.problem.features | combine.problem.features,
            parts=tuple((part, choice.kernel) for part, choice in zip(parts, chosen, strict=True) if choice),
        )
        yield Group(((Cell(i, "experts", phase), problem),))


def _kernel(cells: dict[Cell, Choice], layer: int, shared: int, op: str, phase: str) -> str:
    choice = cells.get(Cell(layer, op, phase)) or cells[Cell(shared, op, phase)]
    return choice.kernel


class Resolver:
    """Asks every candidate of every cell, and takes the cheapest that agrees on a layout within its group."""

    def __init__(self, registry: Registry, device: DeviceProfile, settings: Settings, load: Load = Load()) -> None:
        self.registry, self.device, self.load = registry, device, load
        self.allow_reference = settings.allow_reference or device.kind == "cpu"
        self.invariant = settings.batch_invariant
        self.forced = self._forced(settings.kernel)
        self.check = lru_cache(maxsize=None)(self._check)

    def _forced(self, entries: tuple[str, ...]) -> dict[str, str]:
        forced = {}
        for entry in entries:
            op, _, name = entry.partition("=")
            base, _, kept = op.partition("@")
            base = base.partition(":")[0]
            if kept and kept not in LAYOUTS:
                raise SettingsError(f"--kernel {op}", found=f"weights kept as {kept!r}", accepted=", ".join(LAYOUTS))
            if base not in self.registry.ops:
                raise SettingsError("--kernel", found=f"op {op!r}", accepted=", ".join(self.registry.ops))
            known = {kernel.name for kernel in self.registry.candidates(base)}
            if name not in known:
                raise SettingsError(f"--kernel {op}", found=name, accepted=", ".join(sorted(known)) or _SPECIFIED)
            forced[op] = name
        return forced

    def _named(self, cell: Cell, problem: Problem) -> str | None:
        """The kernel that --kernel names for a cell: of its own name, of weights kept as its are, or of its op."""
        kept = f"{problem.op}@{layout_of(problem.stored)}" if problem.stored else ""
        names = (self.forced[name] for name in (cell.op, kept, problem.op) if name in self.forced)
        return next(names, None)

    def _check(self, name: str, problem: Problem, forced: str | None) -> Verdict:
        kernel: Kernel = self.registry.kernels[name]
        if forced is not None and name != forced:
            return Verdict(False, f"--kernel names {forced}")
        if kernel.reference and not self.allow_reference:
            return Verdict(False, "a reference kernel, slow on a GPU; allow it with --allow-reference")
        if problem.invariant and not self.registry.invariant(name):
            return Verdict(False, "--batch-invariant: what it gives for a row may depend on how many rows there are")
        verdict = kernel.check(self.device, problem)
        if verdict.ok and forced is None and (why := self.registry.asked(name)):
            return Verdict(False, why)
        return verdict

    def resolve(self, group: Group) -> dict[Cell, Choice]:
        """A choice for each cell of the group; cells without a kernel have kernel ""."""
        verdicts: list[dict[str, Verdict]] = []
        cells = [(cell, replace(problem, invariant=self.invariant, load=self.load)) for cell, problem in group.cells]
        for cell, problem in cells:
            forced = self._named(cell, problem)
            names = [kernel.name for kernel in self.registry.candidates(problem.op)]
            verdicts.append({name: self.check(name, problem, forced) for name in names})
        layout = self._layout(verdicts)
        return {
            cell: self._choose(problem, verdict, layout)
            for (cell, problem), verdict in zip(cells, verdicts, strict=True)
        }

    @staticmethod
    def _layout(verdicts: list[dict[str, Verdict]]) -> str | None:
        """The layout with the least total cost among those that every cell can use; None: there is none."""
        best: dict[str, float] | None = None
        for candidates in verdicts:
            here: dict[str, float] = {}
            for verdict in candidates.values():
                if verdict.ok:
                    here[verdict.layout] = min(verdict.cost, here.get(verdict.layout, float("inf")))
            best = here if best is None else {name: best[name] + here[name] for name in best if name in here}
        return min(best, key=best.__getitem__) if best else None

    @staticmethod
    def _choose(problem: Problem, verdicts: dict[str, Verdict], layout: str | None) -> Choice:
        able = {name: v for name, v in verdicts.items() if v.ok and v.layout == layout}
        chosen = min(able, key=lambda name: able[name].cost) if able else ""
        refused = []
        for name, verdict in verdicts.items():
            if name == chosen:
                continue
            if not verdict.ok:
                reason = verdict.reason
            elif verdict.layout != layout:
                reason = (
                    f"reads layout {verdict.layout}, the weight is kept as {layout}"
                    if layout
                    else "no layout suits all uses"
                )
            else:
                reason = f"costs more ({verdict.cost:g} against {able[chosen].cost:g})"
            refused.append(Refusal(name, reason))
        if not chosen:
            return Choice("", "no kernel" if verdicts else _SPECIFIED, problem, refused=tuple(refused))
        taken = able[chosen]
        return Choice(chosen, taken.reason, problem, taken.layout, tuple(refused), taken.workspace, taken.temporary)
