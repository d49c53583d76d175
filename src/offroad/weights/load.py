"""Weights from a source into memory, in the layouts that the plan chose; tensor by tensor, and nothing unexplained.

A tensor that is missing, left over, of another shape or not finite stops the load: each of them would give a model that
answers, and answers wrong.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import prod

import torch

from offroad.errors import ModelError
from offroad.models.shard import Section, linear_sections, part_of, tensor_sections
from offroad.models.shard import shard as shard_spec
from offroad.models.spec import AttentionSpec, DraftSpec, LayerSpec, LinearSpec, Mixer, ModelSpec, TensorSpec
from offroad.quant.packed import PER_BYTE, Packed
from offroad.quant.scheme import FLOATS, canonical, fuse, to_dense, widen
from offroad.quant.shard import shard, take
from offroad.weights import kv_scales
from offroad.weights.kv_scales import Scales
from offroad.weights.source import Headers, Source, Stored

Layouts = Callable[[int, str], str]
Packers = dict[str, Callable[[Packed], Packed]]
Progress = Callable[[float, str], None]
_DENSE_ELEMENTS = 2**26  # weights that are widened at once
MODEL, DRAFTER = -1, -2  # the layer numbers of what stands outside layers
_REPAIR = "check that the file is complete, and that its config is its own"


@dataclass(frozen=True)
class LayerWeights:
    """What one layer loads: its linears, and its small tensors (fp32) by target."""

    linears: dict[str, Packed]
    tensors: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Weights:
    """All weights. `head` is the same object as `embed` when they are tied; `linears` are the others outside layers.
    `layers` are the drafter's too, behind the model's own; `draft` is what it has outside them."""

    layers: list[LayerWeights]
    embed: Packed
    head: Packed
    tensors: dict[str, torch.Tensor]
    linears: dict[str, Packed] = field(default_factory=dict)
    draft: LayerWeights | None = None
    kv_scales: list[Scales | None] = field(default_factory=list)


def _linears(spec: ModelSpec, draft: DraftSpec | None) -> list[LinearSpec]:
    head = [] if spec.head is None else [spec.head]
    outside = [spec.embedding, *head, *spec.linears, *(draft.linears if draft else ())]
    return [*outside, *(linear for layer in _layers(spec, draft) for linear in layer.linears)]


def _layers(spec: ModelSpec, draft: DraftSpec | None) -> tuple[LayerSpec, ...]:
    return spec.layers + (draft.layers if draft and not spec.drafted else ())


def _tensors(spec: ModelSpec, draft: DraftSpec | None) -> list[TensorSpec]:
    outside = [*spec.tensors, *(draft.tensors if draft else ())]
    return [*outside, *(tensor for layer in _layers(spec, draft) for tensor in layer.tensors)]


def draft_of(spec: ModelSpec, headers: Headers) -> DraftSpec | None:
    """The drafter, if it is used or the checkpoint has one."""
    if spec.draft is None or spec.drafted:
        return spec.draft
    there = any(name.startswith(spec.draft.prefix) for name in headers)
    return spec.draft if there else None


def expected_tensors(spec: ModelSpec, headers: Headers, draft: DraftSpec | None = None) -> dict[str, tuple[int, ...]]:
    """Shape by name of every tensor that the model loads; `headers` tell which form experts are stored in."""
    expected: dict[str, tuple[int, ...]] = {}
    for linear in _linears(spec, draft):
        if linear.fused in headers:
            expected[linear.fused] = (linear.experts, linear.n // linear.experts, linear.k)
            continue
        for module, rows in linear.parts:
            expected[f"{module}.weight"] = (rows, linear.k)
            if linear.bias:
                expected[f"{module}.bias"] = (rows,)
    return expected | {tensor.name: tensor.shape for tensor in _tensors(spec, draft)}


def verify_headers(spec: ModelSpec, source: Source) -> None:
    """Each tensor is there, in shape and kind, and none is left over; reads no weights. Raises ModelError."""
    headers = source.headers
    expected = expected_tensors(spec, headers, draft_of(spec, headers))
    if missing := [name for name in expected if name not in headers]:
        raise ModelError(
            f"tensor {missing[0]}",
            found=f"absent ({_some(missing)})",
            accepted=f"{len(expected)} tensors of a {spec.family} model",
            next=_REPAIR,
        )
    indices = _indices(spec, draft_of(spec, headers))
    for name, shape in expected.items():
        _check_header(name, shape, headers, index=name in indices)
    ignored = [re.compile(pattern) for pattern in spec.ignored]
    left = [
        name for name in headers if name not in expected and not any(pattern.fullmatch(name) for pattern in ignored)
    ]
    if left := [name for name in left if not _adds_nothing(name, expected, source)]:
        raise ModelError(
            "tensors that the model does not use",
            found=_some(left),
            accepted=f"those of a {spec.family} model",
            next="the checkpoint may compute something else; report the model",
        )


def _indices(spec: ModelSpec, draft: DraftSpec | None) -> set[str]:
    return {tensor.name for tensor in _tensors(spec, draft) if tensor.transform == "index"}


def _adds_nothing(name: str, expected: dict[str, tuple[int, ...]], source: Source) -> bool:
    """A bias of zeros: AutoGPTQ gives one to every linear that it quantises, whether the model has one or not."""
    module, dot, last = name.rpartition(".")
    return last == "bias" and f"{module}{dot}weight" in expected and not source.read(name).data.any()


def _check_header(name: str, shape: tuple[int, ...], headers: Headers, index: bool) -> None:
    header = headers[name]
    if header.shape != shape:
        raise ModelError(
            f"tensor {name}", found=f"shape {list(header.shape)}", accepted=f"shape {list(shape)}", next=_REPAIR
        )
    if index:
        if header.kind not in ("i64", "i32"):
            raise ModelError(f"tensor {name}", found=f"stored as {header.kind}", accepted="i64, i32", next=_REPAIR)
        return
    blocks = header.kind.partition(".")[0] in ("gguf", *PER_BYTE) and len(shape) >= 2
    if header.kind not in FLOATS and not blocks:
        kinds = ", ".join(FLOATS) + (", block kinds of GGUF, a quantised weight" if len(shape) >= 2 else "")
        raise ModelError(
            f"tensor {name}", found=f"stored as {header.kind}", accepted=kinds, next="use a checkpoint in one of these"
        )


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def load(
    spec: ModelSpec,
    source: Source,
    layouts: Layouts,
    dtype: torch.dtype,
    device: torch.device,
    packers: Packers,
    progress: Progress | None = None,
    *,
    rank: int = 0,
    ranks: int = 1,
) -> Weights:
    """All weights on `device`, `layouts(layer, use)` deciding how each linear is kept; the drafter's if it is among
    the spec's layers.

    `layouts` is asked for "embed", "linear:head" and others of MODEL and DRAFTER too. Dense weights and biases are in
    `dtype`; tensors outside linears stay fp32. `packers` make a kernel's own layout from the canonical one. One linear
    is in flight at a time, and on an accelerator checks, fusing and packing are done there. Of `ranks` ranks, `rank`
    gets its part (see models/shard.py): `spec` is the whole model, `layouts` those of a plan for so many ranks.
    Raises ModelError (see `verify_headers`), also for a value that is not finite, and PlanError for what ranks cannot
    divide.
    """
    assert 0 <= rank < ranks, (rank, ranks)
    part = shard_spec(spec, ranks)
    verify_headers(spec, source)
    found = spec.draft if spec.drafted else None
    total = sum(source.headers[name].nbytes for name in expected_tensors(spec, source.headers, found))
    loader = _Loader(source, dtype, device, packers, progress or (lambda fraction, note: None), max(total, 1))
    loader.rank, loader.ranks = rank, ranks
    embed = loader.linear(replace(spec.embedding, split="rows"), layouts(MODEL, "embed"))
    head = replace(spec.head, split="rows") if spec.head else None
    head = embed if head is None else loader.linear(head, layouts(MODEL, "linear:head"))
    layers = [loader.layer(layer, lambda use, i=i: layouts(i, use)) for i, layer in enumerate(spec.layers)]
    linears = {linear.name: loader.linear(linear, layouts(MODEL, linear.use)) for linear in spec.linears}
    drafter = None if found is None else loader.outside(found, lambda use: layouts(DRAFTER, use))
    scales = loader.kv_scales(spec, kv_scales.read(source, spec, device))
    for layer, own in zip(layers, part.layers, strict=True):
        assert all((layer.linears[li.name].n, layer.linears[li.name].k) == (li.n, li.k) for li in own.linears)
    loaded = Weights(layers, embed, head, loader.tensors(spec.tensors), linears, drafter, scales)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what fusing and packing needed is cut into odd pieces: the caches come next
    return loaded


@dataclass
class _Loader:
    source: Source
    dtype: torch.dtype
    device: torch.device
    packers: Packers
    progress: Progress
    total: int
    done: int = 0
    rank: int = 0
    ranks: int = 1

    def read(self, name: str) -> Stored:
        stored = self.source.read(name)
        self.progress(self.done / self.total, name)
        self.done += stored.header.nbytes
        return stored

    def layer(self, spec: LayerSpec, layout: Callable[[str], str]) -> LayerWeights:
        linears = {linear.name: self.linear(linear, layout(linear.use), spec.mixer) for linear in spec.linears}
        return LayerWeights(linears, self.tensors(spec.tensors, spec.mixer))

    def outside(self, spec: DraftSpec, layout: Callable[[str], str]) -> LayerWeights:
        linears = {linear.name: self.linear(linear, layout(linear.use)) for linear in spec.linears}
        return LayerWeights(linears, self.tensors(spec.tensors))

    def linear(self, spec: LinearSpec, layout: str, mixer: Mixer | None = None) -> Packed:
        parts, names = [], spec.tensors(self.source.headers)
        for name, rows in zip(names, self._rows(spec, mixer, len(names)), strict=True):
            part = canonical(matrix(self.read(name)))
            if self.device.type != "cpu":
                part = self._placed(part)
            for tensor in part.tensors.values():
                _check_finite(name, tensor, "weight")
            part = self._own(part, spec, rows)
            parts.append(self._dense(part) if layout == "dense" else part)
        packed = fuse(parts)
        for tensor in packed.tensors.values():
            _check_finite(spec.parts[0][0], tensor, f"weight in {self.dtype}")
        if spec.bias:
            packed = replace(packed, bias=self._bias(spec, mixer))
        return self._placed(self._laid_out(self._placed(packed), layout))  # packers work where the weight will be

    def _laid_out(self, packed: Packed, layout: str) -> Packed:
        if packed.layout == "dense":
            packed = self._dense(packed) if layout != "dense" else packed
        if packed.layout == layout or packed.layout == "dense" and layout in PER_BYTE:
            return packed  # parts whose columns stand in different orders became dense
        if (packed.layout, layout) == ("affine4", "affine8"):
            return widen(packed, packed.group)
        assert layout in self.packers, f"no packer makes {layout} from {packed.layout}"
        return self.packers[layout](packed)

    def _dense(self, packed: Packed) -> Packed:
        """The weight as `dense` in the plan's dtype. On an accelerator nothing is the file's memory, so what is right
        already stays, and others are widened some rows at a time: fp32 numbers of a whole weight are large."""
        if self.device.type == "cpu":
            return to_dense(packed, self.dtype)
        if packed.layout == "dense" and packed.tensors["w"].dtype == self.dtype:
            return packed
        step = max(1, _DENSE_ELEMENTS // packed.k)
        w = torch.empty((packed.n, packed.k), dtype=self.dtype, device=self.device)
        for first in range(0, packed.n, step):
            rows = packed.rows(slice(first, first + step))
            w[first : first + step] = to_dense(rows, self.dtype).tensors["w"]
        return replace(packed, layout="dense", group=0, tensors={"w": w}, perm=None)

    def _placed(self, packed: Packed) -> Packed:
        tensors = {name: tensor.to(self.device) for name, tensor in packed.tensors.items()}
        bias, perm = (None if x is None else x.to(self.device) for x in (packed.bias, packed.perm))
        return replace(packed, tensors=tensors, bias=bias, perm=perm)

    def _rows(self, spec: LinearSpec, mixer: Mixer | None, tensors: int) -> list[list[slice]]:
        """This rank's rows of each of the tensors that a linear is stored in, if it is divided by rows."""
        sections = linear_sections(spec, mixer, self.ranks)
        if tensors != len(sections):  # one tensor of all experts
            sections = (tuple(section for part in sections for section in part),)
        return [part_of(part, self.rank, self.ranks) for part in sections]

    def _own(self, part: Packed, spec: LinearSpec, rows: list[slice]) -> Packed:
        if self.ranks == 1 or spec.split == "none":
            return part
        return shard(part, "columns", self.rank, self.ranks) if spec.split == "columns" else take(part, rows)

    def _bias(self, spec: LinearSpec, mixer: Mixer | None) -> torch.Tensor | None:
        """This rank's; of a linear whose outputs are summed over ranks, the first one's."""
        biases = []
        for (module, _), rows in zip(spec.parts, self._rows(spec, mixer, len(spec.parts)), strict=True):
            bias = self.read(f"{module}.bias").data.to(self.dtype, copy=True)
            _check_finite(f"{module}.bias", bias, f"bias in {self.dtype}")
            biases += [bias[own] for own in rows] if spec.split == "rows" else [bias]
        return torch.cat(biases) if spec.split != "columns" or self.rank == 0 else None

    def kv_scales(self, spec: ModelSpec, whole: list[Scales | None]) -> list[Scales | None]:
        """The scales of this rank's KV heads."""
        own: list[Scales | None] = []
        for layer, scales in zip(spec.layers, whole, strict=True):
            if scales is not None and isinstance(mixer := layer.mixer, AttentionSpec):
                [heads] = part_of(
                    (Section(mixer.kv_heads, max(1, self.ranks // mixer.kv_heads)),), self.rank, self.ranks
                )
                scales = scales[0][heads], scales[1][heads]
            own.append(scales)
        return own

    def _index(self, name: str) -> torch.Tensor:
        value = self.read(name).data.to(torch.int64, copy=True)
        low, high = (int(x) for x in torch.aminmax(value))
        if low < 0 or high >= len(value):
            raise ModelError(
                f"tensor {name}", found=f"{low} to {high}", accepted=f"numbers of 0 to {len(value) - 1}", next=_REPAIR
            )
        return value.to(self.device)

    def tensors(self, specs: tuple[TensorSpec, ...], mixer: Mixer | None = None) -> dict[str, torch.Tensor]:
        plus_one = "norm_plus_one" not in self.source.conventions
        loaded = {}
        for spec in specs:
            if spec.transform == "index":
                loaded[spec.target] = self._index(spec.name)
                continue
            value = self.read(spec.name).data.to(torch.float32, copy=True)
            _check_finite(spec.name, value, "value")
            if spec.transform == "plus_one" and plus_one:
                value = value + 1.0
            elif spec.transform == "matrix":
                value = value.flatten(1)
            if sections := tensor_sections(spec, mixer) if self.ranks > 1 else ():
                value = torch.cat([value[own] for own in part_of(sections, self.rank, self.ranks)])
            loaded[spec.target] = value.to(self.device)
        return loaded


def matrix(stored: Stored) -> Stored:
    """A tensor [experts, n, k] as the matrix [experts * n, k]; others as they are."""
    header = stored.header
    if len(header.shape) == 2 or stored.packed is not None:
        return stored
    shape = (prod(header.shape[:-1]), header.shape[-1])
    return Stored(replace(header, shape=shape), stored.data.reshape(shape[0], -1))


def _check_finite(name: str, tensor: torch.Tensor, what: str) -> None:
    if not tensor.is_floating_point() or not tensor.numel():
        return
    if tensor.dtype == torch.float8_e4m3fn:  # has no infinities, and two codes of NaN
        tensor = torch.where(((tensor.view(torch.uint8) & 0x7F) == 0x7F).any(), torch.nan, 0.0)
    low, high = torch.aminmax(tensor)
    if not (torch.isfinite(low) and torch.isfinite(high)):
        raise ModelError(
            f"tensor {name}",
            found=f"a non-finite {what} (smallest {low.item()}, largest {high.item()})",
            accepted="finite values",
            next="the file is damaged, or needs --dtype bfloat16 or float32",
        )
