"""Attention over pages, with the store of the step's own rows."""

from __future__ import annotations

import torch

from offroad.models.spec import AttentionSpec
from offroad.ops import kv
from offroad.ops.spec import OpSpec, Tolerance
from offroad.run.rows import PagedView, Rows

TOLERANCE = {"float32": Tolerance(2e-5, 2e-5), "bfloat16": Tolerance(2e-2, 1.6e-2), "float16": Tolerance(3e-3, 3e-3)}

_SCORES = 1 << 24  # scores held at once


def attention(
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    view: PagedView,
    rows: Rows,
    spec: AttentionSpec,
) -> torch.Tensor:
    """Causal attention of each row's tokens over its older rows in pages and its own fresh rows; stores the fresh ones.

    q [tokens, heads, dim], k and v [tokens, kv_heads, dim] -> [tokens, heads * dim]. A query at position p sees the
    positions (p - window, p] that are not below the view's `first`. Rows before `start` come from pages, rows of this
    step from `k` and `v`: in a window layer a late token of a chunk may already have no block. Then the fresh rows are
    written where the table has a block (column value above 0). A reader of another layer's item stores nothing;
    without k and v all its keys come from pages, where the other layer has put this step's rows too. Scores and
    softmax in fp32.
    """
    out = torch.empty_like(q)
    for slot, start, width, offset in zip(rows.slot, rows.start, rows.width, rows.offset, strict=True):
        slot, start = int(slot), int(start)
        span = slice(int(offset), int(offset + width))
        first, keys, values = visible_rows(k, v, view, slot, start, span)
        out[span] = _row(q[span], keys.to(q.dtype), values.to(q.dtype), start - first, view.window, spec)
        if k is not None and view.writable:
            store(view, k[span], v[span], slot, start)
    return out.flatten(1)


def visible_rows(
    k: torch.Tensor | None, v: torch.Tensor | None, view: PagedView, slot: int, start: int, span: slice
) -> tuple[int, torch.Tensor, torch.Tensor]:
    """(first position, keys, values [n, kv_heads, dim]) that the tokens `span` of a row can see."""
    first = max(view.first, start - view.window + 1) if view.window else view.first
    if k is None:
        return first, *gather(view, slot, first, start + span.stop - span.start)
    old_k, old_v = gather(view, slot, first, start)
    fresh_k, fresh_v = kv.as_stored(view, k[span], v[span])
    return first, torch.cat((old_k, fresh_k)), torch.cat((old_v, fresh_v))


def gather(view: PagedView, slot: int, first: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of positions [first, end) of a slot, [end - first, kv_heads, dim]."""
    column = first // view.block
    blocks = view.table[slot, column : (end - 1) // view.block + 1 if end > first else column].long()
    cut = slice(first - column * view.block, max(end, first) - column * view.block)
    k, v = kv.read(view, blocks)
    return k[cut], v[cut]


def _row(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, old: int, window: int | None, spec: AttentionSpec
) -> torch.Tensor:
    """Attention of a row's tokens [width, heads, dim] over its keys, a few queries at a time: scores of a long context
    would not fit in memory."""
    keys, values = k.float(), v.float()
    queries = (q.float() * spec.scale).unflatten(1, (spec.kv_heads, -1))
    seen = visible(q.shape[0], k.shape[0], old, window, q.device)
    out = torch.empty_like(q)
    step = max(1, _SCORES // (spec.heads * k.shape[0]))
    for first in range(0, q.shape[0], step):
        part = slice(first, first + step)
        scores = torch.einsum("qhgd,khd->hgqk", queries[part], keys)
        if spec.softcap:
            scores = torch.tanh(scores / spec.softcap) * spec.softcap
        scores.masked_fill_(~seen[part], float("-inf"))
        out[part] = torch.einsum("hgqk,khd->qhgd", scores.softmax(-1), values).flatten(1, 2).to(q.dtype)
    return out


def visible(width: int, total: int, old: int, window: int | None, device: torch.device) -> torch.Tensor:
    """Which of `total` keys each of `width` queries sees, bool [width, total]; the first query is key number `old`."""
    at = torch.arange(width, device=device)[:, None] + old
    key_at = torch.arange(total, device=device)[None]
    seen = key_at <= at
    return seen & (key_at > at - window) if window else seen


def store(view: PagedView, k: torch.Tensor, v: torch.Tensor, slot: int, start: int) -> None:
    """Writes rows of positions [start, start + len(k)) where the slot's table has a block."""
    at = torch.arange(start, start + k.shape[0], device=k.device)
    blocks = view.table[slot, (at // view.block)].long()
    live = blocks > 0
    kv.write(view, blocks[live], (at % view.block)[live], k[live], v[live])


OPS = (OpSpec("attention", attention.__doc__ or "", attention, TOLERANCE),)
