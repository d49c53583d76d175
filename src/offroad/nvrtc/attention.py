"""Attention over pages for SM70: what kernels/attention.cu is specialised by, and how it is launched."""

from __future__ import annotations

import torch

from offroad.device.profile import DeviceProfile
from offroad.models.spec import AttentionSpec
from offroad.nvrtc import launch
from offroad.nvrtc.compile import Source
from offroad.nvrtc.kernel import CudaKernel
from offroad.nvrtc.launch import LaunchError, Shapes
from offroad.ops.spec import Bound, Problem
from offroad.run.rows import PagedView, Rows

ARGS = "@4P2PP2P4P2P6iqqq4i8i2f"  # `Args` of the kernel
HEAD_DIMS = (32, 64, 128, 256, 512)
KV = {torch.float16: 0, torch.float8_e5m2: 1}
THREADS = 256
MIN_SPAN = 128  # keys that are worth a block of their own
MAX_SPLITS = 128
_SHAPES = Shapes.of(
    "attention",
    q="tokens heads dim",
    k="tokens kv_heads dim",
    v="tokens kv_heads dim",
    k_pages="blocks block kv_heads dim",
    v_pages="blocks block kv_heads dim",
    k_scale="kv_heads",
    v_scale="kv_heads",
)


def source(dim: int, tiles: int, e5m2: bool) -> Source:
    """For heads of `dim` and 8 * `tiles` packed query rows a block.

    The tile of keys is what gives two blocks an SM without spills where one tile of rows is enough, else what fits.
    """
    keys = {32: 128, 64: 128, 128: 64, 256: 32 if tiles == 1 else 64, 512: 32}[dim]
    shared = shared_bytes(dim, tiles, keys)
    blocks = 2 if tiles == 1 and dim < 512 else 1
    defines = (("HEAD_DIM", dim), ("TILES_M", tiles), ("TILE_N", keys), ("MIN_BLOCKS", blocks), ("KV_E5M2", int(e5m2)))
    return Source("attention.cu", defines, shared)


def shared_bytes(dim: int, tiles: int, keys: int) -> int:
    """Queries, a tile of keys or values, scores (a matrix for each part of the sum over dim), weights, row figures."""
    rows, room = 8 * tiles, 8 // (keys // 32)
    parts = room // min(tiles, room)
    return 2 * (rows + keys) * (dim + 8) + 4 * parts * rows * (keys + 4) + 2 * rows * (keys + 8) + 12 * rows


def chunk_tiles(dim: int) -> int:
    """Row tiles of a block for chunks: the most whose sums stay in registers and whose tiles fit 96 KB."""
    return 4 if dim == 512 else 8


