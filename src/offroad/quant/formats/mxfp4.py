"""MXFP4 as gpt-oss has it (`quant_method` "mxfp4"): the experts of a layer in one tensor of E2M1 codes, with a power of
two for each 32 columns. Biases of experts (`..._bias`) are plain tensors, and keep the order of rows in the file.
"""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import torch

from offroad.errors import ModelError
from offroad.quant.formats.base import REPAIR, Claim, Claims, Read, expect, note_listed, sizes
from offroad.quant.formats.floating import mxfp4
from offroad.quant.packed import Packed
from offroad.weights.source import Headers


class Mxfp4:
    """See the module."""

    suffixes = ("_blocks", "_scales")

    def claims(self, headers: Headers, config: dict[str, Any]) -> Claims:
        found = Claims([_claim(headers, name.removesuffix("_blocks")) for name in headers if name.endswith("_blocks")])
        listed = config.get("modules_to_not_convert") or []
        note_listed(found, lambda module: any(fnmatchcase(module, entry) for entry in listed))
        return found


def _claim(headers: Headers, name: str) -> Claim:
    blocks, scale = f"{name}_blocks", f"{name}_scales"
    experts, rows, groups, size = sizes(headers, blocks, ("u8",), 4)
    gate_up = name.endswith("gate_up_proj")
    if size != 16 or gate_up and rows % 2:
        raise ModelError(
            f"tensor {blocks}",
            found=f"shape {list(headers[blocks].shape)}",
            accepted="[experts, rows, columns / 32, 16], with as many rows of gate as of up",
            next=REPAIR,
        )
    expect(headers, scale, ("u8", "f8_e8m0"), (experts, rows, groups))

    def decode(read: Read) -> Packed:
        packed = mxfp4(read, blocks, scale, 32 * groups)
        if not gate_up:
            return packed
        tensors = {part: _parted(tensor, experts) for part, tensor in packed.tensors.items()}
        return replace(packed, tensors=tensors)

    return Claim(name, (experts, rows, 32 * groups), "fp4.mxfp4", (blocks, scale), decode)


def _parted(rows: torch.Tensor, experts: int) -> torch.Tensor:
    """Rows gate, up, gate, up, ... of each expert as all of its gate, then all of its up."""
    return rows.unflatten(0, (experts, -1, 2)).transpose(1, 2).flatten(0, 2).contiguous()
