"""Linears over packed weights for SM70: what kernels/linear.cu is specialised by, and how it is launched."""

from __future__ import annotations

import torch

from offroad.device.profile import DeviceProfile
from offroad.nvrtc import launch
from offroad.nvrtc.compile import Source
from offroad.nvrtc.kernel import VOLTA, CudaKernel
from offroad.nvrtc.launch import LaunchError
from offroad.nvrtc.pack import CHUNK, COLUMNS, KINDS, LAYOUT, NUMBERS, LaneTiles, unfit
from offroad.ops.spec import Bound, Problem
from offroad.quant.packed import group_of
from offroad.quant.scheme import layout_of

ARGS = "@7Pq6ifi"  # `Args` of the kernel
TILES = (1, 2, 4, 8)  # row tiles of a block; a warp has all of them, more rows make more blocks
THREADS = 256
MAX_SPLITS = 8


def source(kind: str, tiles: int, scales: int = 1) -> Source:
    """For weights of `kind` (`q4`, ..), 8 * `tiles` tokens a block, and `scales` scales in a lane's 16 bytes."""
    step = step_of(kind, tiles)
    shared = max(2 * 8 * tiles * (8 // tiles * step + 8), 4 * 8 * 8 * tiles * 32 if tiles < 8 else 0)
    defines = {"KIND": NUMBERS[kind], "TILES_M": tiles, "WARPS_N": tiles, "SCALES": scales, "STEP": step}
    return Source("linear.cu", (*defines.items(), ("MIN_BLOCKS", 2)), shared)


def step_of(kind: str, tiles: int) -> int:
    """k's of a warp at a time: four loads of 16 bytes in flight a lane, fewer where sums take the registers."""
    return 32 if tiles == 8 else CHUNK[kind] * (4 if tiles <= 2 else 2)


def splits_of(units: int, n: int, k: int, kind: str, tiles: int, row_blocks: int) -> int:
    """Blocks that share a tile's k: two blocks on every SM, each with two steps at least; from sizes alone."""
    blocks = -(-n // (COLUMNS * tiles)) * row_blocks
    steps = -(-k // (8 // tiles * step_of(kind, tiles)))
    return max(1, min(2 * units // blocks, steps // 2, MAX_SPLITS))


def bind(device: DeviceProfile, problem: Problem) -> Bound:
    """The op `linear`."""
    k = problem.size("k")
    layout = layout_of(problem.stored)
    kind = KINDS[layout]
    groups = {group_of(stored, k) for stored in problem.stored}
    scales = CHUNK[kind] // 16 if min(groups) == 16 else 1
    kernels = {tiles: launch.load(source(kind, tiles, scales), "linear", ARGS) for tiles in TILES}
    tickets: dict[tuple[torch.device, int], torch.Tensor] = {}

    def linear(x: torch.Tensor, weight: LaneTiles) -> torch.Tensor:
        x = x if x.stride(1) == 1 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0 else x.contiguous()
        _check(x, weight, kind, scales)
        tokens = x.shape[0]
        tiles = next((size for size in TILES if tokens <= 8 * size), TILES[-1])
        row_blocks, columns = -(-tokens // (8 * tiles)), -(-weight.n // (COLUMNS * tiles))
        splits = splits_of(device.units, weight.n, weight.k, kind, tiles, row_blocks)
        out = torch.empty((tokens, weight.n), dtype=x.dtype, device=x.device)
        partial = torch.empty(0 if splits == 1 else splits * tokens * weight.n, device=x.device)
        turn = _tickets(tickets, x.device, row_blocks * columns if splits > 1 else 0)
        pointers = (x, out, weight.bias, weight.tensors[kind], weight.tensors["s"], partial, turn)
        kernels[tiles].launch(
            (columns, row_blocks, splits),
            THREADS,
            *(0 if tensor is None else tensor.data_ptr() for tensor in pointers),
            x.stride(0),
            *(tokens, weight.n, weight.k, weight.group, weight.tensors["s"].shape[1], splits),
            weight.alpha,
            0,
        )
        return out

    return linear


def _tickets(kept: dict[tuple[torch.device, int], torch.Tensor], device: torch.device, count: int) -> torch.Tensor:
    """Counters that are 0 between launches: kernels leave them so. They are never given back: a captured graph may hold
    their address."""
    place = (device, count)
    if place not in kept:
        kept[place] = torch.zeros(count, dtype=torch.int32, device=device)
    return kept[place]


def _check(x: torch.Tensor, weight: LaneTiles, kind: str, scales: int) -> None:
    if weight.kind != kind or x.dtype != torch.float16:
        raise LaunchError("linear", found=f"{x.dtype} by {weight.kind}", accepted=f"torch.float16 by {kind}")
    if x.ndim != 2 or x.shape[1] != weight.k:
        raise LaunchError("linear: x", found=tuple(x.shape), accepted=f"[tokens, {weight.k}]")
    if (weight.group < CHUNK[kind]) != (scales > 1):
        raise LaunchError("linear: group", found=weight.group, accepted="the groups that the headers foretold")
    if weight.bias is not None and weight.bias.dtype != torch.float16:
        raise LaunchError("linear: bias", found=weight.bias.dtype, accepted="torch.float16")


def limits(problem: Problem) -> str | None:
    if not problem.stored:
        return "needs to know how the weight is stored"
    k, layout = problem.size("k"), layout_of(problem.stored)
    if layout not in KINDS:
        return f"is for packed weights ({', '.join(KINDS)}); this one is {layout}"
    if any(kind.endswith("+order") for kind in problem.stored):
        return "needs groups of neighbouring columns; the weight's stand apart (actorder)"
    groups = {group_of(kind, k) for kind in problem.stored}
    if len(groups) > 1:
        return f"needs one size of groups; the parts have {sorted(groups)}"
    return unfit(layout, k, groups.pop())


KERNELS = (
    CudaKernel(
        "cuda.sm70_linear",
        "linear",
        bind,
        limits,
        lambda problem: max(source(kind, tiles).shared for kind in NUMBERS for tiles in TILES),
        frozenset({"bias"}),
        frozenset({VOLTA}),
        LAYOUT,
    ),
)
