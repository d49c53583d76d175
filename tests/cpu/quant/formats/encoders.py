"""Quantised tensors written from the formats' definitions, in numpy and by loops, without offroad's code.

Each encoder gives the tensors of one weight [n, k] by the end of their names, and what they mean in fp32: the codes as
they were before packing, by the format's formula.
"""

from __future__ import annotations

import numpy as np
import torch

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
AWQ_COLUMN_OF_NIBBLE = (0, 2, 4, 6, 1, 3, 5, 7)
Encoded = tuple[dict[str, torch.Tensor], torch.Tensor]


def _codes(w: np.ndarray, groups: np.ndarray, bits: int, sym: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(codes [n, k], fp16 scales [groups, n], zeros [groups, n]); `groups`: the group of each column."""
    count, top = groups.max() + 1, 2**bits - 1
    scale, zero = np.zeros((count, len(w)), np.float16), np.zeros((count, len(w)), np.int64)
    for g in range(count):
        part = w[:, groups == g]
        low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
        if sym:
            high = np.maximum(-low, high)
            low = -high
        scale[g] = np.maximum((high - low) / top, 1e-4)
        zero[g] = 2 ** (bits - 1) if sym else np.clip(np.round(-low / scale[g].astype(np.float32)), 0, top)
    by_column, zeros = scale.astype(np.float32)[groups].T, zero[groups].T
    return np.clip(np.round(w / by_column) + zeros, 0, top).astype(np.int64), scale, zero


def _meaning(codes: np.ndarray, scale: np.ndarray, zero: np.ndarray, groups: np.ndarray) -> torch.Tensor:
    w = (codes - zero[groups].T).astype(np.float32) * scale.astype(np.float32)[groups].T
    return torch.from_numpy(w)


def _words(words: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(words.astype(np.uint32).view(np.int32))


def gptq(
    w: torch.Tensor,
    *,
    bits: int = 4,
    group: int = 32,
    sym: bool = True,
    version: int = 1,
    order: np.ndarray | None = None,
    g_idx: bool = True,
) -> Encoded:
    """`order`: columns as act-order went through them, so that column order[i] is in group i // group."""
    (n, k), per = w.shape, 32 // bits
    size = k if group == -1 else group
    groups = np.arange(k) // size
    if order is not None:
        groups[order] = np.arange(k) // size
    codes, scale, zero = _codes(w.double().numpy(), groups, bits, sym)
    qweight = np.zeros((k // per, n), np.uint64)
    for column in range(k):
        qweight[column // per] |= codes[:, column].astype(np.uint64) << (bits * (column % per))
    qzeros = np.zeros((len(scale), n // per), np.uint64)
    for row in range(n):
        qzeros[:, row // per] |= zero[:, row].astype(np.uint64) << (bits * (row % per))
    if version == 1:  # one is taken from every field at once: a zero of 0 borrows from the next field
        ones = sum(1 << (bits * i) for i in range(per))
        qzeros = (qzeros - np.uint64(ones)) & np.uint64(0xFFFFFFFF)
    tensors = {"qweight": _words(qweight), "qzeros": _words(qzeros), "scales": torch.from_numpy(scale)}
    if g_idx:
        tensors["g_idx"] = torch.from_numpy(groups.astype(np.int32))
    return tensors, _meaning(codes, scale, zero, groups)


def awq(w: torch.Tensor, *, group: int = 32) -> Encoded:
    n, k = w.shape
    groups = np.arange(k) // (k if group == -1 else group)
    codes, scale, zero = _codes(w.double().numpy(), groups, 4, False)
    qweight, qzeros = np.zeros((k, n // 8), np.uint64), np.zeros((len(scale), n // 8), np.uint64)
    for word in range(n // 8):
        for nibble, column in enumerate(AWQ_COLUMN_OF_NIBBLE):
            qweight[:, word] |= codes[8 * word + column].astype(np.uint64) << (4 * nibble)
            qzeros[:, word] |= zero[:, 8 * word + column].astype(np.uint64) << (4 * nibble)
    tensors = {"qweight": _words(qweight), "qzeros": _words(qzeros), "scales": torch.from_numpy(scale)}
    return tensors, _meaning(codes, scale, zero, groups)


def fp8(
    w: torch.Tensor,
    rows: int,
    columns: int,
    *,
    dtype: torch.dtype = torch.float32,
    shape: tuple[int, ...] | None = None,
    name: str = "weight_scale",
) -> Encoded:
    """A scale for each block of rows x columns, in `dtype` (powers of two for uint8 and E8M0) and in `shape`."""
    n, k = w.shape
    q, meaning = torch.empty(n, k, dtype=torch.float8_e4m3fn), torch.empty(n, k)
    scale = torch.empty(-(-n // rows), -(-k // columns))
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            at = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
            s = (w[at].abs().max() / 448).clamp(min=1e-6)
            s = s.to(dtype).float() if dtype.itemsize > 1 else torch.exp2(torch.ceil(torch.log2(s)))
            scale[i, j], q[at] = s, (w[at] / s).clamp(-448, 448).to(torch.float8_e4m3fn)
            meaning[at] = q[at].float() * s
    stored = scale.to(dtype) if dtype.itemsize > 1 else (torch.log2(scale) + 127).to(torch.uint8)
    if dtype == torch.float8_e8m0fnu:
        stored = stored.view(dtype)
    return {"weight": q, name: stored.reshape(scale.shape if shape is None else shape)}, meaning


def _fp4(scaled: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(bytes of two codes, the even column low; the values)."""
    code = np.abs(np.abs(scaled)[..., None] - E2M1).argmin(-1)
    value = np.where(scaled < 0, -E2M1[code], E2M1[code]).astype(np.float32)
    code = (code + 8 * (scaled < 0)).astype(np.uint8)
    return code[:, 0::2] + 16 * code[:, 1::2], value


def nvfp4(w: torch.Tensor, *, second: tuple[int, ...] = (), static: bool = True) -> Encoded:
    """ModelOpt's: an e4m3 scale for 16 columns, and a scale over those, which multiplies."""
    n, k = w.shape
    whole = (w.abs().max() / (6 * 448)).float()
    blocks = (w.reshape(n, k // 16, 16).abs().amax(-1) / 6 / whole).clamp(2**-9, 448).to(torch.float8_e4m3fn)
    s = (blocks.float() * whole).repeat_interleave(16, dim=1).numpy()
    packed, value = _fp4(w.numpy() / s)
    tensors = {"weight": torch.from_numpy(packed), "weight_scale": blocks, "weight_scale_2": whole.reshape(second)}
    if static:
        tensors["input_scale"] = torch.tensor(0.01)
    return tensors, torch.from_numpy(value * s)


def mxfp4(w: torch.Tensor, *, dtype: torch.dtype = torch.uint8) -> Encoded:
    """A power of two for 32 columns, as a byte of exponent; `weight` as uint8 or, beside E8M0, as int8."""
    n, k = w.shape
    exponent = torch.ceil(torch.log2(w.reshape(n, k // 32, 32).abs().amax(-1) / 6)).int()
    s = torch.exp2(exponent.double()).float().repeat_interleave(32, dim=1).numpy()
    packed, value = _fp4(w.numpy() / s)
    packed, scale = torch.from_numpy(packed), (exponent + 127).to(torch.uint8)
    if dtype == torch.float8_e8m0fnu:
        packed, scale = packed.view(torch.int8), scale.view(dtype)
    return {"weight": packed, "scale": scale}, torch.from_numpy(value * s)
