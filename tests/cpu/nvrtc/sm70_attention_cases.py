"""Steps over pages for attention: rows of several sequences, pages in any order, NaN wherever nothing may be read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from offroad.models.spec import AttentionSpec, RopeSpec
from offroad.ops import attention as reference
from offroad.ops.spec import Problem
from offroad.run.rows import PagedView, Rows


@dataclass(frozen=True)
class Case:
    """Rows (start, width) of a step; `verify` of them are verify rows."""

    dim: int
    heads: int
    kv_heads: int
    rows: tuple[tuple[int, int], ...]
    window: int | None = None
    softcap: float | None = None
    e5m2: bool = False
    scales: bool = False
    fresh: bool = True
    block: int = 16
    phase: str = "decode"
    columns: int = 0

    @property
    def problem(self) -> Problem:
        sizes = {"head_dim": self.dim, "heads": self.heads, "kv_heads": self.kv_heads, "block": self.block}
        kv = "float8_e5m2" if self.e5m2 else "float16"
        return Problem("attention", self.phase, "float16", kv, tuple(sorted(sizes.items())))

    @property
    def spec(self) -> AttentionSpec:
        return AttentionSpec(
            self.heads,
            self.kv_heads,
            self.dim,
            self.dim**-0.5,
            RopeSpec(self.dim, 1e4),
            self.window,
            softcap=self.softcap,
            own_kv=self.fresh,
        )


def rows_of(parts: Sequence[tuple[int, int]], verify: int, device: str = "cpu") -> Rows:
    """Rows (start, width), row i in slot i + 1."""
    widths = [width for _, width in parts]
    slots = range(1, len(parts) + 1)
    values = (slots, [start for start, _ in parts], widths, np.cumsum([0, *widths[:-1]]))
    arrays = [np.array(list(v), np.int32) for v in values]
    positions = torch.cat([torch.arange(start, start + width) for start, width in parts]).to(device)
    tensors = [torch.from_numpy(a).to(device) for a in arrays]
    nothing = torch.zeros(0, dtype=torch.int64, device=device)
    return Rows(torch.zeros_like(positions), positions, *arrays, *tensors, verify, nothing, np.zeros_like(arrays[2]))


def inputs(case: Case, seed: int = 0, device: str = "cpu"):
    """(q, k, v, view, rows): k and v are strided views of one projection, as rope leaves them."""
    random = torch.Generator().manual_seed(seed)
    tokens = sum(width for _, width in case.rows)
    needed = max(-(-(start + width) // case.block) for start, width in case.rows)
    columns = max(needed, case.columns)
    blocks = len(case.rows) * needed + 3
    q = torch.randn(tokens, case.heads, case.dim, generator=random).half()
    kv = torch.randn(tokens, 2 * case.kv_heads, case.dim, generator=random).half()
    k, v = kv.split(case.kv_heads, dim=1) if case.fresh else (None, None)
    pages = torch.randn(2, blocks, case.block, case.kv_heads, case.dim, generator=random)
    order = torch.randperm(blocks - 1, generator=random)[: len(case.rows) * needed] + 1
    table = torch.zeros(len(case.rows) + 1, columns, dtype=torch.int32)
    table[1:, :needed] = order.view(len(case.rows), needed)
    readable = torch.zeros(blocks, case.block, dtype=torch.bool)
    for slot, (start, width) in enumerate(case.rows, 1):
        first = max(0, start - case.window + 1) if case.window else 0
        table[slot, : first // case.block] = 0
        for position in range(first, start if case.fresh else start + width):
            readable[table[slot, position // case.block], position % case.block] = True
    pages[:, ~readable] = float("nan")
    stored = pages.to(torch.float8_e5m2 if case.e5m2 else torch.float16)
    scales = (torch.rand(2, case.kv_heads, generator=random) + 0.5).to(device) if case.scales else (None, None)
    view = PagedView(
        stored[0].to(device), stored[1].to(device), table.to(device), case.block, case.window, case.fresh, *scales
    )
    verify = 0 if case.phase == "prefill" else len(case.rows)
    move = (lambda x: None if x is None else x.to(device)) if device != "cpu" else (lambda x: x)
    return move(q), move(k), move(v), view, rows_of(case.rows, verify, device)


def expected(case: Case, q, k, v, view: PagedView, rows: Rows) -> tuple[torch.Tensor, PagedView]:
    """What the reference gives in fp32, and the pages that it leaves behind."""
    view = replace(view, k=view.k.clone(), v=view.v.clone())
    wide = [None if x is None else x.float() for x in (q, k, v)]
    return reference.attention(*wide, view, rows, case.spec), view


CASES = (
    Case(64, 6, 2, ((0, 1), (37, 2), (150, 3))),
    Case(128, 8, 1, ((127, 1), (129, 4)), block=32),
    Case(128, 4, 2, ((200, 2), (5, 1)), e5m2=True),
    Case(128, 4, 2, ((90, 3),), e5m2=True, scales=True, window=40),
    Case(256, 6, 1, ((270, 1), (31, 5), (0, 2)), window=64, softcap=20.0),
    Case(256, 8, 2, ((63, 1), (64, 1)), e5m2=True, block=64),
    Case(512, 2, 1, ((100, 1), (33, 2)), fresh=False),
    Case(512, 8, 2, ((40, 5),), window=17),
    Case(64, 4, 4, ((0, 33), (50, 70)), phase="prefill"),
    Case(128, 8, 2, ((0, 5), (130, 40)), phase="prefill", window=32, block=32),
    Case(256, 6, 1, ((17, 30),), phase="prefill", e5m2=True),
    Case(512, 4, 2, ((60, 19),), phase="prefill"),
)
