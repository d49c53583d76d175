"""Linear layers and embeddings over packed weights."""

from __future__ import annotations

import torch

from offroad.ops.spec import OpSpec, Tolerance
from offroad.quant.packed import Packed, dequantise

TOLERANCE = {"float32": Tolerance(2e-4, 2e-5), "bfloat16": Tolerance(3e-2, 1.6e-2), "float16": Tolerance(4e-3, 2e-3)}


def dense(weight: Packed) -> torch.Tensor:
    """A canonical weight as a matrix [n, k]: as it is kept, else in fp32."""
    return weight.tensors["w"] if weight.layout == "dense" else dequantise(weight)


def linear(x: torch.Tensor, weight: Packed) -> torch.Tensor:
    """`x w^T + bias`; x [tokens, k] -> [tokens, n] in x's dtype, products in the wider of the two dtypes."""
    w = dense(weight)
    if w.dtype != x.dtype:
        w = w.to(x.dtype)
    return torch.nn.functional.linear(x, w, weight.bias)


def round_activations(x: torch.Tensor) -> torch.Tensor:
    """x as products of e4m3 operands see it: of each 128 of a token a scale s = max|x| / 448, and x / s to the nearest
    e4m3 number; x [tokens, k], k a multiple of 128, in fp32 or fp64, and so the result.

    It is what the checkpoints' `activation_scheme: dynamic` asks for. 128 values with one that is not finite are NaN.
    """
    groups = x.float().unflatten(-1, (-1, 128))
    most = groups.abs().amax(-1, keepdim=True).clamp_min(2.0**-100)
    largest = torch.full_like(most, 448.0)  # as a tensor: PyTorch divides by numbers, and numbers by tensors, otherwise
    q = (groups * (largest / most)).to(torch.float8_e4m3fn)
    s = torch.where(most.isfinite(), most / largest, torch.nan)
    return (q.to(x.dtype) * s.to(x.dtype)).flatten(-2)


def linear_a8(x: torch.Tensor, weight: Packed) -> torch.Tensor:
    """`linear` of activations rounded to e4m3: what W8A8 kernels compute."""
    return linear(round_activations(x.float()).to(x.dtype), weight)


def embed(ids: torch.Tensor, weight: Packed, scale: float, dtype: torch.dtype) -> torch.Tensor:
    """Rows `ids` of the embedding times `scale`; ids int64 [tokens] -> [tokens, hidden] in `dtype`."""
    rows = dequantise(weight.rows(ids)).to(dtype)
    return rows if scale == 1.0 else rows * torch.tensor(scale, dtype=dtype)


# Half precision has steps of 2^-24 below 6e-5, and a row is rounded twice: as a weight and behind the scale.
EMBED_TOLERANCE = {name: Tolerance(2.0**-23 * (name == "float16"), t.relative) for name, t in TOLERANCE.items()}
OPS = (
    OpSpec("linear", linear.__doc__ or "", linear, TOLERANCE),
    OpSpec("embed", embed.__doc__ or "", embed, EMBED_TOLERANCE),
)
