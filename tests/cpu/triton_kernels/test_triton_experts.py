"""All that a layer's experts do by one op, in the interpreter: the bits of its four parts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from linear_cases import random_weight  # noqa: E402

from offroad.models.spec import MoeSpec  # noqa: E402
from offroad.ops import blocks, moe  # noqa: E402
from offroad.ops.activation import gated_activation as act  # noqa: E402
from offroad.ops.bound import LayerOps  # noqa: E402
from offroad.ops.linear import TOLERANCE  # noqa: E402
from offroad.quant.packed import Packed  # noqa: E402
from offroad.triton_kernels import linear_grouped, linear_pack  # noqa: E402
from offroad.triton_kernels.elementwise_jit import gated_activation  # noqa: E402
from offroad.triton_kernels.linear_grouped import experts, grouped  # noqa: E402
from offroad.triton_kernels.linear_run import Card  # noqa: E402
from offroad.triton_kernels.route_jit import moe_combine  # noqa: E402

pytestmark = pytest.mark.usefixtures("exact_products")
CARD = Card(4, True)
COUNT, TOP_K, HIDDEN = 5, 3, 256


def weights_of(layout: str, group: int, sym: bool, size: int) -> dict[str, tuple[Packed, Packed]]:
    """By name a weight as it is stored and as kernels read it."""
    found = {}
    for name, n, k in (("experts_gate_up", 2 * size, HIDDEN), ("experts_down", HIDDEN, size)):
        if layout == "dense":
            weight = Packed("dense", COUNT * n, k, {"w": torch.randn(COUNT * n, k) / k**0.5})
            found[name] = weight, weight
        else:
            weight = random_weight(layout, COUNT * n, k, group or k, sym=sym)
            found[name] = weight, linear_pack.pack(weight)
    return found


def layer_of(linears: dict[str, Packed], size: int, kind: str, by_parts: dict) -> LayerOps:
    return LayerOps(by_parts, linears, {}, 1e-6, moe=MoeSpec(COUNT, TOP_K, size, kind))


def parts(one: object, activation: object, combine: object) -> dict:
    linears = dict.fromkeys(("grouped_linear:experts_gate_up", "grouped_linear:experts_down"), one)
    return linears | {"gated_activation:experts": activation, "moe_combine": combine}


REFERENCE = parts(moe.grouped_linear, act, moe.moe_combine)
OURS = parts(grouped, gated_activation, moe_combine)


def inputs(tokens: int, shared: bool, dtype: torch.dtype = torch.float32) -> tuple:
    x, chosen = torch.randn(tokens, HIDDEN).to(dtype), torch.rand(tokens, COUNT).topk(TOP_K).indices
    more = (torch.randn(tokens, HIDDEN).to(dtype), torch.randn(tokens, 1).to(dtype)) if shared else (None, None)
    return x, torch.rand(tokens, TOP_K).softmax(-1), chosen, *more


@pytest.mark.parametrize("tokens", [1, 21, 22, 40])
@pytest.mark.parametrize(
    ("layout", "group", "sym", "size", "kind"),
    [
        ("affine4", 128, True, 128, "silu"),
        ("affine4", 32, False, 96, "gelu_tanh"),
        ("affine8", 32, False, 128, "silu"),
        ("fp8", 128, True, 128, "silu"),
        ("fp4", 16, True, 32, "silu"),
        ("dense", 0, True, 160, "silu"),
    ],
)
def test_the_bits_of_four_kernels(layout: str, group: int, sym: bool, size: int, kind: str, tokens: int):
    """Up to 63 pairs and from 66 on, which are sorted; with a shared expert and without."""
    torch.manual_seed(tokens)
    both = weights_of(layout, group, sym, size)
    stored, mine = ({name: pair[i] for name, pair in both.items()} for i in (0, 1))
    for shared in (False, True):
        args = inputs(tokens, shared)
        found = experts(*args, layer_of(mine, size, kind, {}), on=CARD)
        assert torch.equal(found, blocks.experts(*args, layer_of(mine, size, kind, OURS)))
        expected = blocks.experts(*args, layer_of(stored, size, kind, REFERENCE))
        allowed = TOLERANCE["float32"]
        scale = 4 * float(expected.abs().max())  # sums of two linears stand before it
        torch.testing.assert_close(found, expected, atol=scale * allowed.absolute, rtol=4 * allowed.relative)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_and_another_order_of_columns(dtype: torch.dtype):
    torch.manual_seed(0)
    both = weights_of("affine4", 128, True, 128)
    mine = {name: replace(pair[1], perm=torch.randperm(pair[1].k)) for name, pair in both.items()}
    for tokens in (2, 30):
        args = inputs(tokens, True, dtype)
        found = experts(*args, layer_of(mine, 128, "silu", {}), on=CARD)
        assert torch.equal(found, blocks.experts(*args, layer_of(mine, 128, "silu", OURS)))
        assert found.dtype == dtype
        assert found.isfinite().all()


def test_pairs_are_sorted_once(monkeypatch):
    calls, sort = [], linear_grouped.sort
    monkeypatch.setattr(linear_grouped, "sort", lambda *args: (calls.append(args), sort(*args))[1])
    mine = {name: pair[1] for name, pair in weights_of("affine4", 128, True, 128).items()}
    for tokens, sorts in ((0, 0), (1, 0), (21, 0), (22, 1), (30, 1)):
        calls.clear()
        found = experts(*inputs(tokens, True), layer_of(mine, 128, "silu", {}), on=CARD)
        assert found.shape == (tokens, HIDDEN)
        assert len(calls) == sorts
