"""Kernels bound for --batch-invariant: a row has the same bits alone, among others, anywhere, and at any cut."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from delta_pair import EPS, Pair, rows_of  # noqa: E402
from linear_cases import check, random_weight  # noqa: E402

from offroad.device.profile import load_profile  # noqa: E402
from offroad.models.spec import GatedDeltaSpec  # noqa: E402
from offroad.ops.linear import linear  # noqa: E402
from offroad.ops.moe import grouped_linear  # noqa: E402
from offroad.ops.registry import default_registry  # noqa: E402
from offroad.ops.spec import Bound, Problem  # noqa: E402
from offroad.quant.packed import Packed  # noqa: E402
from offroad.triton_kernels import linear_pack  # noqa: E402
from offroad.triton_kernels.linear_pack import W4, W8  # noqa: E402

H100 = load_profile("h100-80gb")
pytestmark = pytest.mark.usefixtures("exact_products")
LAYOUTS = {"affine4": W4, "fp4": W4, "affine8": W8, "fp8": W8, "dense": "dense"}
KINDS = [("affine4", 128, False), ("affine4", 32, True), ("affine8", 64, True), ("fp8", 128, True), ("fp4", 16, True)]
KINDS.append(("dense", 0, True))


def bound(op: str, layout: str) -> Bound:
    """The kernel that a plan binds with the flag."""
    name = f"triton.{op.removesuffix('_linear')}_{LAYOUTS[layout].removeprefix('triton.')}"
    name = "triton.linear_invariant" if name == "triton.linear_dense" else name
    problem = Problem(op, "decode", "float32", sizes=(("k", 512), ("n", 130)), invariant=True)
    return default_registry().kernels[name].prepare(H100, problem)


def weights(layout: str, n: int, k: int, group: int, sym: bool) -> tuple[Packed, Packed]:
    """(canonical, as the kernel reads it)."""
    if layout == "dense":
        weight = Packed("dense", n, k, {"w": torch.randn(n, k) / k**0.5}, bias=torch.randn(n))
        return weight, weight
    weight = random_weight(layout, n, k, group or k, sym=sym)
    return weight, linear_pack.pack(weight)


@pytest.mark.parametrize(("layout", "group", "sym"), KINDS)
def test_linears(layout: str, group: int, sym: bool):
    torch.manual_seed(1)
    k = 512 if layout == "affine8" else 256  # one in parts
    weight, mine = weights(layout, 66, k, group, sym)
    run, x = bound("linear", layout), torch.randn(70, k)
    alone = run(x[40:41], mine)
    for rows, place in ((2, 1), (17, 0), (70, 69)):
        others = x[:rows].clone()
        others[place] = x[40]
        assert torch.equal(run(others, mine)[place], alone[0]), (rows, place)
    check(run(x, mine), linear(x, weight))


@pytest.mark.parametrize(("layout", "group", "sym"), [KINDS[0], KINDS[-1]])
def test_linears_of_experts(layout: str, group: int, sym: bool):
    torch.manual_seed(2)
    weight, mine = weights(layout, 5 * 64, 256, group, sym)
    weight, mine = (Packed(w.layout, w.n, w.k, w.tensors, w.group) if layout == "dense" else w for w in (weight, mine))
    run, x = bound("grouped_linear", layout), torch.randn(40, 256)
    experts = torch.stack([torch.randperm(5)[:2] for _ in range(40)])
    alone = run(x[7:8], experts[7:8], mine, 5)
    for rows, place in ((2, 1), (9, 0), (40, 39)):
        order = torch.arange(rows)
        order[place] = 7
        assert torch.equal(run(x[order], experts[order], mine, 5)[place], alone[0]), (rows, place)
    check(run(x, experts, mine, 5), grouped_linear(x, experts, weight, 5))


def test_a_prompt_cut_between_blocks_leaves_the_same_states():
    """The recurrent layers count 64 tokens from where a chunk begins, so cuts at blocks change nothing."""
    spec = GatedDeltaSpec(1, 2, 16, 16, 4)
    pairs = [Pair(spec, seed=5) for _ in range(2)]
    qkvz, ba = pairs[0].inputs(150)

    def run(pair: Pair, cuts: list[int]) -> tuple[torch.Tensor, ...]:
        out = []
        for start, end in zip(cuts, cuts[1:], strict=False):
            rows = rows_of([(1, start, end - start)], 0, "cpu")
            out.append(pair.kernel(qkvz[start:end], ba[start:end], *pair.rings, rows, spec, pair.weights, EPS))
        return torch.cat(out), *(ring.data[1] for ring in pair.rings)

    for whole, cut in zip(run(pairs[0], [0, 150]), run(pairs[1], [0, 64, 128, 150]), strict=True):
        assert torch.equal(whole, cut)
