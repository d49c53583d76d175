"""Kernels that stream weights and states (CUDA C++ for compute capability 8.0 and later), against the references."""

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

from delta_pair import H100, Pair, spec_of  # noqa: E402
from linear_cases import check, random_weight  # noqa: E402

from offroad.nvrtc.stream import KINDS, MOST, Streamer  # noqa: E402
from offroad.ops.linear import linear  # noqa: E402
from offroad.ops.registry import default_registry  # noqa: E402
from offroad.ops.spec import Problem  # noqa: E402
from offroad.triton_kernels.linear_pack import pack  # noqa: E402

DEVICE = torch.device("cuda")
FORMATS = (
    ("affine4", 128, True),
    ("affine4", 128, False),
    ("affine4", 32, True),
    ("affine4", 32, False),
    ("affine4", 64, True),
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
    streamer = Streamer(torch.cuda.get_device_properties(0).multi_processor_count)
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
            if rows <= 8:
                assert torch.equal(found, eight[:rows])
        assert torch.equal(streamer.run(x[5:6], mine), eight[5:6])
        assert all(torch.equal(streamer.run(x[:8], mine), eight) for _ in range(10))


def pair_of(spec, dtype: str, k: int) -> Pair:
    pair = Pair(spec, dtype, k, "cuda")
    sizes = (("key_dim", 128), ("value_dim", 128))
    problem = Problem("gated_delta", "decode", dtype, sizes=sizes)
    pair.kernel = default_registry().kernels["cuda.gated_delta"].prepare(H100, problem)
    return pair


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("spec", [spec_of(16, 3, 128, 128), spec_of(16, 2, 128, 128), spec_of(1, 1, 128, 128)], ids=str)
def test_states(spec, dtype: str):
    for k in (0, 1, 3):
        pair = pair_of(spec, dtype, k)
        pair.step(chunks=[(0, 0, 1), (2, 0, 2), (3, 0, 70)])
        pair.rounds(range(1, k + 2), (1, 0, 2, 70), 10)
        pair.alone([(0, 100, k + 1), (3, 7, 1), (1, 0, 1), (2, 0, k + 1)])
