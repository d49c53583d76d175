"""The fused draw in Triton's interpreter against choose_dense: the same tokens, not merely as likely ones."""

from __future__ import annotations

import pytest
import torch
from draw_cases import same_tokens

pytest.importorskip("triton")

from offroad.sample.choose import Filters  # noqa: E402
from offroad.triton_kernels.sample_jit import draw  # noqa: E402


@pytest.mark.parametrize("vocab", [5, 1000, 2048, 5003])
def test_the_same_tokens(vocab: int):
    same_tokens(vocab, rows=6, device="cpu")


def test_rows_of_nan_and_of_equal_logits():
    numbers = (torch.full((2,), value) for value in (1e-30, -torch.inf, 1.0))
    whole = (torch.full((2,), value, dtype=torch.int64) for value in (9, 1, 2))
    filters = Filters(*(n.double() for n in numbers), *whole)
    logits = torch.stack((torch.full((3000,), torch.nan), torch.zeros(3000)))
    logits[1, 7] = logits[1, 2500] = 5.0
    assert 0 <= int(draw(logits, filters)[0]) < 3000
    assert int(draw(logits, filters)[1]) in (7, 2500)
