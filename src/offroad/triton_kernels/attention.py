"""Triton attention over pages as kernels of the registry: what they take, their tiles, and their launches.

One source serves compute capability 8.0 to 12.1; tiles differ by shared memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from offroad.device.profile import DeviceProfile
from offroad.models.spec import AttentionSpec
from offroad.ops.spec import Bound, Load, Problem, Registry
from offroad.run.rows import PagedView, Rows
from offroad.triton_kernels.kernel import TritonKernel
from offroad.triton_kernels.memory import MEMORY

LARGEST_HEAD = 512
WORKSPACE = 128 << 20  # bytes of partial results at once that any card has room for: more rows take more launches
KINDS = {"float8_e5m2": 1, "float8_e4m3fn": 2}  # kv_rows.E5M2, E4M3; others are plain
STORE_WARPS = {1: 4, 8: 8}  # of a program that stores rows, by its tokens
SMALLEST = 128  # tokens of the shortest partition
EACH = 64  # partitions of one length, twice as many of the shortest one
_ITEMSIZE = {"float32": 4, "float8_e5m2": 1, "float8_e4m3fn": 1}
DECODE, PREFILL = frozenset({"decode", "verify", "draft"}), frozenset({"prefill"})
FEATURES = frozenset({"window", "softcap", "pages_only"})


@dataclass(frozen=True)
class Tile:
    """A specialisation's sizes: queries and keys of a tile, warps, stages of prefetch, bytes of shared memory."""

    queries: int
    keys: int
    warps: int
    stages: int
    shared: int


def padded(dim: int) -> int:
    """The least power of 2 that holds a head, 16 at least."""
    return max(16, 1 << (dim - 1).bit_length())


