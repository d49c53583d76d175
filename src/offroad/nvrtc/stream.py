"""Linears of few tokens over records for compute capability 8.0 and later: how kernels/stream.cu is specialised and
launched."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial

import torch

from offroad.device.profile import DeviceProfile
from offroad.nvrtc import launch
from offroad.nvrtc.compile import Source
from offroad.nvrtc.kernel import CudaKernel
from offroad.ops.spec import Bound, Problem
from offroad.quant.packed import Packed, group_of
from offroad.triton_kernels.linear import limits_of, workspace
from offroad.triton_kernels.linear_pack import BLOCK_K, W4, W8, Records
from offroad.triton_kernels.memory import MEMORY

ARGS = "@9Pq7i4x"  # `Args` of the kernel
MOST = 8  # tokens
# Tokens up to which it is faster than the Triton kernels (benchmarks/kernels_linear.py on an H100).
FASTER = {"int4": 4, "e4m3": 8}
WARPS, OUTPUTS = 8, 16
RESIDENT = 3  # blocks of an SM that registers allow: two, and one of the next kernel that waits with its first records
KINDS = {"int4": 0, "e4m3": 1}
DEPTHS = {"int4": 4, "e4m3": 3}  # records in flight for each warp
MOST_SLICES = 16
ROOM = 81_920  # bytes of shared memory of a block at most: of two blocks on compute capability 8.0
TWO_BLOCKS = 2 * ROOM  # of an SM: where there is less, one block has it


@dataclass(frozen=True)
class Cut:
    """How a weight is divided: slices of k, ranges of 16-output tiles, and bytes of shared memory of a block."""

    slices: int
    ranges: int
    shared: int


def ring_bytes(kind: str) -> int:
    """Shared memory of the records in flight of a block."""
    return WARPS * DEPTHS[kind] * (1024 if kind == "int4" else 2048)


def slices_of(units: int, ring: int) -> dict[int, int]:
    """In how many slices k can be divided, and bytes of shared memory of a block for each."""
    found = {}
    for slices in range(1, MOST_SLICES + 1):
        longest = -(-units // slices)
        shared = longest * MOST * (2 * BLOCK_K + 4) + 2 * WARPS * MOST * 17 * 4 + ring
        if units // slices >= WARPS and shared <= ROOM:
            found[slices] = shared
    return found


@cache
def cut(n: int, units: int, ring: int, blocks: int) -> Cut:
    """The division among `blocks` with the least work for the one that has most: of shapes alone, so that a row's
    result does not depend on how many there are."""
    tiles, best = -(-n // OUTPUTS), None
    for slices, shared in slices_of(units, ring).items():
        ranges = max(1, min(tiles, blocks // slices))
        # The sum over slices costs about as much as 3 % of a large weight.
        work = -(-tiles // ranges) * -(-units // slices) * (1.0 if slices == 1 else 1.03)
        if best is None or work < best[0]:
            best = work, Cut(slices, ranges, shared)
    assert best is not None, f"{units} units: refused by `limits`"
    return best[1]


def source(kind: str, bf16: bool, scales: torch.dtype, minima: int) -> Source:
    """For scales of a type; `minima`: 0 none, 1 integers times the scale, 2 numbers."""
    bits = 32 if scales == torch.float32 else 16
    defines = {"KIND": KINDS[kind], "BF16": int(bf16), "DEPTH": DEPTHS[kind]}
    defines |= {
        "SCALE_BITS": bits,
        "SCALE_BF16": int(scales == torch.bfloat16),
        "MINIMA": minima,
        "MIN_BLOCKS": RESIDENT,
    }
    return Source("stream.cu", tuple(defines.items()), ROOM, headers=False)


@dataclass
class Streamer:
    """Launches the kernels on one device."""

    blocks: int
    arrived: dict[torch.device, torch.Tensor] = field(default_factory=dict)

    def run(self, x: torch.Tensor, weight: Records) -> torch.Tensor:
        """`x w^T + bias` of at most MOST tokens; x [tokens, k] -> [tokens, n]."""
        rows, n, k = x.shape[0], weight.n, weight.k
        out = torch.empty(rows, n, dtype=x.dtype, device=x.device)
        units = -(-k // BLOCK_K)
        s, m, r = weight.tensors["s"], weight.tensors.get("m"), weight.tensors.get("r")
        whole = weight.group >= k
        shift = 30 if whole else (weight.group // BLOCK_K).bit_length() - 1
        minima = 0 if m is None else 1 if m.dtype == torch.int16 else 2
        at = cut(n, units, ring_bytes(weight.kind), self.blocks)
        code = source(weight.kind, x.dtype == torch.bfloat16, s.dtype, minima)
        if x.is_meta:
            launch.ahead(code, "stream", ARGS)
            return out
        kernel = launch.load(code, "stream", ARGS)
        x = x if x.stride(1) == 1 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0 else x.contiguous()
        partial, arrived = out, out
        if at.slices > 1:
            partial, arrived = self._memory(x.device, at.slices * -(-n // OUTPUTS) * OUTPUTS * rows)
        pointers = (x, out, weight.bias, weight.tensors["q"], s, m, r, partial, arrived)
        kernel.launch(
            (at.slices * at.ranges, 1, 1),
            32 * WARPS,
            *(0 if tensor is None else tensor.data_ptr() for tensor in pointers),
            x.stride(0),
            *(rows, n, k, units, at.slices, shift, s.shape[1]),
            dependent=True,
            shared=at.shared,
        )
        return out

    def _memory(self, device: torch.device, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(partial sums, counters that are 0 between launches)."""
        if device not in self.arrived:
            self.arrived[device] = torch.zeros(self.blocks, dtype=torch.int32, device=device)
        return MEMORY.get(device, "partial", size, torch.float32), self.arrived[device]


