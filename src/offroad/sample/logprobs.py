"""Log-probabilities of what was drawn and of the best tokens, from raw logits."""

from __future__ import annotations

import torch
from torch import Tensor

from offroad.sample.params import MAX_LOGPROBS
from offroad.schedule.step import Logprobs


def logprobs(logits: Tensor, chosen: Tensor) -> Logprobs:
    """Log-softmax of logits `[rows, vocab]` (before any adjustment) at `chosen` int64 `[rows]` and at the MAX_LOGPROBS
    best tokens, best first, the lower id first of equal ones. Waits for the device.

    A vocabulary smaller than MAX_LOGPROBS leaves the last places at id 0 and -inf.
    """
    logits = logits.float()
    scale = torch.logsumexp(logits, -1, keepdim=True)
    count = min(MAX_LOGPROBS, logits.shape[-1])
    best = _ordered_keys(logits).topk(count, -1).indices
    ids = torch.zeros(logits.shape[0], MAX_LOGPROBS, dtype=torch.int64, device=logits.device)
    values = torch.full(ids.shape, -torch.inf, device=logits.device)
    ids[:, :count] = best
    values[:, :count] = logits.gather(-1, best) - scale
    picked = (logits.gather(-1, chosen[:, None]) - scale)[:, 0]
    return Logprobs(picked.cpu().numpy(), ids.cpu().numpy(), values.cpu().numpy())


def _ordered_keys(logits: Tensor) -> Tensor:
    """int64 keys that order as (logit, lower id first) and are all different: the best ones do not depend on how a
    device breaks ties, which are common among half-precision logits."""
    bits = (logits + 0.0).contiguous().view(torch.int32)  # + 0.0 turns -0.0 into 0.0
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    return (ordered << 32) - torch.arange(logits.shape[-1], device=logits.device)
