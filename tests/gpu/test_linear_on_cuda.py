"""Triton linears on a CUDA device, in every format and type, with real shapes, against the references in fp32."""

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

from linear_cases import FORMATS, check, random_weight  # noqa: E402

from offroad.models.spec import MoeSpec  # noqa: E402
from offroad.ops import blocks  # noqa: E402
from offroad.ops.bound import LayerOps  # noqa: E402
from offroad.ops.linear import linear  # noqa: E402
from offroad.ops.moe import grouped_linear  # noqa: E402
from offroad.quant.packed import Packed  # noqa: E402
from offroad.triton_kernels import linear_grouped  # noqa: E402
from offroad.triton_kernels.elementwise_jit import gated_activation  # noqa: E402
from offroad.triton_kernels.linear_grouped import grouped, sort, sort_many  # noqa: E402
from offroad.triton_kernels.linear_pack import dequantised_rows, pack  # noqa: E402
from offroad.triton_kernels.linear_run import card, run  # noqa: E402
from offroad.triton_kernels.route_jit import moe_combine  # noqa: E402

DTYPES = ("bfloat16", "float16", "float32")
DEVICE = torch.device("cuda")


def moved(weight: Packed) -> Packed:
    return replace(weight, tensors={name: tensor.to(DEVICE) for name, tensor in weight.tensors.items()})


def real_weight(layout: str, n: int, k: int, group: int, sym: bool) -> Packed:
    return moved(random_weight(layout, n, k, group or k, sym=sym))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("layout", "group", "sym"), FORMATS)
def test_formats(layout: str, group: int, sym: bool, dtype: str):
    """Every regime: one token to many, through registers and through memory; odd sizes, a bias, another order."""
    for n, k in ((1090, 2016), (1024, 5120)):
        weight = real_weight(layout, n, k, group, sym)
        weight = replace(weight, bias=torch.randn(n, device=DEVICE).to(getattr(torch, dtype)))
        weight = replace(weight, perm=torch.randperm(k, device=DEVICE))
        mine = pack(weight)
        for rows in (1, 2, 3, 8, 16, 17, 33, 64, 65, 130, 600):
            x = (0.5 * torch.randn(rows, k, device=DEVICE)).to(getattr(torch, dtype))
            expected = linear(x.float(), replace(weight, bias=weight.bias.float()))
            check(run(x, mine), expected, dtype)


@pytest.mark.parametrize(("n", "k"), [(34816, 5120), (5120, 17408), (16384, 5120), (5120, 6144), (43008, 5376)])
@pytest.mark.parametrize(("layout", "group", "sym"), FORMATS)
def test_real_shapes(layout: str, group: int, sym: bool, n: int, k: int):
    weight = real_weight(layout, n, k, group, sym)
    mine = pack(weight)
    for rows in (1, 8, 32, 64):
        x = torch.randn(rows, k, device=DEVICE).bfloat16()
        check(run(x, mine), linear(x.float(), weight), "bfloat16")


def test_embeddings_come_back():
    rows = torch.randint(0, 5000, (40,), device=DEVICE)
    for layout, group, sym in FORMATS:
        weight = real_weight(layout, 5000, 2048, group, sym)
        expected = linear(torch.eye(2048, device=DEVICE), weight).T[rows]
        torch.testing.assert_close(dequantised_rows(pack(weight), rows), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("tokens", [1, 4, 9, 200, 3000])
@pytest.mark.parametrize(("layout", "group", "sym"), [*FORMATS, ("dense", 0, True)])
def test_experts(layout: str, group: int, sym: bool, tokens: int):
    """The experts of Qwen3.5-35B-A3B, 32 of them."""
    count, n, k, top_k = 32, 1024, 2048, 8
    if layout == "dense":
        weight = Packed("dense", count * n, k, {"w": torch.randn(count * n, k, device=DEVICE).bfloat16() / 45})
        mine = weight
    else:
        weight = real_weight(layout, count * n, k, group, sym)
        mine = pack(weight)
    experts = torch.rand(tokens, count, device=DEVICE).topk(top_k, dim=-1).indices
    x = torch.randn(tokens, k, device=DEVICE).bfloat16()
    check(grouped(x, experts, mine, count), grouped_linear(x.float(), experts, weight, count), "bfloat16")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("layout", "group", "sym"), [*FORMATS, ("dense", 0, True)])
