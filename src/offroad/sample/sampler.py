"""The sampler: parameters by slot, one token per row of logits.

A token is a function of the row's logits, the slot's parameters, the position and the tokens before it; batch mates,
row order and drafts have no part in it (noise.py, choose.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from offroad.sample.adjust import Adjustment
from offroad.sample.choose import Filters, choose_compact, choose_dense
from offroad.schedule.step import Start

# Elements of logits that are filtered at once on an accelerator: bounds the memory of sorting and noise to ~100 MB.
_DENSE_ELEMENTS = 2**21
Plain = Callable[[Tensor, Filters], Tensor]
_NEVER = np.iinfo(np.int64).max  # a position that no sequence reaches


class Sampler:
    """Draws tokens for up to `slots` sequences over `vocab` logits on `device`.

    Order, as in vLLM: min_tokens, logit_bias, penalties, temperature, min_p, top_k, top_p, draw. Greedy rows take the
    largest adjusted logit, the lowest id of equal ones. `plain`: what draws rows without top_k and top_p on an
    accelerator; the same tokens as `choose_dense`, which does it if there is none.
    """

    def __init__(self, slots: int, vocab: int, device: torch.device | str, plain: Plain | None = None) -> None:
        self.vocab, self.device, self._plain = vocab, torch.device(device), plain
        self._greedy = np.ones(slots, bool)
        # First positions whose logits are taken as they are, and of those whose best is drawn.
        self._adjusted_until = np.zeros(slots, np.int64)
        self._plain_from = np.zeros(slots, np.int64)
        self._temperature = np.ones(slots)
        self._low = np.full(slots, -math.inf)
        self._top_p = np.ones(slots)
        self._top_k = np.full(slots, vocab, np.int64)
        self._seed = np.zeros(slots, np.int64)
        self._adjustments: list[Adjustment | None] = [None] * slots

    def start(self, start: Start) -> None:
        """Take over the parameters of a sequence that begins in a slot. Ids beyond the vocabulary must have been
        refused before (`SamplingParams.check_vocab`)."""
        slot, params = start.slot, start.params
        adjustment = Adjustment.of(params, start.prompt_len, start.eos_ids, self.device)
        self._adjustments[slot] = adjustment
        until = _NEVER if adjustment.lasting else start.prompt_len + adjustment.min_tokens
        self._adjusted_until[slot] = until
        self._plain_from[slot] = until if params.greedy else _NEVER
        self._greedy[slot] = params.greedy
        self._temperature[slot] = params.temperature
        self._low[slot] = math.log(params.min_p) if params.min_p else -math.inf
        self._top_p[slot] = params.top_p
        self._top_k[slot] = min(params.top_k or self.vocab, self.vocab)
        self._seed[slot] = start.seed

    def plain(self, slots: np.ndarray, positions: np.ndarray) -> bool:
        """Whether every row draws the largest logit as it is."""
        return bool((positions >= self._plain_from[slots]).all())

    def draw(self, logits: Tensor, slots: np.ndarray, positions: np.ndarray, tokens: Tensor) -> Tensor:
        """Token ids int64 `[rows]` for logits `[rows, vocab]` of any float type, which are left as they are.

        `slots`, `positions` `[rows]`: whose row it is, and the index in its sequence of the token to be drawn; a slot
        may occur several times, with its drafts. `tokens` int64 `[slots, max_len]`: known tokens by slot, those before
        the position are read. A row with NaN gives some valid id: the caller looks for such rows.
        """
        plain = positions >= self._plain_from[slots]
        if plain.all():
            return self._best(logits)
        adjusted = positions < self._adjusted_until[slots]
        out = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
        simple, others = np.flatnonzero(plain), np.flatnonzero(~plain)
        if len(simple):
            index = self._to_device(simple)
            out[index] = self._best(logits[index])
        step = max(1, _DENSE_ELEMENTS // self.vocab)
        for chunk in (others[i : i + step] for i in range(0, len(others), step)):
            index = self._to_device(chunk)
            rows = logits[index].float()
            for i in np.flatnonzero(adjusted[chunk]):
                slot = slots[chunk[i]]
                self._adjustments[slot].apply(rows[i], tokens[slot, : positions[chunk[i]]])
            out[index] = self._choose(rows, slots[chunk], positions[chunk])
        return out

    @staticmethod
    def _best(logits: Tensor) -> Tensor:
        """The ids of the largest logits, the lowest of equal ones; numpy finds them several times faster on a CPU."""
        if logits.device.type == "cpu":
            return torch.from_numpy(logits.float().numpy().argmax(-1))
        return logits.argmax(-1)

    def _choose(self, logits: Tensor, slots: np.ndarray, positions: np.ndarray) -> Tensor:
        """Token ids for adjusted fp32 logits, some of whose rows are greedy."""
        greedy = self._greedy[slots]
        if greedy.all():
            return self._best(logits)
        columns = (self._temperature, self._low, self._top_p, self._top_k, self._seed)
        arrays = [*(c[slots] for c in columns), positions.astype(np.int64)]
        if logits.device.type == "cpu":
            filters, rows = Filters(*arrays), logits.numpy()
            ids = [
                int(rows[i].argmax()) if greedy[i] else choose_compact(rows[i], filters, i) for i in range(len(slots))
            ]
            return torch.tensor(ids, dtype=torch.int64)
        filtered = bool((~greedy & ((arrays[2] < 1.0) | (arrays[3] < self.vocab))).any())
        filters = Filters(*map(self._to_device, arrays))
        simple = self._plain is not None and not filtered
        drawn = self._plain(logits, filters) if simple else choose_dense(logits, filters, filtered)
        return torch.where(self._to_device(greedy), logits.argmax(-1), drawn) if greedy.any() else drawn

    def _to_device(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.device, non_blocking=True)
