"""A rank's part of a canonical weight: rows of it, or columns with their scales, in whole bytes and whole groups."""

from __future__ import annotations

from dataclasses import replace
from math import gcd
from typing import Literal

import torch

from offroad.quant.packed import PER_BYTE, Packed
from offroad.quant.scheme import regroup, to_dense


def take(packed: Packed, slices: list[slice]) -> Packed:
    """Some rows of a canonical weight, without the bias, in memory of their own: the rest may be freed."""
    tensors = {name: torch.cat([tensor[own] for own in slices]) for name, tensor in packed.tensors.items()}
    return replace(packed, n=sum(own.stop - own.start for own in slices), tensors=tensors, bias=None)


def shard(packed: Packed, axis: Literal["rows", "columns"], rank: int, ranks: int) -> Packed:
    """Part `rank` of `ranks` equal ones. A bias goes with rows, and with columns to rank 0, since ranks are summed.

    Groups that a cut would divide become smaller ones with the same scales. Columns in another order (`perm`) that go
    to a rank belong to groups of all sizes: that part becomes dense, in fp32.
    """
    size = packed.n if axis == "rows" else packed.k
    assert size % ranks == 0, (axis, size, ranks)
    cut = slice(rank * size // ranks, (rank + 1) * size // ranks)
    if axis == "rows":
        return replace(packed.rows(cut), bias=None if packed.bias is None else packed.bias[cut])
    bias = packed.bias if rank == 0 else None
    if packed.perm is not None:
        packed = to_dense(packed, torch.float32)
    if packed.layout == "dense":
        own = packed.tensors["w"][:, cut].contiguous()
        return replace(packed, k=cut.stop - cut.start, tensors={"w": own}, bias=bias)
    return replace(_columns(packed, cut), bias=bias)


def _columns(packed: Packed, cut: slice) -> Packed:
    width, per_byte = cut.stop - cut.start, PER_BYTE[packed.layout]
    assert width % per_byte == 0, f"{width} columns are no whole bytes"
    if packed.group >= packed.k:  # one group: every part has its scale
        scales = {name: packed.tensors[name] for name in ("s", "m") if name in packed.tensors}
        group = width
    else:
        whole = regroup(packed, gcd(packed.group, width))
        group = whole.group
        of = slice(cut.start // group, cut.stop // group)
        scales = {name: whole.tensors[name][:, of].contiguous() for name in ("s", "m") if name in whole.tensors}
    q = packed.tensors["q"][:, cut.start // per_byte : cut.stop // per_byte].contiguous()
    return replace(packed, k=width, group=group, tensors={"q": q, **scales})
