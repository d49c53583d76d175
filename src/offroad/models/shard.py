"""One rank's part of a model under tensor parallelism, as a spec: whole heads and whole slices of each mlp.

The projections into a block are divided by their outputs (`split` "rows"), the one out of it by its inputs ("columns"),
so that a block ends with one sum over ranks. KV heads that are fewer than the ranks are held by several of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from offroad.errors import PlanError
from offroad.models.spec import (
    AttentionSpec,
    FfnSpec,
    GatedDeltaSpec,
    Item,
    LayerSpec,
    LinearSpec,
    Mixer,
    ModelSpec,
    Paged,
    Plane,
    Ring,
    SparseMlaSpec,
    TensorSpec,
)
from offroad.quant.packed import group_of
from offroad.weights.source import Headers


@dataclass(frozen=True)
class Section:
    """Neighbouring rows of a tensor that ranks divide evenly; each part is held by `copies` neighbouring ranks."""

    rows: int
    copies: int = 1

    def part(self, rank: int, ranks: int) -> tuple[int, int]:
        """First and last row (exclusive) of a rank."""
        each = self.rows * self.copies // ranks
        first = rank // self.copies * each
        return first, first + each


Sections = tuple[Section, ...]


def linear_sections(linear: LinearSpec, mixer: Mixer | None, ranks: int) -> tuple[Sections, ...]:
    """How ranks divide the rows of each part of a linear that is split by rows; `mixer` is the layer's, undivided."""
    if linear.name == "qkv" and isinstance(mixer, AttentionSpec):
        copies = [1] + [max(1, ranks // mixer.kv_heads)] * (len(linear.parts) - 1)
        return tuple((Section(rows, copy),) for (_, rows), copy in zip(linear.parts, copies, strict=True))
    if linear.name == "qkvz" and isinstance(mixer, GatedDeltaSpec):
        return _channels(mixer), (Section(mixer.value_width),)
    return tuple((Section(rows),) for _, rows in linear.parts)


def _channels(mixer: GatedDeltaSpec) -> Sections:
    keys = mixer.key_heads * mixer.key_dim
    return Section(keys), Section(keys), Section(mixer.value_width)


def tensor_sections(tensor: TensorSpec, mixer: Mixer | None) -> Sections:
    """How ranks divide the rows of a tensor outside linears; nothing: each has it whole."""
    if isinstance(mixer, GatedDeltaSpec):
        heads = (Section(mixer.value_heads),)
        return {"conv": _channels(mixer), "a_log": heads, "dt_bias": heads}.get(tensor.target, ())
    return (Section(mixer.heads),) if isinstance(mixer, SparseMlaSpec) and tensor.target == "sink" else ()


def part_of(sections: Sections, rank: int, ranks: int) -> list[slice]:
    """A rank's rows of sections that follow each other."""
    slices, at = [], 0
    for section in sections:
        first, last = section.part(rank, ranks)
        slices.append(slice(at + first, at + last))
        at += section.rows
    return slices


def shard(spec: ModelSpec, ranks: int) -> ModelSpec:
    """What each of `ranks` ranks holds. Raises PlanError naming what cannot be divided."""
    if ranks == 1:
        return spec
    layers = tuple(_layer(i, layer, ranks) for i, layer in enumerate(spec.layers))
    vocab = _divided("vocab_size", spec.vocab, ranks)
    head = None if spec.head is None else replace(spec.head, parts=((spec.head.parts[0][0], vocab),))
    return replace(spec, layers=layers, head=head, vocab=vocab)


def _divided(what: str, count: int, ranks: int) -> int:
    if count % ranks:
        divisors = [n for n in range(1, count + 1) if count % n == 0 and n <= 64]
        raise PlanError(
            f"--tensor-parallel-size {ranks}",
            found=f"{what} of {count}",
            accepted=f"a divisor of it: {', '.join(map(str, divisors))}",
            next="choose another number of ranks",
        )
    return count // ranks


def _layer(i: int, layer: LayerSpec, ranks: int) -> LayerSpec:
    mixer = _mixer(f"layer {i}: ", layer.mixer, ranks)
    ffn = FfnSpec(_divided(f"layer {i}: mlp size", layer.ffn.size, ranks), layer.ffn.activation)
    moe = layer.moe and replace(layer.moe, size=_divided(f"layer {i}: expert size", layer.moe.size, ranks))
    linears = tuple(_linear(linear, layer.mixer, ranks) for linear in layer.linears)
    tensors = tuple(_tensor(tensor, layer.mixer, ranks) for tensor in layer.tensors)
    items = tuple((name, _item(item, layer.mixer, mixer)) for name, item in layer.items)
    return replace(layer, mixer=mixer, ffn=ffn, moe=moe, linears=linears, items=items, tensors=tensors)


def _mixer(where: str, mixer: Mixer, ranks: int) -> Mixer:
    if isinstance(mixer, GatedDeltaSpec):
        key_heads = _divided(f"{where}linear key heads", mixer.key_heads, ranks)
        return replace(mixer, key_heads=key_heads, value_heads=mixer.value_heads // ranks)
    heads = _divided(f"{where}heads", mixer.heads, ranks)
    if isinstance(mixer, SparseMlaSpec):  # rows of keys and values, and what picks them, are on every rank
        return replace(mixer, heads=heads, out_groups=_divided(f"{where}output groups", mixer.out_groups, ranks))
    kv_heads = mixer.kv_heads
    if kv_heads % ranks and ranks % kv_heads:
        _divided(f"{where}KV heads", kv_heads, ranks)
    return replace(mixer, heads=heads, kv_heads=max(1, kv_heads // ranks))


def _linear(linear: LinearSpec, mixer: Mixer, ranks: int) -> LinearSpec:
    if linear.split == "columns":
        return replace(linear, k=_divided(f"{linear.name}: columns", linear.k, ranks))
    if linear.split == "none":
        return linear
    parts = []
    for (module, _), sections in zip(linear.parts, linear_sections(linear, mixer, ranks), strict=True):
        for section in sections:
            _divided(f"{linear.name}: rows of {module}", section.rows * section.copies, ranks)
        parts.append((module, sum(own.stop - own.start for own in part_of(sections, 0, ranks))))
    return replace(linear, parts=tuple(parts))


def _tensor(tensor: TensorSpec, mixer: Mixer, ranks: int) -> TensorSpec:
    if not (sections := tensor_sections(tensor, mixer)):
        return tensor
    rows = sum(own.stop - own.start for own in part_of(sections, 0, ranks))
    return replace(tensor, shape=(rows, *tensor.shape[1:]))


def _item(item: Item, whole: Mixer, part: Mixer) -> Item:
    if isinstance(item, Paged) and isinstance(part, AttentionSpec):
        return replace(item, planes=tuple(replace(p, shape=(part.kv_heads, *p.shape[1:])) for p in item.planes))
    if isinstance(item, Ring) and isinstance(part, GatedDeltaSpec):
        planes, records = (tuple(_ring(p, whole, part) for p in some) for some in (item.planes, item.records))
        return replace(item, planes=planes, records=records)
    return item


def _ring(plane: Plane, whole: GatedDeltaSpec, part: GatedDeltaSpec) -> Plane:
    if plane.shape == (whole.channels,):
        return replace(plane, shape=(part.channels,))
    if plane.name == "key":
        return replace(plane, shape=(part.key_heads, *plane.shape[1:]))
    return replace(plane, shape=(part.value_heads, *plane.shape[1:]))


def check_groups(spec: ModelSpec, headers: Headers, ranks: int) -> None:
    """A rank's columns of a quantised weight hold whole groups. `spec` is a rank's. Raises PlanError."""
    for i, layer in enumerate(spec.layers if ranks > 1 else ()):
        for linear in layer.linears:
            for name in linear.tensors(headers) if linear.split == "columns" else ():
                group = group_of(headers[name].kind, linear.k * ranks) if name in headers else 1
                if linear.k % group and group != linear.k * ranks:
                    raise PlanError(
                        f"--tensor-parallel-size {ranks}",
                        found=f"layer {i}, {linear.name}: {linear.k} columns a rank, in groups of {group}",
                        accepted="whole groups on each rank",
                        next="choose another number of ranks",
                    )
