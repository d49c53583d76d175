"""What one step runs, as tensors on the device: the only argument besides ops that a model's forward gets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
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
    wanted: torch.Tensor  # int64 [n]: tokens whose hidden states leave the model
    wanted_width: np.ndarray  # int32 [rows]: how many of each row's last tokens are scored, that is get logits
    scored: torch.Tensor | None = None  # int64: which of the wanted ones those are; None: all
    streams: torch.Tensor | None = None  # int64 [3, tokens]: positions in time, height and width, where a rope has them
    narrowed: Rows | None = None  # a graph's rows of the wanted tokens, whose numbers are on the device already

    @property
    def tokens(self) -> int:
        return self.ids.shape[0]

    @property
    def rope_positions(self) -> torch.Tensor:
        """What angles are looked up by: [tokens], or [3, tokens]."""
        return self.positions if self.streams is None else self.streams

    @cached_property
    def addresses(self) -> tuple[int, ...]:
        """Addresses of positions, slots, starts, widths and offsets: every layer's kernels ask for them."""
        return tuple(t.data_ptr() for t in (self.positions, self.slot_t, self.start_t, self.width_t, self.offset_t))

    def parts(self) -> tuple[Rows, Rows, int]:
        """(verify rows, chunk rows, tokens of the former); ids and positions are cut, offsets start from 0 in each."""
        cut = int(self.width[: self.verify].sum())
        head, tail = slice(None, self.verify), slice(self.verify, None)

        def part(rows: slice, tokens: slice, verify: int, shift: int) -> Rows:
            return replace(
                self._cut(tokens),
                slot=self.slot[rows],
                start=self.start[rows],
                width=self.width[rows],
                offset=self.offset[rows] - shift,
                slot_t=self.slot_t[rows],
                start_t=self.start_t[rows],
                width_t=self.width_t[rows],
                offset_t=self.offset_t[rows] - shift,
                verify=verify,
                wanted_width=self.wanted_width[rows],
            )

        return part(head, slice(None, cut), self.verify, 0), part(tail, slice(cut, None), 0, cut), cut

    def _cut(self, tokens: slice | torch.Tensor) -> Rows:
        streams = None if self.streams is None else self.streams[:, tokens]
        return replace(self, ids=self.ids[tokens], positions=self.positions[tokens], streams=streams)

    def narrow(self) -> Rows:
        """The wanted tokens alone, as verify rows: for layers that store nothing, whose keys are all in pages."""
        if self.verify == len(self.slot) and len(self.wanted) == self.tokens:
            return self
        if self.narrowed is not None:
            cut = self._cut(self.wanted)
            return replace(self.narrowed, ids=cut.ids, positions=cut.positions, streams=cut.streams)
        picked = np.flatnonzero(self.wanted_width)
        width = self.wanted_width[picked]
        start = self.start[picked] + self.width[picked] - width
        packed = np.stack((self.slot[picked], start, width, np.cumsum(width) - width)).astype(np.int32)
        on_device = torch.from_numpy(packed).to(self.ids.device)
        return replace(
            self._cut(self.wanted),
            slot=packed[0],
            start=packed[1],
            width=packed[2],
            offset=packed[3],
            slot_t=on_device[0],
            start_t=on_device[1],
            width_t=on_device[2],
            offset_t=on_device[3],
            verify=len(picked),
            wanted=torch.arange(len(self.wanted), device=self.ids.device),
            wanted_width=width,
        )


@dataclass(frozen=True)
class PagedView:
    """An item's pages as a kernel sees them: `k`, `v` [blocks, block, kv_heads, head_dim] (rows by position), `table`
    int32 [slots, columns]; block 0 is the bin: a column that holds 0 stores nothing that is ever read. `writable` is
    False for a reader of another layer's item. Stored numbers of 8 bits are multiplied by `k_scale`, `v_scale` fp32
    [kv_heads]; None: 1. Positions below `first` have no row."""

    k: torch.Tensor
    v: torch.Tensor
    table: torch.Tensor
    block: int
    window: int | None = None
    writable: bool = True
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
    first: int = 0


