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
    `_compute_llama3_parameters`. Raises ValueError for other kinds (the model file refuses them first).
    """
    # Written as Hugging Face does: another rounding of a frequency is an angle off by 1e-4 at position 3,000.
    inverse = 1.0 / (spec.base ** (torch.arange(0, spec.dim, 2, dtype=torch.int64, device=device).float() / spec.dim))
    scaling = dict(spec.scaling)
    kind = scaling.get("rope_type", "default")
    if kind == "linear":
        inverse = inverse / float(scaling["factor"])
    elif kind == "llama3":
        inverse = _llama3(inverse, {key: float(value) for key, value in scaling.items() if key != "rope_type"})
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
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q [tokens, heads, dim], k and v [tokens, kv_heads, dim] from qkv [tokens, (heads + 2 kv_heads) dim].

    q and k are normed per head (where weights are given), then rotated: `(a, b) -> (a cos - b sin, b cos + a sin)` for
    the halves a, b of the first `rope.dim` dims.
    """
    heads, kv_heads, dim = spec.heads, spec.kv_heads, spec.head_dim
    q, k, v = qkv.view(-1, heads + 2 * kv_heads, dim).split((heads, kv_heads, kv_heads), dim=1)
    if q_norm is not None:
        q = norm(q, q_norm, eps)
    if k_norm is not None:
        k = norm(k, k_norm, eps)
    cos, sin = table[positions][:, None].chunk(2, dim=-1)
    return _rotate(q, cos, sin, spec.rope.dim), _rotate(k, cos, sin, spec.rope.dim), v


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, dim: int) -> torch.Tensor:
    a, b = x[..., :dim].float().chunk(2, dim=-1)
    turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)
    return turned if dim == x.shape[-1] else torch.cat((turned, x[..., dim:]), dim=-1)


OPS = (OpSpec("qkv_rope", qkv_rope.__doc__ or "", qkv_rope, TOLERANCE),)