def splits_of(units: int, kv_heads: int, keys: int) -> int:
    """Splits of a sequence's keys: blocks for two on every SM with a single sequence, from fixed sizes alone."""
    return max(1, min(-(-2 * units // kv_heads), MAX_SPLITS, -(-keys // MIN_SPAN)))


def bind(device: DeviceProfile, problem: Problem) -> Bound:
    """The op `attention`; verify rows split their keys over blocks, chunks do not."""
    dim, e5m2 = problem.size("head_dim"), problem.kv_dtype == "float8_e5m2"
    sizes = (1, 4) if problem.phase != "prefill" else (chunk_tiles(dim),)
    kernels = {tiles: launch.load(source(dim, tiles, e5m2), "attention", ARGS) for tiles in sizes}
    # Spans are whole tiles of keys, whose size goes with the tiles of rows: what adds splits must know the same ones.
    finish = {tiles: launch.load(source(dim, tiles, e5m2), "finish", ARGS, shares=False) for tiles in sizes}
    store = launch.load(source(dim, sizes[0], e5m2), "store", ARGS, shares=False)

    def attention(
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        view: PagedView,
        rows: Rows,
        spec: AttentionSpec,
    ) -> torch.Tensor:
        q, k, v = _usable(q), _usable(k), _usable(v)
        _check(q, k, v, view, e5m2)
        tokens, heads, _ = q.shape
        count, widest = len(rows.slot), int(rows.width.max(initial=0))
        packed = widest * (heads // spec.kv_heads)
        tiles = next((size for size in sizes if packed <= 8 * size), sizes[-1])
        visible = view.table.shape[1] * view.block
        visible = min(visible, view.window + widest) if view.window else visible
        splits = splits_of(device.units, spec.kv_heads, visible) if problem.phase != "prefill" else 1
        out = torch.empty((tokens, heads * dim), dtype=q.dtype, device=q.device)
        partial = torch.empty(0 if splits == 1 else tokens * heads * splits * (dim + 2), device=q.device)
        arguments = _arguments(q, k, v, out, partial, view, rows, spec, splits)
        chunks = -(-packed // (8 * tiles))
        kernels[tiles].launch((chunks * spec.kv_heads, count, splits), THREADS, *arguments)
        if splits > 1:
            finish[tiles].launch((heads, count, widest), dim // 4, *arguments)
        if k is not None and view.writable:
            store.launch((spec.kv_heads, count, widest), dim // 8, *arguments)
        return out

    return attention


def _usable(x: torch.Tensor | None) -> torch.Tensor | None:
    """x itself if its heads are rows of whole 16-byte words, else a copy."""
    if x is None or (x.stride(2) == 1 and x.stride(0) % 8 == 0 and x.stride(1) % 8 == 0 and x.data_ptr() % 16 == 0):
        return x
    return x.contiguous()


def _check(q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None, view: PagedView, e5m2: bool) -> None:
    sizes = {"block": view.block, "dim": q.shape[-1]}
    _SHAPES.check(sizes, q=q, k=k, v=v, k_pages=view.k, v_pages=view.v, k_scale=view.k_scale, v_scale=view.v_scale)
    wanted = torch.float8_e5m2 if e5m2 else torch.float16
    if q.dtype != torch.float16 or view.k.dtype != wanted:
        raise LaunchError("attention", found=f"{q.dtype} over {view.k.dtype}", accepted=f"torch.float16 over {wanted}")
    if view.k.stride(3) != 1 or view.v.stride(3) != 1 or view.table.dtype != torch.int32:
        raise LaunchError("attention: pages", found=view.k.stride(), accepted="rows of neighbouring numbers")


def _arguments(
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    out: torch.Tensor,
    partial: torch.Tensor,
    view: PagedView,
    rows: Rows,
    spec: AttentionSpec,
    splits: int,
) -> tuple[float, ...]:
    """`Args` of the kernel, in its order."""
    tokens, heads, dim = q.shape
    fresh = (0, 0, 0, 0) if k is None else (*k.stride()[:2], *v.stride()[:2])
    stats = partial.data_ptr() + 4 * tokens * heads * splits * dim if splits > 1 else 0
    _, slots, starts, widths, offsets = rows.addresses
    return (
        *(0 if x is None else x.data_ptr() for x in (q, k, v, out, view.k, view.v, view.table)),
        *(0 if x is None else x.data_ptr() for x in (view.k_scale, view.v_scale)),
        *(slots, starts, widths, offsets),
        *(partial.data_ptr(), stats),
        *(*q.stride()[:2], *fresh),
        *(view.table.stride(0), view.k.stride(0), view.v.stride(0)),
        *(*view.k.stride()[1:3], *view.v.stride()[1:3]),
        *(view.block, view.window or 0, spec.heads, spec.kv_heads, splits, MIN_SPAN, int(view.writable), 0),
        *(spec.scale, spec.softcap or 0.0),
    )


def limits(problem: Problem) -> str | None:
    dim = problem.size("head_dim")
    if dim not in HEAD_DIMS:
        return f"needs a head size of {', '.join(map(str, HEAD_DIMS))}; asked: {dim}"
    if problem.kv_dtype not in ("", "float16", "float8_e5m2"):
        return f"reads a KV cache in float16 or float8_e5m2; asked: {problem.kv_dtype}"
    return None


def shared_of(problem: Problem) -> int:
    dim = problem.size("head_dim")
    tiles = chunk_tiles(dim) if problem.phase == "prefill" else 4
    return source(dim, tiles, False).shared


KERNELS = (
    CudaKernel(
        "cuda.sm70_attention",
        "attention",
        bind,
        limits,
        shared_of,
        frozenset({"window", "softcap", "pages_only"}),
    ),
)
