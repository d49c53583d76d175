"""Memory between launches, and what of it kernels need: one piece for all, since launches of a device run in turn.

What lies in it is written and read within one call of a kernel. It is made in its whole size before anything runs, so
that it lies where captured graphs found it. Triton is not imported here: plans ask for sizes.
"""

from __future__ import annotations

import logging

import torch

_log = logging.getLogger(__name__)
DENSE_BYTES = 64 << 20  # parts of sums of many rows, or dequantised weights, that any card has room for
COUNTERS = "arrived"


class Memory:
    """Tensors by device and use. One that must grow leaves the smaller one to the graphs that captured it."""

    def __init__(self) -> None:
        self.shared: dict[torch.device, list[torch.Tensor]] = {}
        self.counters: dict[torch.device, list[torch.Tensor]] = {}
        self.most: dict[torch.device, int] = {}  # bytes that were asked for at once

    def reserve(self, device: torch.device, nbytes: int) -> None:
        """Makes what all uses share, unless there is as much already."""
        if nbytes:
            named = torch.empty(0, device=device).device  # with its number, as tensors name it
            self._grown(self.shared, named, nbytes)

    def get(self, device: torch.device, use: str, size: int, dtype: torch.dtype) -> torch.Tensor:
        """At least `size` elements. Of COUNTERS zeros when they are made, which launches leave as they find them; of
        any other use what the last one left."""
        nbytes = size * dtype.itemsize
        if use == COUNTERS:
            return self._grown(self.counters, device, nbytes).view(dtype)
        had = len(self.shared.get(device, ()))
        found = self._grown(self.shared, device, nbytes)
        self.most[device] = max(nbytes, self.most.get(device, 0))
        if had and len(self.shared[device]) > had and device.type == "cuda":
            _log.warning("kernels share %d bytes for %s, more than was planned", found.numel(), use)
        return found[: nbytes + -nbytes % 16].view(dtype)

    @staticmethod
    def _grown(kept: dict[torch.device, list[torch.Tensor]], device: torch.device, nbytes: int) -> torch.Tensor:
        tensors = kept.setdefault(device, [])
        if not tensors or tensors[-1].numel() < nbytes:
            tensors.append(torch.zeros(nbytes + -nbytes % 256, dtype=torch.uint8, device=device))
        return tensors[-1]


MEMORY = Memory()


def dense_bytes(memory: int) -> int:
    """Dequantised weights that are in memory at a time on a card of `memory` bytes. Products of 1,024 tokens by whole
    weights of Qwen3.5-27B take 5 to 13 % less time on an H100 than by pieces of 64 MiB, of 8,192 tokens 2 to 10 %."""
    return max(DENSE_BYTES, memory // 256)


def dense_outputs(n: int, k: int, itemsize: int, most: int) -> int:
    """Outputs of one piece of a dequantised weight [n, k], so that pieces are even and have at most `most` bytes."""
    block = 256 if 256 * k * itemsize <= most else 64
    blocks, fit = -(-n // block), max(1, most // (block * k * itemsize))
    pieces = -(-blocks // fit)
    return -(-blocks // pieces) * block


def split_bytes(units: int) -> int:
    """The most that parts of sums take, of linears for few tokens: as many programs as keep `units` busy, each
    with a tile of 128 outputs by 64 tokens at most; 5 a unit is more than tiles are cut for."""
    return 5 * 128 * 64 * 4 * units
