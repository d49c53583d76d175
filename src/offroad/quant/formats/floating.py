"""Weights in small floats: FP8, NVFP4 and MXFP4, told apart by the dtypes of their tensors and by the scales' names.

A weight is `X.weight` with scales `X.weight_scale...`, or a tensor of all experts `Y.gate_up_proj` [experts, n, k]
with scales `Y.gate_up_proj_weight_scale...` or `Y.gate_up_proj_scale...`.
"""

from __future__ import annotations

from math import prod

import torch

from offroad.errors import ModelError
from offroad.quant.formats.base import FLOAT, REPAIR, Claim, Claims, Read, expect, scales
from offroad.quant.packed import Packed
from offroad.weights.source import Headers

SUFFIXES = tuple(
    f"{before}{name}"
    for before in "._"
    for name in ("weight_scale_inv", "weight_scale", "weight_scale_2", "scale_inv", "input_scale", "activation_scale")
)
_SCALES = ("weight_scale_inv", "weight_scale", "scale_inv", "scale")  # all of them multiply
_STATIC = ("input_scale", "activation_scale")
BYTES, POWERS = ("u8", "i8"), ("f8_e8m0", "u8")
Block = tuple[int, int]


def claim_all(headers: Headers, block: Block | None, maker: str = "") -> Claims:
    """Every weight in small floats. `block`: rows and columns that share an FP8 scale; `maker`: whom its kind names.

    Static scales of activations become `others`: activations are not quantised here.
    """
    found, static = Claims(), False
    for name, header in headers.items():
        if len(header.shape) < 2 or name.endswith((*SUFFIXES, ".scale")):
            continue
        stem = _stem(name)
        scale = next((stem + s for s in _SCALES if stem + s in headers), None)
        if header.kind == "f8_e4m3":
            scale = scale or stem + ("weight_scale_inv" if block else "weight_scale")
            found.claims.append(_fp8(headers, name, scale, block, maker))
        elif header.kind in BYTES and scale is not None:
            nvfp4 = headers[scale].kind == "f8_e4m3" or f"{stem}weight_scale_2" in headers
            found.claims.append(_nvfp4(headers, name, stem) if nvfp4 else _mxfp4(headers, name, scale))
        else:
            continue
        inputs = [stem + s for s in _STATIC if stem + s in headers]
        found.others += inputs
        static = static or bool(inputs)
    if static:
        found.notes.append("static scales of activations are not used: activations keep their dtype")
    return found


def _stem(name: str) -> str:
    """What the names of the weight's scales begin with."""
    return name.removesuffix("weight") if name.endswith(".weight") else f"{name}_"


def _fp8(headers: Headers, name: str, scale: str, block: Block | None, maker: str) -> Claim:
    shape = headers[name].shape
    expect(headers, scale, (*FLOAT, *POWERS))
    a, rows, columns, detail = _grid(headers, name, scale, block)

    def decode(read: Read) -> Packed:
        q, s = read(name).reshape(-1, shape[-1]), scales(read, scale)
        return Packed("fp8", *q.shape, {"q": q, "s": _by_row(s, shape, a, rows)}, group=columns)

    return Claim(name, shape, f"fp8.{maker}-{detail}" if maker else f"fp8.{detail}", (name, scale), decode)


def _grid(headers: Headers, name: str, scale: str, block: Block | None) -> tuple[int, int, int, str]:
    """(scales down the rows of a matrix, rows and columns that share one, what that is called)."""
    *lead, n, k = headers[name].shape
    lead, stored, blocks = tuple(lead), headers[scale].shape, [block or (128, 128)]
    if len(stored) == len(lead) + 4 and stored[-3] == stored[-1] == 1:  # ModelOpt's [n / 128, 1, k / 128, 1]
        stored = (*stored[:-4], stored[-4], stored[-2])
    if headers[scale].kind in POWERS:
        blocks.append((1, 32))
    for rows, columns in blocks:
        if stored == (*lead, -(-n // rows), -(-k // columns)):
            return stored[-2], rows, columns, f"block{rows}x{columns}"
    if stored in ((*lead, n), (*lead, n, 1)):
        return n, 1, k, "channel"
    if whole := _whole(headers[name].shape, stored):
        return *whole, k, "tensor"
    rows, columns = blocks[0]
    raise ModelError(
        f"tensor {scale}",
        found=f"shape {list(headers[scale].shape)} for a weight {[*lead, n, k]}",
        accepted=f"a scale for the whole, for each row, or for blocks of {rows} x {columns}",
        next=REPAIR,
    )


def _by_row(s: torch.Tensor, shape: tuple[int, ...], a: int, rows: int) -> torch.Tensor:
    """Scales [all rows, groups] of scales by block of rows; a single one is for all."""
    lead, n = prod(shape[:-2]), shape[-2]
    s = s.reshape(1 if s.numel() == 1 else lead, a, -1).expand(lead, -1, -1)
    return s.repeat_interleave(rows, dim=1)[:, :n].flatten(0, 1).contiguous()


def _nvfp4(headers: Headers, name: str, stem: str) -> Claim:
    *lead, n, half = headers[name].shape
    shape, second = (*lead, n, 2 * half), f"{stem}weight_scale_2"
    scale = f"{stem}weight_scale"
    expect(headers, scale, ("f8_e4m3",), (*lead, n, _groups(name, 2 * half, 16)))
    expect(headers, second, FLOAT)
    whole = _whole(shape, headers[second].shape)
    if whole is None:
        found = f"shape {list(headers[second].shape)}"
        raise ModelError(f"tensor {second}", found=found, accepted="one scale for each matrix", next=REPAIR)

    def decode(read: Read) -> Packed:
        s = scales(read, scale).reshape(-1, half // 8) * _by_row(scales(read, second), shape, *whole)
        return Packed("fp4", len(s), 2 * half, {"q": _codes(read(name), half), "s": s}, group=16)

    return Claim(name, shape, "fp4.nvfp4", (name, scale, second), decode)


def _whole(shape: tuple[int, ...], stored: tuple[int, ...]) -> tuple[int, int] | None:
    """(scales down the rows of a matrix, rows that share one) where there is one for the tensor, for each matrix, or
    for its gate and up halves."""
    lead, n = shape[:-2], shape[-2]
    if prod(stored) == 1 or stored in (lead, (*lead, 1), (*lead, 1, 1)):
        return 1, n
    return (2, n // 2) if lead and n % 2 == 0 and stored in ((*lead, 2), (*lead, 2, 1)) else None


def _mxfp4(headers: Headers, name: str, scale: str) -> Claim:
    *lead, n, half = headers[name].shape
    shape = (*lead, n, 2 * half)
    expect(headers, scale, POWERS, (*lead, n, _groups(name, 2 * half, 32)))
    return Claim(name, shape, "fp4.mxfp4", (name, scale), lambda read: mxfp4(read, name, scale, 2 * half))


def mxfp4(read: Read, name: str, scale: str, k: int) -> Packed:
    """The canonical weight of E2M1 pairs in bytes and a power of two for each 32 columns."""
    s = scales(read, scale).reshape(-1, k // 32)
    return Packed("fp4", len(s), k, {"q": _codes(read(name), k // 2), "s": s}, group=32)


def _codes(pairs: torch.Tensor, half: int) -> torch.Tensor:
    return pairs.reshape(-1, half).view(torch.uint8)


def _groups(name: str, k: int, size: int) -> int:
    if k % size:
        raise ModelError(
            f"tensor {name}",
            found=f"{k} columns of 4-bit floats",
            accepted=f"a multiple of {size}, which share a scale",
            next=REPAIR,
        )
    return k // size
