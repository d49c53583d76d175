"""Packed weights: what a linear or an embedding is stored as while the model runs."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import torch

# Canonical layouts, and how many values a byte of `q` holds.
PER_BYTE = {"affine4": 2, "affine8": 1, "fp8": 1, "fp4": 2}
FP8_BLOCKS = "fp8.block128x128"  # how a weight of e4m3 with a scale for each 128 by 128 is stored
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


@dataclass(frozen=True)
class Packed:
    """A weight `[n, k]` in `layout`.

    Canonical layouts, which every reference kernel reads; scales `s` (and `m`) are fp32 [n, ceil(k / group)]:
    - `dense`: tensors `w` [n, k] in a float dtype;
    - `affine4`: `q` uint8 [n, k / 2] (even k in the low nibble), `m` as `s`: w = q * s + m;
    - `affine8`: `q` int8 [n, k], and `m` or not (0);
    - `fp8`: `q` float8_e4m3fn [n, k]: w = q * s;
    - `fp4`: `q` uint8 [n, k / 2] of E2M1 codes (even k in the low nibble): w = q * s.
    With `perm` int64 [k], column j of `q` is column perm[j] of the weight: groups of columns that stand apart in it.
    A kernel may declare a layout of its own (`cpu.…`), which its packer makes from a canonical one.
    """

    layout: str
    n: int
    k: int
    tensors: dict[str, torch.Tensor]
    group: int = 0
    bias: torch.Tensor | None = None
    perm: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())

    def rows(self, picked: slice | torch.Tensor) -> Packed:
        """Some rows of a canonical weight, without the bias."""
        tensors = {name: tensor[picked] for name, tensor in self.tensors.items()}
        return replace(self, n=next(iter(tensors.values())).shape[0], tensors=tensors, bias=None)


def values(packed: Packed) -> torch.Tensor:
    """The numbers that `q` holds, fp32 [n, k]."""
    q = packed.tensors["q"]
    if packed.layout in ("affine4", "fp4"):
        q = torch.stack((q & 15, q >> 4), dim=-1).reshape(packed.n, packed.k)
    if packed.layout == "fp4":
        return torch.tensor(E2M1, device=q.device)[q.int()]
    return q.float()


def dequantise(packed: Packed) -> torch.Tensor:
    """The weight `[n, k]` in fp32, from a canonical layout: the oracle for kernels."""
    tensors = packed.tensors
    if packed.layout == "dense":
        return tensors["w"].float()
    assert packed.layout in PER_BYTE, packed.layout
    weight = values(packed) * spread(tensors["s"], packed.group, packed.k)
    if "m" in tensors:
        weight = weight + spread(tensors["m"], packed.group, packed.k)
    if packed.perm is None:
        return weight
    ordered = torch.empty_like(weight)
    ordered[:, packed.perm] = weight
    return ordered


def spread(scales: torch.Tensor, group: int, k: int) -> torch.Tensor:
    """Scales by column [n, k] of scales by group [n, ceil(k / group)]; the last group may be short."""
    return scales.repeat_interleave(group, dim=1)[:, :k]


def group_of(kind: str, k: int) -> int:
    """Columns that share a scale in a weight stored as `kind` (`layout.detail`), of k columns; 1: not quantised."""
    if found := re.search(r"[-.]g(\d+)|block\d+x(\d+)", kind):
        return int(found.group(1) or found.group(2))
    if "mxfp" in kind:
        return 32
    return 16 if "nvfp4" in kind else k if kind.partition(".")[0] in PER_BYTE else 1
