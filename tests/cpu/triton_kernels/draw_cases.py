"""Draws of random rows, by the kernel and by the reference."""

from __future__ import annotations

import torch

from offroad.sample.choose import Filters, choose_dense


def same_tokens(vocab: int, rows: int, device: str) -> None:
    """Rows of several temperatures and min_p, with seeds and positions beyond 32 bits."""
    from offroad.triton_kernels.sample_jit import draw

    random = torch.Generator(device).manual_seed(vocab)

    def integers(high: int) -> torch.Tensor:
        return torch.randint(high, (rows,), generator=random, device=device)

    temperature = torch.tensor([1.0, 0.7, 1e-9, 2.0, 30.0, 0.0], device=device, dtype=torch.float64).repeat(rows)[:rows]
    low = torch.tensor([-torch.inf, -3.0, -torch.inf, -0.5], device=device, dtype=torch.float64).repeat(rows)[:rows]
    nothing = torch.ones_like(low), torch.full_like(integers(9), vocab)
    filters = Filters(temperature, low, *nothing, integers(2**62), integers(2**40))
    logits = torch.randn((rows, vocab), generator=random, device=device) * 3
    assert torch.equal(draw(logits, filters), choose_dense(logits, filters, filtered=False))
