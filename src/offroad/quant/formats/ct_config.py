"""The `quantization_config` of compressed-tensors: schemes with their targets, the list of ignored modules, KV cache.

Names in its lists are the checkpoint's, before any renaming. A list entry is a module's full name, "re:" and a regular
expression that matches from the start, or a class of modules.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from offroad.errors import ModelError

FORMATS = (
    "dense",
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mxfp8-quantized",
    "mixed-precision",
)
STRATEGIES = ("tensor", "channel", "group", "block", "tensor_group")
_WHERE = "quantization_config"
_EMBEDDING = re.compile(r"(.*\.)?(embed_tokens\w*|\w*embed|\w*embeddings?)")


@dataclass(frozen=True)
class Scheme:
    """How a config group quantises weights. `size` is that of groups along k (0: none), `block` that of blocks;
    `activations` says what the group does with them ("" is nothing)."""

    group: str
    kind: str
    bits: int
    strategy: str
    size: int = 0
    block: tuple[int, int] = (0, 0)
    symmetric: bool = True
    activations: str = ""
    activation_bits: int = 16

    @property
    def label(self) -> str:
        """What a person calls it, e.g. "w4a16"."""
        return f"w{self.bits}a{self.activation_bits}"


@dataclass(frozen=True)
class KvScheme:
    """How the checkpoint wants keys and values to be stored: x / scale in `bits`, by tensor or by head."""

    kind: str
    bits: int
    strategy: str
    dynamic: bool


@dataclass(frozen=True)
class Names:
    """A list of modules, as compressed-tensors matches it."""

    exact: frozenset[str]
    patterns: tuple[re.Pattern[str], ...]

    def named(self, module: str) -> bool:
        """Whether an entry is the module's name, or matches it."""
        return module in self.exact or any(pattern.match(module) for pattern in self.patterns)

    def classed(self, module: str) -> bool:
        """Whether an entry is the class of a module that has a weight matrix."""
        return any(name in self.exact for name in _classes(module))

    def __contains__(self, module: str) -> bool:
        return self.named(module) or self.classed(module)


def _classes(module: str) -> tuple[str, ...]:
    """What lists call the class of a module that has a weight matrix: headers have names only."""
    return ("Embedding", "embedding") if _EMBEDDING.fullmatch(module) else ("Linear", "linear")


def names(entries: Iterable[Any], where: str) -> Names:
    """Raises ModelError for an entry that is no string, or no regular expression after "re:"."""
    exact, patterns = set(), []
    for entry in entries:
        if not isinstance(entry, str):
            raise ModelError(f"{_WHERE}: {where}", found=repr(entry), accepted="names of modules")
        if not entry.startswith("re:"):
            exact.add(entry)
            continue
        try:
            patterns.append(re.compile(entry.removeprefix("re:")))
        except re.error as error:
            raise ModelError(
                f"{_WHERE}: {where}", found=f"{entry!r} ({error})", accepted="a regular expression after re:"
            ) from error
    return Names(frozenset(exact), tuple(patterns))


@dataclass(frozen=True)
class QuantConfig:
    """Schemes with one target each, in the order in which a module looks for its own: names, then patterns, both by
    alphabet."""

    targets: tuple[tuple[Names, Scheme], ...]
    ignore: Names
    kv: KvScheme | None = None
    notes: list[str] = field(default_factory=list)

    @cached_property
    def _by_name(self) -> dict[str, list[Scheme]]:
        """Schemes by target that is no pattern: checkpoints may list thousands."""
        found: dict[str, list[Scheme]] = {}
        for target, scheme in self.targets:
            for name in target.exact:
                found.setdefault(name, []).append(scheme)
        return found

    @cached_property
    def _patterns(self) -> list[tuple[re.Pattern[str], Scheme]]:
        return [(pattern, scheme) for target, scheme in self.targets for pattern in target.patterns]

    @cached_property
    def all(self) -> list[Scheme]:
        return list(dict.fromkeys(scheme for _, scheme in self.targets))

    def wanted(self, module: str) -> list[Scheme]:
        """Schemes whose targets have the module: by name, then by class."""
        named = [*self._by_name.get(module, ()), *(scheme for p, scheme in self._patterns if p.match(module))]
        return named + [scheme for name in _classes(module) for scheme in self._by_name.get(name, ())]


