"""Weights as the CPU kernels read them: tiles of 16 output rows, a vector lane being an output row."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import gcd

import torch

from offroad.errors import PlanError
from offroad.quant.packed import Packed, dequantise, values

LAYOUT = "cpu.tile16"
TILE = 16
UNIT = 128  # k whose products are summed in one chain, at most (KB of linear.c)
_CHUNK = 1 << 24  # weights packed at a time, so that packing needs little memory beside the result
_KINDS = {"f32": 0, "bf16": 1, "q4": 2, "q8": 3}


class _Handle(ctypes.Structure):
    """`weight_t` of linear.c."""

    _fields_ = [
        ("n", ctypes.c_int64),
        ("k", ctypes.c_int64),
        ("group", ctypes.c_int64),
        ("kind", ctypes.c_int32),
        ("half_scales", ctypes.c_int32),
        ("has_m", ctypes.c_int32),
        ("unit", ctypes.c_int32),
        ("q", ctypes.c_void_p),
        ("s", ctypes.c_void_p),
        ("m", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
    ]


@dataclass(frozen=True)
class Tiled(Packed):
    """A weight in layout `cpu.tile16`: one of the tensors

    - `f32`, `bf16`: [tiles, k, 16];
    - `q4`: uint8 [tiles, k / 32, 4, 16, 4], i.e. 32-bit words [.., b, row] whose nibble j is the weight of k = 4 j + b;
    - `q8`: int8 [tiles, k, 16],

    and for the last two `s` and perhaps `m` [tiles, k / group, 16], in fp16 if that holds them exactly, else fp32.
    Rows beyond n are 0. `address` is that of the C description; it stays valid while this object lives.
    """

    def __post_init__(self) -> None:
        kind = next(name for name in _KINDS if name in self.tensors)
        scale = self.tensors.get("s")
        assert self.bias is None or (self.bias.dtype == torch.float32 and self.bias.is_contiguous())
        handle = _Handle(
            n=self.n,
            k=self.k,
            group=self.group,
            kind=_KINDS[kind],
            unit=gcd(self.group, UNIT) or UNIT,
            has_m="m" in self.tensors,
            half_scales=scale is not None and scale.dtype == torch.float16,
            q=self.tensors[kind].data_ptr(),
            s=_address(scale),
            m=_address(self.tensors.get("m")),
            bias=_address(self.bias),
        )
        object.__setattr__(self, "handle", handle)
        object.__setattr__(self, "address", ctypes.addressof(handle))


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def pack(weight: Packed) -> Tiled:
    """A canonical weight (dense, affine4, affine8) in tiles. Whether it fits is `unfit`'s to say."""
    if isinstance(weight, Tiled):
        return weight
    assert weight.perm is None, "the kernels read groups of neighbouring columns"
    reason = unfit(weight.layout, weight.k, weight.group)
    if reason is not None:
        raise PlanError("weight for the CPU kernels", found=reason, next="--kernel linear=torch.linear")
    if weight.layout == "fp8":  # no integers: the numbers themselves
        weight = replace(weight, layout="dense", tensors={"w": dequantise(weight)}, group=0)
    elif weight.layout == "fp4":  # twice E2M1 is an integer
        halves = weight.tensors["s"] / 2
        weight = replace(weight, layout="affine8", tensors={"q": (2 * values(weight)).to(torch.int8), "s": halves})
    tensors = weight.tensors
    if weight.layout == "dense":
        name = "bf16" if tensors["w"].dtype == torch.bfloat16 else "f32"
        made = {name: _by_rows(tensors["w"] if name == "bf16" else tensors["w"].float(), weight.k)}
    elif weight.layout == "affine8":
        made = {"q8": _by_rows(tensors["q"], weight.k)}
    else:
        made = {"q4": _nibbles(tensors["q"], weight.k)}
    affine = {name: tensors[name] for name in ("s", "m") if name in tensors}
    halves = {name: tensor.half() for name, tensor in affine.items()}
    exact = all(torch.equal(halves[name].float(), tensor) for name, tensor in affine.items())
    for name, tensor in (halves if exact else affine).items():
        made[name] = _by_rows(tensor if exact else tensor.float(), weight.k)
    bias = None if weight.bias is None else weight.bias.float().contiguous()
    return Tiled(LAYOUT, weight.n, weight.k, made, weight.group, bias)


def unfit(layout: str, k: int, group: int) -> str | None:
    """Why a canonical weight cannot be packed, or None."""
    if layout in ("dense", "fp8"):
        return None
    if layout == "affine4":
        return (
            None
            if group and group % 32 == 0 and k % group == 0
            else f"affine4 needs groups of a multiple of 32, not {group} of {k}"
        )
    if layout in ("affine8", "fp4"):
        return None if group and k % group == 0 else f"{layout} needs whole groups, not {group} of {k}"
    return f"no packer from layout {layout}"


def _tiles(tensor: torch.Tensor, k: int):
    """(first tile, rows [tiles * 16, ...] padded with 0) pieces of at most about _CHUNK weights."""
    step = max(1, _CHUNK // (k * TILE)) * TILE
    for first in range(0, tensor.shape[0], step):
        rows = tensor[first : first + step]
        if missing := -rows.shape[0] % TILE:
            rows = torch.cat((rows, rows.new_zeros(missing, rows.shape[1])))
        yield first // TILE, rows


def _by_rows(tensor: torch.Tensor, k: int) -> torch.Tensor:
    """[n, c] -> [tiles, c, 16]"""
    out = torch.empty(-(-tensor.shape[0] // TILE), tensor.shape[1], TILE, dtype=tensor.dtype)
    for first, rows in _tiles(tensor, k):
        piece = rows.view(-1, TILE, rows.shape[1]).transpose(1, 2)
        out[first : first + piece.shape[0]] = piece
    return out


def _nibbles(q: torch.Tensor, k: int) -> torch.Tensor:
    out = torch.empty(-(-q.shape[0] // TILE), k // 32, 4, TILE, 4, dtype=torch.uint8)
    for first, rows in _tiles(q, k):
        # Byte c of 16 holds k = 2 c (low) and 2 c + 1; byte i of word b takes k = 8 i + b (low) and 8 i + 4 + b.
        pairs = rows.view(-1, TILE, k // 32, 4, 2, 2)  # [tile, row, 32s, i, half, c]: k = 8 i + 4 half + 2 c
        low, high = pairs & 15, pairs >> 4
        even = low[:, :, :, :, 0] | (low[:, :, :, :, 1] << 4)  # [tile, row, 32s, i, c]: words b = 2 c
        odd = high[:, :, :, :, 0] | (high[:, :, :, :, 1] << 4)  # words b = 2 c + 1
        words = torch.stack((even, odd), dim=-1)  # [tile, row, 32s, i, c, odd]
        out[first : first + words.shape[0]] = words.flatten(4).permute(0, 2, 4, 1, 3)
    return out


PACKERS: dict[str, Callable[[Packed], Packed]] = {LAYOUT: pack}