def decode_tile(dim: int, wide: int, room: int) -> Tile:
    """For heads of `dim` and activations or stored rows of `wide` bytes, with `room` bytes of shared memory.

    `shared`: the stages' keys and values, the queries, and the sums on their way to memory, as the compiler lays them
    out; a test compares it with what the compiler reports.
    """
    size, large = padded(dim), room >= 160 << 10
    if size <= 128:
        keys, stages = 64, 3
    elif size == 256:
        keys, stages = 32, 4 if large else 3
    else:
        keys, stages = (32, 3) if room >= 200 << 10 else (16, 3 if large and wide == 2 else 2)
    keys = max(16, keys * 2 // wide)
    shared = 2 * keys * size * wide * (stages - 1) + 16 * size * (wide + 4)
    return Tile(16, keys, 4, stages, shared)


def step_of(dim: int) -> int:
    """Partitions whose results a program that adds them up reads at once."""
    return max(8, min(32, 8192 // padded(dim)))


def prefill_tile(dim: int, wide: int, room: int, eight: bool, hopper: bool) -> Tile:
    """As `decode_tile`, for chunks; `eight`: rows are stored in 8 bits, `hopper`: products are wgmma."""
    size, level, warps = padded(dim), (room >= 160 << 10) + (room >= 200 << 10), 8
    if size == 128 and hopper and wide == 2 and not eight:
        # Two of these are on an SM at once. Widening 8 bits twice as often would cost more than that gains.
        queries, keys, stages, warps = 64, 64, 3, 4
    elif size <= 128:
        queries, keys, stages = (64, 64, 2) if level == 0 else (128, 64, 3)
    elif size == 256:
        queries, keys, stages = ((64, 32, 2), (64, 32, 3), (128, 64, 2))[level]
    else:
        queries, keys, stages = ((32, 16, 2), (32, 32, 2), (64, 32, 2))[level]
    if wide == 4:
        queries, keys = max(16, queries // 8), max(16, keys // 2)
    elif eight and level == 2 and size >= 256 and not hopper:
        keys //= 2  # registers
    buffers = stages if level == 2 else stages - 1  # wgmma reads one while others are filled
    shared = 2 * keys * size * wide * buffers + queries * size * wide + queries * keys * wide + 2048
    if eight and wide == 4:
        shared += 2 * keys * size * buffers  # as they are stored, beside what they are widened to
    return Tile(queries, keys, warps, stages, shared)


def prefill_form(dim: int, eight: bool, window: int | None, hopper: bool) -> dict[str, bool]:
    """Constants of `paged_prefill`. TWICE: keys that every query sees have a loop of their own, which is faster, but
    there are not registers enough for both everywhere. AGAIN: what the end needs is made once more, else registers are
    too few; where they are not, loops come out faster without: 10 % on an H200."""
    size = padded(dim)
    twice = not window and size <= 256
    return {"TWICE": twice, "AGAIN": not (hopper and twice and size == 256 and not eight)}


def wide(dtype: str, kv_dtype: str) -> int:
    """Bytes of a number in tiles: 8-bit rows are widened there."""
    return 4 if "float32" in (dtype, kv_dtype) else 2


def _wide(problem: Problem) -> int:
    return wide(problem.dtype, problem.kv_dtype)


def precision_of(dtype: str) -> str:
    """fp32 activations are multiplied as such: the CPU's answers are what they are compared with."""
    return "ieee" if dtype == "float32" else "tf32"


def limits(phases: frozenset[str]) -> Any:
    """The part of `check` that is for both kernels, in these phases."""

    def of(device: DeviceProfile, problem: Problem) -> str | None:
        if problem.phase not in phases:
            return f"is for {', '.join(sorted(phases))}; asked: {problem.phase}"
        if problem.size("head_dim") > LARGEST_HEAD:
            return f"takes heads of up to {LARGEST_HEAD}; asked: {problem.size('head_dim')}"
        if problem.size("head_dim") % 16:
            return f"takes heads that are multiples of 16; asked: {problem.size('head_dim')}"
        if "window" in problem.features and problem.size("window") < 2:
            return "takes windows of 2 positions or more; asked: 1"
        if problem.kv_dtype == "float8_e4m3fn" and not device.has("cvt_e4m3"):
            return f"reads e4m3 rows by cvt_e4m3, which {device.name} has not; use --kv-cache-dtype fp8_e5m2"
        return None

    return of


def partition_of(position: int, base: int, grows: bool) -> int:
    """Number of the partition that holds a position, as `paged_decode.partition`."""
    times = (position // (2 * EACH * base)).bit_length() if grows else 0
    return EACH * times + position // (base << times)


def partitions(window: int, longest: int, width: int) -> tuple[int, int]:
    """(first length of partitions, how many a token can have): of the item and of the table's size alone, and of the
    widest row."""
    if window:
        base = max(SMALLEST, 1 << (window // 8).bit_length() >> 1)
        return base, (window + width - 2) // base + 2
    return SMALLEST, partition_of(longest - 1, SMALLEST, True) + 1


def _partitions(view: PagedView, width: int) -> tuple[int, int]:
    return partitions(view.window or 0, view.table.shape[1] * view.block, width)


def sizes_of(problem: Problem) -> tuple[int, int, int, int]:
    """(heads, KV heads, head dim, window or 0)."""
    sizes = dict(problem.sizes)
    return sizes["heads"], sizes["kv_heads"], sizes["head_dim"], sizes.get("window", 0)


def room(memory: int) -> int:
    """Bytes of partial results at once on a card of `memory` bytes."""
    return max(WORKSPACE, memory // 256)


def longest(load: Load, block: int) -> int:
    """Positions that a row's columns of the tables are for."""
    return (-(-(load.length + load.width) // block) + 1) * block


def partials(device: DeviceProfile, problem: Problem) -> int:
    """Bytes of partial results of a launch at most, of rows of any width at their longest: more narrow ones fit."""
    heads, _, dim, window = sizes_of(problem)
    load, block = problem.load, dict(problem.sizes).get("block", 1)
    if not load.rows:
        return 0
    row = load.width * heads * partitions(window, longest(load, block), load.width)[1] * (dim + 2) * 4
    return min(load.rows * row, max(row, room(device.memory)))


def _fresh(device: DeviceProfile, problem: Problem) -> int:
    """Bytes of a step's own rows as they are stored in pages; values of a fused projection do not lie side by side."""
    _, kv_heads, dim, _ = sizes_of(problem)
    return 2 * problem.load.tokens * kv_heads * dim * _ITEMSIZE.get(problem.kv_dtype, 2)


def side_by_side(x: torch.Tensor) -> torch.Tensor:
    """x [tokens, heads, dim] with heads side by side in a token's row."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


def pages_of(view: PagedView) -> tuple[torch.Tensor, torch.Tensor]:
    assert view.k.is_contiguous(), "pages lie in one piece"
    assert view.v.is_contiguous(), "pages lie in one piece"
    return (view.k.view(torch.uint8), view.v.view(torch.uint8)) if view.k.dtype.itemsize == 1 else (view.k, view.v)


def kind_of(view: PagedView) -> int:
    return KINDS.get(str(view.k.dtype).removeprefix("torch."), 0)


def store(
    k: torch.Tensor, v: torch.Tensor, view: PagedView, rows: Rows, fresh: tuple[torch.Tensor, torch.Tensor] | None
) -> None:
    """Stores a step's rows in pages if the view is writable, and as they are stored there in `fresh` if given."""
    from offroad.triton_kernels.dependent import launching
    from offroad.triton_kernels.kv_rows import store_rows

    assert view.writable, "a reader of another layer's pages has no rows of its own"
    k, v = side_by_side(k), side_by_side(v)
    k_pages, v_pages = pages_of(view)
    k_fresh, v_fresh = fresh or (k_pages, v_pages)
    k_scale, v_scale = (rows.start_t if x is None else x for x in (view.k_scale, view.v_scale))
    widest = int(rows.width.max())
    tokens = 1 if widest == 1 else 8  # few sizes, each of which is compiled
    kv_heads, dim = k.shape[1:]
    store_rows[(len(rows.slot), -(-widest // tokens), kv_heads)](
        k, v, k_pages, v_pages, k_fresh, v_fresh,
        view.table, rows.slot_t, rows.start_t, rows.width_t, rows.offset_t, k_scale, v_scale,
        k.stride(0), v.stride(0), view.table.stride(0),
        KV_HEADS=kv_heads, DIM=dim, BLOCK_D=padded(dim), BLOCK=view.block, TOKENS=tokens, KIND=kind_of(view),
        SCALED=view.k_scale is not None, PAGES=view.writable, FRESH=fresh is not None, num_warps=STORE_WARPS[tokens],
        **launching(k.shape[0]),
    )  # fmt: skip


def bind_decode(device: DeviceProfile, problem: Problem) -> Bound:
    """Attention of few queries a row, over pages split among programs."""
    from offroad.triton_kernels.dependent import launching
    from offroad.triton_kernels.paged_decode import paged_decode, sum_partitions

    heads, kv_heads, dim = (problem.size(name) for name in ("heads", "kv_heads", "head_dim"))
    tile = decode_tile(dim, _wide(problem), device.shared_per_block)
    group, block_d = heads // kv_heads, padded(dim)
    precision = precision_of(problem.dtype)
    programs = 4 * device.units

    def launch(
        q: torch.Tensor, out: torch.Tensor, view: PagedView, rows: Rows, spec: AttentionSpec, part: slice, widest: int
    ) -> None:
        """Rows `part` of the step."""
        count = part.stop - part.start
        first = int(rows.offset[part.start])
        tokens = (int(rows.offset[part.stop]) if part.stop < len(rows.slot) else q.shape[0]) - first
        base, partitions = _partitions(view, widest)
        numbers = tokens * heads * partitions
        space = MEMORY.get(q.device, "partial attention", numbers * (dim + 2), torch.float32)
        sums, largest, total = space, space[numbers * dim :], space[numbers * (dim + 1) :]
        tiles = -(-group * widest // tile.queries)
        most_splits = 2**31 // (view.table.shape[1] * view.block)  # ends of splits are of 32 bits on their way
        splits = max(1, min(partitions, programs // (count * kv_heads * tiles), most_splits))
        scaled = view.k_scale is not None
        k_scale, v_scale = (view.k_scale, view.v_scale) if scaled else (space, space)
        k_pages, v_pages = pages_of(view)
        lists = (rows.slot_t[part], rows.start_t[part], rows.width_t[part], rows.offset_t[part])
        window = view.window or 0
        paged_decode[(count, kv_heads * tiles, splits)](
            q, k_pages, v_pages, view.table, *lists, k_scale, sums, largest, total,
            spec.scale, spec.softcap or 0.0, q.stride(0), view.table.stride(0), partitions, first,
            KV_HEADS=kv_heads, GROUP=group, DIM=dim, BLOCK_D=block_d, BLOCK_M=tile.queries, BLOCK=view.block,
            TILE=tile.keys, WINDOW=window, BASE=base, KIND=kind_of(view), SCALED=scaled,
            SOFTCAP=spec.softcap is not None, PRECISION=precision, num_warps=tile.warps, num_stages=tile.stages,
            **launching(tokens),
        )  # fmt: skip
        sum_partitions[(tokens, heads)](
            out, sums, largest, total, rows.positions, v_scale, partitions, first,
            HEADS=heads, GROUP=group, DIM=dim, BLOCK_D=block_d, BLOCK_P=padded(partitions), STEP=step_of(dim),
            WINDOW=window, BASE=base, SCALED=scaled, num_warps=4, **launching(tokens),
        )  # fmt: skip

    def attention(
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        view: PagedView,
        rows: Rows,
        spec: AttentionSpec,
    ) -> torch.Tensor:
        """As `ops.attention.attention`; rows of this step are stored first, and read from pages like older ones."""
        q = side_by_side(q)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if not len(rows.slot):  # a chunk that wants nothing, narrowed for layers that store nothing
            return out.flatten(1)
        if k is not None:
            assert v is not None
            store(k, v, view, rows, None)
        widest, total = int(rows.width.max()), len(rows.slot)
        row_bytes = widest * heads * _partitions(view, widest)[1] * (dim + 2) * 4
        step = max(1, room(device.memory) // row_bytes)
        for first in range(0, total, step):
            launch(q, out, view, rows, spec, slice(first, min(total, first + step)), widest)
        return out.flatten(1)

    return attention


def bind_prefill(device: DeviceProfile, problem: Problem) -> Bound:
    """Attention of chunks: tiles of queries over pages and the step's own rows."""
    from offroad.triton_kernels.paged_prefill import paged_prefill

    heads, kv_heads, dim = (problem.size(name) for name in ("heads", "kv_heads", "head_dim"))
    tile, eight = _prefill_tile(device, problem), problem.kv_dtype in KINDS
    precision = precision_of(problem.dtype)

    def attention(
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        view: PagedView,
        rows: Rows,
        spec: AttentionSpec,
    ) -> torch.Tensor:
        """As `ops.attention.attention`; rows of this step are stored first, but read from `k` and `v`."""
        q = side_by_side(q)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        k_pages, v_pages = pages_of(view)
        fresh = (k_pages, v_pages)
        if k is not None:
            assert v is not None
            as_is = k.dtype == view.k.dtype and k.is_contiguous() and v.is_contiguous()
            copies = [torch.empty(k.shape, dtype=k_pages.dtype, device=k.device) for _ in "kv"]
            fresh = (k, v) if as_is else (copies[0], copies[1])
            store(k, v, view, rows, None if as_is else fresh)
        scaled = view.k_scale is not None
        k_scale, v_scale = (view.k_scale, view.v_scale) if scaled else (rows.start_t, rows.start_t)
        tiles = -(-int(rows.width.max()) * heads // kv_heads // tile.queries)
        paged_prefill[(tiles, kv_heads, len(rows.slot))](
            q, out, k_pages, v_pages, *fresh, view.table, rows.slot_t, rows.start_t, rows.width_t, rows.offset_t,
            k_scale, v_scale, spec.scale, spec.softcap or 0.0, q.stride(0), view.table.stride(0), tiles,
            KV_HEADS=kv_heads, GROUP=heads // kv_heads, DIM=dim, BLOCK_D=padded(dim), BLOCK_M=tile.queries,
            BLOCK=view.block, TILE=tile.keys, WINDOW=view.window or 0, OWN=k is not None, KIND=kind_of(view),
            SCALED=scaled, SOFTCAP=spec.softcap is not None, PRECISION=precision,
            **prefill_form(dim, eight, view.window, device.has("wgmma")), num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
        return out.flatten(1)

    return attention


def _prefill_tile(device: DeviceProfile, problem: Problem) -> Tile:
    dim, eight = problem.size("head_dim"), problem.kv_dtype in KINDS
    return prefill_tile(dim, _wide(problem), device.shared_per_block, eight, device.has("wgmma"))


def _shared_prefill(device: DeviceProfile, problem: Problem) -> int:
    return _prefill_tile(device, problem).shared


def _shared_decode(device: DeviceProfile, problem: Problem) -> int:
    return decode_tile(problem.size("head_dim"), _wide(problem), device.shared_per_block).shared


def register(registry: Registry) -> None:
    """Adds the kernels."""
    registry.add(
        TritonKernel(
            "triton.paged_decode",
            "attention",
            bind_decode,
            limits(DECODE),
            _shared_decode,
            FEATURES,
            workspace=partials,
        )
    )
    registry.add(
        TritonKernel(
            "triton.paged_prefill",
            "attention",
            bind_prefill,
            limits(PREFILL),
            _shared_prefill,
            FEATURES,
            temporary=_fresh,
        )
    )
