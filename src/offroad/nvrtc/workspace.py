"""Linears of many tokens on SM70: weights become halves in a workspace, some columns at a time; cuBLAS does the rest.

A fused kernel takes weights apart once for every tile of tokens; from some number of tokens on it is cheaper to do so
once, and a library's GEMM has better tiles than ours. The figures that CROSSOVER comes from are others' measurements on
a V100 (4,096 tokens by 8,704 x 5,120, 4 bits): fused 7.09 ms, this way 4.78 ms, of which writing the halves takes some
0.14 ms at 800 GB/s. So the two meet near 240 tokens; libraries need more rows than that to be at their best.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from offroad.nvrtc import launch
from offroad.nvrtc.compile import Source
from offroad.nvrtc.pack import COLUMNS, NUMBERS, LaneTiles

ARGS = "@3P6i2f"  # `Args` of the kernel
CROSSOVER = 512  # tokens from which on a linear goes this way
WORKSPACE = 64 << 20  # bytes of halves at a time
THREADS = 256
BLOCK_K = 256  # k's of a block


def source(kind: str, scales: int = 1) -> Source:
    return Source("dequantise.cu", (("KIND", NUMBERS[kind]), ("SCALES", scales)), 2 * COLUMNS * (BLOCK_K + 8))


def slab(n: int, k: int) -> int:
    """Columns whose halves fit the workspace, in whole tiles."""
    return min(-(-n // COLUMNS), max(1, WORKSPACE // (2 * k * COLUMNS))) * COLUMNS


def workspace(n: int, k: int) -> int:
    """Bytes of the workspace for a weight [n, k]."""
    return 2 * k * slab(n, k)


@dataclass(frozen=True)
class Dequantiser:
    """The kernel for one kind of weights."""

    kind: str
    kernel: launch.Function

    @classmethod
    def of(cls, kind: str, scales: int) -> Dequantiser:
        return cls(kind, launch.load(source(kind, scales), "dequantise", ARGS))

    def halves(self, weight: LaneTiles, first: int, out: torch.Tensor) -> None:
        """Columns from `first` on as fp16 rows of `out` [columns, k]; `first` begins a tile."""
        scales = weight.tensors["s"]
        self.kernel.launch(
            (-(-out.shape[0] // COLUMNS), -(-weight.k // BLOCK_K), 1),
            THREADS,
            *(t.data_ptr() for t in (weight.tensors[self.kind], scales, out)),
            *(weight.n, weight.k, weight.group, scales.shape[1], first // COLUMNS, 0),
            *(weight.alpha, 0.0),
        )

    def linear(self, x: torch.Tensor, weight: LaneTiles) -> torch.Tensor:
        """x W^T + bias, [tokens, n]."""
        n, each = weight.n, slab(weight.n, weight.k)
        out = torch.empty((x.shape[0], n), dtype=x.dtype, device=x.device)
        held = torch.empty((each, weight.k), dtype=x.dtype, device=x.device)
        for first in range(0, n, each):
            halves = held[: min(each, n - first)]
            self.halves(weight, first, halves)
            part = out[:, first : first + each]
            if weight.bias is None:
                torch.mm(x, halves.T, out=part)
            else:
                torch.addmm(weight.bias[first : first + each], x, halves.T, out=part)
        return out
