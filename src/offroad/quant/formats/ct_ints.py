"""Integer weights of compressed-tensors: codes packed into 32-bit words (`weight_packed`), or int8 (`weight`).

A stored code is u = q + 2^(bits - 1), and w = (q - zero point) * s. Sums of the canonical `u * s + m` are exact in fp32
for scales in bf16 or fp16. With scales in fp32 an `affine4` weight (and an 8-bit one with zero points) is rounded three
times, by 2^-24 of at most 15 (255) times its scale; the library rounds once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from offroad.errors import ModelError
from offroad.quant.formats.base import FLOAT, REPAIR, Claim, Read, expect, scales
from offroad.quant.formats.ct_config import Scheme
from offroad.quant.packed import Packed, spread
from offroad.weights.source import Headers


def unpack(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """Codes uint8 [..., count] of int32 words [..., ceil(count * bits / 32)], packed densely from the lowest bit on."""
    raw = words.contiguous().view(torch.uint8)
    if bits == 8:
        return raw[..., :count]
    if bits == 4:
        return torch.stack((raw & 15, raw >> 4), dim=-1).flatten(-2)[..., :count]
    flat = np.unpackbits(raw.numpy(), axis=-1, bitorder="little")[..., : count * bits]
    return torch.from_numpy(np.packbits(flat.reshape(*raw.shape[:-1], count, bits), axis=-1, bitorder="little")[..., 0])


def scale_shape(headers: Headers, name: str, strategy: str, lead: tuple[int, ...], n: int, groups: int) -> None:
    """Raises ModelError unless scales `name` are by tensor (one, or one for each of `lead`), by row or by group."""
    found = headers[name].shape if name in headers else ()
    accepted: tuple[tuple[int, ...], ...] = ((*lead, n, groups),)
    if strategy == "tensor":
        accepted = ((1,), (), (1, 1), *((*lead, *(1,) * more) for more in range(3) if lead))
    elif strategy == "channel":
        accepted = ((*lead, n, 1), (*lead, n))
    expect(headers, name, FLOAT, found if found in accepted else accepted[0])


def by_row(value: torch.Tensor, lead: tuple[int, ...], n: int, groups: int) -> torch.Tensor:
    """Scales or zero points, as `scale_shape` accepts them, by row: [prod(lead) * n, groups]."""
    each = value.reshape(*lead, n, groups) if value.numel() == torch.Size(lead).numel() * n * groups else None
    if each is None:  # one for all, or one for each of `lead`
        each = value.reshape(*(lead if value.numel() > 1 else (1,) * len(lead)), 1, 1).expand(*lead, n, groups)
    return each.reshape(-1, groups).contiguous()


@dataclass(frozen=True)
class _Ints:
    """A module with integer weights; k is the most that the words may hold if only its metadata tell it."""

    module: str
    scheme: Scheme
    packed: bool
    lead: tuple[int, ...]
    n: int
    k: int
    has_zero: bool
    has_order: bool
    has_shape: bool

    @property
    def weight(self) -> str:
        return f"{self.module}.weight_packed" if self.packed else f"{self.module}.weight"

    @property
    def unknown_k(self) -> bool:
        """Scales by row say nothing of k, and the last word may be filled in part."""
        return self.packed and not self.scheme.size and self.has_shape

    @property
    def layout(self) -> str:
        """Kernels for 4 bits want groups of a multiple of 32; int8 holds the others, exactly too."""
        narrow = self.packed and self.scheme.bits <= 4 and self.scheme.size % 32 == 0 and self.k % 2 == 0
        return "affine4" if narrow else "affine8"

    @property
    def kind(self) -> str:
        size = f"g{self.scheme.size}" if self.scheme.size else self.scheme.strategy
        asym, order = "-asym" if self.has_zero else "", "+order" if self.has_order else ""
        return f"{self.layout}.{self.scheme.label}-{size}{asym}{order}"

    def measure(self, read: Read) -> tuple[int, ...]:
        """The shape in the module's metadata. Raises ModelError if the tensors are not of that shape."""
        name = f"{self.module}.weight_shape"
        shape = tuple(read(name).tolist())
        k, bits = shape[-1] if shape else 0, self.scheme.bits
        _refuse_gaps(self.weight, k, bits, -(-self.k * bits // 32))
        fits = -(-k * bits // 32) == -(-self.k * bits // 32) if self.unknown_k else k == self.k
        if shape not in ((*self.lead, self.n, k), (self.n, k)) or not fits:
            raise ModelError(
                f"tensor {name}", found=list(shape), accepted=f"{[*self.lead, self.n, self.k]}, as {self.weight} has it"
            )
        if k % 2 and self.layout == "affine4":
            raise ModelError(
                f"tensor {name}", found=list(shape), accepted="an even number of columns for 4-bit weights"
            )
        return (*self.lead, self.n, k)

    def decode(self, read: Read) -> Packed:
        k = self.measure(read)[-1] if self.has_shape else self.k
        group, bits = self.scheme.size or k, self.scheme.bits
        s = by_row(scales(read, f"{self.module}.weight_scale"), self.lead, self.n, k // group)
        zero, order = self._zero(read, k // group), self._order(read, k, group)
        if self.packed:
            words = read(self.weight)
            words = words.reshape(-1, words.shape[-1])
            if bits == 4 and self.layout == "affine4" and order is None:  # the words hold what the layout wants
                q = words.contiguous().view(torch.uint8)[:, : k // 2].contiguous()
                return self._affine4(q, s, zero, group, None)
            codes = unpack(words, bits, k)
        else:
            codes = read(self.weight).reshape(-1, k).view(torch.uint8) ^ 128
        if order is not None:
            codes = codes[:, order]
        if self.layout == "affine4":
            return self._affine4(codes[:, 0::2] | codes[:, 1::2] << 4, s, zero, group, order)
        return self._affine8(codes, s, zero, group, order)

    def _affine4(
        self, q: torch.Tensor, s: torch.Tensor, zero: torch.Tensor | None, group: int, order: torch.Tensor | None
    ) -> Packed:
        half = 2.0 ** (self.scheme.bits - 1)
        m = -half * s if zero is None else -(zero + half) * s
        return Packed("affine4", q.shape[0], q.shape[1] * 2, {"q": q, "s": s, "m": m}, group, perm=order)

    def _affine8(
        self, codes: torch.Tensor, s: torch.Tensor, zero: torch.Tensor | None, group: int, order: torch.Tensor | None
    ) -> Packed:
        bits = self.scheme.bits if self.packed else 8
        q = (codes ^ 128).view(torch.int8) if bits == 8 else codes.view(torch.int8) - 2 ** (bits - 1)
        tensors = {"q": q.contiguous(), "s": s}
        if zero is not None and bits < 8:  # the difference fits in a byte
            tensors["q"] = q - spread(zero.to(torch.int8), group, q.shape[1])
        elif zero is not None:
            tensors["m"] = -zero * s
        return Packed("affine8", *q.shape, tensors, group, perm=order)

    def _zero(self, read: Read, groups: int) -> torch.Tensor | None:
        """Zero points, signed, int32 [rows, groups]."""
        if not self.has_zero:
            return None
        value = read(f"{self.module}.weight_zero_point")
        if value.dtype == torch.int32:  # packed along n
            half = 2 ** (self.scheme.bits - 1)
            along_n = value.transpose(-1, -2).clone(memory_format=torch.contiguous_format)  # for strides of 1, always
            value = unpack(along_n, self.scheme.bits, self.n).transpose(-1, -2).int() - half
        return by_row(value.int(), self.lead, self.n, groups)

    def _order(self, read: Read, k: int, group: int) -> torch.Tensor | None:
        """The columns sorted by group; None where they are already."""
        if not self.has_order:
            return None
        name = f"{self.module}.weight_g_idx"
        of_column = read(name).long()
        if (of_column == -1).all():  # as initialised: no order was found
            return None
        whole = torch.arange(k) // group
        order = torch.argsort(of_column, stable=True)
        if not torch.equal(of_column[order], whole):
            raise ModelError(
                f"tensor {name}",
                found="groups that are not all of the same size",
                accepted=f"{group} columns for each of {k // group} groups",
                next=REPAIR,
            )
        return None if torch.equal(of_column, whole) else order


def packed_ints(headers: Headers, module: str, scheme: Scheme) -> Claim:
    """The claim of a module with `weight_packed` int32. Raises ModelError for a tensor of another shape or dtype."""
    name, scale = f"{module}.weight_packed", f"{module}.weight_scale"
    expect(headers, name, ("i32",))
    *lead, n, words = matrix(headers, name)
    expect(headers, scale, FLOAT)
    k = headers[scale].shape[-1] * scheme.size if scheme.size and headers[scale].shape else words * 32 // scheme.bits
    _refuse_gaps(name, k, scheme.bits, words)
    expect(headers, name, ("i32",), (*lead, n, -(-k * scheme.bits // 32)))
    return _claim(headers, module, scheme, True, (*lead, n, k))


def _refuse_gaps(name: str, k: int, bits: int, words: int) -> None:
    """Raises ModelError if words hold whole codes only, as writers before 0.18 had it for bits that 32 is no multiple
    of: such words are more than those of codes without gaps, if k is a multiple of 32."""
    whole = 32 // bits
    if words == -(-k // whole) != -(-k * bits // 32):
        raise ModelError(
            f"tensor {name}",
            found=f"{bits}-bit weights, {whole} to a word and {32 % bits} bits unused",
            accepted="weights without gaps, as compressed-tensors packs them from version 0.18 on",
            next="quantise the model again with a newer version",
        )


def plain_ints(headers: Headers, module: str, scheme: Scheme) -> Claim:
    """The claim of a module with `weight` int8."""
    return _claim(headers, module, scheme, False, matrix(headers, f"{module}.weight"))


def matrix(headers: Headers, name: str) -> tuple[int, ...]:
    """The shape of a matrix, or of one for each expert."""
    shape = headers[name].shape
    if len(shape) not in (2, 3):
        raise ModelError(f"tensor {name}", found=f"shape {list(shape)}", accepted="2 or 3 dimensions", next=REPAIR)
    return shape


def _claim(headers: Headers, module: str, scheme: Scheme, packed: bool, shape: tuple[int, ...]) -> Claim:
    *lead, n, k = shape
    weight, zero, order, size = (f"{module}.weight_{part}" for part in ("packed", "zero_point", "g_idx", "shape"))
    weight = weight if packed else f"{module}.weight"
    if scheme.size and k % scheme.size:
        raise ModelError(
            f"tensor {weight}", found=f"{k} columns", accepted=f"whole groups of {scheme.size} ({scheme.group})"
        )
    groups = k // scheme.size if scheme.size else 1
    scale_shape(headers, f"{module}.weight_scale", scheme.strategy, tuple(lead), n, groups)
    if zero in headers or not scheme.symmetric:
        _check_zero(headers, zero, scheme, packed, tuple(lead), n, groups)
    if order in headers:
        expect(headers, order, ("i32", "i64"), (k,))
    if packed and size in headers:
        expect(headers, size, ("i32", "i64"), headers[size].shape if headers[size].shape == (len(shape),) else (2,))
    there = [name for name in (weight, f"{module}.weight_scale", zero, order, size) if name in headers]
    ints = _Ints(module, scheme, packed, tuple(lead), n, k, zero in there, order in there, packed and size in there)
    measure = ints.measure if ints.unknown_k else None
    name = module if lead else f"{module}.weight"
    return Claim(name, shape, ints.kind, tuple(there), ints.decode, measure)


def _check_zero(
    headers: Headers, name: str, scheme: Scheme, packed: bool, lead: tuple[int, ...], n: int, groups: int
) -> None:
    if packed and scheme.strategy != "tensor":
        expect(headers, name, ("i32",), (*lead, -(-n * scheme.bits // 32), groups))
        return
    expect(headers, name, ("i8",), headers[name.replace("_zero_point", "_scale")].shape)
