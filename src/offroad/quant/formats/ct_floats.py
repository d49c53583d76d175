"""Float weights of compressed-tensors: FP8 (e4m3) and FP4 (E2M1), with scales in floats, e4m3 or powers of two."""

from __future__ import annotations

import torch

from offroad.errors import ModelError
from offroad.quant.formats.base import FLOAT, REPAIR, Claim, Read, expect, scales
from offroad.quant.formats.ct_config import Scheme
from offroad.quant.formats.ct_ints import by_row, matrix, scale_shape
from offroad.quant.packed import Packed
from offroad.weights.source import Headers

EXPONENTS = ("u8", "f8_e8m0")


def fp8(headers: Headers, module: str, scheme: Scheme) -> Claim:
    """The claim of a module with an e4m3 `weight`. Raises ModelError for a tensor of another shape or dtype."""
    name, scale = f"{module}.weight", f"{module}.weight_scale"
    *lead, n, k = shape = matrix(headers, name)
    rows, columns = scheme.block if scheme.strategy == "block" else (1, scheme.size or k)
    exponents = scale in headers and headers[scale].kind in EXPONENTS
    groups, blocks = -(-k // columns), -(-n // rows)
    if exponents or scheme.strategy == "block":
        expect(headers, scale, EXPONENTS if exponents else FLOAT, (*lead, blocks, groups))
    else:
        scale_shape(headers, scale, scheme.strategy, tuple(lead), n, groups)

    def decode(read: Read) -> Packed:
        value = scales(read, scale)
        if scheme.strategy == "block":
            value = value.repeat_interleave(rows, dim=-2)[..., :n, :]
        q = read(name).reshape(-1, k)
        return Packed("fp8", q.shape[0], k, {"q": q, "s": by_row(value, tuple(lead), n, groups)}, columns)

    detail = (
        f"block{rows}x{columns}" if scheme.strategy == "block" else f"g{columns}" if scheme.size else scheme.strategy
    )
    return Claim(module if lead else name, shape, "fp8.mxfp8" if exponents else f"fp8.{detail}", (name, scale), decode)


def fp4(headers: Headers, module: str, scheme: Scheme) -> Claim:
    """The claim of a module with E2M1 codes (`weight_packed` of bytes): NVFP4 if it has a global scale, else MXFP4."""
    name, scale = f"{module}.weight_packed", f"{module}.weight_scale"
    overall = f"{module}.weight_global_scale"
    *lead, n, half = matrix(headers, name)
    nvidia, k = overall in headers, 2 * half
    if k % scheme.size:
        raise ModelError(f"tensor {name}", found=f"{k} columns", accepted=f"whole groups of {scheme.size}", next=REPAIR)
    groups = k // scheme.size
    expect(headers, scale, ("f8_e4m3",) if nvidia else EXPONENTS, (*lead, n, groups))
    if nvidia:
        found = headers[overall].shape
        each = [(1,), (), *((*lead, *more) for more in ((), (1,), (2,), (1, 1)) if lead)]
        expect(headers, overall, FLOAT, found if found in each else (1,))

    def decode(read: Read) -> Packed:
        q = read(name).reshape(-1, half)
        value = scales(read, scale)
        value = value.reshape(-1, groups)
        if nvidia:
            value = value / _overall(read, overall, tuple(lead), n)
        return Packed("fp4", q.shape[0], k, {"q": q, "s": value}, scheme.size)

    tensors = (name, scale, overall) if nvidia else (name, scale)
    kind = "fp4.nvfp4" if nvidia else "fp4.mxfp4"
    return Claim(module if lead else f"{module}.weight", (*lead, n, k), kind, tensors, decode)


def _overall(read: Read, name: str, lead: tuple[int, ...], n: int) -> torch.Tensor:
    """What scales are divided by, [rows, 1]: one for all, for each expert, or for each half of an expert's rows."""
    value = scales(read, name)
    if not (value > 0).all():
        raise ModelError(f"tensor {name}", found=f"{value.min().item()}", accepted="a positive scale", next=REPAIR)
    rows = torch.Size(lead).numel() * n
    return value.reshape(-1, 1).repeat_interleave(rows // value.numel(), dim=0)
