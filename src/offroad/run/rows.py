"""What one step runs, as tensors on the device: the only argument besides ops that a model's forward gets."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch


@dataclass(frozen=True)
class Rows:
    """Rows of one step; row r runs the tokens `[offset[r], offset[r] + width[r])` of the flat token axis, which sit at
    positions `[start[r], start[r] + width[r])` of slot `slot[r]`. The first `verify` rows are verify rows (width 1 +
    drafts), the others chunks. Host copies serve reference kernels; device kernels read the tensors.
    """

    ids: torch.Tensor  # int64 [tokens]
    positions: torch.Tensor  # int64 [tokens]
    slot: np.ndarray  # int32 [rows]
    start: np.ndarray  # int32 [rows]
    width: np.ndarray  # int32 [rows]
    offset: np.ndarray  # int32 [rows]
    slot_t: torch.Tensor  # int32 [rows], as the arrays above, on the device
    start_t: torch.Tensor
    width_t: torch.Tensor
    offset_t: torch.Tensor
    verify: int
    wanted: torch.Tensor  # int64 [n]: tokens whose logits are needed

    @property
    def tokens(self) -> int:
        return self.ids.shape[0]

    @cached_property
    def addresses(self) -> tuple[int, ...]:
        """Addresses of positions, slots, starts, widths and offsets: every layer's kernels ask for them."""
        return tuple(t.data_ptr() for t in (self.positions, self.slot_t, self.start_t, self.width_t, self.offset_t))

    def parts(self) -> tuple[Rows, Rows, int]:
        """(verify rows, chunk rows, tokens of the former); ids and positions are cut, offsets start from 0 in each."""
        cut = int(self.width[: self.verify].sum())
        head, tail = slice(None, self.verify), slice(self.verify, None)

        def part(rows: slice, tokens: slice, verify: int, shift: int) -> Rows:
            return Rows(
                self.ids[tokens],
                self.positions[tokens],
                self.slot[rows],
                self.start[rows],
                self.width[rows],
                self.offset[rows] - shift,
                self.slot_t[rows],
                self.start_t[rows],
                self.width_t[rows],
                self.offset_t[rows] - shift,
                verify,
                self.wanted,
            )

        return part(head, slice(None, cut), self.verify, 0), part(tail, slice(cut, None), 0, cut), cut


@dataclass(frozen=True)
class PagedView:
    """An item's pages as a kernel sees them: `k`, `v` [blocks, block, kv_heads, head_dim] (rows by position), `table`
    int32 [slots, columns]; block 0 is the bin: a column that holds 0 stores nothing that is ever read. `writable` is
    False for a reader of another layer's item."""

    k: torch.Tensor
    v: torch.Tensor
    table: torch.Tensor
    block: int
    window: int | None = None
    writable: bool = True
