"""Log-probabilities of what was drawn and of the best tokens, from raw logits."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from offroad.sample.params import MAX_LOGPROBS
from offroad.schedule.step import Logprobs, PromptLogprobs


def logprobs(logits: Tensor, chosen: Tensor) -> Logprobs:
    """Log-softmax of logits `[rows, vocab]` (before any adjustment) at `chosen` int64 `[rows]` and at the MAX_LOGPROBS
    best tokens, best first, the lower id first of equal ones. Waits for the device.

    A vocabulary smaller than MAX_LOGPROBS leaves the last places at id 0 and -inf.
    """
    logits = logits.float()
    scale = _log_sum_exp(logits)
    count = min(MAX_LOGPROBS, logits.shape[-1])
    best = _best_compact(logits, count) if logits.device.type == "cpu" else _best_dense(logits, count)
    ids = torch.zeros(logits.shape[0], MAX_LOGPROBS, dtype=torch.int64, device=logits.device)
    values = torch.full(ids.shape, -torch.inf, device=logits.device)
    ids[:, :count] = best
    values[:, :count] = logits.gather(-1, best) - scale
    picked = (logits.gather(-1, chosen[:, None]) - scale)[:, 0]
    return Logprobs(picked.cpu().numpy(), ids.cpu().numpy(), values.cpu().numpy())


def prompt_logprobs(logits: Tensor, chosen: Tensor) -> PromptLogprobs:
    """The same for tokens of a prompt, and the rank of each among all tokens: 1 and how many logits are larger."""
    found, logits = logprobs(logits, chosen), logits.float()
    ranks = 1 + (logits > logits.gather(-1, chosen[:, None])).sum(-1)
    return PromptLogprobs(found.chosen, ranks.cpu().numpy(), found.top_ids, found.top)


def _log_sum_exp(logits: Tensor) -> Tensor:
    """log(sum(exp(logits))) of each row, `[rows, 1]`, summed by halves: torch's reductions share a row among threads as
    the number of rows tells them, and a row's last bits with it."""
    top = logits.amax(-1, keepdim=True)
    top = torch.where(top.isfinite(), top, 0.0)
    parts = (logits - top).exp()
    while (count := parts.shape[-1]) > 1:
        half = count // 2
        folded = parts[:, :half] + parts[:, half : 2 * half]
        parts = torch.cat((folded, parts[:, -1:]), -1) if count % 2 else folded
    return parts.log() + top


def _best_dense(logits: Tensor, count: int) -> Tensor:
    """Ids `[rows, count]` of the best tokens, by int64 keys that order as (logit, lower id first), all different.
    Ties are common among half-precision logits, and `topk` leaves their order to the device."""
    bits = (logits + 0.0).contiguous().view(torch.int32)  # + 0.0 turns -0.0 into 0.0
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    keys = (ordered << 32) - torch.arange(logits.shape[-1], device=logits.device)
    return keys.topk(count, -1).indices


def _best_compact(logits: Tensor, count: int) -> Tensor:
    """The same for the CPU, at a fraction of the time: sorts only what is not below the last of the best."""
    out = np.empty((logits.shape[0], count), np.int64)
    for i, row in enumerate(logits.numpy()):
        ids = np.flatnonzero(row >= np.partition(row, -count)[-count])
        best = ids[np.argsort(-row[ids], kind="stable")[:count]]
        # Only a row with NaN has fewer; its values are of no use, and the caller looks for such rows.
        out[i] = best if best.shape[0] == count else np.arange(count)
    return torch.from_numpy(out)
