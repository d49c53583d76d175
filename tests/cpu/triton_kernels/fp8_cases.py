"""Weights and products for the tests of W8A8 linears, on a CPU and on a GPU."""

from __future__ import annotations

import torch

from offroad.quant.packed import Packed

E4M3 = torch.float8_e4m3fn


def block_weight(
    n: int, k: int, *, seed: int = 0, scale_dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> Packed:
    """A canonical weight of random e4m3 codes with a scale for each block of 128 by 128; outputs of about 1."""
    random = torch.Generator(device).manual_seed(seed)
    q = torch.randn(n, k, generator=random, device=device).mul_(60).clamp_(-448, 448).to(E4M3)
    blocks = torch.rand(n // 128, k // 128, generator=random, device=device).add_(0.5).mul_(k**-0.5 / 60)
    return Packed("fp8", n, k, {"q": q, "s": blocks.to(scale_dtype).float().repeat_interleave(128, dim=0)}, 128)


def activations(rows: int, k: int, dtype: torch.dtype, *, seed: int = 0) -> torch.Tensor:
    """[rows, k] with groups of 128 of sizes from 1e-6 to 10, one of zeros."""
    random = torch.Generator().manual_seed(seed)
    sizes = 10.0 ** (torch.rand(rows, k // 128, generator=random) * 2 - 1)
    x = torch.randn(rows, k, generator=random) * sizes.repeat_interleave(128, dim=1)
    x[0, :128] = 0
    x[-1, -128:] *= 1e-6
    return x.to(dtype)


def plain_product(
    x: torch.Tensor, x_scales: torch.Tensor, w: torch.Tensor, w_scales: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """What `scaled_product` gives of the same operands, in fp64."""
    units = x.shape[1] // 128
    wide = x.view(E4M3).double() * x_scales.T.double().repeat_interleave(128, dim=1)
    blocks = w_scales[:, :units].double().repeat_interleave(128, dim=1).repeat_interleave(128, dim=0)
    return (wide @ (w.view(E4M3).double() * blocks).T).to(dtype)
