"""Stored weights to canonical packed ones, without losing a bit: what a file's blocks mean, as `w = q * s + m`.

Sums such as `q * d - 8 * d` are exact in fp32 (a 4-bit integer times an fp16 scale has 15 significant bits), so the
canonical form has the values that the file's own definition gives.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import gcd

import numpy as np
import torch

from offroad.quant.packed import PER_BYTE, Packed, dequantise, group_of
from offroad.weights.source import Stored

FLOATS = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
Array = np.ndarray
Blocks = tuple[Array, Array, Array | None]  # q [n, blocks, bytes or weights], s [n, groups], m [n, groups] or None


def _f16(raw: Array) -> Array:
    """fp32 [..., halves] from bytes [..., 2 * halves] that hold fp16."""
    return np.ascontiguousarray(raw).view(np.float16).astype(np.float32)


def _pairs(raw: Array) -> Array:
    """Nibbles regrouped: chunks of bytes whose low halves are the first weights and high halves the rest [..., chunk]
    become bytes that hold neighbours, the even one low; same shape."""
    even, odd = raw[..., 0::2], raw[..., 1::2]
    return np.concatenate(((even & 15) | (odd << 4), (even >> 4) | (odd & 0xF0)), axis=-1)


def _nibbles(raw: Array) -> Array:
    """Weights [..., 2 * chunk] of chunks of bytes [..., chunk]: all low halves, then all high halves."""
    return np.concatenate((raw & 15, raw >> 4), axis=-1)


def _bits(raw: Array, shift: int) -> Array:
    """The 32 bits of 4 bytes, each shifted left: uint8 [..., 32] from [..., 4]."""
    return np.unpackbits(np.ascontiguousarray(raw), axis=-1, bitorder="little") << shift


def _q4_0(b: Array) -> Blocks:
    d = _f16(b[..., :2])[..., 0]
    return _pairs(b[..., 2:]), d, d * np.float32(-8)


def _q4_1(b: Array) -> Blocks:
    dm = _f16(b[..., :4])
    return _pairs(b[..., 4:]), dm[..., 0], dm[..., 1]


def _q5_0(b: Array) -> Blocks:
    q = (_nibbles(b[..., 6:]) | _bits(b[..., 2:6], 4)).view(np.int8)
    q -= 16
    return q, _f16(b[..., :2])[..., 0], None


def _q5_1(b: Array) -> Blocks:
    dm = _f16(b[..., :4])
    return (_nibbles(b[..., 8:]) | _bits(b[..., 4:8], 4)).view(np.int8), dm[..., 0], dm[..., 1]


def _q8_0(b: Array) -> Blocks:
    return np.ascontiguousarray(b[..., 2:]).view(np.int8), _f16(b[..., :2])[..., 0], None


def _k_scales(b: Array) -> tuple[Array, Array]:
    """Scales and minima [..., 8] of a 256-weight block whose first bytes are d, dmin and 12 bytes of 6-bit pairs."""
    dm, raw = _f16(b[..., :4]), b[..., 4:16]
    low, high, both = raw[..., 0:4], raw[..., 4:8], raw[..., 8:12]
    scale = np.concatenate((low & 63, (both & 15) | ((low >> 2) & 48)), axis=-1)
    minimum = np.concatenate((high & 63, (both >> 4) | ((high >> 2) & 48)), axis=-1)
    return dm[..., :1] * scale.astype(np.float32), -(dm[..., 1:] * minimum.astype(np.float32))


def _q4_k(b: Array) -> Blocks:
    chunks = b[..., 16:].reshape(*b.shape[:-1], 4, 32)
    return (_pairs(chunks), *_k_scales(b))


def _q5_k(b: Array) -> Blocks:
    lead = b.shape[:-1]
    low = _nibbles(b[..., 48:].reshape(*lead, 4, 32)).reshape(*lead, 8, 32)
    high = (b[..., None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None]) & 1
    return ((low | (high << 4)).view(np.int8), *_k_scales(b))


def _q6_k(b: Array) -> Blocks:
    lead = b.shape[:-1]
    low = _nibbles(b[..., :128].reshape(*lead, 2, 64)).reshape(*lead, 2, 4, 32)
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    high = (b[..., 128:192].reshape(*lead, 2, 1, 32) >> shifts) & 3
    q = (low | (high << 4)).view(np.int8)
    q -= 32
    scale = np.ascontiguousarray(b[..., 192:208]).view(np.int8).astype(np.float32)
    return q, _f16(b[..., 208:210]) * scale, None


# Kind: (layout, group, bytes a block, unpacking).
_AFFINE: dict[str, tuple[str, int, int, Callable[[Array], Blocks]]] = {
    "gguf.q4_0": ("affine4", 32, 18, _q4_0),
    "gguf.q4_1": ("affine4", 32, 20, _q4_1),
    "gguf.q4_k": ("affine4", 32, 144, _q4_k),
    "gguf.q5_0": ("affine8", 32, 22, _q5_0),
    "gguf.q5_1": ("affine8", 32, 24, _q5_1),
    "gguf.q8_0": ("affine8", 32, 34, _q8_0),
    "gguf.q5_k": ("affine8", 32, 176, _q5_k),
    "gguf.q6_k": ("affine8", 16, 210, _q6_k),
}


def layout_of(kinds: tuple[str, ...]) -> str:
    """The canonical layout of parts stored as `kinds` once they are one weight: from headers, before any data.

    Kinds are float dtypes, `gguf.…`, or `layout.detail` of a quantised weight. Parts of one layout keep it, and 4-bit
    beside 8-bit integers become `affine8`; other mixtures are `dense`.
    """
    assert kinds, "a weight has at least one part"
    layouts = {_AFFINE[kind][0] if kind in _AFFINE else kind.partition(".")[0] for kind in kinds}
    if len(layouts) == 1 and layouts <= PER_BYTE.keys():
        return layouts.pop()
    return "affine8" if layouts == {"affine4", "affine8"} else "dense"


def fused_group(kinds: tuple[str, ...], k: int) -> int:
    """The group of parts stored as `kinds` once they are one weight, as `layout_of` is its layout; 0 where groups that
    differ do not divide k, and `fuse` makes the parts dense."""
    groups = {_AFFINE[kind][1] if kind in _AFFINE else group_of(kind, k) for kind in kinds}
    return gcd(*groups) if len(groups) == 1 or not any(k % group for group in groups) else 0


def canonical(stored: Stored) -> Packed:
    """A stored matrix in its canonical layout; float kinds stay in their dtype (and may still be the file's memory)."""
    if stored.packed is not None:
        return stored.packed
    n, k = stored.header.shape
    kind = stored.header.kind
    if kind in FLOATS:
        return Packed("dense", n, k, {"w": stored.data})
    if kind not in _AFFINE:
        return Packed("dense", n, k, {"w": torch.from_numpy(_by_library(stored))})
    layout, group, size, unpack = _AFFINE[kind]
    q, s, m = unpack(stored.data.numpy().reshape(n, -1, size))
    per_row = k // 2 if layout == "affine4" else k
    tensors = {
        "q": torch.from_numpy(q.reshape(n, per_row)),
        "s": torch.from_numpy(np.ascontiguousarray(s.reshape(n, -1))),
    }
    if m is not None:
        tensors["m"] = torch.from_numpy(np.ascontiguousarray(m.reshape(n, -1)))
    return Packed(layout, n, k, tensors, group)


def _by_library(stored: Stored) -> Array:
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    name = stored.header.kind.removeprefix("gguf.")
    kind = next(kind for kind in GGMLQuantizationType if kind.name.lower() == name)
    return dequantize(np.ascontiguousarray(stored.data.numpy()), kind).reshape(stored.header.shape)


def to_dense(packed: Packed, dtype: torch.dtype) -> Packed:
    """The weight as `dense` in `dtype`; its own memory, never the file's."""
    w = packed.tensors["w"] if packed.layout == "dense" else dequantise(packed)
    tensors = {"w": w.to(dtype, copy=packed.layout == "dense")}
    return replace(packed, layout="dense", group=0, tensors=tensors, perm=None)


def widen(packed: Packed, group: int) -> Packed:
    """An affine weight as `affine8` with groups of `group` weights (which must divide its own): the same values."""
    assert packed.layout in ("affine4", "affine8"), packed.layout
    assert packed.group % group == 0, (packed.group, group)
    tensors = dict(packed.tensors)
    if packed.layout == "affine4":
        q = tensors["q"]
        tensors["q"] = torch.stack((q & 15, q >> 4), dim=-1).reshape(packed.n, packed.k).view(torch.int8)
    return regroup(replace(packed, layout="affine8", tensors=tensors), group)


def fuse(parts: list[Packed]) -> Packed:
    """The parts stacked along n, in the layout that `layout_of` foretells. Exact, except that parts which cannot stand
    side by side turn into fp32 (a dense one among others, columns in different orders)."""
    assert len({part.k for part in parts}) == 1, [part.k for part in parts]
    if len(parts) == 1:
        return parts[0]
    parts = _alike(parts)
    names = {name for part in parts for name in part.tensors}
    tensors = {name: torch.cat([_or_zero(part, name) for part in parts]) for name in sorted(names)}
    biases = [part.bias for part in parts if part.bias is not None]
    assert len(biases) in (0, len(parts)), "a bias on some parts only"
    return replace(
        parts[0], n=sum(part.n for part in parts), tensors=tensors, bias=torch.cat(biases) if biases else None
    )


def _alike(parts: list[Packed]) -> list[Packed]:
    """The parts in one layout, with one group size and one order of columns."""
    layouts, groups = {part.layout for part in parts}, {part.group for part in parts}
    if layouts == {"dense"}:
        same = len({part.tensors["w"].dtype for part in parts}) == 1
        return parts if same else [to_dense(part, torch.float32) for part in parts]
    ordered = all(_same_order(part.perm, parts[0].perm) for part in parts)
    if layouts == {"affine4", "affine8"} and ordered:
        parts, layouts = [widen(part, part.group) for part in parts], {"affine8"}
    group = gcd(*groups)
    if len(layouts) > 1 or not ordered or any(part.k % part.group for part in parts if part.group != group):
        return [to_dense(part, torch.float32) for part in parts]
    return parts if len(groups) == 1 else [regroup(part, group) for part in parts]


def _same_order(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    return (a is None) == (b is None) and (a is None or torch.equal(a, b))


def regroup(part: Packed, group: int) -> Packed:
    """The same values with scales for smaller groups."""
    times = part.group // group
    scales = {name: part.tensors[name].repeat_interleave(times, dim=1) for name in ("s", "m") if name in part.tensors}
    return replace(part, group=group, tensors=part.tensors | scales)


def _or_zero(part: Packed, name: str) -> torch.Tensor:
    return part.tensors[name] if name in part.tensors else torch.zeros_like(part.tensors["s"])
