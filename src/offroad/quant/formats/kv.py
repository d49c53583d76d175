"""Scales for a quantised KV cache, which several formats may carry."""

from __future__ import annotations

from offroad.quant.formats.base import Claims
from offroad.weights.source import Headers

SUFFIXES = (
    *(f".{name}" for name in ("k_scale", "v_scale", "q_scale", "kv_scale", "prob_scale", "k_cache.scale")),
    *(f".{name}" for name in ("v_cache.scale", "k_proj.output_scale", "v_proj.output_scale")),
    *(f".{name}" for name in ("k_proj.k_bias", "v_proj.v_bias", "k_zero_point", "v_zero_point")),
)


def set_aside(found: Claims, headers: Headers) -> None:
    """Takes the scales out of what is a weight or an ordinary tensor."""
    found.kv += [name for name in headers if name.endswith(SUFFIXES)]