@dataclass(frozen=True)
class RingView:
    """A ring item as a kernel sees it: `data` [slots, capacity, ...]; the row of position p is `p % capacity`. Rows
    before position 0 read as zeros, whatever lies there: a slot is never cleared."""

    data: torch.Tensor

    @property
    def capacity(self) -> int:
        return self.data.shape[1]

    def before(self, slot: int, boundary: int, count: int) -> torch.Tensor:
        """The last `count` rows before a boundary, in order of position; [count, ...]."""
        return self.data[slot, self._places(boundary, count)]

    def put(self, slot: int, boundary: int, rows: torch.Tensor) -> None:
        """Makes `rows` the last ones before a boundary."""
        self.data[slot, self._places(boundary, len(rows))] = rows.to(self.data.dtype)

    def _places(self, boundary: int, count: int) -> torch.Tensor:
        return torch.arange(boundary - count, boundary, device=self.data.device) % self.capacity


@dataclass(frozen=True)
class ReplayView:
    """A ring of states that is kept as one of them and what followed: `state` [slots, heads, key_dim, value_dim] is
    what the tokens before `base` int64 [slots] have left (zeros before position 0, whatever lies there), and the fp32
    records of the tokens from `base` on, that of position p at `p % capacity`, make the later ones:
    `S_p = e^decay S_{p-1} + key delta^T`. `key` [slots, capacity, key_heads, key_dim], `delta` [slots, capacity, heads,
    value_dim], `decay` [slots, capacity, heads].

    Who runs a verify row whose records could become more than `lag` (`folds`) first folds those of [base, start) into
    `state`; then it stores its tokens' records. Who runs a chunk leaves the last state. `base` is one for all layers:
    `Arrays.settle` moves it once all have run, to the start of a row that folds and to a chunk's end. So any boundary
    that a step has passed can be produced, at most `lag` tokens behind `base`; there is room for a step's tokens more,
    so that a kernel may write while another part of it reads.

    `fold`: what makes of this view the state of a slot at a boundary, [1, heads, key_dim, value_dim] fp32, where a
    device has a kernel for it; None: `at`.
    """

    state: torch.Tensor
    key: torch.Tensor
    delta: torch.Tensor
    decay: torch.Tensor
    base: torch.Tensor
    lag: int
    fold: Callable[[ReplayView, int, int], torch.Tensor] | None = None

    @property
    def capacity(self) -> int:
        return self.key.shape[1]

    def folds(self, slots: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        """Whether verify rows of slots int64 [n] that begin at `starts` fold their records, bool [n]."""
        return folding(self.base[slots], starts, self.lag, self.capacity - self.lag)

    def at(self, slots: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """The states that `lengths` tokens have left, int64 [n] each; [n, heads, key_dim, value_dim] in the
        records' dtype. With G the running sum of decays over n records,
        `S = e^(G_n) S_base + sum_i e^(G_n - G_i) key_i delta_i^T`."""
        base = self.base[slots]
        position = base[:, None] + torch.arange(self.lag, device=base.device)
        where = slots[:, None], position % self.capacity
        live = position < lengths[:, None]
        # What is not live may be anything, NaN also: it is replaced, not multiplied by zero.
        key, delta, decay = (
            torch.where(live.view(*live.shape, *[1] * (x.ndim - 2)), x[where], 0.0)
            for x in (self.key, self.delta, self.decay)
        )
        total = decay.cumsum(1)
        left = (total[:, -1:] - total).exp()
        key = key.repeat_interleave(delta.shape[2] // key.shape[2], dim=2)
        state = torch.where((base > 0)[:, None, None, None], self.state[slots].to(decay.dtype), 0.0)
        return state * total[:, -1].exp()[..., None, None] + torch.einsum("nch,nchk,nchv->nhkv", left, key, delta)

    def before(self, slot: int, boundary: int, count: int) -> torch.Tensor:
        """The state before a boundary at or behind the base; [1, heads, key_dim, value_dim]."""
        assert count == 1, "a state has no state before it"
        if self.fold is not None:
            return self.fold(self, slot, boundary)
        return self.at(*(torch.tensor([i], device=self.base.device) for i in (slot, boundary)))

    def put(self, slot: int, boundary: int, rows: torch.Tensor) -> None:
        """Makes `rows` [1, ...] the state before a boundary, which becomes the base: no record is behind it."""
        self.state[slot] = rows[0].to(self.state.dtype)
        self.base[slot] = boundary


def folding(base: torch.Tensor, starts: torch.Tensor, lag: int, width: int) -> torch.Tensor:
    """Whether records from `base` on and those of a row of up to `width` tokens at `starts` may be more than `lag`."""
    return starts - base + width > lag


View = PagedView | RingView | ReplayView
