"""AWQ, GEMM version: 4-bit codes packed along the output rows, eight to a word in an interleaved order."""

from __future__ import annotations

from typing import Any

import torch

from offroad.errors import ModelError
from offroad.quant.formats.base import FLOAT, Claim, Claims, Read, expect, note_listed, scales, sizes
from offroad.quant.formats.integers import affine, group_of, kind, nibbles, pairs, refuse_bits
from offroad.quant.packed import Packed
from offroad.weights.source import Headers

_NIBBLE = [0, 4, 1, 5, 2, 6, 3, 7]  # the nibble of a word that holds row 0, 1, ... of its eight


class Awq:
    """See the module."""

    suffixes = (".qweight", ".qzeros", ".scales")

    def claims(self, headers: Headers, config: dict[str, Any]) -> Claims:
        version = str(config.get("version") or config.get("format") or "gemm").lower()
        if version != "gemm":
            raise ModelError(
                "quantization_config: version (awq)",
                found=version,
                accepted="gemm",
                next="convert the model to the GEMM version, or use another quantisation of it",
            )
        bits = config.get("bits", config.get("w_bit", 4))
        if bits != 4:
            raise refuse_bits("awq", bits, "4")
        size = config.get("group_size", config.get("q_group_size", 128))
        modules = [name.removesuffix(".qweight") for name in headers if name.endswith(".qweight")]
        found = Claims([_claim(headers, module, size) for module in modules])
        listed = config.get("modules_to_not_convert") or []
        note_listed(found, lambda module: any(part in module for part in listed))
        return found


def _claim(headers: Headers, module: str, size: object) -> Claim:
    names = {part: f"{module}.{part}" for part in ("qweight", "qzeros", "scales")}
    k, words = sizes(headers, names["qweight"], ("i32",), 2)
    n, group = 8 * words, group_of(module, k, size)
    expect(headers, names["scales"], FLOAT, (k // group, n))
    expect(headers, names["qzeros"], ("i32",), (k // group, words))

    def decode(read: Read) -> Packed:
        codes, zeros = (_rows(read(names[part])) for part in ("qweight", "qzeros"))
        return affine(pairs(codes), scales(read, names["scales"]).T.contiguous(), zeros, k, 4)

    return Claim(f"{module}.weight", (n, k), kind("awq", 4, size, group), tuple(names.values()), decode)


def _rows(words: torch.Tensor) -> torch.Tensor:
    """Codes [8 * words, columns] of words [columns, words]."""
    return nibbles(words).unflatten(1, (-1, 8))[:, :, _NIBBLE].flatten(1).T.contiguous()
