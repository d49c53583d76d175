"""Attention of few queries a row over pages on Hopper: what kernels/attention_few.cu is specialised by, and how it is
launched. Partitions of a history are those of Triton's kernel; one launch gives the answer. Plans ask this module for
sizes, so that Triton is imported by launches only."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from offroad.device.profile import DeviceProfile
from offroad.models.spec import AttentionSpec
from offroad.nvrtc import launch
from offroad.nvrtc.compile import Source
from offroad.nvrtc.linear_args import SHARED, TARGET
from offroad.nvrtc.tensor_map import map_of
from offroad.ops.spec import Bound, Problem
from offroad.run.rows import PagedView, Rows
from offroad.triton_kernels import attention as paged
from offroad.triton_kernels.memory import COUNTERS, MEMORY

ARGS = "@32Q12Q2q5i2f52x"  # `Args` of the kernel, to its alignment
WARPS = 8
RINGS = 192 << 10  # bytes of slots of a block
MOST_ROWS = 96  # of a launch
HELD = 16  # blocks whose numbers a warp holds
LISTED = 14  # bytes of what a block has of a row
DIMS = (64, 128, 256, 512)  # of heads; the first one's rows have 128 bytes in bf16 only
EARLY = 64  # tokens of steps whose kernels start early: an H200 decodes 32 sequences of Qwen3-8B 4 % faster so, 64 2 %
LEAST_BLOCK = 16  # tokens: a copy has as many rows at least
LEAST_STREAMS = 24  # rows times KV heads: with fewer, Triton's programs of four warps are done sooner, unless a history
LONG = 65_536  # may have so many positions
MOST_WIDE = 512  # dims times tiles of 8 queries of an item: what registers hold


@dataclass(frozen=True)
class Kind:
    """What a kernel is for: dims of a head, KV heads, queries of one and a token, the number of the kind of stored
    rows (`kv_rows`), tokens of a block of pages, whether there is a window and a softcap."""

    dim: int
    kv_heads: int
    group: int
    stored: int = 0
    block: int = 64
    window: bool = False
    softcap: bool = False

    @property
    def row(self) -> int:
        """Bytes of a stored row."""
        return self.dim * (1 if self.stored else 2)

    @property
    def keys(self) -> int:
        """Keys of a step: as many as 8 KB have, 16 at least."""
        return max(16, 8192 // self.row)

    @property
    def warps(self) -> int:
        """Of a block: half as many where slots are so large that their rings would have one each."""
        return WARPS if 16 * self.row <= 8192 else WARPS // 2


def source(kind: Kind, queries: int) -> Source:
    """For rows of up to so many queries of a KV head."""
    tiles, parts = tiles_of(kind.dim, queries)
    keys, warps = kind.keys, kind.warps
    slots = RINGS // warps // (keys * kind.row)
    shared = 1024 + RINGS + warps * (tiles * 8 * kind.dim * 2 + slots * 8 + HELD * 4) + LISTED * MOST_ROWS
    while shared > SHARED:
        slots -= 1
        shared -= warps * (keys * kind.row + 8)
    sizes = {"DIM": kind.dim, "KV_HEADS": kind.kv_heads, "GROUP": kind.group, "KIND": kind.stored, "BLOCK": kind.block}
    sizes |= {"WINDOW": int(kind.window), "SOFTCAP": int(kind.softcap), "TILES": tiles, "PARTS": parts, "KEYS": keys}
    sizes |= {"SAME": paged.EACH, "WARPS": warps, "SLOTS": slots, "MOST_ROWS": MOST_ROWS}
    return Source("attention_few.cu", tuple(sizes.items()), shared, TARGET)


def tiles_of(dim: int, queries: int) -> tuple[int, int]:
    """(tiles of 8 queries of an item, items of a KV head) for a row of so many queries of one KV head."""
    needed = -(-queries // 8)
    each = min(needed, 2, MOST_WIDE // dim)
    return each, -(-needed // each)


def sums_bytes(heads: int, kv_heads: int, dim: int, width: int, partitions: int) -> int:
    """Bytes of what so many partitions of a row give."""
    queries = heads // kv_heads * width
    tiles, parts = tiles_of(dim, queries)
    return kv_heads * parts * tiles * partitions * (min(4, -(-queries // 2)) * dim * 8 + 64)


def partials(device: DeviceProfile, problem: Problem) -> int:
    """Bytes of what partitions give in a launch at most, of rows of any width at their longest."""
    heads, kv_heads, dim, window = paged.sizes_of(problem)
    load, block = problem.load, problem.size("block")
    if not load.rows:
        return 0
    longest = paged.longest(load, block)
    row = sums_bytes(heads, kv_heads, dim, load.width, paged.partitions(window, longest, load.width)[1])
    return min(min(load.rows, MOST_ROWS) * row, max(row, paged.room(device.memory)))


def attend(q: torch.Tensor, view: PagedView, rows: Rows, spec: AttentionSpec, out: torch.Tensor, most: int) -> None:
    """Writes `out` [tokens, heads, dim] of q, whose heads lie side by side, over rows that are in pages already.
    `most`: bytes of what partitions give in a launch."""
    from offroad.triton_kernels.dependent import launching
    from offroad.triton_kernels.linear_run import card

    heads, dim = q.shape[1:]
    kv_heads, widest = view.k.shape[2], int(rows.width.max())
    group, window = heads // kv_heads, view.window or 0
    kind = Kind(dim, kv_heads, group, paged.kind_of(view), view.block, window > 0, spec.softcap is not None)
    made = source(kind, group * widest)
    if q.device.type == "meta":
        launch.rehearse(made, "attend", ARGS)
        return
    tiles, parts = tiles_of(dim, group * widest)
    base, partitions = paged.partitions(window, view.table.shape[1] * view.block, widest)
    row_bytes = sums_bytes(heads, kv_heads, dim, widest, partitions)
    step = max(1, min(MOST_ROWS, most // row_bytes))
    step = -(-len(rows.slot) // -(-len(rows.slot) // step))  # launches alike
    pairs = min(4, -(-group * widest // 2))
    high, chunks = min(view.block, kind.keys), kind.row // 128
    maps = [
        word
        for pages in paged.pages_of(view)
        for word in map_of(pages.data_ptr(), pages.shape[0] * view.block, kv_heads * dim, high, pages.itemsize, chunks)
    ]
    scales = [0 if scale is None else scale.data_ptr() for scale in (view.k_scale, view.v_scale)]
    kernel, sms = launch.load(made, "attend", ARGS), card(q.device).sms
    for first in range(0, len(rows.slot), step):
        count = min(step, len(rows.slot) - first)
        items = count * kv_heads * parts
        space = MEMORY.get(q.device, "partial attention", count * row_bytes, torch.uint8)
        arrived = MEMORY.get(q.device, COUNTERS, 2, torch.int32)
        sizes_at = space.data_ptr() + items * partitions * tiles * pairs * dim * 8
        lists = (t[first:].data_ptr() for t in (rows.slot_t, rows.start_t, rows.width_t, rows.offset_t))
        kernel.launch(
            (min(sms, items * partitions), 1, 1),
            32 * kind.warps,
            *(*maps, q.data_ptr(), out.data_ptr(), view.table.data_ptr(), *lists, *scales),
            *(space.data_ptr(), sizes_at, arrived.data_ptr(), q.stride(0), view.table.stride(0)),
            *(count, window, base.bit_length() - 1, partitions, pairs, spec.scale, spec.softcap or 0.0),
            early=launching(q.shape[0])["PDL"],
        )


def attention(
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    view: PagedView,
    rows: Rows,
    spec: AttentionSpec,
    other: Bound,
    most: int,
) -> torch.Tensor:
    """As `ops.attention.attention`; rows of this step are stored first, and read from pages like older ones. Few rows
    go to the kernel `other`, unless tables are for long histories, of which few have many partitions."""
    long = not view.window and view.table.shape[1] * view.block >= LONG
    if not len(rows.slot) or (not long and len(rows.slot) * view.k.shape[2] < LEAST_STREAMS):
        return other(q, k, v, view, rows, spec)
    q = paged.side_by_side(q)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if k is not None:
        assert v is not None
        paged.store(k, v, view, rows, None)
    attend(q, view, rows, spec, out, most)
    return out.flatten(1)
