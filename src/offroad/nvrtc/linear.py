"""Linears over packed weights for SM70: what kernels/linear.cu is specialised by, and how it is launched."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from offroad.device.profile import DeviceProfile
from offroad.nvrtc import launch, workspace
from offroad.nvrtc.compile import Source
from offroad.nvrtc.kernel import VOLTA, CudaKernel
from offroad.nvrtc.launch import LaunchError
from offroad.nvrtc.pack import CHUNK, COLUMNS, KINDS, LAYOUT, NUMBERS, LaneTiles, unfit
from offroad.ops.spec import Bound, Problem
from offroad.quant.scheme import fused_group, layout_of

ARGS = "@10Pq6ifi"  # `Args` of the kernel
TILES = (1, 2, 4, 8)  # row tiles of a block; a warp has all of them, more rows make more blocks
THREADS = 256
MAX_SPLITS = 8
MAX_GRID = 65_535  # blocks in the second dimension
SORTED = 2  # rows an expert, on average, from which on chunks are sorted by expert: each is read once, not for each row


def source(kind: str, tiles: int, scales: int = 1) -> Source:
    """For weights of `kind` (`q4`, ..), 8 * `tiles` tokens a block, and `scales` scales in a lane's 16 bytes."""
    step = step_of(kind, tiles)
    shared = max(2 * 8 * tiles * (8 // tiles * step + 8), 4 * 8 * 8 * tiles * 32 if tiles < 8 else 0) + 32 * tiles
    defines = {"KIND": NUMBERS[kind], "TILES_M": tiles, "WARPS_N": tiles, "SCALES": scales, "STEP": step}
    blocks = 1 if (kind, tiles) == ("q8", 8) else 2  # for two it would spill
    return Source("linear.cu", (*defines.items(), ("MIN_BLOCKS", blocks)), shared)


def step_of(kind: str, tiles: int) -> int:
    """k's of a warp at a time: four loads of 16 bytes in flight a lane, fewer where sums take the registers."""
    return 32 if tiles == 8 else CHUNK[kind] * (4 if tiles <= 2 else 2)


def splits_of(units: int, n: int, k: int, kind: str, tiles: int, row_blocks: int) -> int:
    """Blocks that share a tile's k: two blocks on every SM, each with two steps at least; from sizes alone."""
    blocks = -(-n // (COLUMNS * tiles)) * row_blocks
    steps = -(-k // (8 // tiles * step_of(kind, tiles)))
    return max(1, min(2 * units // blocks, steps // 2, MAX_SPLITS))


@dataclass(frozen=True)
class Parts:
    """Rows sorted by expert and cut into parts of at most 8 * `tiles`: `table` int32 [parts, 3] has the expert of each,
    where it begins in `order` int64 [rows], and how many rows it has (0: the part is not there)."""

    tiles: int
    table: torch.Tensor
    order: torch.Tensor

    @classmethod
    def of(cls, experts: torch.Tensor, count: int, tiles: int) -> Parts:
        """Of int64 [rows] experts below `count`; nothing waits for the device."""
        size, device = 8 * tiles, experts.device
        rows = torch.zeros(count, dtype=torch.int64, device=device)
        rows.scatter_add_(0, experts, torch.ones_like(experts))
        parts = (rows + size - 1) // size
        number = torch.arange(cls.most(len(experts), count, tiles), device=device)
        ends = parts.cumsum(0)
        expert = torch.searchsorted(ends, number, right=True)
        there, expert = expert < count, expert.clamp(max=count - 1)
        before = (number - (ends - parts)[expert]) * size
        here = (rows[expert] - before).clamp(max=size)
        begin = (rows.cumsum(0) - rows)[expert] + before
        table = torch.stack((expert, begin, torch.where(there, here, 0)), dim=1).int()
        return cls(tiles, table, torch.argsort(experts, stable=True))

    @staticmethod
    def most(rows: int, count: int, tiles: int) -> int:
        """Parts that there can be."""
        return min(rows, rows // (8 * tiles) + count)


@dataclass(frozen=True)
class _Linears:
    """The kernels for one kind of weights, with the counters of their splits."""

    kind: str
    scales: int
    units: int
    kernels: dict[int, launch.Function]
    tickets: dict[tuple[torch.device, int], torch.Tensor] = field(default_factory=dict)

    def run(
        self,
        x: torch.Tensor,
        weight: LaneTiles,
        out: torch.Tensor,
        experts: torch.Tensor | None = None,
        parts: Parts | None = None,
    ) -> None:
        """out [rows, n] = x W^T; with `experts` int64 [rows], row i takes that expert's n rows of the weight, and row
        i / (rows / len(x)) of x. With `parts` likewise, experts as those say."""
        rows, n = out.shape
        if parts is not None:
            tiles, row_blocks = parts.tiles, len(parts.table)
        else:
            tiles = 1 if experts is not None else next((size for size in TILES if rows <= 8 * size), TILES[-1])
            row_blocks = rows if experts is not None else -(-rows // (8 * tiles))
        columns = -(-n // (COLUMNS * tiles))
        splits = 1 if parts else splits_of(self.units, n, weight.k, self.kind, tiles, row_blocks)
        partial = torch.empty(0 if splits == 1 else splits * rows * n, device=x.device)
        turn = _tickets(self.tickets, x.device, row_blocks * columns if splits > 1 else 0)
        pointers = (x, out, weight.bias, weight.tensors[self.kind], weight.tensors["s"], partial, turn, experts)
        pointers += (None, None) if parts is None else (parts.table, parts.order)
        self.kernels[tiles].launch(
            (columns, row_blocks, splits),
            THREADS,
            *(0 if tensor is None else tensor.data_ptr() for tensor in pointers),
            x.stride(0),
            *(rows, n, weight.k, weight.group, weight.tensors["s"].shape[1], splits),
            *(weight.alpha, rows // x.shape[0]),
        )


def _linears(device: DeviceProfile, problem: Problem, sizes: tuple[int, ...]) -> _Linears:
    kind = KINDS[layout_of(problem.stored)]
    group = fused_group(problem.stored, problem.size("k"))
    scales = CHUNK[kind] // 16 if group == 16 else 1
    kernels = {tiles: launch.load(source(kind, tiles, scales), "linear", ARGS) for tiles in sizes}
    return _Linears(kind, scales, device.units, kernels)


def bind(device: DeviceProfile, problem: Problem) -> Bound:
    """The op `linear`; chunks of many tokens take the way through a workspace."""
    linears = _linears(device, problem, TILES)
    many = None
    if problem.phase == "prefill":
        many = workspace.Dequantiser.of(linears.kind, linears.scales)

    def linear(x: torch.Tensor, weight: LaneTiles) -> torch.Tensor:
        x = _usable(x)
        _check(x, weight, linears)
        if many is not None and x.shape[0] >= workspace.CROSSOVER:
            return many.linear(x, weight)
        out = torch.empty((x.shape[0], weight.n), dtype=x.dtype, device=x.device)
        if len(x):  # none: a chunk that wants nothing, in layers that store nothing
            linears.run(x, weight, out)
        return out

    return linear


def bind_grouped(device: DeviceProfile, problem: Problem) -> Bound:
    """The op `grouped_linear`: a block of the grid for each token and expert of its; in chunks with enough rows for
    each expert, for each part of the rows that an expert has."""
    chunks = problem.phase == "prefill"
    linears = _linears(device, problem, TILES if chunks else (1,))

    def grouped_linear(x: torch.Tensor, experts: torch.Tensor, weight: LaneTiles, count: int) -> torch.Tensor:
        x = _usable(x.flatten(0, 1) if x.ndim == 3 else x)
        _check(x, weight, linears)
        n = weight.n // count
        if not len(x):
            return x.new_empty((*experts.shape, n))
        if n % COLUMNS or experts.dtype != torch.int64 or experts.numel() % x.shape[0]:
            found = f"{count} x {n} rows, {experts.dtype} {tuple(experts.shape)} for {x.shape[0]} rows of x"
            raise LaunchError("grouped_linear", found=found, accepted=f"experts of a multiple of {COLUMNS} rows, int64")
        out = torch.empty((*experts.shape, n), dtype=x.dtype, device=x.device)
        flat, chosen, share = out.flatten(0, 1), experts.reshape(-1), experts.numel() // x.shape[0]
        rows = flat.shape[0]
        tiles = next((size for size in TILES if rows <= 8 * size * count), TILES[-1])
        if chunks and rows >= SORTED * count and Parts.most(rows, count, tiles) <= MAX_GRID:
            linears.run(x, weight, flat, parts=Parts.of(chosen, count, tiles))
            return out
        step = MAX_GRID // share * share
        for at in range(0, flat.shape[0], step):
            part = slice(at, at + step)
            linears.run(x[at // share : -(-(at + step) // share)], weight, flat[part], chosen[part])
        return out

    return grouped_linear


def _usable(x: torch.Tensor) -> torch.Tensor:
    """x itself if its rows are whole 16-byte words, else a copy."""
    return x if x.stride(1) == 1 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0 else x.contiguous()


def _tickets(kept: dict[tuple[torch.device, int], torch.Tensor], device: torch.device, count: int) -> torch.Tensor:
    """Counters that are 0 between launches: kernels leave them so. They are never given back: a captured graph may hold
    their address."""
    place = (device, count)
    if place not in kept:
        kept[place] = torch.zeros(count, dtype=torch.int32, device=device)
    return kept[place]


def _check(x: torch.Tensor, weight: LaneTiles, linears: _Linears) -> None:
    kind = linears.kind
    if weight.kind != kind or x.dtype != torch.float16:
        raise LaunchError("linear", found=f"{x.dtype} by {weight.kind}", accepted=f"torch.float16 by {kind}")
    if x.ndim != 2 or x.shape[1] != weight.k:
        raise LaunchError("linear: x", found=tuple(x.shape), accepted=f"[tokens, {weight.k}]")
    if (weight.group < CHUNK[kind]) != (linears.scales > 1):
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
    group = fused_group(problem.stored, k)
    return unfit(layout, k, group) if group else "needs groups that divide k where those of parts differ"


def grouped_limits(problem: Problem) -> str | None:
    n = problem.size("n") // problem.size("experts")
    return f"needs experts of a multiple of {COLUMNS} rows; asked: {n}" if n % COLUMNS else limits(problem)


def _shared(problem: Problem) -> int:
    return max(source(kind, tiles).shared for kind in NUMBERS for tiles in TILES)


def _workspace(problem: Problem) -> int:
    return workspace.workspace(problem.size("n"), problem.size("k")) if problem.phase == "prefill" else 0


_ONLY = frozenset({VOLTA})  # elsewhere m8n8k4 is scalar code, but for 7.5
KERNELS = (
    CudaKernel(
        "cuda.sm70_linear",
        "linear",
        bind,
        limits,
        _shared,
        frozenset({"bias"}),
        _ONLY,
        LAYOUT,
        workspace=_workspace,
    ),
    CudaKernel(
        "cuda.sm70_grouped_linear", "grouped_linear", bind_grouped, grouped_limits, _shared, frozenset(), _ONLY, LAYOUT
    ),
)
