"""Root-mean-square norms and their fusions with residual adds. Statistics in fp32 (in float64 for float64 inputs),
output in the input's dtype."""

from __future__ import annotations

import torch

from offroad.ops.spec import OpSpec, Tolerance

TOLERANCE = {"float32": Tolerance(2e-5, 1e-5), "bfloat16": Tolerance(2e-2, 1.6e-2), "float16": Tolerance(2e-3, 2e-3)}


def widened(x: torch.Tensor) -> torch.Tensor:
    """x in the dtype that is computed in: fp32, or float64 for x in float64, by which tests judge kernels in fp32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """`weight * x / sqrt(mean(x^2) + eps)`; x [tokens, hidden], weight fp32 [hidden] (None: 1)."""
    wide = widened(x)
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide if weight is None else wide * weight).to(x.dtype)


def add_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(norm(residual + x), residual + x): pre-norm blocks."""
    residual = residual + x
    return norm(residual, weight, eps), residual


def sandwich_norm(
    x: torch.Tensor, residual: torch.Tensor, post: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(norm(r), r) with r = residual + norm(x, post): blocks that norm what they add (Gemma)."""
    residual = residual + norm(x, post, eps)
    return norm(residual, weight, eps), residual


OPS = (
    OpSpec("norm", norm.__doc__ or "", norm, TOLERANCE),
    OpSpec("add_norm", add_norm.__doc__ or "", add_norm, TOLERANCE),
    OpSpec("sandwich_norm", sandwich_norm.__doc__ or "", sandwich_norm, TOLERANCE),
)
