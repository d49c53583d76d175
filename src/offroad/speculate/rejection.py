"""The classic rule for drafts of a known distribution, to be compared with the one that is used.

Leviathan et al., "Fast Inference from Transformers via Speculative Decoding" (2023): a draft x ~ q is accepted with
probability min(1, p(x) / q(x)), else the token is drawn from max(0, p - q), normed. The tokens have the distribution p,
but are not those that are drawn without drafts; the rule that is used (a draft is accepted iff it is what is drawn at
its position with the same noise) keeps them, at the price of fewer acceptances: `benchmarks/acceptance.py` measures it.
"""

from __future__ import annotations

import torch


def rejection(
    target: torch.Tensor, drafter: torch.Tensor, drafts: torch.Tensor, uniform: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(accepted int64 [rows], tokens int64 [rows, k + 1]) of drafts int64 [rows, k], -1 behind the last token.

    `target` [rows, k + 1, vocab] and `drafter` [rows, k, vocab] are probabilities; `uniform` [rows, k + 1, 2] are
    numbers of [0, 1): one to accept by, one to draw by.
    """
    rows, k = drafts.shape
    index = drafts[..., None]
    ratio = target[:, :k].gather(-1, index)[..., 0] / drafter.gather(-1, index)[..., 0]
    accepted = (uniform[:, :k, 0] < ratio).long().cumprod(-1).sum(-1)
    at = torch.arange(rows)
    rest = target.clone()
    rest[:, :k] = (target[:, :k] - drafter).clamp_min(0)
    rest = rest[at, accepted].cumsum(-1)
    last = torch.searchsorted(rest, uniform[at, accepted, 1:] * rest[:, -1:], right=True)[:, 0]
    tokens = torch.cat((drafts, torch.full((rows, 1), -1)), -1)
    tokens[at, accepted] = last.clamp_max(target.shape[-1] - 1)
    tokens[torch.arange(k + 1) > accepted[:, None]] = -1
    return accepted, tokens
