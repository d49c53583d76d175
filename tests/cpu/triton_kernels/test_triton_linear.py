"""Triton linears in the interpreter against the references, over odd shapes, formats and numbers of rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from linear_cases import FORMATS, check, random_weight  # noqa: E402

from offroad.ops.linear import linear  # noqa: E402
from offroad.ops.moe import grouped_linear  # noqa: E402
from offroad.quant.packed import Packed, dequantise  # noqa: E402
from offroad.triton_kernels import linear_grouped, linear_pack, linear_run  # noqa: E402
from offroad.triton_kernels.linear_grouped import grouped  # noqa: E402
from offroad.triton_kernels.linear_run import Tile  # noqa: E402


def through(weight: Packed, x: torch.Tensor, **choice) -> torch.Tensor:
    return linear_run.run(x, linear_pack.pack(weight), **choice)


@pytest.mark.parametrize(("n", "k"), [(64, 128), (192, 384), (130, 224)])
@pytest.mark.parametrize("group", [32, 64, 128, 0])
@pytest.mark.parametrize("sym", [True, False])
def test_int4(n: int, k: int, group: int, sym: bool):
    if group and k % group:
        pytest.skip("whole groups only")
    weight = random_weight("affine4", n, k, group or k, sym=sym)
    for rows in (1, 3, 17):
        x = torch.randn(rows, k)
        check(through(weight, x), linear(x, weight))


@pytest.mark.parametrize(
    ("layout", "group", "sym"),
    [
        ("affine8", 16, True),
        ("affine8", 32, False),
        ("affine8", 0, False),
        ("fp8", 128, True),
        ("fp8", 0, True),
        ("fp8", 32, True),
        ("fp4", 16, True),
        ("fp4", 32, True),
    ],
)
def test_other_codes(layout: str, group: int, sym: bool):
    n, k = 130, 352
    weight = random_weight(layout, n, k, group or k, sym=sym)
    for rows in (2, 17):
        x = torch.randn(rows, k)
        check(through(weight, x), linear(x, weight))
        check(through(weight, x, dense_from=1), linear(x, weight))


@pytest.mark.parametrize(("layout", "group", "sym"), FORMATS)
def test_packed_rows_are_the_weights(layout: str, group: int, sym: bool):
    """All of the weight comes back out of records: exactly, but for the factors of NVFP4's rows, and minima."""
    weight = random_weight(layout, 130, 352, group or 352, sym=sym)
    rows = torch.tensor([0, 129, 7, 64, 63, 8, 100, 7])
    found = linear_pack.dequantised_rows(linear_pack.pack(weight), rows)
    torch.testing.assert_close(found, dequantise(weight)[rows], atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("layout", "group", "sym"), FORMATS)
def test_half_activations_bias_and_order(layout: str, group: int, sym: bool, dtype: str):
    """Columns in another order (act order), a bias, and k over several programs, whose sums are added in order."""
    n, k = 130, 640
    weight = random_weight(layout, n, k, group or k, sym=sym)
    weight = replace(weight, bias=torch.randn(n).to(getattr(torch, dtype)), perm=torch.randperm(k))
    x = torch.randn(5, k).to(getattr(torch, dtype))
    expected = linear(x.float(), replace(weight, bias=weight.bias.float()))
    for split in (1, 2, 3):
        check(through(weight, x, choice=Tile(64, 16, split)), expected, dtype)
    check(through(weight, x, dense_from=1), expected, dtype)


@pytest.mark.parametrize("tokens", [1, 3, 30])
@pytest.mark.parametrize(("layout", "group", "sym"), [*FORMATS, ("dense", 0, True)])
def test_experts(layout: str, group: int, sym: bool, tokens: int):
    """One pair a block, and pairs sorted by expert; experts that nobody chose, x by token and by pair."""
    count, n, k, top_k = 5, 64, 256, 3
    torch.manual_seed(tokens)
    if layout == "dense":
        weight = Packed("dense", count * n, k, {"w": torch.randn(count * n, k) / 16})
        mine = weight
    else:
        weight = random_weight(layout, count * n, k, group or k, sym=sym)
        mine = linear_pack.pack(weight)
    experts = torch.stack([torch.randperm(count - 1)[:top_k] for _ in range(tokens)])
    x = torch.randn(tokens, k)
    check(grouped(x, experts, mine, count), grouped_linear(x, experts, weight, count))
    x = torch.randn(tokens, top_k, k)
    check(grouped(x, experts, mine, count), grouped_linear(x, experts, weight, count))


@pytest.mark.parametrize(("pairs", "count", "size"), [(7, 3, 2), (40, 6, 16), (1, 4, 16), (64, 2, 16)])
def test_sorting_places_every_pair_once(pairs: int, count: int, size: int):
    experts = torch.randint(0, count, (pairs, 1))
    ids, owner = linear_grouped.sort(experts, count, size)
    assert len(ids) == len(owner) * size
    placed = ids < pairs
    assert sorted(ids[placed].tolist()) == list(range(pairs))
    for block, expert in enumerate(owner.tolist()):
        own = ids[block * size : (block + 1) * size]
        assert all(int(experts[i, 0]) == expert for i in own[own < pairs])
        assert expert >= 0 or bool((own == pairs).all())
