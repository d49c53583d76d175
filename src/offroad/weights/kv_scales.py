"""Static scales of an 8-bit KV cache out of a checkpoint: one a tensor, or one a head. Stored is x / scale."""

from __future__ import annotations

from collections.abc import Callable

import torch

from offroad.errors import ModelError
from offroad.models.spec import AttentionSpec, LayerSpec, ModelSpec, Shared
from offroad.weights.source import Source

# Spellings of the tools that write them, after the name of the attention.
_NAMES = {
    "k": ("k_scale", "k_proj.k_scale", "k_proj.output_scale", "qkv_proj.k_scale", "k_cache.scale", "kv_scale"),
    "v": ("v_scale", "v_proj.v_scale", "v_proj.output_scale", "qkv_proj.v_scale", "v_cache.scale", "kv_scale"),
}
Scales = tuple[torch.Tensor, torch.Tensor]  # of keys and of values, fp32 [kv_heads]


def names(source: Source, spec: ModelSpec) -> dict[int, dict[str, str]]:
    """The tensors of keys ("k") and values ("v") by layer, under their names in the file."""
    raw: tuple[str, ...] = getattr(source, "kv", ())
    known = {short(name, spec.prefixes): name for name in raw}
    found: dict[int, dict[str, str]] = {}
    for i, layer in enumerate(spec.layers):
        if (at := _attention(layer)) is None:
            continue
        picked = {
            plane: next((known[f"{at}.{name}"] for name in listed if f"{at}.{name}" in known), None)
            for plane, listed in _NAMES.items()
        }
        if any(picked.values()):
            found[i] = {plane: name for plane, name in picked.items() if name}
    return found


def read(source: Source, spec: ModelSpec, device: torch.device) -> list[Scales | None]:
    """The scales of each layer; None: it has none, that is 1. Raises ModelError for one that is not a positive number,
    and for a count that is neither 1 nor that of heads."""
    listed = names(source, spec)
    scales: list[Scales | None] = []
    for i, layer in enumerate(spec.layers):
        if i not in listed:
            scales.append(None)
            continue
        get: Callable[[str], torch.Tensor] = source.read_kv  # type: ignore[attr-defined]
        heads = layer.mixer.kv_heads
        k, v = (_checked(listed[i].get(plane), get, heads).to(device) for plane in "kv")
        scales.append((k, v))
    return scales


def _checked(name: str | None, get: Callable[[str], torch.Tensor], heads: int) -> torch.Tensor:
    if name is None:
        return torch.ones(heads)
    value = get(name).float().flatten()
    if value.numel() not in (1, heads):
        raise ModelError(f"tensor {name}", found=f"{value.numel()} scales", accepted=f"1, or {heads}: one a KV head")
    if not (torch.isfinite(value).all() and (value > 0).all()):
        raise ModelError(f"tensor {name}", found=value.tolist()[:4], accepted="finite scales above 0")
    return value.expand(heads).contiguous()


def _attention(layer: LayerSpec) -> str | None:
    """The name of the attention whose keys and values the layer stores."""
    stores = isinstance(layer.mixer, AttentionSpec) and not isinstance(dict(layer.items)["kv"], Shared)
    if not stores:
        return None
    first = next(linear for linear in layer.linears if linear.name == "qkv").parts[0][0]
    return first.rpartition(".")[0]


def short(name: str, prefixes: tuple[tuple[str, str], ...]) -> str:
    """A name in the file as the spec has it: the first beginning that fits is replaced."""
    old, new = next(((old, new) for old, new in prefixes if name.startswith(old)), ("", ""))
    return new + name.removeprefix(old)
