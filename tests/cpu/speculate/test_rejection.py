"""The classic rule: its tokens have the model's distribution, and it accepts as often as can be."""

from __future__ import annotations

import torch

from offroad.speculate.rejection import rejection


def test_tokens_have_the_model_s_distribution_and_acceptance_is_the_largest_possible():
    torch.manual_seed(0)
    rows, k, vocab = 200_000, 2, 5
    target, drafter = torch.randn(k + 1, vocab).softmax(-1), torch.randn(k, vocab).softmax(-1)
    drafts = torch.stack([torch.multinomial(drafter[i], rows, replacement=True) for i in range(k)], -1)
    uniform = torch.rand(rows, k + 1, 2)
    accepted, tokens = rejection(target.expand(rows, -1, -1), drafter.expand(rows, -1, -1), drafts, uniform)
    alike = torch.minimum(target[:k], drafter).sum(-1)  # 1 - total variation
    expected = torch.tensor([1 - alike[0], alike[0] * (1 - alike[1]), alike[0] * alike[1]])
    found = torch.bincount(accepted, minlength=k + 1) / rows
    assert (found - expected).abs().max() < 5e-3
    for place in range(k + 1):
        drawn = tokens[:, place]
        drawn = drawn[drawn >= 0]
        assert len(drawn) == int((accepted >= place).sum())
        assert (torch.bincount(drawn, minlength=vocab) / len(drawn) - target[place]).abs().max() < 8e-3
