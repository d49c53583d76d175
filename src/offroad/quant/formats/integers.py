"""What AWQ and GPTQ share: codes in 32-bit words, a scale and a zero for each group of columns; w = (code - zero) * s.

Files hold the transposed weight: `scales` [groups, n], `qzeros` [groups, n * bits / 32].
"""

from __future__ import annotations

import torch

from offroad.errors import ModelError
from offroad.quant.packed import Packed
from offroad.quant.scheme import widen


def group_of(tensor: str, k: int, size: object) -> int:
    """Columns of a group; a `group_size` of -1 is all k. Raises ModelError for one that leaves a rest."""
    if size == -1:
        return k
    if type(size) is not int or size < 1 or k % size:
        raise ModelError(
            f"quantization_config: group_size of {tensor}",
            found=f"{size!r}, for {k} columns",
            accepted=f"-1, or a number of columns that divides {k}",
            next="quantise the model again with such a group size, or leave this module out of quantisation",
        )
    return size


def kind(name: str, bits: int, size: object, group: int, ordered: bool = False) -> str:
    """The claim's kind. 4-bit kernels read groups of whole 32s: others are kept in bytes."""
    layout = "affine4" if bits == 4 and group % 32 == 0 else "affine8"
    return f"{layout}.{name}-{'channel' if size == -1 else f'g{size}'}{'+order' if ordered else ''}"


def nibbles(words: torch.Tensor) -> torch.Tensor:
    """The 8 nibbles of each word, the lowest first: uint8 [..., 8 * words] from int32 [..., words]; or 2 of a byte."""
    raw = words.contiguous().view(torch.uint8)
    return torch.stack((raw & 15, raw >> 4), dim=-1).flatten(-2)


def pairs(codes: torch.Tensor) -> torch.Tensor:
    """4-bit codes two to a byte, the even column low: uint8 [n, k / 2] from [n, k]."""
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


def affine(
    q: torch.Tensor, s: torch.Tensor, zero: torch.Tensor | None, k: int, bits: int, perm: torch.Tensor | None = None
) -> Packed:
    """The canonical weight. q uint8: pairs [n, k / 2] of 4-bit codes, or 8-bit codes [n, k]; s and zero [n, groups],
    zero None being the middle of the codes."""
    n, groups = s.shape
    middle, group = 1 << (bits - 1), k // groups
    if bits == 8:
        tensors = {"q": (q ^ 0x80).view(torch.int8), "s": s}  # code - 128
        if zero is not None:
            tensors["m"] = (middle - zero.float()) * s
        return Packed("affine8", n, k, tensors, group, perm=perm)
    m = s * -middle if zero is None else s * -zero.float()
    packed = Packed("affine4", n, k, {"q": q, "s": s, "m": m}, group, perm=perm)
    return packed if group % 32 == 0 else widen(packed, group)


def refuse_bits(name: str, found: object, accepted: str) -> ModelError:
    return ModelError(
        f"quantization_config: bits ({name})",
        found=found,
        accepted=accepted,
        next="use another quantisation of the model",
    )
