"""Masks of tokens that may be drawn, as bits, and what they do to logits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Masks:
    """`bits` int32 `[n, words]`: the tokens that rows of logits, int64 `[n]` ascending, may draw."""

    rows: np.ndarray
    bits: np.ndarray

    def apply(self, logits: Tensor, rows: np.ndarray) -> None:
        """Sets what the masked ones among `rows` int64 [m] ascending may not draw to -inf; `logits` fp32 [m, vocab] are
        theirs, changed in place."""
        here = np.flatnonzero(np.isin(rows, self.rows))
        if not len(here):
            return
        bits = self.bits[np.searchsorted(self.rows, rows[here])]
        vocab = logits.shape[-1]
        if logits.device.type == "cpu":
            allowed = np.unpackbits(bits.view(np.uint8), axis=-1, bitorder="little")[:, :vocab].view(bool)
            for row, may in zip(here.tolist(), allowed, strict=True):
                logits.numpy()[row][~may] = -np.inf
            return
        index = torch.from_numpy(here).to(logits.device)
        allowed = unpacked(torch.from_numpy(bits).to(logits.device), vocab)
        logits[index] = logits[index].masked_fill(~allowed, -torch.inf)


def unpacked(bits: Tensor, vocab: int) -> Tensor:
    """bool `[n, vocab]` of int32 `[n, words]`."""
    shifts = torch.arange(32, dtype=torch.int32, device=bits.device)
    return ((bits[:, :, None] >> shifts) & 1).flatten(1)[:, :vocab].bool()
