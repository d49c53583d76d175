"""NVIDIA ModelOpt: FP8 and NVFP4, also mixed in one checkpoint. The tensors tell which a module has; the config's names
of algorithms are checked, since some store other things under the same names of tensors."""

from __future__ import annotations

import re
from fnmatch import translate
from typing import Any

from offroad.errors import ModelError
from offroad.quant.formats import floating, kv
from offroad.quant.formats.base import Claims, module, note_listed
from offroad.weights.source import Headers

# Algorithm: the layout of its weights.
_ALGORITHMS = {
    "FP8": "fp8",
    "FP8_PER_CHANNEL_PER_TOKEN": "fp8",
    "FP8_PB_WO": "fp8",
    "MXFP8": "fp8",
    "NVFP4": "fp4",
    "W4A16_NVFP4": "fp4",
}
_MIXED = "MIXED_PRECISION"


class ModelOpt:
    """See the module."""

    suffixes = (*floating.SUFFIXES, ".pre_quant_scale")

    def claims(self, headers: Headers, config: dict[str, Any]) -> Claims:
        layers = {name: values.get("quant_algo") for name, values in (config.get("quantized_layers") or {}).items()}
        usual = _known("quant_algo", config.get("quant_algo") or "", _MIXED, "")  # none: only the cache is quantised
        named = {name: _known(f"quantized_layers[{name}]", algorithm) for name, algorithm in layers.items()}
        found = floating.claim_all(headers, None, "modelopt")
        kv.set_aside(found, headers)
        listed = config.get("ignore") or config.get("exclude_modules") or []
        wild = re.compile("|".join(map(translate, listed)) or "(?!)")  # one expression: there may be 40,000 experts
        note_listed(found, lambda module: any(entry in module for entry in listed) or bool(wild.match(module)))
        for claim in found.claims:
            algorithm = _of(module(claim.name), named) if usual == _MIXED else usual
            if claim.kind.partition(".")[0] != _ALGORITHMS.get(algorithm):
                found.notes.append(
                    f"{module(claim.name)} is stored as {claim.kind}, and the config has {algorithm or 'nothing'} for "
                    "it: the file decides"
                )
                break
        return found


def _known(where: str, algorithm: object, *more: str) -> str:
    name = str(algorithm).upper()
    if name not in (*_ALGORITHMS, *more):
        raise ModelError(
            f"quantization_config: {where} (modelopt)",
            found=algorithm or "absent",
            accepted=", ".join(filter(None, (*_ALGORITHMS, *more))),
            next="use a checkpoint that was quantised with one of these",
        )
    return name


def _of(module: str, named: dict[str, str]) -> str:
    """The algorithm of a module: its own, or that of the module that it is in (experts)."""
    while module and module not in named:
        module = module.rpartition(".")[0]
    return named.get(module, "")
