"""Hopper's linear over 4-bit integers and e4m3 against the reference in fp32: odd and real shapes, groups, zero points,
scales, gates, and that what blocks leave to one another is put back."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("no Hopper GPU", allow_module_level=True)
pytest.importorskip("triton")
pytest.importorskip("cuda.bindings")
sys.path.append(str(Path(__file__).parents[1] / "cpu" / "triton_kernels"))

from linear_cases import check, random_weight  # noqa: E402

from offroad.nvrtc.linear_by_rows import MOST, product  # noqa: E402
from offroad.ops.activation import TOLERANCE, gated_activation  # noqa: E402
from offroad.ops.linear import linear  # noqa: E402
from offroad.quant.packed import Packed  # noqa: E402
from offroad.triton_kernels.linear_pack import pack  # noqa: E402
from offroad.triton_kernels.memory import COUNTERS, MEMORY  # noqa: E402

DEVICE = torch.device("cuda", 0)
REAL = [(34816, 5120), (5120, 17408), (16384, 5120), (5120, 6144), (14336, 5120), (43008, 5376), (5376, 21504)]


def weight_of(n: int, k: int, group: int, sym: bool = True, layout: str = "affine4") -> Packed:
    weight = random_weight(layout, n, k, group or k, sym=sym)
    return replace(weight, tensors={name: tensor.to(DEVICE) for name, tensor in weight.tensors.items()})


def x_of(rows: int, k: int) -> torch.Tensor:
    return torch.randn(rows, k, device=DEVICE).bfloat16()


def checked(x: torch.Tensor, weight: Packed, mine: Packed) -> None:
    found = product(x, mine)
    check(found, linear(x.float(), weight), "bfloat16")
    assert torch.equal(found, product(x, mine)), "the same bits again"
    counters = MEMORY.get(DEVICE, COUNTERS, 1, torch.int32)
    assert not counters.any(), "counters are ready for the next launch"


@pytest.mark.parametrize("sym", [True, False])
@pytest.mark.parametrize("group", [32, 64, 128, 256, 0])
@pytest.mark.parametrize(("n", "k"), [(64, 128), (1090, 2048), (200, 2016), (5120, 640), (70_000, 256)])
def test_odd_shapes(n: int, k: int, group: int, sym: bool):
    """A bias and another order of columns too."""
    if group and k % group:
        pytest.skip("groups that do not divide k")
    weight = replace(weight_of(n, k, group, sym), bias=torch.randn(n, device=DEVICE).bfloat16())
    weight = replace(weight, perm=torch.randperm(k, device=DEVICE))
    mine = pack(weight)
    for rows in (1, 3, 8, 9, 16, 17, 32, 33, 50, MOST):
        checked(x_of(rows, k), replace(weight, bias=weight.bias.float()), mine)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_scales(dtype: torch.dtype):
    """Of each type that records keep: what bf16 holds is bf16, what fp16 holds is fp16."""
    weight = weight_of(1024, 1024, 128, True)
    finest = {torch.bfloat16: 2.0**-13, torch.float16: 2.0**-16, torch.float32: 2.0**-26}[dtype]  # near 2^-6
    s = 2.0**-6 + finest * torch.arange(8, device=DEVICE).expand(1024, 8)
    weight = replace(weight, tensors=weight.tensors | {"s": s, "m": -8 * s})
    mine = pack(weight)
    assert mine.tensors["s"].dtype == dtype
    for rows in (7, 40):
        checked(x_of(rows, 1024), weight, mine)


@pytest.mark.parametrize(("group", "sym"), [(128, True), (32, True), (128, False), (32, False)])
@pytest.mark.parametrize(("n", "k"), REAL)
def test_real_shapes(n: int, k: int, group: int, sym: bool):
    weight = weight_of(n, k, group, sym)
    mine = pack(weight)
    for rows in (1, 8, 16, 32, MOST):
        checked(x_of(rows, k), weight, mine)


@pytest.mark.parametrize("group", [128, 256, 0])
@pytest.mark.parametrize(("n", "k"), [(64, 128), (1090, 2048), (201, 2008), (5120, 640), (70_000, 256)])
def test_odd_shapes_in_e4m3(n: int, k: int, group: int):
    """A bias and another order of columns too; the last group may be short."""
    weight = replace(weight_of(n, k, group, layout="fp8"), bias=torch.randn(n, device=DEVICE).bfloat16())
    weight = replace(weight, perm=torch.randperm(k, device=DEVICE))
    mine = pack(weight)
    for rows in (1, 3, 8, 9, 16, 17, 32, 33, 50, MOST):
        checked(x_of(rows, k), replace(weight, bias=weight.bias.float()), mine)


@pytest.mark.parametrize(("n", "k"), REAL)
def test_real_shapes_in_e4m3(n: int, k: int):
    """Scales of blocks of 128 by 128, which fp32 holds only."""
    weight = weight_of(n, k, 128, layout="fp8")
    s = weight.tensors["s"][::128] * (1 + 2.0**-20)
    weight = replace(weight, tensors=weight.tensors | {"s": s.repeat_interleave(128, dim=0)})
    mine = pack(weight)
    assert mine.tensors["s"].dtype == torch.float32
    for rows in (1, 8, 16, 32, MOST):
        checked(x_of(rows, k), weight, mine)


@pytest.mark.parametrize("rows", [8, 16, 32, MOST])
def test_numbers_in_e4m3_are_exact(rows: int):
    """All of them, those below 2^-6 too: y is columns of the weight."""
    finite = torch.tensor([byte for byte in range(256) if byte % 128 != 127], dtype=torch.uint8)
    codes = finite[torch.arange(4096 * 128).view(4096, 128) % len(finite)].view(torch.float8_e4m3fn).to(DEVICE)
    mine = pack(Packed("fp8", 4096, 128, {"q": codes, "s": torch.ones(4096, 1, device=DEVICE)}, 128))
    one = torch.eye(128, device=DEVICE).bfloat16()
    found = torch.cat([product(one[columns], mine) for columns in torch.arange(128).view(-1, rows)])
    assert torch.equal(found.T.float(), codes.float())


@pytest.mark.parametrize("layout", ["affine4", "fp8"])
@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
@pytest.mark.parametrize(("size", "k"), [(64, 128), (192, 2048), (17408, 5120), (21504, 5376)])
def test_gates(size: int, k: int, kind: str, layout: str):
    weight = weight_of(2 * size, k, 128, layout=layout)
    weight = replace(weight, bias=torch.randn(2 * size, device=DEVICE).bfloat16())
    mine = pack(weight)
    for rows in (1, 8, 16, 17, 33, MOST):
        x = x_of(rows, k)
        found = product(x, mine, gate=kind)
        both = linear(x.float(), replace(weight, bias=weight.bias.float())).bfloat16().float()
        allowed = TOLERANCE["bfloat16"]
        expected = gated_activation(both, kind)
        torch.testing.assert_close(found.float(), expected, atol=allowed.absolute, rtol=allowed.relative)
        assert torch.equal(found, product(x, mine, gate=kind))


@pytest.mark.parametrize("layout", ["affine4", "fp8"])
@pytest.mark.parametrize("rows", [5, 48])
def test_in_a_graph_of_many(rows: int, layout: str):
    """A thousand launches one after the other leave the same numbers and the counters at 0."""
    weight = weight_of(5120, 2048, 128, layout=layout)
    mine, x = pack(weight), x_of(rows, 2048)
    expected = product(x, mine)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [product(x, mine) for _ in range(20)]
    for _ in range(50):
        graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(y, expected) for y in found)
    assert not MEMORY.get(DEVICE, COUNTERS, 1, torch.int32).any()