def blocks_of(device: DeviceProfile) -> int:
    """Blocks that run at a time."""
    return device.units * (2 if device.shared_per_block >= TWO_BLOCKS else 1)


def bind(device: DeviceProfile, problem: Problem) -> Bound:
    """The op `linear`: this kernel for few tokens, and Triton's for others."""
    from offroad.triton_kernels.linear_run import card_of, run

    streamer, others = Streamer(blocks_of(device)), partial(run, on=card_of(device))

    def linear(x: torch.Tensor, weight: Packed) -> torch.Tensor:
        few = FASTER.get(getattr(weight, "kind", ""), 0)
        if not 0 < x.shape[0] <= few or weight.perm is not None:
            return others(x, weight)
        return streamer.run(x, weight)

    return linear


def _limits(layout: str) -> Callable[[Problem], str | None]:
    others = limits_of(layout)

    def limits(problem: Problem) -> str | None:
        k = problem.size("k")
        units, kind = -(-k // BLOCK_K), "int4" if layout == W4 else "e4m3"
        if k % 8 or not slices_of(units, ring_bytes(kind)):
            return f"needs k between {BLOCK_K * (WARPS - 1) + 1:,} and about 90,000, a multiple of 8; asked: {k:,}"
        if any(stored.startswith("gguf.") for stored in problem.stored):
            return "needs groups of 128 or more, which files of ggml have not"
        for group in (group_of(stored, k) for stored in problem.stored):
            if group < k and (group < BLOCK_K or group & (group - 1)):
                return f"needs groups of a power of two from {BLOCK_K} on, or all of k; asked: {group}"
        return others(problem)

    return limits


def _workspace(problem: Problem) -> int:
    """Sums of slices, at most."""
    slices = min(MOST_SLICES, -(-problem.size("k") // BLOCK_K) // WARPS)
    return 4 * MOST * problem.size("n") * slices


def _kernel(layout: str, name: str) -> CudaKernel:
    return CudaKernel(
        name,
        "linear",
        bind,
        _limits(layout),
        lambda problem: ROOM,
        frozenset({"bias"}),
        layout=layout,
        cost=0.9,
        workspace=_workspace,
        oldest=(8, 0),
        dtypes=frozenset({"bfloat16", "float16"}),
        reason="few tokens: CUDA C++, weights stream through registers; more: the Triton kernel",
        kept=workspace,
    )


KERNELS = (_kernel(W4, "cuda.linear_w4"), _kernel(W8, "cuda.linear_w8"))
