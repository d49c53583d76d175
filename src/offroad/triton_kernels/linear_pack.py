"""Weights of 4 bits as the Triton kernels read them: records in the order of a matrix operand's registers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from offroad.quant.packed import Packed

LAYOUT = "triton.w4"
BLOCK_N, BLOCK_K = 64, 128  # outputs and k of one record: 1,024 words, 4 KiB
_CHUNK = 1 << 24  # weights packed at a time, so that packing needs little memory beside the result


@dataclass(frozen=True)
class Records(Packed):
    """A weight in layout `triton.w4` (see `pack`); `kind`: what its codes are, "int4" or "e2m1"."""

    kind: str = "int4"


def pack(weight: Packed) -> Records:
    """A canonical affine4 or fp4 weight in records:

    - `q` int32 [ceil(n / 64), ceil(k / 128), 1024];
    - `s` [groups, padded n], and for affine4 with minima other than -8 s `m`: w = (u - 8) * s + m. They are in fp16 or
      bf16 if that holds them exactly, else in fp32;
    - fp4: `s` may be uint8 codes of E4M3, then `r` fp32 [padded n] is a row's factor: w = e2m1 * e4m3 * r.

    Padding has scale 0. Groups are a divisor of 128, a multiple of it, or all of k. A dense weight (parts that could not
    stand side by side became one) stays as it is, under this layout's name. Works where the weight is.
    """
    if weight.layout == "dense":
        return Records(LAYOUT, weight.n, weight.k, weight.tensors, 0, weight.bias)
    assert weight.layout in ("affine4", "fp4"), weight.layout
    tensors = {"q": _records(weight)}
    s = weight.tensors["s"]
    if weight.layout == "affine4":
        tensors["s"] = _halved(s)
        m = weight.tensors["m"]
        if not torch.equal(m, -8 * s):
            tensors["m"] = _halved(m + 8 * s)
    else:
        tensors |= _factored(s)
    whole = weight.group >= BLOCK_K or weight.group >= weight.k
    groups = s.shape[1] if whole else tensors["q"].shape[1] * BLOCK_K // weight.group
    rows = tensors["q"].shape[0] * BLOCK_N
    for name in ("s", "m"):
        if name in tensors:
            tensors[name] = _padded(tensors[name].T, groups, rows)
    if "r" in tensors:
        tensors["r"] = torch.nn.functional.pad(tensors["r"], (0, rows - weight.n))
    kind = "int4" if weight.layout == "affine4" else "e2m1"
    return Records(LAYOUT, weight.n, weight.k, tensors, weight.group, weight.bias, weight.perm, kind)


def _padded(scales: torch.Tensor, groups: int, rows: int) -> torch.Tensor:
    out = scales.new_zeros(groups, rows)
    out[: scales.shape[0], : scales.shape[1]] = scales
    return out


def _halved(scales: torch.Tensor) -> torch.Tensor:
    for dtype in (torch.bfloat16, torch.float16):
        if torch.equal(scales.to(dtype).float(), scales):
            return scales.to(dtype)
    return scales.float()


def _factored(s: torch.Tensor) -> dict[str, torch.Tensor]:
    """Scales as E4M3 codes times one factor a row, where that gives them to within 2^-20; else as `_halved`.

    A row's largest scale is (8 + i) / 8 times a power of two times the factor, for one i of 8: each is tried.
    """
    top = s.abs().amax(1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    best = torch.full_like(top, torch.inf)
    factor = torch.ones_like(top)
    for i in range(8):  # codes end at 448 = 2^8 * 14 / 8
        r = top / ((8 + i) * (32 if i < 7 else 16))
        scaled = s / r
        error = (scaled.to(torch.float8_e4m3fn).float() - scaled).abs()
        worst = torch.where(scaled == 0, 0.0, error / scaled.abs()).amax(1, keepdim=True)
        better = worst < best
        best, factor = torch.where(better, worst, best), torch.where(better, r, factor)
    if float(best.max()) > 2.0**-20:
        return {"s": _halved(s)}
    return {"s": (s / factor).to(torch.float8_e4m3fn).view(torch.uint8), "r": factor[:, 0].contiguous()}


def _records(weight: Packed) -> torch.Tensor:
    """Words: nibble i of 0..3 and 4 + i hold neighbours in k (the even one low), bit 0 of i the lower or upper 8 of 16
    outputs, bit 1 the lower or upper 8 of 16 k. Word order: [16 outputs 4][64 k 2][output 8][pair of k 4][16 k 4]."""
    q, n, k = weight.tensors["q"], weight.n, weight.k
    tiles, units = -(-n // BLOCK_N), -(-k // BLOCK_K)
    out = torch.empty(tiles, units, 1024, dtype=torch.int32, device=q.device)
    zero = 0x88 if weight.layout == "affine4" else 0
    step = max(1, _CHUNK // (units * BLOCK_K * BLOCK_N))
    for first in range(0, tiles, step):
        rows = q[first * BLOCK_N : (first + step) * BLOCK_N]
        count = -(-rows.shape[0] // BLOCK_N)
        missing = (0, units * 64 - rows.shape[1], 0, count * BLOCK_N - rows.shape[0])
        rows = torch.nn.functional.pad(rows, missing, value=zero) if any(missing) else rows
        # tile, 16 outputs, half of 16, output, unit, 64 k, 16 k, half of 16, pair
        pairs = rows.reshape(count, 4, 2, 8, units, 2, 4, 2, 4).permute(0, 4, 1, 5, 3, 8, 6, 7, 2).to(torch.int32)
        low, high = pairs & 15, pairs >> 4
        halves = low | (high << 16)  # ..., half of k, half of outputs
        word = halves[..., 0, 0] | (halves[..., 0, 1] << 4) | (halves[..., 1, 0] << 8) | (halves[..., 1, 1] << 12)
        out[first : first + count] = word.reshape(count, units, 1024)
    return out


def codes(q: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Codes uint8 [len(rows), padded k] of some rows of records."""
    at = rows % BLOCK_N
    words = q[rows // BLOCK_N].view(len(rows), -1, 4, 2, 8, 4, 4)
    own = torch.arange(len(rows), device=q.device)
    words = words[own, :, at // 16, :, at % 8]  # [rows, unit, 64 k, pair, 16 k]
    half = ((at // 8) % 2 * 4).view(-1, 1, 1, 1, 1, 1, 1)
    khalf = torch.tensor([0, 8], device=q.device).view(2, 1, 1)
    parity = torch.tensor([0, 16], device=q.device)
    words = words.transpose(-1, -2)[..., None, :, None]  # unit, 64 k, 16 k, half, pair, parity
    return ((words >> (half + khalf + parity)) & 15).to(torch.uint8).flatten(1)


PACKERS: dict[str, Callable[[Packed], Packed]] = {LAYOUT: pack}
