"""Weights as the SM70 kernels read them: 16 bytes of one output column for each lane of a warp."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from offroad.errors import PlanError
from offroad.quant.packed import Packed

LAYOUT = "cuda.sm70.tile32"
COLUMNS = 32
KINDS = {"affine4": "q4", "fp8": "f8", "fp4": "f4", "affine8": "q8"}
NUMBERS = {"q4": 0, "f8": 1, "f4": 2, "q8": 3}  # KIND of kernels/linear.cu
CHUNK = {"q4": 32, "f4": 32, "f8": 16, "q8": 16}  # k's in a lane's 16 bytes
# Which k stands at each nibble of a word or byte of a pair of words: the order in which a kernel takes them apart.
_ORDER = {
    "q4": (0, 2, 4, 6, 1, 3, 5, 7),
    "f4": (6, 4, 2, 0, 7, 5, 3, 1),
    "f8": (2, 0, 3, 1, 6, 4, 7, 5),
    "q8": (0, 2, 1, 3, 4, 6, 5, 7),
}
_BITS_BELOW = {"f8": 8, "f4": 14, "q4": 0, "q8": 0}  # a kernel reads such numbers this many powers of two too small
_LARGEST = 6  # the largest scale is scaled to (2^5, 2^6]: products with it are far from both ends of fp16
_FURTHEST = 6e4  # the zero that is furthest from 0, in fp16
_ROWS = 1 << 12  # output columns packed at a time


@dataclass(frozen=True)
class LaneTiles(Packed):
    """A weight in layout `cuda.sm70.tile32`: tensors

    - `q4`, `f8`, `f4` or `q8`: uint8 [n / 32, k / chunk, 32, 16]: lane l has column 8 (l / 4 % 4) + l % 4 + 4 (l / 16)
      of the 32; columns beyond n are 0;
    - `s`: fp16 [n / 32, groups, 32] by lane, or for integers [.., 32, 2] of scale and minus zero: w = (q - zero) * s.
      A group whose weights are all its minimum (GGUF has such, with scale 0) has q 0 and that as its scale.

    Scales are divided by `alpha`, a power of two that keeps them in the middle of fp16's range.
    """

    alpha: float = 1.0

    @property
    def kind(self) -> str:
        return next(name for name in NUMBERS if name in self.tensors)


def unfit(layout: str, k: int, group: int) -> str | None:
    """Why a canonical weight cannot be packed, or None."""
    if layout not in KINDS:
        return f"packs {', '.join(KINDS)}; the weight is {layout}"
    chunk = CHUNK[KINDS[layout]]
    if k % chunk:
        return f"{layout} needs k of a multiple of {chunk}; asked: {k}"
    if group < k and group % chunk and (chunk % group or group < 16):
        return f"{layout} needs groups of 16 or of a multiple of {chunk}; asked: {group}"
    return None


def pack(weight: Packed) -> LaneTiles:
    """A canonical weight in lane tiles. Raises PlanError if `unfit` says so, or if columns are in another order."""
    if isinstance(weight, LaneTiles):
        return weight
    reason = unfit(weight.layout, weight.k, weight.group)
    if weight.perm is not None:
        reason = "columns of a group stand apart (actorder)"
    if reason is not None:
        raise PlanError("weight for the SM70 kernels", found=reason, next="--kernel linear=torch.linear")
    kind = KINDS[weight.layout]
    if "m" in weight.tensors:
        weight = _without_flat_groups(weight)
    scale, minimum = weight.tensors["s"].float(), weight.tensors.get("m")
    largest = float(scale.abs().max())
    alpha = 2.0 ** (math.ceil(math.log2(largest)) - _LARGEST) if largest > 0 else 1.0
    scales = _by_lane(scale / alpha)
    if kind in ("q4", "q8"):
        zero = torch.zeros_like(scale) if minimum is None else minimum.float() / scale
        zero = torch.where(scale == 0, torch.zeros_like(zero), zero)
        scales = torch.stack((scales, _by_lane(zero)), dim=-1)
    tiles = torch.cat([_tile(weight.rows(slice(at, at + _ROWS)), kind) for at in range(0, weight.n, _ROWS)])
    tensors = {kind: tiles, "s": scales.half().contiguous()}
    return LaneTiles(
        LAYOUT, weight.n, weight.k, tensors, weight.group, weight.bias, alpha=alpha * 2.0 ** _BITS_BELOW[kind]
    )


def _without_flat_groups(weight: Packed) -> Packed:
    """The weight with groups of one number written as (0 + 1) * s: minima that are no multiple of a scale that fp16
    holds have no zero."""
    s, m = weight.tensors["s"].float(), weight.tensors["m"].float()
    flat = (m != 0) & (m.abs() > _FURTHEST * s.abs())
    if not bool(flat.any()):
        return weight
    q, codes = weight.tensors["q"], 2 if weight.layout == "affine4" else 1
    columns = flat.repeat_interleave(weight.group // codes, dim=1)[:, : q.shape[1]]
    return replace(weight, tensors=weight.tensors | {"s": torch.where(flat, m, s), "q": q.masked_fill(columns, 0)})


def _lanes(device: torch.device) -> torch.Tensor:
    """The column of each lane."""
    lane = torch.arange(COLUMNS, device=device)
    return 8 * (lane // 4 % 4) + lane % 4 + 4 * (lane // 16)


def _by_lane(x: torch.Tensor) -> torch.Tensor:
    """[n, groups] -> [n / 32, groups, 32], columns beyond n 0."""
    if missing := -x.shape[0] % COLUMNS:
        x = torch.cat((x, x.new_zeros(missing, x.shape[1])))
    return x.unflatten(0, (-1, COLUMNS))[:, _lanes(x.device)].transpose(1, 2).contiguous()


def _tile(weight: Packed, kind: str) -> torch.Tensor:
    q = weight.tensors["q"].view(torch.uint8)
    if missing := -q.shape[0] % COLUMNS:
        q = torch.cat((q, q.new_zeros(missing, q.shape[1])))
    order = torch.tensor(_ORDER[kind], device=q.device)
    if kind in ("q4", "f4"):
        q = torch.stack((q & 15, q >> 4), dim=-1).flatten(1).unflatten(1, (-1, 8))[..., order]
        q = q[..., 0::2] | (q[..., 1::2] << 4)
    else:
        q = q.unflatten(1, (-1, 8))[..., order]
    q = q.flatten(1).view(-1, COLUMNS, weight.k // CHUNK[kind], 16)
    return q[:, _lanes(q.device)].transpose(1, 2).contiguous()


def unpack(tiles: LaneTiles) -> torch.Tensor:
    """The weight [n, k] that a kernel sees, fp32: what tests compare with."""
    from offroad.quant.packed import dequantise

    kind, device = tiles.kind, tiles.tensors["s"].device
    back = torch.argsort(_lanes(device))
    q = (
        tiles.tensors[kind]
        .transpose(1, 2)[:, back]
        .flatten(0, 1)
        .flatten(1)
        .unflatten(1, (-1, 4 if kind[1] == "4" else 8))
    )
    undo = torch.argsort(torch.tensor(_ORDER[kind], device=device))
    if kind[1] == "4":
        q = torch.stack((q & 15, q >> 4), dim=-1).flatten(2)[..., undo]
        q = q[..., 0::2] | (q[..., 1::2] << 4)
    else:
        q = q[..., undo]
    q = q.flatten(1)[: tiles.n]
    layout = next(name for name, short in KINDS.items() if short == kind)
    q = q.view({"fp8": torch.float8_e4m3fn, "affine8": torch.int8}.get(layout, torch.uint8))
    scales = tiles.tensors["s"].float()
    alpha = tiles.alpha / 2.0 ** _BITS_BELOW[kind]
    flat = scales[:, :, back].transpose(1, 2).flatten(0, 1)[: tiles.n]
    tensors = {"q": q, "s": flat[..., 0] * alpha if kind[0] == "q" else flat * alpha}
    if kind[0] == "q":
        tensors["m"] = flat[..., 1] * tensors["s"]
    return dequantise(replace(Packed(layout, tiles.n, tiles.k, tensors, tiles.group)))


PACKERS: dict[str, Callable[[Packed], Packed]] = {LAYOUT: pack}
