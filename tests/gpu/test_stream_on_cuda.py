"""Linears of few tokens whose weights stream (CUDA C++ for compute capability 8.0 and later), against the reference."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)
pytest.importorskip("triton")
sys.path.append(str(Path(__file__).parents[1] / "cpu" / "triton_kernels"))

from linear_cases import check, random_weight  # noqa: E402

from offroad.nvrtc.stream import KINDS, MOST, Streamer  # noqa: E402
from offroad.ops.linear import linear  # noqa: E402
from offroad.triton_kernels.linear_pack import pack  # noqa: E402

DEVICE = torch.device("cuda")
FORMATS = (
    ("affine4", 128, True),
    ("affine4", 128, False),
    ("affine4", 256, True),
    ("affine4", 0, True),
    ("fp8", 128, True),
    ("fp8", 0, True),
)
ODD = ((1090, 2016), (640, 9216), (16, 1032))


def weight_of(layout: str, n: int, k: int, group: int, sym: bool):
    weight = random_weight(layout, n, k, group or k, sym=sym)
    return replace(weight, tensors={name: tensor.to(DEVICE) for name, tensor in weight.tensors.items()})


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("layout", "group", "sym"), FORMATS)
def test_linears(layout: str, group: int, sym: bool, dtype: str):
    """Odd sizes; a row has the same bits alone, in every batch of its kernel and in every run."""
    streamer = Streamer(2 * torch.cuda.get_device_properties(0).multi_processor_count)
    for n, k in ODD:
        weight = weight_of(layout, n, k, group, sym)
        weight = replace(weight, bias=torch.randn(n, device=DEVICE).to(getattr(torch, dtype)))
        mine = pack(weight)
        assert mine.kind in KINDS
        x = (0.5 * torch.randn(MOST, k, device=DEVICE)).to(getattr(torch, dtype))
        expected = linear(x.float(), replace(weight, bias=weight.bias.float()))
        eight = streamer.run(x[:8], mine)
        for rows in range(1, MOST + 1):
            found = streamer.run(x[:rows], mine)
            check(found, expected[:rows], dtype)
            assert torch.equal(found, eight[:rows])
        assert torch.equal(streamer.run(x[5:6], mine), eight[5:6])
        assert all(torch.equal(streamer.run(x[:8], mine), eight) for _ in range(10))
