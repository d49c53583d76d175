"""Round to nearest, by scheme: what a quantised weight is stored as, in the tensors and config keys of public formats.

int4 and fp4 weights are written as compressed-tensors, fp8 in the native block form; transformers and vLLM read both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from offroad.quant.packed import E2M1

Tensors = dict[str, torch.Tensor]  # by suffix of the module's name
_LARGEST_E4M3, _LARGEST_E2M1 = 448.0, 6.0
_BOUNDS = torch.tensor([(a + b) / 2 for a, b in zip(E2M1[:7], E2M1[1:8], strict=True)])
_BLOCK = 128


@dataclass(frozen=True)
class Encoder:
    """A scheme: `encode(weight fp32 [n, k], group)`, the groups it may take (the largest that divides k is taken), and
    the format's name in config.json."""

    name: str
    method: str
    format: str
    groups: tuple[int, ...]
    encode: Callable[[torch.Tensor, int], Tensors]

    def group(self, k: int) -> int | None:
        """Columns that share a scale in a weight of k columns; None: no group fits."""
        return next((group for group in self.groups if k % group == 0), None)


def _amax(weight: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The weight by group [n, k / group, group], and the largest of each, never 0."""
    grouped = weight.unflatten(1, (-1, group))
    return grouped, grouped.abs().amax(-1).clamp(min=1e-12)


def int4(weight: torch.Tensor, group: int) -> Tensors:
    """Codes of -8..7 times bf16 scales, symmetric: 8 columns a word, the first in the lowest bits."""
    grouped, largest = _amax(weight, group)
    scale = (largest / 7.5).to(torch.bfloat16)
    codes = (grouped / scale.float()[..., None]).round().clamp(-8, 7).to(torch.int64).flatten(1) + 8
    shifts = torch.arange(0, 32, 4)
    words = (codes.unflatten(1, (-1, 8)) << shifts).sum(-1)
    words = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    return {".weight_packed": words, ".weight_scale": scale, ".weight_shape": torch.tensor(weight.shape)}


def e2m1(values: torch.Tensor) -> torch.Tensor:
    """The codes of the nearest E2M1 numbers, ties to the even code, two a byte with the first in the lower half."""
    size = values.abs()
    code = torch.bucketize(size, _BOUNDS, right=False)
    tie = size == _BOUNDS[code.clamp(max=6)]
    code = torch.where(tie & (code % 2 == 1), code + 1, code) | (torch.signbit(values).long() << 3)
    pairs = code.flatten(1).unflatten(1, (-1, 2)).to(torch.uint8)
    return pairs[..., 0] | pairs[..., 1] << 4


def nvfp4(weight: torch.Tensor, group: int) -> Tensors:
    """E2M1 codes with an e4m3 scale for 16 columns, and one fp32 scale that divides those."""
    grouped, largest = _amax(weight, group)
    overall = _LARGEST_E4M3 * _LARGEST_E2M1 / largest.max()
    scale = (largest / _LARGEST_E2M1 * overall).clamp(max=_LARGEST_E4M3).to(torch.float8_e4m3fn)
    # Blocks whose scale rounds to 0 hold zeros.
    step = (scale.float() / overall).clamp(min=torch.finfo(torch.float32).tiny)
    codes = e2m1((grouped / step[..., None]).clamp(-_LARGEST_E2M1, _LARGEST_E2M1))
    return {".weight_packed": codes, ".weight_scale": scale, ".weight_global_scale": overall.reshape(1)}


def mxfp4(weight: torch.Tensor, group: int) -> Tensors:
    """E2M1 codes with a power of two for 32 columns: that of the largest's exponent less E2M1's own, 2 (OCP MX 1.0)."""
    grouped, largest = _amax(weight, group)
    exponent = (largest.log2().floor() - 2).clamp(-126, 127)
    codes = e2m1((grouped / exponent.exp2()[..., None]).clamp(-_LARGEST_E2M1, _LARGEST_E2M1))
    return {".weight_packed": codes, ".weight_scale": (exponent + 127).to(torch.uint8)}


def fp8_block(weight: torch.Tensor, group: int) -> Tensors:
    """e4m3 numbers with an fp32 scale for 128 x 128 of them; the last blocks may be smaller."""
    n, k = weight.shape
    rows, columns = -(-n // _BLOCK), -(-k // _BLOCK)
    padded = torch.zeros(rows * _BLOCK, columns * _BLOCK)
    padded[:n, :k] = weight
    blocks = padded.unflatten(1, (columns, _BLOCK)).unflatten(0, (rows, _BLOCK))
    scale = blocks.abs().amax((1, 3)).clamp(min=1e-12) / _LARGEST_E4M3
    codes = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
    return {".weight": codes.flatten(2).flatten(0, 1)[:n, :k].contiguous(), ".weight_scale_inv": scale}


ENCODERS = {
    encoder.name: encoder
    for encoder in (
        Encoder("w4a16-g128", "compressed-tensors", "pack-quantized", (128, 64, 32), int4),
        Encoder("fp8-block", "fp8", "fp8", (1,), fp8_block),
        Encoder("nvfp4", "compressed-tensors", "nvfp4-pack-quantized", (16,), nvfp4),
        Encoder("mxfp4", "compressed-tensors", "mxfp4-pack-quantized", (32,), mxfp4),
    )
}


def config_of(encoder: Encoder, groups: dict[int, list[str]], ignored: list[str]) -> dict[str, Any]:
    """The `quantization_config` of a checkpoint whose modules were encoded in these groups."""
    if encoder.method == "fp8":
        return {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "weight_block_size": [_BLOCK, _BLOCK],
            "modules_to_not_convert": ignored,
        }
    weights: dict[str, Any] = {"symmetric": True, "dynamic": False}
    if encoder.name.startswith("w4a16"):
        weights |= {"num_bits": 4, "type": "int", "strategy": "group"}
    else:
        strategy = "tensor_group" if encoder.name == "nvfp4" else "group"
        weights |= {"num_bits": 4, "type": "float", "strategy": strategy}
    if encoder.name == "mxfp4":
        weights["scale_dtype"] = "torch.uint8"
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": encoder.format,
        "ignore": ignored,
        "kv_cache_scheme": None,
        "config_groups": {
            f"group_{i}": {
                "format": encoder.format,
                "targets": modules if len(groups) > 1 else ["Linear"],
                "weights": weights | {"group_size": group},
                "input_activations": None,
                "output_activations": None,
            }
            for i, (group, modules) in enumerate(sorted(groups.items()))
        },
    }
