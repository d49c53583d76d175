"""A linear and its gated activation in one kernel, in the interpreter: the bits of two kernels."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from linear_cases import random_weight  # noqa: E402

from offroad.models.spec import FfnSpec  # noqa: E402
from offroad.ops.activation import TOLERANCE  # noqa: E402
from offroad.ops.activation import gated_activation as reference  # noqa: E402
from offroad.ops.bound import LayerOps  # noqa: E402
from offroad.ops.linear import linear  # noqa: E402
from offroad.quant.packed import Packed  # noqa: E402
from offroad.triton_kernels import linear_gated, linear_pack, linear_run  # noqa: E402
from offroad.triton_kernels.elementwise_jit import gated_activation  # noqa: E402
from offroad.triton_kernels.linear_gated import fused, gated_linear, takes  # noqa: E402
from offroad.triton_kernels.linear_run import Card, Tile, run, tile  # noqa: E402

pytestmark = pytest.mark.usefixtures("exact_products")
CARD = Card(4, True)
FORMATS = [
    ("affine4", 32, True),
    ("affine4", 64, False),
    ("affine4", 128, False),
    ("affine4", 0, True),
    ("affine8", 32, False),
    ("fp8", 128, True),
    ("fp4", 16, True),
    ("dense", 0, True),
]


def made(layout: str, size: int, k: int, group: int, sym: bool) -> tuple[Packed, Packed]:
    """A weight of gate and up of `size` each: (canonical, as the kernel reads it)."""
    if layout == "dense":
        weight = Packed("dense", 2 * size, k, {"w": torch.randn(2 * size, k) / k**0.5})
        return weight, weight
    weight = random_weight(layout, 2 * size, k, group or k, sym=sym)
    return weight, linear_pack.pack(weight)


def check(found: torch.Tensor, x: torch.Tensor, weight: Packed, kind: str, dtype: str = "float32") -> None:
    bias = None if weight.bias is None else weight.bias.float()
    expected = reference(linear(x.float(), replace(weight, bias=bias)), kind)
    allowed = TOLERANCE[dtype]
    torch.testing.assert_close(
        found.float(), expected, atol=4 * allowed.absolute, rtol=2 * allowed.relative
    )  # sums of a linear stand before it


@pytest.mark.parametrize(
    ("layout", "group", "sym", "rows"),
    [(*of, 3) for of in FORMATS] + [(*FORMATS[2], rows) for rows in (1, 16, 17, 64)] + [(*FORMATS[5], 17)],
)
def test_bits_of_both_kernels(layout: str, group: int, sym: bool, rows: int):
    """Every way of keeping weights, k that ends within a record, the tile that a linear of this size has."""
    torch.manual_seed(rows)
    size, k, kind = {1: 64, 3: 96, 16: 32, 17: 64, 64: 32}[rows], 160, ("silu", "gelu_tanh")[rows % 2]
    weight, mine = made(layout, size, k, group, sym)
    x = torch.randn(rows, k)
    at = tile(linear_run.stored(mine).kind, 2 * size, k, rows, 1, CARD, x.dtype)
    found = fused(x, mine, kind, on=CARD)
    y = torch.full((rows, 2 * size), torch.nan)
    linear_run.launch(x, linear_run.stored(mine), y, mine, at, -(-rows // at.m), 2 * size)
    assert torch.equal(found, gated_activation(y, kind))
    check(found, x, weight, kind)


@pytest.mark.parametrize(
    ("layout", "group", "sym", "dtype"),
    [(*of, ("bfloat16", "float16")[i % 2]) for i, of in enumerate(FORMATS[2:])] + [(*FORMATS[2], "float16")],
)
def test_half_activations_bias_order_and_parts_of_k(layout: str, group: int, sym: bool, dtype: str):
    """Gate and up are rounded before the activation, whatever the tile: both halves of a record, of two, of four."""
    size, k, kind = 96 if layout == "dense" else 128, 256, "silu"
    weight, mine = made(layout, size, k, group, sym)
    more = dict(bias=torch.randn(2 * size).to(getattr(torch, dtype)), perm=torch.randperm(k))
    more = more if layout != "dense" else more | {"perm": None}
    weight, mine = replace(weight, **more), replace(mine, **more)
    if layout == "dense":
        half = {"w": weight.tensors["w"].to(getattr(torch, dtype))}
        weight, mine = replace(weight, tensors={"w": half["w"].float()}), replace(mine, tensors=half)
    x = torch.randn(5, k).to(getattr(torch, dtype))
    shares = Tile(64, 16, 1, programs=3)  # of an output begin elsewhere than in the linear alone: not its bits
    check(fused(x, mine, kind, choice=shares), x, weight, kind, dtype)
    for n, split in ((64, 2), (128, 1), (256, 2)):
        if size % (n // 2) or (n == 256 and layout != "fp8"):
            continue
        at = Tile(n, 16, split)
        found = fused(x, mine, kind, choice=at)
        both = torch.full((5, 2 * size), torch.nan, dtype=x.dtype)
        xs = x if mine.perm is None else x[:, mine.perm]
        linear_run.launch(xs.contiguous(), linear_run.stored(mine), both, mine, at, 1, 2 * size)
        assert torch.equal(found, gated_activation(both, kind)), (n, split)
        check(found, x, weight, kind, dtype)


def layer_of(mine: Packed, kind: str, calls: list[str]) -> LayerOps:
    def by_two(x: torch.Tensor, weight: Packed) -> torch.Tensor:
        calls.append("linear")
        return run(x, weight, on=CARD)

    bounds = {"linear:gate_up": by_two, "gated_activation": gated_activation}
    return LayerOps(bounds, {"gate_up": mine}, {}, 1e-6, ffn=FfnSpec(mine.n // 2, kind))


@pytest.mark.parametrize("layout", ["affine4", "fp8", "dense"])
def test_more_tokens_go_through_both_kernels(layout: str):
    """From and up to what is said one kernel, else those of the plan's two cells; no token, nothing to do."""
    weight, mine = made(layout, 64, 256, 128, True)
    dtype = torch.float16 if layout == "dense" else torch.float32
    mine = replace(mine, tensors={"w": mine.tensors["w"].half()}) if layout == "dense" else mine
    most, calls = (16 if layout == "dense" else 64), []
    layer, x = layer_of(mine, "gelu_tanh", calls), torch.randn(most + 1, 256).to(dtype)
    for rows, two in ((1, layout == "affine4"), (17, layout == "dense"), (most, False), (most + 1, True), (0, True)):
        calls.clear()
        found = gated_linear(x[:rows], layer, on=CARD)
        assert found.shape == (rows, 64)
        assert (calls == ["linear"]) == two == (not takes(rows, dtype, mine))
        check(found, x[:rows], weight, "gelu_tanh", "float16" if layout == "dense" else "float32")


def test_fp32_by_torch_where_the_linear_is():
    """A dense weight in fp32 is torch's GEMM's in the linear's kernel, so it is here."""
    _, mine = made("dense", 64, 256, 0, True)
    assert not takes(1, torch.float32, mine)
    assert takes(1, torch.bfloat16, mine)
    assert not takes(1, torch.bfloat16, replace(mine, tensors={"w": mine.tensors["w"].T.contiguous().T}))


def test_a_real_tile_never_cuts_a_half():
    """The tile that a linear gets divides gate and up evenly on every card, for every number of rows and every size."""
    cards = [Card(132, True), Card(170, False), Card(20, False)]
    for size in (32, 64, 96, 160, 17408, 21504, 32 * 771):
        for kind in ("int4", "e2m1", "int8", "e4m3", "dense"):
            for rows in (1, 16, 17, 33, linear_gated.MOST):
                for on in cards:
                    at = tile(kind, 2 * size, 5120, rows, 1, on, torch.bfloat16)
                    assert size % (at.n // 2) == 0, (size, kind, rows, at)