def test_all_of_experts_by_one_op(layout: str, group: int, sym: bool, dtype: str):
    """To the bit what linears, activation and sum give one after the other; with a shared expert, and without."""
    count, top_k, hidden, size, kind = 32, 8, 1024, 256, getattr(torch, dtype)
    linears = {}
    for name, n, k in (("experts_gate_up", 2 * size, hidden), ("experts_down", hidden, size)):
        if layout == "dense":
            w = (torch.randn(count * n, k, device=DEVICE) / k**0.5).to(kind)
            linears[name] = Packed("dense", count * n, k, {"w": w})
        else:
            linears[name] = pack(real_weight(layout, count * n, k, group, sym))
    bounds = {f"grouped_linear:{name}": grouped for name in linears}
    bounds |= {"gated_activation:experts": gated_activation, "moe_combine": moe_combine}
    layer = LayerOps(bounds, linears, {}, 1e-6, moe=MoeSpec(count, top_k, size, "silu"))
    for tokens in (1, 8, 9, 33, 200, 600):
        x, shared = (torch.randn(tokens, hidden, device=DEVICE).to(kind) for _ in range(2))
        weights, chosen = torch.rand(tokens, count, device=DEVICE).softmax(-1).topk(top_k, dim=-1)
        mixed = (shared, x[:, :1]) if tokens % 2 else (None, None)
        found = linear_grouped.experts(x, weights, chosen, *mixed, layer, on=card(DEVICE))
        assert torch.equal(found, blocks.experts(x, weights, chosen, *mixed, layer))


@pytest.mark.parametrize(("tokens", "top_k"), [(1, 1), (1, 8), (9, 8), (16, 8), (60, 2), (65, 6), (511, 8), (512, 8)])
def test_pairs_are_put_in_blocks_as_by_torch(tokens: int, top_k: int):
    for count in (8, 255, 256):
        for size in (16, 64):
            experts = torch.rand(tokens, count, device=DEVICE).topk(top_k, dim=-1).indices
            for chosen in (experts, torch.full_like(experts, count - 1)):
                found, expected = sort(chosen, count, size), sort_many(chosen, count, size)
                assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("tokens", [3, 40])
def test_captured_in_a_graph(tokens: int):
    """Replays with other inputs and other experts give what eager calls give: no host decision is left in them."""
    count, top_k = 16, 4
    weight = pack(real_weight("affine4", 5120, 6144, 128, True))
    experts_weight = pack(real_weight("affine4", count * 512, 6144, 128, True))
    x = torch.randn(tokens, 6144, device=DEVICE).bfloat16()
    chosen = torch.rand(tokens, count, device=DEVICE).topk(top_k, dim=-1).indices

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        return run(x, weight), grouped(x, chosen, experts_weight, count)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    for _ in range(3):
        x.normal_()
        chosen.copy_(torch.rand(tokens, count, device=DEVICE).topk(top_k, dim=-1).indices)
        graph.replay()
        expected = step()
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_rows_do_not_depend_on_their_mates():
    """In the invariant mode a row has the same bits in any batch."""
    weight = pack(real_weight("affine4", 5120, 6144, 128, True))
    x = torch.randn(900, 6144, device=DEVICE).bfloat16()
    alone = run(x[:1], weight, invariant=True)
    for rows in (2, 16, 17, 64, 65, 300, 900):
        assert torch.equal(run(x[:rows], weight, invariant=True)[:1], alone)
