"""Weights of 4 and 8 bits as Triton's and Hopper's kernels read them: records in the order of operands' registers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from offroad.quant.packed import E2M1, Packed, spread

W4, W8 = "triton.w4", "triton.w8"
KINDS = {"affine4": "int4", "fp4": "e2m1", "affine8": "int8", "fp8": "e4m3"}
BLOCK_N, BLOCK_K = 64, 128  # outputs and k of one record: 1,024 words of 4-bit codes, 2,048 of 8-bit ones
_CHUNK = 1 << 24  # weights packed at a time, so that packing needs little memory beside the result


@dataclass(frozen=True)
class Records(Packed):
    """A weight in one of these layouts (see `pack`); `kind`: what its codes are, "int4", "e2m1", "int8" or "e4m3"."""

    kind: str = ""


def pack(weight: Packed) -> Records:
    """A canonical quantised weight in records, `triton.w4` or `triton.w8` by the size of its codes:

    - `q` int32 [ceil(n / 64), ceil(k / 128), words] (see `_nibbles`, `_bytes`); codes of affine4 are u = q;
    - `s` [groups, padded n], and `m` unless it is 0: w = q * s + m, for affine4 w = (q - 8) * s + m. They are in bf16
      or fp16 if that holds them exactly, else in fp32; `m` in int16 is a multiple of `s`, as zero points give it;
    - fp4: `s` may be uint8 codes of E4M3, then `r` fp32 [padded n] is a row's factor: w = e2m1 * e4m3 * r.

    Padding has scale 0. Groups are a divisor of 128, a multiple of it, or all of k. A dense weight (parts that could
    not stand side by side became one) stays as it is, under the name of 4 bits. Works where the weight is.
    """
    if weight.layout == "dense":
        return Records(W4, weight.n, weight.k, weight.tensors, 0, weight.bias, kind="dense")
    kind, s = KINDS[weight.layout], weight.tensors["s"]
    m = weight.tensors.get("m")
    if kind == "int4":
        m = m + 8 * s
    folded = weight.group < min(BLOCK_K, weight.k)
    tensors = {"q": _records(weight)} | (_factored(s) if kind == "e2m1" and folded else {"s": _halved(s)})
    if m is not None and bool(m.any()):
        tensors["m"] = _minima(m, s)
    rows, units = tensors["q"].shape[0] * BLOCK_N, tensors["q"].shape[1]
    groups = units * BLOCK_K // weight.group if folded else s.shape[1]
    for name in ("s", "m"):
        if name in tensors:
            tensors[name] = _padded(tensors[name].T, groups, rows)
    if "r" in tensors:
        tensors["r"] = torch.nn.functional.pad(tensors["r"], (0, rows - weight.n))
    layout = W4 if kind in ("int4", "e2m1") else W8
    return Records(layout, weight.n, weight.k, tensors, weight.group, weight.bias, weight.perm, kind)


def _padded(scales: torch.Tensor, groups: int, rows: int) -> torch.Tensor:
    out = scales.new_zeros(groups, rows)
    out[: scales.shape[0], : scales.shape[1]] = scales
    return out


def _halved(scales: torch.Tensor) -> torch.Tensor:
    for dtype in (torch.bfloat16, torch.float16):
        if torch.equal(scales.to(dtype).float(), scales):
            return scales.to(dtype)
    return scales.float()


def _minima(m: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    """Minima as integers that the kernel multiplies by the scale, where they are that exactly; else as `_halved`."""
    times = torch.where(s == 0, 0.0, m / s).round()
    return times.to(torch.int16) if torch.equal(times * s, m) and bool(times.abs().max() < 2**15) else _halved(m)


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
    if float(best.max()) > 2.0**-20 or bool((s < 0).any()):
        return {"s": _halved(s)}
    return {"s": (s / factor).to(torch.float8_e4m3fn).view(torch.uint8), "r": factor[:, 0].contiguous()}


def _records(weight: Packed) -> torch.Tensor:
    """Codes in records, int32 [tiles, units, words]."""
    q, n, k = weight.tensors["q"].view(torch.uint8), weight.n, weight.k
    small = weight.layout in ("affine4", "fp4")
    tiles, units = -(-n // BLOCK_N), -(-k // BLOCK_K)
    width = BLOCK_K // 2 if small else BLOCK_K
    out = torch.empty(tiles, units, width * BLOCK_N // 4, dtype=torch.int32, device=q.device)
    step = max(1, _CHUNK // (units * BLOCK_K * BLOCK_N))
    for first in range(0, tiles, step):
        rows = q[first * BLOCK_N : (first + step) * BLOCK_N]
        count = -(-rows.shape[0] // BLOCK_N)
        missing = (0, units * width - rows.shape[1], 0, count * BLOCK_N - rows.shape[0])
        rows = torch.nn.functional.pad(rows, missing) if any(missing) else rows
        out[first : first + count] = (_nibbles if small else _bytes)(rows, count, units)
    return out


def _nibbles(rows: torch.Tensor, count: int, units: int) -> torch.Tensor:
    """Nibbles i = 0..3 and 4 + i of a word are neighbours in k (the even one low); bit 0 of i is the lower or upper 8
    of 16 outputs, bit 1 the lower or upper 8 of 16 k. Order of words: [16 outputs][64 k][output][pair of k][16 k]."""
    # tile, 16 outputs, upper 8 outputs, output, unit, 64 k, 16 k, upper 8 k, pair
    pairs = rows.reshape(count, 4, 2, 8, units, 2, 4, 2, 4).permute(0, 4, 1, 5, 3, 8, 6, 7, 2).to(torch.int32)
    halves = (pairs & 15) | ((pairs >> 4) << 16)
    word = halves[..., 0, 0] | (halves[..., 0, 1] << 4) | (halves[..., 1, 0] << 8) | (halves[..., 1, 1] << 12)
    return word.reshape(count, units, -1)


def _bytes(rows: torch.Tensor, count: int, units: int) -> torch.Tensor:
    """Bytes 0 and 1, 2 and 3 of a word are neighbours in k, the latter 8 further. Order of words: [16 outputs][64 k]
    [8 outputs][output][pair of k][16 k]."""
    # tile, 16 outputs, upper 8 outputs, output, unit, 64 k, 16 k, upper 8 k, pair, parity
    parts = rows.reshape(count, 4, 2, 8, units, 2, 4, 2, 4, 2).permute(0, 4, 1, 5, 2, 3, 8, 6, 7, 9)
    return parts.reshape(count, units, -1).view(torch.int32)


def _codes(weight: Records, rows: torch.Tensor) -> torch.Tensor:
    """Codes of some rows in the order of k, integers [rows, padded k]. Only the words that hold a row's are read, of
    8 bits a 64th of its records, of 4 bits a 32nd."""
    q, at, tile = weight.tensors["q"], rows % BLOCK_N, rows // BLOCK_N
    if weight.layout == W8:
        words = q.view(len(q), -1, 4, 2, 2, 8, 4, 4).permute(0, 2, 4, 5, 1, 3, 7, 6)
        parts = words[tile, at // 16, at // 8 % 2, at % 8].contiguous().view(torch.uint8)  # ..., 16 k, pair * 4
        return parts.unflatten(-1, (4, 2, 2)).transpose(-3, -2).flatten(1)
    words = q.view(len(q), -1, 4, 2, 8, 4, 4).permute(0, 2, 4, 1, 3, 6, 5)
    words = words[tile, at // 16, at % 8][..., None, :, None]  # unit, 64 k, 16 k, upper 8 k, pair, parity
    shift = torch.arange(0, 16, 8, device=q.device).view(2, 1, 1) + torch.arange(0, 32, 16, device=q.device)
    shift = (shift + (at // 8 % 2 * 4).view(-1, 1, 1, 1, 1, 1, 1)).to(torch.int32)  # as words: no wider codes
    return ((words >> shift) & 15).flatten(1)


def dequantised_rows(weight: Records, rows: torch.Tensor) -> torch.Tensor:
    """Some rows of the weight in fp32, [rows, k]; `rows` int64."""
    if "w" in weight.tensors:
        return weight.tensors["w"][rows].float()
    codes, tensors = _codes(weight, rows)[:, : weight.k], weight.tensors
    if weight.kind == "int4":
        numbers = codes.float() - 8
    elif weight.kind == "e2m1":
        numbers = torch.tensor(E2M1, device=codes.device)[codes]
    else:
        numbers = codes.view(torch.int8 if weight.kind == "int8" else torch.float8_e4m3fn).float()
    s = tensors["s"][:, rows].T
    s = s.contiguous().view(torch.float8_e4m3fn) if s.dtype == torch.uint8 else s
    s = s.float()
    numbers = numbers * spread(s, weight.group, weight.k)
    if "m" in tensors:
        m = tensors["m"][:, rows].T
        m = m * s if m.dtype == torch.int16 else m.float()
        numbers = numbers + spread(m, weight.group, weight.k)
    if "r" in tensors:
        numbers = numbers * tensors["r"][rows, None]
    if weight.perm is None:
        return numbers
    ordered = torch.empty_like(numbers)
    ordered[:, weight.perm] = numbers
    return ordered


PACKERS: dict[str, Callable[[Packed], Packed]] = {W4: pack, W8: pack}
