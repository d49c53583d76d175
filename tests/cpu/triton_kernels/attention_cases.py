"""Cases of attention over pages: scattered blocks, columns that hold nothing, NaN wherever nothing may be read."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from offroad.models.spec import AttentionSpec, RopeSpec
from offroad.ops import kv
from offroad.ops.attention import TOLERANCE
from offroad.ops.spec import Problem
from offroad.run.rows import PagedView, Rows

BLOCK = 64


@dataclass(frozen=True)
class Case:
    starts: tuple[int, ...]
    widths: tuple[int, ...]
    kv_heads: int = 2
    group: int = 1
    dim: int = 16
    window: int | None = None
    softcap: float | None = None
    dtype: torch.dtype = torch.float32
    kv: torch.dtype = torch.float32
    scaled: bool = False
    pages_only: bool = False
    retired: bool = False  # early tokens of a chunk have no block any more
    blocks: int = 0  # of the pool; 0: as many as needed
    device: str = "cpu"
    seed: int = 0


def problem(case: Case, phase: str) -> Problem:
    sizes = {"heads": case.kv_heads * case.group, "kv_heads": case.kv_heads, "head_dim": case.dim, "block": BLOCK}
    sizes |= {"window": case.window} if case.window else {}
    features = {"window": case.window, "softcap": case.softcap, "pages_only": case.pages_only}
    names = [str(dtype).removeprefix("torch.") for dtype in (case.dtype, case.kv)]
    return Problem("attention", phase, *names, tuple(sizes.items()), frozenset(n for n, on in features.items() if on))


def tolerance(case: Case) -> dict[str, float]:
    bound = TOLERANCE[str(case.dtype).removeprefix("torch.")]
    return {"atol": bound.absolute, "rtol": bound.relative}


def rows_of(starts: np.ndarray, widths: np.ndarray, slots: np.ndarray, device: str) -> Rows:
    """Verify rows with the given starts and widths."""
    offset = np.cumsum(widths) - widths
    packed = np.stack((slots, starts, widths, offset)).astype(np.int32)
    on_device = torch.from_numpy(packed).to(device)
    positions = np.concatenate([np.arange(s, s + w) for s, w in zip(starts, widths, strict=True)])
    positions_t = torch.from_numpy(positions.astype(np.int64)).to(device)
    return Rows(
        positions_t, positions_t, *packed, *on_device, len(starts), positions_t[:0], np.zeros(len(starts), np.int32)
    )


def make(case: Case) -> tuple:
    """(q, k, v, view, rows, spec) of a case."""
    generator = torch.Generator().manual_seed(case.seed)
    rng = np.random.default_rng(case.seed)
    starts, widths = np.array(case.starts), np.array(case.widths)
    ends = starts + widths
    columns = int(-(-ends.max() // BLOCK)) + 2
    slots = rng.permutation(len(starts)) + 1
    table = torch.zeros((len(starts) + 1, columns), dtype=torch.int32)
    used = 1 + int((-(-ends // BLOCK)).sum())
    pool = max(case.blocks, used + 3)
    ids = rng.permutation(np.arange(pool - used - 2, pool - 1) if case.blocks else np.arange(1, pool))
    scales = (torch.rand(2, case.kv_heads, generator=generator) + 0.5).to(case.device) if case.scaled else (None, None)
    shape = (pool, BLOCK, case.kv_heads, case.dim)
    pages = [torch.empty(shape, dtype=case.kv, device=case.device) for _ in "kv"]
    for plane in pages:
        part = plane if not case.blocks else plane[pool - used - 3 :]
        part.view(torch.uint8).fill_(0x7F if case.kv.itemsize == 1 else 0xFF)  # NaN in every kind
        if case.blocks:
            plane[0].view(torch.uint8).fill_(0x7F if case.kv.itemsize == 1 else 0xFF)
    view = PagedView(*pages, table.to(case.device), BLOCK, case.window, not case.pages_only, *scales)
    taken = 0
    for slot, start, end in zip(slots, starts, ends, strict=True):
        low = max(0, start - case.window + 1) if case.window else 0
        first = low // BLOCK
        if case.retired and case.window:
            first = max(0, end - case.window) // BLOCK if start == 0 else first
        last = -(-end // BLOCK)
        view.table[slot, first:last] = torch.from_numpy(ids[taken : taken + last - first].astype(np.int32))
        taken += last - first
        stop = end if case.pages_only else start
        old = torch.arange(low, stop, device=case.device)
        if len(old):
            values = _random((2, len(old), case.kv_heads, case.dim), generator, case)
            kv.write(view, view.table[slot, old // BLOCK].long(), old % BLOCK, *values)
    tokens, heads = int(widths.sum()), case.kv_heads * case.group
    q = _random((tokens, heads, case.dim), generator, case)
    k, v = _random((2, tokens, case.kv_heads, case.dim), generator, case)
    spec = AttentionSpec(
        heads, case.kv_heads, case.dim, case.dim**-0.5, RopeSpec(case.dim, 1e4), case.window, softcap=case.softcap
    )
    rows = rows_of(starts, widths, slots, case.device)
    return (q, None, None, view, rows, spec) if case.pages_only else (q, k, v, view, rows, spec)


def _random(shape: tuple[int, ...], generator: torch.Generator, case: Case) -> torch.Tensor:
    return torch.randn(shape, generator=generator).to(case.dtype).to(case.device)
