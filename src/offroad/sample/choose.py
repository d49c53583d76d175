"""Temperature, min_p, top_k, top_p and the draw: argmax(logits / T + noise) over the tokens that the filters leave.

Every filter is a lower bound on scaled logits, so tokens that tie with the last one kept are kept too. Sums are taken
over fixed-point integers. Hence nothing depends on the order of equal logits, on how a reduction is split or on other
rows, and the two forms choose the same token: `choose_dense` for accelerators (all rows at once, without waiting for
the device) and `choose_compact` for the CPU (one row; sorting and noise only where a token can win).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from offroad.sample.noise import GUMBEL_MAX, bits_row, gumbel, gumbel_row

# Probability mass of the best token in fixed point: 2**22 such tokens still fit into int64.
_UNITS = 2.0**40
# Below it a token weighs less than one unit, and the widest noise (26.1) cannot make it win.
_REACH = -28.0
# Distances below the best logit within which the CPU looks for candidates, nearest first.
_WIDTHS = (8.0, 16.0, -_REACH)
# Keeps a division by the temperature finite in fp32; the draw is greedy long before.
_COLDEST = 1e-30


@dataclass(frozen=True)
class Filters:
    """How rows are drawn: `[rows]` fp64 `temperature`, `low` (log of min_p), `top_p`; int64 `top_k` (off: the size of
    the vocabulary), `seed`, `position`. Tensors for `choose_dense`, arrays for `choose_compact`."""

    temperature: Tensor | np.ndarray
    low: Tensor | np.ndarray
    top_p: Tensor | np.ndarray
    top_k: Tensor | np.ndarray
    seed: Tensor | np.ndarray
    position: Tensor | np.ndarray


def choose_dense(logits: Tensor, filters: Filters, filtered: bool) -> Tensor:
    """Token ids int64 `[rows]` for fp32 logits `[rows, vocab]`; `filtered`: whether any row has top_k or top_p."""
    x = logits - logits.amax(-1, keepdim=True)
    x = x / filters.temperature.clamp(min=_COLDEST).float()[:, None]
    bound = filters.low.float()[:, None]
    if filtered:
        ordered = x.sort(-1, descending=True).values
        bound = torch.maximum(bound, ordered.gather(-1, filters.top_k[:, None] - 1))
        mass = torch.where(ordered >= bound, (ordered.exp() * _UNITS).long(), 0).cumsum(-1)
        # As many tokens fall short of the mass as precede the one that reaches it, the last to be kept.
        last = (mass < filters.top_p[:, None] * mass[:, -1:]).sum(-1, keepdim=True)
        bound = torch.maximum(bound, ordered.gather(-1, last))
    noise = gumbel(filters.seed, filters.position, x.shape[-1])
    return torch.where(x >= bound, x + noise, -torch.inf).argmax(-1)


@np.errstate(invalid="ignore", over="ignore")
def choose_compact(logits: np.ndarray, filters: Filters, row: int) -> int:
    """The token id for fp32 logits `[vocab]` with the filters of `row`; 0 when a logit is NaN."""
    x = logits - logits.max()
    x /= np.float32(max(filters.temperature[row], _COLDEST))
    low, top_p, top_k = float(np.float32(filters.low[row])), float(filters.top_p[row]), int(filters.top_k[row])
    noise_of = (int(filters.seed[row]), int(filters.position[row]))
    if top_k < x.shape[0] or top_p < 1.0:
        return _best(x, np.flatnonzero(x >= _filter_bound(x, low, top_p, top_k)), noise_of)[0]
    token, score = _best(x, np.flatnonzero(x >= max(low, -_WIDTHS[0])), noise_of)
    if low >= -_WIDTHS[0] or score - GUMBEL_MAX >= -_WIDTHS[0]:
        return token
    # The others win only if their noise makes up for the distance; noise is at most -log(bits / 2**32).
    reach = np.exp(x - np.float32(score - 0.01)) * np.float32(2.0**32)
    ids = np.flatnonzero((bits_row(*noise_of, x.shape[0]) <= reach) & (x >= low))
    return _best(x, ids, noise_of)[0]


def _best(x: np.ndarray, ids: np.ndarray, noise_of: tuple[int, int]) -> tuple[int, float]:
    """The winner among `ids` and its score; of equal ones the lowest id."""
    if not ids.size:
        return 0, math.nan
    scores = x[ids] + gumbel_row(*noise_of, ids)
    best = int(scores.argmax())
    return int(ids[best]), float(scores[best])


def _filter_bound(x: np.ndarray, low: float, top_p: float, top_k: int) -> float:
    """The least scaled logit that min_p, top_k and top_p keep (to within `_REACH`)."""
    limited = top_k < x.shape[0]
    total = None if limited else _mass(x if low == -math.inf else x[x >= low]).sum()
    for width in _WIDTHS:
        bound = max(low, -width)
        kept = x[x >= bound]
        if limited and kept.shape[0] >= top_k:
            break
        if not limited and _mass(kept).sum() >= top_p * total:
            break
    if kept.shape[0] > top_k:
        bound = float(np.partition(kept, -top_k)[-top_k])
        kept = kept[kept >= bound]
    if top_p < 1.0 and kept.shape[0]:
        ordered = np.sort(kept)[::-1]
        mass = _mass(ordered).cumsum()
        needed = top_p * (mass[-1] if limited else total)
        bound = float(ordered[np.searchsorted(mass, needed)])
    return bound


def _mass(x: np.ndarray) -> np.ndarray:
    return (np.exp(x) * np.float32(_UNITS)).astype(np.int64)
