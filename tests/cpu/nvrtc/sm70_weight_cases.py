"""Random canonical weights of every kind that the SM70 linears read."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from offroad.ops.spec import Problem
from offroad.quant.packed import Packed


@dataclass(frozen=True)
class Case:
    layout: str
    n: int
    k: int
    group: int
    tokens: int
    bias: bool = False
    whole: bool = True  # integers: zeros are whole numbers

    @property
    def problem(self) -> Problem:
        sizes = (("k", self.k), ("n", self.n))
        return Problem("linear", "decode", "float16", sizes=sizes, stored=(f"{self.layout}.x-g{self.group}",))


def weight(case: Case, seed: int = 0) -> Packed:
    random = torch.Generator().manual_seed(seed)
    n, k, groups = case.n, case.k, -(-case.k // case.group)

    def integers(low: int, high: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randint(low, high, (n, columns), generator=random).to(dtype)

    if case.layout in ("affine4", "fp4"):
        q = integers(0, 256, k // 2, torch.uint8)
    elif case.layout == "affine8":
        q = integers(-128, 128, k, torch.int8)
    else:
        q = (torch.randn(n, k, generator=random) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
    largest = {"affine4": 8, "affine8": 128, "fp8": 448, "fp4": 6}[case.layout]
    s = (torch.rand(n, groups, generator=random) + 0.5) / largest * k**-0.5
    tensors = {"q": q, "s": s}
    if case.layout == "affine4" or not case.whole:
        zero = torch.rand(n, groups, generator=random) * 15
        tensors["m"] = -s * (zero.round() if case.whole else zero)
    bias = torch.randn(n, generator=random).half() if case.bias else None
    return Packed(case.layout, n, k, tensors, case.group, bias)


def tokens(case: Case, seed: int = 1) -> torch.Tensor:
    """x, a view whose rows are longer than k."""
    random = torch.Generator().manual_seed(seed)
    return torch.randn(case.tokens, case.k + 8, generator=random).half()[:, : case.k]


CASES = (
    Case("affine4", 40, 64, 32, 1, bias=True),
    Case("affine4", 96, 2208, 32, 5),
    Case("affine4", 64, 1024, 128, 9, whole=False),
    Case("affine4", 33, 4160, 64, 8),
    Case("affine4", 130, 96, 96, 70),
    Case("fp8", 64, 1168, 128, 3),
    Case("fp8", 70, 256, 256, 31, bias=True),
    Case("fp4", 48, 544, 16, 2),
    Case("fp4", 64, 96, 32, 40),
    Case("affine8", 32, 400, 16, 7),
    Case("affine8", 64, 256, 128, 17, whole=False),
)
