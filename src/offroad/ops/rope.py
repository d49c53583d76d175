"""Rotary embedding of queries and keys out of the fused projection, with optional per-head norms before it."""

from __future__ import annotations

import math

import torch

from offroad.models.spec import AttentionSpec, RopeSpec
from offroad.ops.norm import norm
from offroad.ops.spec import OpSpec, Tolerance

TOLERANCE = {"float32": Tolerance(2e-5, 1e-5), "bfloat16": Tolerance(2e-2, 1.6e-2), "float16": Tolerance(2e-3, 2e-3)}


def rope_table(spec: RopeSpec, length: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """cos and sin by position, fp32 [length, dim]: cos of the dim / 2 angles, then their sin.

    Scaling "linear" divides the frequencies; "llama3" does so by wavelength as in Hugging Face's
    `_compute_llama3_parameters`; "proportional" turns only the first part of the angles. Raises ValueError for other
    kinds (the model file refuses them first).
    """
    # Written as Hugging Face does: another rounding of a frequency is an angle off by 1e-4 at position 3,000.
    inverse = 1.0 / (spec.base ** (torch.arange(0, spec.dim, 2, dtype=torch.int64, device=device).float() / spec.dim))
    scaling = dict(spec.scaling)
    kind = scaling.get("rope_type", "default")
    if kind == "linear":
        inverse = inverse / float(scaling["factor"])
    elif kind == "llama3":
        inverse = _llama3(inverse, {key: float(value) for key, value in scaling.items() if key != "rope_type"})
    elif kind == "proportional":
        inverse[int(float(scaling["partial_rotary_factor"]) * spec.dim // 2) :] = 0
    elif kind != "default":
        raise ValueError(f"rope scaling {kind!r}")
    angles = torch.arange(length, device=device).float()[:, None] * inverse[None]
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


def _llama3(inverse: torch.Tensor, scaling: dict[str, float]) -> torch.Tensor:
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    original, factor = scaling["original_max_position_embeddings"], scaling["factor"]
    wavelength = 2 * math.pi / inverse
    smooth = (original / wavelength - low) / (high - low)
    blended = (1 - smooth) * inverse / factor + smooth * inverse
    scaled = torch.where(wavelength > original / low, inverse / factor, blended)
    return torch.where(wavelength < original / high, inverse, scaled)


def qkv_rope(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    table: torch.Tensor,
    spec: AttentionSpec,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """q [tokens, heads, dim], k and v [tokens, kv_heads, dim] from the fused projection qkv [tokens, n]; k and v are
    None if the layer has none of its own. positions int64 [tokens], or [3, tokens] for a rope with sections.

    Rows of qkv: queries (each head's followed by its output gates, if it has them), keys, values (unless values are
    the keys as projected). v is normed without weights if the layer does so; q and k are normed per head (where
    weights are given), then rotated: `(a, b) -> (a cos - b sin, b cos + a sin)` for the halves a, b of the first
    `rope.dim` dims.
    """
    heads, kv_heads, dim = spec.heads, spec.kv_heads, spec.head_dim
    q = qkv[:, : spec.q_width].view(-1, heads, spec.q_width // heads)[..., :dim]
    q = q if q_norm is None else norm(q, q_norm, eps)
    cos, sin = _angles(table, positions, spec.rope)
    q = _rotate(q, cos, sin, spec.rope.dim)
    if not spec.own_kv:
        return q, None, None
    k, *rest = qkv[:, spec.q_width :].view(-1, kv_heads * (1 if spec.k_eq_v else 2), dim).split(kv_heads, dim=1)
    v = k if spec.k_eq_v else rest[0]
    v = norm(v, None, eps) if spec.v_norm else v
    k = k if k_norm is None else norm(k, k_norm, eps)
    return q, _rotate(k, cos, sin, spec.rope.dim), v


def _angles(table: torch.Tensor, positions: torch.Tensor, rope: RopeSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [tokens, 1, rope.dim / 2] of positions [tokens], or [3, tokens] with sections."""
    cos, sin = table[positions][..., None, :].chunk(2, dim=-1)
    if rope.sections is None:
        return cos, sin
    stream = torch.zeros(rope.dim // 2, dtype=torch.int64, device=table.device)
    for number, count in enumerate(rope.sections, 1):
        stream[number : 3 * count : 3] = number
    at = torch.arange(rope.dim // 2, device=table.device)
    return cos[stream, :, :, at].movedim(0, -1), sin[stream, :, :, at].movedim(0, -1)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, dim: int) -> torch.Tensor:
    a, b = x[..., :dim].float().chunk(2, dim=-1)
    turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)
    return turned if dim == x.shape[-1] else torch.cat((turned, x[..., dim:]), dim=-1)


OPS = (OpSpec("qkv_rope", qkv_rope.__doc__ or "", qkv_rope, TOLERANCE),)
