"""Device memory addressed by slot and by block: known tokens, lengths, tables and pages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module

import numpy as np
import torch

from offroad.models.spec import AttentionSpec, Item, ModelSpec, Plane, Ring, Shared
from offroad.ops.budget import Dtypes
from offroad.ops.plan import SCALED, Plan
from offroad.run.rows import PagedView, ReplayView, RingView, Rows, View, folding
from offroad.run.transfer import Upload
from offroad.schedule.step import Kind, Step, Table
from offroad.weights.kv_scales import Scales

_VERIFY = int(Kind.VERIFY)


class Arrays:
    """`tokens` int64 [slots, max_len + k + 1] (prompt, then the pending token at `length`), `length` int64 [slots],
    `tables` int32 [slots, columns] by `Table`, the pages and rings of every layer's items, and checkpoints of rings.

    `drafted` int64 [slots]: how many drafts stand behind the pending token. `base` int64 [slots] on the device: at
    which length the states of the slot are that are replayed from there. Nothing is cleared: what lies at or past
    `length` is dead, block 0 and slot 0 are the bin.
    """

    def __init__(
        self, plan: Plan, spec: ModelSpec, device: torch.device, kv_scales: list[Scales | None] | None = None
    ) -> None:
        slots, self.device, self.upload = plan.memory.slots, device, Upload(device)
        self.k, self.tapped = plan.k, plan.drafter is not None and plan.drafter.tapped
        self.columns = -(-(plan.max_len + plan.k + 1) // plan.block) + 1
        self.tokens = torch.zeros((slots, plan.max_len + plan.k + 1), dtype=torch.int64, device=device)
        # On a CPU the same memory as an array: indexing it costs less than half of what a tensor's does.
        self.shared = self.tokens.numpy() if device.type == "cpu" else None
        self.length = np.zeros(slots, np.int64)
        self.drafted = np.zeros(slots, np.int64)
        self.base = torch.zeros(slots, dtype=torch.int64, device=device)
        self.lag = plan.lag
        self.all_tables = torch.zeros((len(Table), slots, self.columns), dtype=torch.int32, device=device)
        self.tables = {t: self.all_tables[int(t)] for t in Table}
        self.streams = any(
            isinstance(layer.mixer, AttentionSpec) and layer.mixer.rope.sections for layer in spec.layers
        )
        dtypes = Dtypes(plan.dtype, plan.kv_dtype)
        self.views: list[dict[str, View]] = []
        self.checkpoints: list[tuple[RingView | ReplayView, torch.Tensor]] = []
        scaled = kv_scales if plan.kv_dtype == SCALED and kv_scales else [None] * len(spec.layers)
        for layer, scales in zip(spec.layers, scaled, strict=True):
            window = layer.mixer.window if isinstance(layer.mixer, AttentionSpec) else None
            views = {name: self._view(plan, dtypes, name, item, window) for name, item in layer.items}
            if scales is not None and isinstance(views.get("kv"), PagedView):
                views["kv"] = replace(views["kv"], k_scale=scales[0], v_scale=scales[1])
            self.views.append(views)

    def _view(self, plan: Plan, dtypes: Dtypes, name: str, item: Item, window: int | None) -> View:
        if isinstance(item, Shared):
            source = self.views[item.layer][name]
            assert isinstance(source, PagedView)
            return replace(source, writable=False, window=window)
        if isinstance(item, Ring):
            return self._ring(plan, dtypes, item)
        assert item.rate == 1
        table = Table.WINDOW if item.window else Table.HISTORY
        blocks = plan.memory.window_blocks if item.window else plan.memory.history_blocks
        planes = {
            plane.name: torch.empty(
                (blocks, plan.block, *plane.shape), dtype=getattr(torch, dtypes.of(plane)), device=self.device
            )
            for plane in item.planes
        }
        return PagedView(planes["k"], planes["v"], self.tables[table], plan.block, item.window, first=item.first)

    def _ring(self, plan: Plan, dtypes: Dtypes, item: Ring) -> RingView | ReplayView:
        [plane], memory = item.planes, plan.memory

        def empty(count: int, each: int, plane: Plane) -> torch.Tensor:
            return torch.empty((count, each, *plane.shape), dtype=getattr(torch, dtypes.of(plane)), device=self.device)

        data = empty(memory.slots, item.capacity(plan.k), plane)
        ring: RingView | ReplayView = RingView(data)
        if item.store == "replay":
            records = {record.name: empty(memory.slots, item.replayed(plan.k), record) for record in item.records}
            ring = ReplayView(data[:, 0], **records, base=self.base, lag=item.lag, fold=_fold(plan))
        if item.resume:
            self.checkpoints.append((ring, empty(memory.checkpoints, item.resume, plane)))
        return ring

    def restore(self, copies: np.ndarray) -> None:
        """Copies the rows before a boundary from a checkpoint to a slot; rows (checkpoint, slot, boundary)."""
        for place, slot, boundary in copies.tolist():
            for ring, kept in self.checkpoints:
                ring.put(slot, boundary, kept[place])

    def capture(self, copies: np.ndarray, before: np.ndarray) -> None:
        """Copies the rows before a boundary from a slot to a checkpoint, for those boundaries that the step has passed:
        the slot's length was below, `before` [slots], and is not now."""
        for place, slot, boundary in copies.tolist():
            if before[slot] < boundary <= self.length[slot]:
                for ring, kept in self.checkpoints:
                    kept[place] = ring.before(slot, boundary, kept.shape[1])

    def settle(self, rows: Rows) -> None:
        """Notes where the layers have left the states that are replayed: once a step, when all have run."""
        if self.lag:
            slots, at = rows.slot_t.long(), rows.start_t.long()
            base = self.base[slots]
            base = torch.where(folding(base, at, self.lag, self.k + 1), at, base)
            base[rows.verify :] = at[rows.verify :] + rows.width_t[rows.verify :]
            self.base[slots] = base

    def apply(self, step: Step) -> None:
        """Slots that begin, then table edits."""
        for start in step.starts:
            known = torch.from_numpy(np.ascontiguousarray(start.tokens, dtype=np.int64))
            self.tokens[start.slot, : len(known)] = known.to(self.device)
            self.length[start.slot] = start.length
            self.drafted[start.slot] = 0
            self.base[start.slot] = start.length
        if len(step.tables):
            slot, table, column, block = self.upload(np.ascontiguousarray(step.tables.T, dtype=np.int64))[0]
            self.all_tables[table, slot, column] = block.to(torch.int32)

    def put(self, slots: np.ndarray, positions: np.ndarray, drawn: torch.Tensor | np.ndarray) -> None:
        """Writes drawn tokens, int64 [n] on the device or the host, at positions of slots. A sequence that is at its
        limit draws a token that has no place: it goes to the last one, and the scheduler ends the sequence."""
        positions = np.minimum(positions, self.tokens.shape[1] - 1)
        if self.shared is not None:
            self.shared[slots, positions] = drawn if isinstance(drawn, np.ndarray) else drawn.numpy()
            return
        host = [drawn] if isinstance(drawn, np.ndarray) else []
        slot, position, *there = self.upload(slots.astype(np.int64), positions.astype(np.int64), *host)
        self.tokens[slot, position] = there[0] if there else drawn

    def rows(self, step: Step) -> Rows:
        """The step's rows as tensors. Where a row wants something, a chunk's last token is wanted, and all of a verify
        row's: its pending one and its drafts. All tokens are where a drafter or a prompt's scores need them."""
        # Few operations: each runs cold after a forward pass, which has swept the CPU's caches.
        slot, width = step.slot, step.width
        verify = int(np.count_nonzero(step.kind == _VERIFY))
        wanted_width = step.samples.astype(np.int32)
        if self.k:  # verify rows come first, and their width is a bound
            width = width.copy()
            width[:verify] = np.minimum(width[:verify], 1 + self.drafted[slot[:verify]])
            wanted_width[:verify] *= width[:verify]
        rows = self.rows_of(slot, self.length[slot], width, verify, wanted_width)
        if not (self.tapped or step.scores.any()):
            return rows
        return replace(rows, wanted=torch.arange(rows.tokens, device=self.device), scored=rows.wanted)

    def rows_of(
        self,
        slot: np.ndarray,
        start: np.ndarray,
        width: np.ndarray,
        verify: int,
        wanted_width: np.ndarray,
        late: int = 0,
    ) -> Rows:
        """Rows of known tokens; int32 or int64 [rows] each. The angles are those of positions that lie `late` lower."""
        end = width.cumsum(dtype=np.int64)
        packed = np.empty((4, len(slot)), np.int32)
        packed[0], packed[1], packed[2], packed[3] = slot, start, width, end - width
        if end[-1] == len(width):  # every row has one token
            of_token, positions = slot, start.astype(np.int64, copy=False)
        else:
            of_token = np.repeat(slot, width)
            positions = np.arange(end[-1]) + np.repeat(start - packed[3], width)
        wanted = _last(end, wanted_width)
        if self.shared is not None:
            packed_t, wanted_t = torch.from_numpy(packed), torch.from_numpy(wanted)
            ids = torch.from_numpy(self.shared[of_token, positions])
            positions_t = torch.from_numpy(positions - late if late else positions)
        else:
            at = np.stack((of_token, positions)).astype(np.int64)
            packed_t, wanted_t, at_t, positions_t = self.upload(packed, wanted, at, at[1] - late)
            ids = self.tokens[at_t[0], at_t[1]]
        slot_t, start_t, width_t, offset_t = packed_t.unbind()
        return Rows(
            ids=ids,
            positions=positions_t,
            slot=packed[0],
            start=packed[1],
            width=packed[2],
            offset=packed[3],
            slot_t=slot_t,
            start_t=start_t,
            width_t=width_t,
            offset_t=offset_t,
            verify=verify,
            wanted=wanted_t,
            wanted_width=wanted_width,
            streams=positions_t.expand(3, -1) if self.streams else None,
        )

    def ids(self, slots: np.ndarray, positions: np.ndarray) -> torch.Tensor:
        """Tokens at positions of slots, int64 [n] on the device."""
        if self.shared is not None:
            return torch.from_numpy(self.shared[slots, positions])
        at = torch.from_numpy(np.stack((slots.astype(np.int64), positions))).to(self.device)
        return self.tokens[at[0], at[1]]

    def known(self, slot: int) -> np.ndarray:
        """Tokens of a slot up to its pending one, int64 on the host."""
        upto = int(self.length[slot]) + 1
        return self.shared[slot, :upto] if self.shared is not None else self.tokens[slot, :upto].cpu().numpy()

    def room(self, slots: np.ndarray) -> np.ndarray:
        """How many drafts of each slot there is a place for, int64."""
        return np.minimum(self.k, self.tokens.shape[1] - 1 - self.length[slots])

    def draft(self, slot: int, ids: np.ndarray) -> None:
        """Puts drafts behind the pending token of a slot; those beyond the longest context have no place."""
        first = int(self.length[slot]) + 1
        ids = ids[: self.tokens.shape[1] - first]
        self.drafted[slot] = len(ids)
        if len(ids):
            self.tokens[slot, first : first + len(ids)] = torch.from_numpy(ids.copy()).to(self.device)


def _fold(plan: Plan) -> Callable[[ReplayView, int, int], torch.Tensor] | None:
    """What makes a state from its records, if the plan's kernel of them brings that."""
    if "triton.gated_delta" not in plan.kernels():
        return None
    return import_module("offroad.triton_kernels.delta_replay_jit").state_at


def _last(end: np.ndarray, count: np.ndarray) -> np.ndarray:
    """Numbers of the last `count` tokens of each row that ends at `end`, int64."""
    if count.max(initial=0) <= 1:
        return end[count.nonzero()] - 1
    total = count.cumsum()
    return np.repeat(end - total, count) + np.arange(total[-1])
