"""Checkpoints of the compressed-tensors library (LLM Compressor): integers, FP8, FP4, each module by its own scheme.

The tensors of a module say how it is stored; the config groups say what headers cannot (bits, group size), and are
looked for by the module's name. Only weights are quantised here: activations stay in the plan's precision.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from offroad.errors import ModelError
from offroad.quant.formats.base import FLOAT, REPAIR, Claim, Claims
from offroad.quant.formats.ct_config import KvScheme, QuantConfig, Scheme, read_config
from offroad.quant.formats.ct_floats import EXPONENTS, fp4, fp8
from offroad.quant.formats.ct_ints import packed_ints, plain_ints
from offroad.weights.source import Headers

Build = Callable[[Headers, str, Scheme], Claim]
_WEIGHT = ("packed", "scale", "zero_point", "shape", "g_idx", "global_scale")
_ACTIVATIONS = ("input_scale", "input_zero_point", "input_global_scale", "output_scale", "output_zero_point")
_KV = re.compile(r"(.*)\.([qkv]_(scale|zero_point|global_scale)|(k_proj|v_proj|qkv_proj)\.output_(scale|zero_point))")
_KV_SUFFIXES = (".k_scale", ".v_scale", ".q_scale", ".k_zero_point", ".v_zero_point", ".q_zero_point")


class CompressedTensors:
    """See the module."""

    suffixes = (*(f".weight_{part}" for part in _WEIGHT), *(f".{name}" for name in _ACTIVATIONS), *_KV_SUFFIXES)

    def claims(self, headers: Headers, config: dict[str, Any]) -> Claims:
        read, found = read_config(config), Claims()
        wrong: dict[str, list[str]] = {}
        for module, build, suits in _modules(headers):
            claim, scheme = _claim(headers, module, build, suits, read)
            found.claims.append(claim)
            static = [name for part in _ACTIVATIONS if (name := f"{module}.{part}") in headers]
            found.others += [name for name in static if not _KV.fullmatch(name)]
            if doubt := _doubt(module, claim, scheme, read):
                wrong.setdefault(doubt, []).append(module)
        if plain := _plain(headers, found, read):
            wrong["targets of the config, and not quantised in the file"] = plain
        found.notes += read.notes
        found.notes += [f"{_some(modules)}: {doubt}: the file decides" for doubt, modules in wrong.items()]
        if found.others:
            found.notes.append(f"{_some(found.others)}: not used, since activations are not quantised")
        _kv(headers, found, read.kv)
        return found


def _doubt(module: str, claim: Claim, scheme: Scheme, config: QuantConfig) -> str:
    """How the lists disagree with the file on a quantised module; "" if they do not."""
    if module in config.ignore:
        return "ignored by the config, and quantised in the file"
    if len(claim.shape) > 2:  # experts stored as one: lists have names for each
        return ""
    wanted = config.wanted(module)
    if not wanted:
        return f"no target of the config, and quantised in the file as {scheme.group} says"
    if scheme != wanted[0]:
        return f"a target of another group, and quantised in the file as {scheme.group} says"
    return ""


def _modules(headers: Headers) -> Iterator[tuple[str, Build, Callable[[Scheme], bool]]]:
    """(module, what builds its claim, which schemes suit) of every module whose weight is quantised."""
    for name, header in headers.items():
        module, _, tensor = name.rpartition(".")
        scale = headers.get(f"{module}.weight_scale")
        exponents = scale is not None and scale.kind in EXPONENTS
        if tensor == "weight_packed" and header.kind == "u8":
            size = 16 if f"{module}.weight_global_scale" in headers else 32
            yield module, fp4, lambda s, size=size: (s.kind, s.bits, s.size) == ("float", 4, size)
        elif tensor == "weight_packed":
            yield module, packed_ints, lambda s: s.kind == "int" and s.strategy != "block"
        elif tensor == "weight" and header.kind == "i8":
            yield module, plain_ints, lambda s: s.kind == "int" and s.strategy != "block"
        elif tensor == "weight" and header.kind == "f8_e4m3":
            yield module, fp8, lambda s, mx=exponents: (s.kind, s.bits) == ("float", 8) and (s.size == 32 or not mx)


def _claim(
    headers: Headers, module: str, build: Build, suits: Callable[[Scheme], bool], config: QuantConfig
) -> tuple[Claim, Scheme]:
    """The claim by the first scheme that the tensors fit, those whose targets have the module first."""
    first: ModelError | None = None
    for scheme in filter(suits, dict.fromkeys((*config.wanted(module), *config.all))):
        try:
            return build(headers, module, scheme), scheme
        except ModelError as error:
            first = first or error
    raise first or ModelError(
        f"tensor {module}.weight{'_packed' if build in (fp4, packed_ints) else ''}",
        found="no config group whose weights are stored like this",
        accepted="one of " + (", ".join(scheme.group for scheme in config.all) or "none"),
        next=REPAIR,
    )


def _plain(headers: Headers, found: Claims, config: QuantConfig) -> list[str]:
    """Modules that the config has quantised and the file has not."""
    claimed = {tensor for claim in found.claims for tensor in claim.tensors}
    plain = []
    for name, header in headers.items():
        module = name.removesuffix(".weight")
        if module == name or name in claimed or len(header.shape) != 2 or header.kind not in FLOAT:
            continue
        if config.wanted(module) and module not in config.ignore:
            plain.append(module)
    return plain


def _kv(headers: Headers, found: Claims, scheme: KvScheme | None) -> None:
    """Scales of keys and values of an attention that is there."""
    parents = {name.rpartition(".")[0].rpartition(".")[0] for name in headers if not _KV.fullmatch(name)}
    names = [name for name in headers if (match := _KV.fullmatch(name)) and match[1] in parents]
    found.kv += names
    if scheme is not None and not names:
        wanted = f"{scheme.bits}-bit {scheme.kind} by {scheme.strategy}"
        found.notes.append(f"the config has a KV cache scheme ({wanted}), and the file no scales for it: 1 is taken")


def _some(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
