"""Packed weights: what a linear or an embedding is stored as while the model runs."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Packed:
    """A weight `[n, k]` in `layout`.

    Canonical layouts, which every reference kernel reads:
    - `dense`: tensors `w` [n, k] in a float dtype;
    - `affine4`: `q` uint8 [n, k / 2] (even k in the low nibble), `s` fp32 [n, k / group], `m` fp32 [n, k / group]:
      w = q * s + m;
    - `affine8`: `q` int8 [n, k], `s` fp32 [n, k / group], and `m` as above or absent (0).
    A kernel may declare a layout of its own (`cpu.…`), which its packer makes from a canonical one.
    """

    layout: str
    n: int
    k: int
    tensors: dict[str, torch.Tensor]
    group: int = 0
    bias: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())


def dequantise(packed: Packed) -> torch.Tensor:
    """The weight `[n, k]` in fp32, from a canonical layout: the oracle for kernels."""
    tensors = packed.tensors
    if packed.layout == "dense":
        return tensors["w"].float()
    q = tensors["q"]
    if packed.layout == "affine4":
        q = torch.stack((q & 15, q >> 4), dim=-1).reshape(packed.n, packed.k)
    else:
        assert packed.layout == "affine8", packed.layout
    grouped = q.float().reshape(packed.n, -1, packed.group) * tensors["s"][:, :, None]
    if "m" in tensors:
        grouped = grouped + tensors["m"][:, :, None]
    return grouped.reshape(packed.n, packed.k)
