"""Weights from a source into memory, in the layouts that the plan chose; tensor by tensor, and nothing unexplained.

A tensor that is missing, left over, of another shape or not finite stops the load: each of them would give a model that
answers, and answers wrong.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from offroad.errors import ModelError
from offroad.models.spec import LinearSpec, ModelSpec, TensorSpec
from offroad.quant.packed import Packed
from offroad.quant.scheme import FLOATS, canonical, fuse, to_dense, widen
from offroad.weights.source import Headers, Source, Stored

Layouts = Callable[[int, str], str]
Packers = dict[str, Callable[[Packed], Packed]]
Progress = Callable[[float, str], None]
MODEL = -1  # the layer number of what stands outside layers
_REPAIR = "check that the file is complete, and that its config is its own"


@dataclass(frozen=True)
class LayerWeights:
    """What one layer loads: its linears, and its small tensors (fp32) by target."""

    linears: dict[str, Packed]
    tensors: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Weights:
    """All weights. `head` is the same object as `embed` when they are tied."""

    layers: list[LayerWeights]
    embed: Packed
    head: Packed
    tensors: dict[str, torch.Tensor]


def _embed(spec: ModelSpec) -> LinearSpec:
    return LinearSpec("embed", ((spec.embed, spec.vocab),), spec.hidden)


def _linears(spec: ModelSpec) -> list[LinearSpec]:
    head = [] if spec.head is None else [spec.head]
    return [_embed(spec), *head, *(linear for layer in spec.layers for linear in layer.linears)]


def expected_tensors(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Shape by name of every tensor that the model loads."""
    expected: dict[str, tuple[int, ...]] = {}
    for linear in _linears(spec):
        for module, rows in linear.parts:
            expected[f"{module}.weight"] = (rows, linear.k)
            if linear.bias:
                expected[f"{module}.bias"] = (rows,)
    for tensor in [*spec.tensors, *(tensor for layer in spec.layers for tensor in layer.tensors)]:
        expected[tensor.name] = tensor.shape
    return expected


def verify_headers(spec: ModelSpec, source: Source) -> None:
    """Checks that need no data: each tensor is there, in shape and kind, and none is left over. Raises ModelError."""
    headers, expected = source.headers, expected_tensors(spec)
    if missing := [name for name in expected if name not in headers]:
        raise ModelError(
            f"tensor {missing[0]}",
            found=f"absent ({_some(missing)})",
            accepted=f"{len(expected)} tensors of a {spec.family} model",
            next=_REPAIR,
        )
    for name, shape in expected.items():
        _check_header(name, shape, headers)
    ignored = [re.compile(pattern) for pattern in spec.ignored]
    left = [
        name for name in headers if name not in expected and not any(pattern.fullmatch(name) for pattern in ignored)
    ]
    if left:
        raise ModelError(
            "tensors that the model does not use",
            found=_some(left),
            accepted=f"those of a {spec.family} model",
            next="the checkpoint may compute something else; report the model",
        )


def _check_header(name: str, shape: tuple[int, ...], headers: Headers) -> None:
    header = headers[name]
    if header.shape != shape:
        raise ModelError(
            f"tensor {name}", found=f"shape {list(header.shape)}", accepted=f"shape {list(shape)}", next=_REPAIR
        )
    blocks = header.kind.startswith("gguf.") and len(shape) == 2
    if header.kind not in FLOATS and not blocks:
        kinds = ", ".join(FLOATS) + (", GGUF block kinds" if len(shape) == 2 else "")
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
) -> Weights:
    """All weights on `device`, `layouts(layer, name)` deciding how each linear is kept.

    `layouts` is asked for "embed" and "head" of MODEL too. Dense weights and biases are in `dtype`; tensors outside
    linears stay fp32. `packers` make a kernel's own layout from the canonical one. One linear is in flight at a time.
    Raises ModelError (see `verify_headers`), also for a value that is not finite.
    """
    verify_headers(spec, source)
    total = sum(source.headers[name].nbytes for name in expected_tensors(spec))
    loader = _Loader(source, dtype, device, packers, progress or (lambda fraction, note: None), max(total, 1))
    embed = loader.linear(_embed(spec), layouts(MODEL, "embed"))
    head = embed if spec.head is None else loader.linear(spec.head, layouts(MODEL, "head"))
    layers = [
        LayerWeights(
            {linear.name: loader.linear(linear, layouts(i, linear.name)) for linear in layer.linears},
            loader.tensors(layer.tensors),
        )
        for i, layer in enumerate(spec.layers)
    ]
    return Weights(layers, embed, head, loader.tensors(spec.tensors))


@dataclass
class _Loader:
    source: Source
    dtype: torch.dtype
    device: torch.device
    packers: Packers
    progress: Progress
    total: int
    done: int = 0

    def read(self, name: str) -> Stored:
        stored = self.source.read(name)
        self.progress(self.done / self.total, name)
        self.done += stored.header.nbytes
        return stored

    def linear(self, spec: LinearSpec, layout: str) -> Packed:
        parts = []
        for module, _ in spec.parts:
            part = canonical(self.read(f"{module}.weight"))
            for tensor in part.tensors.values():
                _check_finite(f"{module}.weight", tensor, "weight")
            parts.append(to_dense(part, self.dtype) if layout == "dense" else part)
        packed = fuse(parts)
        for tensor in packed.tensors.values():
            _check_finite(f"{spec.parts[0][0]}.weight", tensor, f"weight in {self.dtype}")
        if spec.bias:
            packed = replace(packed, bias=torch.cat([self._bias(f"{module}.bias") for module, _ in spec.parts]))
        return self._placed(self._laid_out(packed, layout))

    def _laid_out(self, packed: Packed, layout: str) -> Packed:
        if packed.layout == "dense":
            packed = to_dense(packed, self.dtype) if layout != "dense" else packed
        if packed.layout == layout:
            return packed
        if (packed.layout, layout) == ("affine4", "affine8"):
            return widen(packed, packed.group)
        assert layout in self.packers, f"no packer makes {layout} from {packed.layout}"
        return self.packers[layout](packed)

    def _placed(self, packed: Packed) -> Packed:
        tensors = {name: tensor.to(self.device) for name, tensor in packed.tensors.items()}
        return replace(packed, tensors=tensors, bias=None if packed.bias is None else packed.bias.to(self.device))

    def _bias(self, name: str) -> torch.Tensor:
        bias = self.read(name).data.to(self.dtype, copy=True)
        _check_finite(name, bias, f"bias in {self.dtype}")
        return bias

    def tensors(self, specs: tuple[TensorSpec, ...]) -> dict[str, torch.Tensor]:
        plus_one = "norm_plus_one" not in self.source.conventions
        loaded = {}
        for spec in specs:
            value = self.read(spec.name).data.to(torch.float32, copy=True)
            _check_finite(spec.name, value, "value")
            loaded[spec.target] = (value + 1.0 if spec.transform == "plus_one" and plus_one else value).to(self.device)
        return loaded


def _check_finite(name: str, tensor: torch.Tensor, what: str) -> None:
    if not tensor.is_floating_point() or not tensor.numel():
        return
    low, high = torch.aminmax(tensor)
    if not (torch.isfinite(low) and torch.isfinite(high)):
        raise ModelError(
            f"tensor {name}",
            found=f"a non-finite {what} (smallest {low.item()}, largest {high.item()})",
            accepted="finite values",
            next="the file is damaged, or needs --dtype bfloat16 or float32",
        )
