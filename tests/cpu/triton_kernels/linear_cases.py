"""Weights for the tests of the Triton linears, and how results are compared."""

from __future__ import annotations

import torch

from offroad.ops.linear import TOLERANCE
from offroad.quant.packed import Packed

FORMATS = [("affine4", 32, False), ("affine4", 0, True), ("affine8", 32, False), ("fp8", 128, True), ("fp4", 16, True)]
FP8 = torch.float8_e4m3fn


def random_weight(layout: str, n: int, k: int, group: int, *, sym: bool = True, seed: int = 0) -> Packed:
    """A canonical weight of random codes; scales that 16 bits hold, as files have them."""
    g = torch.Generator().manual_seed(seed)
    groups = -(-k // group)
    s = ((torch.rand(n, groups, generator=g) + 0.2) / k**0.5).bfloat16().float()
    if layout == "affine4":
        q = torch.randint(0, 256, (n, k // 2), generator=g, dtype=torch.uint8)
        zero = torch.full((n, groups), 8.0) if sym else torch.randint(0, 16, (n, groups), generator=g).float()
        return Packed(layout, n, k, {"q": q, "s": s / 4, "m": -zero * s / 4}, group)
    if layout == "affine8":
        q = torch.randint(-128, 128, (n, k), generator=g, dtype=torch.int8)
        tensors = {"q": q, "s": s / 64} | (
            {} if sym else {"m": s / 64 * torch.randint(-99, 99, (n, groups), generator=g)}
        )
        return Packed(layout, n, k, tensors, group)
    if layout == "fp8":
        return Packed(layout, n, k, {"q": torch.randn(n, k, generator=g).to(FP8), "s": s}, group)
    assert layout == "fp4"
    q = torch.randint(0, 256, (n, k // 2), generator=g, dtype=torch.uint8)
    if group == 16:  # NVFP4: E4M3 times a row's own fp32 factor
        s = (torch.rand(n, groups, generator=g) * 400 + 1).to(FP8).float() * (torch.rand(n, 1, generator=g) * 1e-4)
    else:
        s = 2.0 ** torch.randint(-9, -3, (n, groups), generator=g)
    return Packed(layout, n, k, {"q": q, "s": s}, group)


def check(found: torch.Tensor, expected: torch.Tensor, dtype: str = "float32") -> None:
    allowed = TOLERANCE[dtype]
    torch.testing.assert_close(found.float(), expected.float(), atol=allowed.absolute, rtol=allowed.relative)
