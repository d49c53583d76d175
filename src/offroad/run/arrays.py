"""Device memory addressed by slot and by block: known tokens, lengths, tables and pages."""

from __future__ import annotations

import numpy as np
import torch

from offroad.models.spec import ModelSpec, Paged, Shared
from offroad.ops.plan import Plan
from offroad.run.rows import PagedView, Rows
from offroad.schedule.step import Kind, Step, Table

_VERIFY = int(Kind.VERIFY)


class Arrays:
    """`tokens` int64 [slots, max_len + k + 1] (prompt, then the pending token at `length`), `length` int64 [slots],
    `tables` int32 [slots, columns] by `Table`, and the pages of every item.

    Pages are not cleared: what lies at or past `length` is dead, and block 0 is the bin.
    """

    def __init__(self, plan: Plan, spec: ModelSpec, device: torch.device) -> None:
        slots, self.device = plan.memory.slots, device
        self.columns = -(-(plan.max_len + plan.k + 1) // plan.block) + 1
        self.tokens = torch.zeros((slots, plan.max_len + plan.k + 1), dtype=torch.int64, device=device)
        # On a CPU the same memory as an array: indexing it costs less than half of what a tensor's does.
        self.shared = self.tokens.numpy() if device.type == "cpu" else None
        self.length = np.zeros(slots, np.int64)
        self.tables = {t: torch.zeros((slots, self.columns), dtype=torch.int32, device=device) for t in Table}
        self.views = self._views(plan, spec)

    def _views(self, plan: Plan, spec: ModelSpec) -> list[PagedView]:
        dtype = getattr(torch, plan.kv_dtype)
        views: list[PagedView] = []
        for layer in spec.layers:
            item = dict(layer.items)["kv"]
            if isinstance(item, Shared):
                source = views[item.layer]
                views.append(PagedView(source.k, source.v, source.table, source.block, source.window, writable=False))
                continue
            assert isinstance(item, Paged)
            assert item.rate == 1
            table = Table.WINDOW if item.window else Table.HISTORY
            blocks = plan.memory.window_blocks if item.window else plan.memory.history_blocks
            shapes = {plane.name: (blocks, plan.block, *plane.shape) for plane in item.planes}
            k, v = (torch.empty(shapes[name], dtype=dtype, device=self.device) for name in ("k", "v"))
            views.append(PagedView(k, v, self.tables[table], plan.block, item.window))
        return views

    def apply(self, step: Step) -> None:
        """Slots that begin, then table edits."""
        for start in step.starts:
            known = torch.from_numpy(np.ascontiguousarray(start.tokens, dtype=np.int64))
            self.tokens[start.slot, : len(known)] = known.to(self.device)
            self.length[start.slot] = start.length
        if len(step.tables):
            edits = torch.from_numpy(step.tables.astype(np.int64))
            for table in Table:
                picked = edits[edits[:, 1] == int(table)].to(self.device)
                self.tables[table][picked[:, 0], picked[:, 2]] = picked[:, 3].to(torch.int32)

    def put(self, slots: np.ndarray, positions: np.ndarray, drawn: torch.Tensor) -> None:
        """Writes drawn tokens, int64 [n] on the device, at positions of slots. A sequence that is at its limit draws a
        token that has no place: it goes to the last one, and the scheduler ends the sequence."""
        positions = np.minimum(positions, self.tokens.shape[1] - 1)
        if self.shared is not None:
            self.shared[slots, positions] = drawn.numpy()
            return
        at = torch.from_numpy(np.stack((slots.astype(np.int64), positions))).to(self.device)
        self.tokens[at[0], at[1]] = drawn

    def rows(self, step: Step) -> Rows:
        """The step's rows as tensors; `wanted` holds the last token of each row that wants something."""
        # Few operations: each runs cold after a forward pass, which has swept the CPU's caches.
        slot, width, start = step.slot, step.width, self.length[step.slot]
        end = width.cumsum(dtype=np.int64)
        packed = np.empty((4, len(slot)), np.int32)
        packed[0], packed[1], packed[2], packed[3] = slot, start, width, end - width
        if end[-1] == len(width):  # every row has one token
            of_token, positions = slot, start
        else:
            of_token = np.repeat(slot, width)
            positions = np.arange(end[-1]) + np.repeat(start - packed[3], width)
        slot_t, start_t, width_t, offset_t = torch.from_numpy(packed).to(self.device).unbind()
        if self.shared is not None:
            positions_t = torch.from_numpy(positions)
            ids = torch.from_numpy(self.shared[of_token, positions])
        else:
            at = torch.from_numpy(np.stack((of_token, positions))).to(self.device)
            ids, positions_t = self.tokens[at[0], at[1]], at[1]
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
            verify=int(np.count_nonzero(step.kind == _VERIFY)),
            wanted=torch.from_numpy(end[step.wants.nonzero()] - 1).to(self.device),
        )
