"""The fused draw on a CUDA device: the tokens of choose_dense and of the CPU, through the sampler too."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "cpu" / "triton_kernels"))
from draw_cases import same_tokens  # noqa: E402

from offroad import SamplingParams  # noqa: E402
from offroad.sample.sampler import Sampler  # noqa: E402
from offroad.schedule.step import Start  # noqa: E402

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.mark.parametrize("vocab", [5, 2048, 50_003, 151_936, 248_320])
def test_the_same_tokens(vocab: int):
    same_tokens(vocab, rows=64, device="cuda")


def test_the_sampler_draws_what_it_draws_on_the_cpu():
    from offroad.triton_kernels.sample_jit import draw

    vocab, slots, positions = 32_000, np.array([1, 0, 2]), np.array([9, 10, 11])
    logits = torch.randn((3, vocab), generator=torch.Generator().manual_seed(1)) * 3
    drawn = []
    for device, plain in (("cpu", None), ("cuda", None), ("cuda", draw)):
        sampler = Sampler(3, vocab, device, plain)
        for slot, temperature in enumerate((0.7, 1.0, 0.0)):
            params = SamplingParams(temperature=temperature, top_p=1.0, top_k=0)
            sampler.start(Start(slot, np.zeros(4, np.int64), 0, 4, params, seed=77 + slot))
        tokens = torch.zeros((3, 16), dtype=torch.int64, device=device)
        drawn.append(sampler.draw(logits.to(device), slots, positions, tokens).tolist())
    assert drawn[0] == drawn[1] == drawn[2]
