"""Native FP8 (`quant_method` "fp8", as in DeepSeek's and Qwen's own checkpoints): e4m3 weights with scales by block of
128 x 128 (`weight_scale_inv`, which multiplies in spite of its name), by row, or one a module (`weight_scale`).

DeepSeek-V4 names its scales `.scale`, has powers of two there, and MXFP4 in its experts, all under this method.
"""

from __future__ import annotations

from typing import Any

from offroad.errors import ModelError
from offroad.quant.formats import floating, kv
from offroad.quant.formats.base import REPAIR, Claims, note_listed
from offroad.weights.source import Headers

# Modules that lists may name as one, and their last names in the file.
_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


class Fp8:
    """See the module."""

    suffixes = floating.SUFFIXES

    def claims(self, headers: Headers, config: dict[str, Any]) -> Claims:
        block = config.get("weight_block_size")
        if block is not None and not (isinstance(block, list) and len(block) == 2 and all(map(_counts, block))):
            raise ModelError("quantization_config: weight_block_size", found=block, accepted="[128, 128]", next=REPAIR)
        found = floating.claim_all(headers, tuple(block) if block else None)
        kv.set_aside(found, headers)
        listed = config.get("ignored_layers") or config.get("modules_to_not_convert") or []
        names = {part for name in listed for part in _parts(name)}
        experts = [name for name in listed if ".experts" in name]
        note_listed(found, lambda module: module in names or _expert_listed(module, experts))
        return found


def _counts(size: object) -> bool:
    return type(size) is int and size > 0


def _parts(name: str) -> list[str]:
    """The modules that an entry of a list means: whole paths."""
    path, _, last = name.rpartition(".")
    return [f"{path}.{part}" for part in _FUSED.get(last, (last,))] if path else [name]


def _expert_listed(module: str, listed: list[str]) -> bool:
    """Experts are quantised together: all of a layer's are left out if an entry names one of them, or their module."""
    before, experts, _ = module.partition(".experts")
    return bool(experts) and any(f"{before}{experts}" in name for name in listed)