def read_config(config: dict[str, Any]) -> QuantConfig:
    """Raises ModelError for what is not implemented: other formats, sparsity, transforms of activations."""
    groups = config.get("config_groups")
    if not isinstance(groups, dict):
        raise ModelError(f"{_WHERE}: config_groups", found=repr(groups)[:80], accepted="schemes by name")
    _refuse_others(config)
    targets: list[tuple[str, Scheme]] = []
    notes = []
    for name, group in groups.items():
        if not isinstance(group, dict):
            raise ModelError(f"{_WHERE}: config_groups.{name}", found=repr(group)[:80], accepted="an object")
        _format(f"config_groups.{name}.format", group.get("format"))
        if group.get("weights") is None:
            continue  # of activations only
        scheme = _scheme(name, group)
        targets += [(target, scheme) for target in group.get("targets") or ()]
        if scheme.activations:
            notes.append(f"{name}: made for activations in {scheme.activations}; they stay in the plan's precision")
    ordered = sorted(targets, key=lambda entry: ("re:" in str(entry[0]), str(entry[0])))
    return QuantConfig(
        tuple((names([target], f"config_groups.{scheme.group}.targets"), scheme) for target, scheme in ordered),
        names(config.get("ignore") or (), "ignore"),
        kv_scheme(config),
        notes,
    )


def kv_scheme(config: dict[str, Any]) -> KvScheme | None:
    """What `kv_cache_scheme` says; None: nothing, keys and values have no scales."""
    values = config.get("kv_cache_scheme")
    if values is None:
        return None
    if not isinstance(values, dict):
        raise ModelError(f"{_WHERE}: kv_cache_scheme", found=repr(values)[:80], accepted="an object or null")
    return KvScheme(
        values.get("type") or "int",
        values.get("num_bits") or 8,
        values.get("strategy") or "tensor",
        values.get("dynamic") is True,
    )


def _refuse_others(config: dict[str, Any]) -> None:
    _format("format", config.get("format"))
    sparsity = (config.get("sparsity_config") or {}).get("format", "dense")
    if sparsity != "dense":
        raise ModelError(f"{_WHERE}: sparsity_config", found=sparsity, accepted="none, or format dense")
    if (config.get("transform_config") or {}).get("config_groups"):
        raise ModelError(
            f"{_WHERE}: transform_config",
            found="transforms that run with the model",
            accepted="none",
            next="use a checkpoint that was quantised without rotations",
        )


def _format(where: str, value: Any) -> None:
    if value is not None and value not in FORMATS:
        raise ModelError(f"{_WHERE}: {where}", found=repr(value), accepted=", ".join(FORMATS))


def _scheme(name: str, group: dict[str, Any]) -> Scheme:
    where, weights = f"config_groups.{name}.weights", group["weights"]

    def value(key: str, default: Any, *accepted: Any) -> Any:
        found = weights.get(key)
        found = default if found is None else found
        if found not in accepted:
            raise ModelError(f"{_WHERE}: {where}.{key}", found=repr(found), accepted=", ".join(map(str, accepted)))
        return found

    size = weights.get("group_size")
    if not (size is None or type(size) is int and (size > 0 or size == -1)):
        raise ModelError(f"{_WHERE}: {where}.group_size", found=repr(size), accepted="a number of columns, -1 or null")
    strategy = value("strategy", "tensor" if size is None else "channel" if size == -1 else "group", *STRATEGIES)
    if ("group" in strategy) != (size is not None and size > 0):
        raise ModelError(
            f"{_WHERE}: {where}.group_size", found=f"{size} of strategy {strategy}", accepted="a size for groups only"
        )
    kind, bits = value("type", "int", "int", "float"), value("num_bits", 8, *range(1, 9))
    block = weights.get("block_structure")
    if isinstance(block, str):  # as older writers had it: "128x128"
        block = [int(part) for part in block.split("x") if part.isdecimal()]
    whole = isinstance(block, list) and len(block) == 2 and all(type(side) is int and side > 0 for side in block)
    if strategy == "block" and not whole:
        raise ModelError(f"{_WHERE}: {where}.block_structure", found=repr(block), accepted="[128, 128]")
    inputs = group.get("input_activations") or {}
    act = inputs.get("num_bits", 8) if inputs else 16
    return Scheme(
        group=name,
        kind=kind,
        bits=bits,
        strategy=strategy,
        size=size if size and size > 0 else 0,
        block=tuple(block) if strategy == "block" else (0, 0),
        symmetric=value("symmetric", True, True, False),
        activations=f"{act}-bit {inputs.get('type', 'int')}" if inputs else "",
        activation_bits=act,
    )
