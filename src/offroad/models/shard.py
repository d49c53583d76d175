"""One rank's part of a model under tensor parallelism, as a spec: whole heads and whole slices of each mlp.

The projections into a block are divided by their outputs (`split` "rows"), the one out of it by its inputs ("columns"),
so that a block ends with one sum over ranks. KV heads that are fewer than the ranks are held by several of them.
"""

from __future__ import annotations

from dataclasses import replace

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
)
from offroad.quant.packed import group_of
from offroad.weights.source import Headers


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
    linears = tuple(_linear(linear, layer.mixer, mixer, ranks) for linear in layer.linears)
    items = tuple((name, _item(item, layer.mixer, mixer)) for name, item in layer.items)
    return replace(layer, mixer=mixer, ffn=ffn, moe=moe, linears=linears, items=items)


def _mixer(where: str, mixer: Mixer, ranks: int) -> Mixer:
    if isinstance(mixer, GatedDeltaSpec):
        key_heads = _divided(f"{where}linear key heads", mixer.key_heads, ranks)
        return replace(mixer, key_heads=key_heads, value_heads=mixer.value_heads // ranks)
    kv_heads = mixer.kv_heads
    if kv_heads % ranks and ranks % kv_heads:
        _divided(f"{where}KV heads", kv_heads, ranks)
    return replace(mixer, heads=_divided(f"{where}heads", mixer.heads, ranks), kv_heads=max(1, kv_heads // ranks))


def _linear(linear: LinearSpec, whole: Mixer, part: Mixer, ranks: int) -> LinearSpec:
    if linear.split == "columns":
        return replace(linear, k=_divided(f"{linear.name}: columns", linear.k, ranks))
    if linear.split == "none":
        return linear
    if linear.name == "qkv" and isinstance(whole, AttentionSpec) and isinstance(part, AttentionSpec):
        rows = [part.q_width, *[part.kv_heads * part.head_dim] * (len(linear.parts) - 1)]
    elif isinstance(whole, GatedDeltaSpec) and isinstance(part, GatedDeltaSpec) and linear.name == "qkvz":
        rows = [part.channels, part.value_width]
    else:
        rows = [_divided(f"{linear.name}: rows of {module}", count, ranks) for module, count in linear.parts]
    return replace(linear, parts=tuple((module, count) for (module, _), count in zip(linear.parts, rows, strict=True)))


def _item(item: Item, whole: Mixer, part: Mixer) -> Item:
    if isinstance(item, Paged) and isinstance(part, AttentionSpec):
        return replace(item, planes=tuple(replace(p, shape=(part.kv_heads, *p.shape[1:])) for p in item.planes))
    if isinstance(item, Ring) and isinstance(part, GatedDeltaSpec):
        return replace(item, planes=tuple(_ring(plane, whole, part) for plane in item.planes))
    return item


def _ring(plane: Plane, whole: GatedDeltaSpec, part: GatedDeltaSpec) -> Plane:
    if plane.shape == (whole.channels,):
        return replace(plane, shape=(part.channels,))
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
