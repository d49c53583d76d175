"""Triton linears in the interpreter against the references, over odd shapes, formats and numbers of rows."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from linear_cases import FORMATS, check, random_weight  # noqa: E402

from offroad.device.profile import load_profile  # noqa: E402
from offroad.ops.budget import _width  # noqa: E402
from offroad.ops.linear import linear  # noqa: E402
from offroad.ops.moe import grouped_linear  # noqa: E402
from offroad.ops.registry import default_registry  # noqa: E402
from offroad.ops.spec import Problem  # noqa: E402
from offroad.quant.packed import Packed, dequantise  # noqa: E402
from offroad.triton_kernels import linear_grouped, linear_pack, linear_run  # noqa: E402
from offroad.triton_kernels.linear_grouped import grouped  # noqa: E402
from offroad.triton_kernels.linear_pack import BLOCK_N  # noqa: E402
from offroad.triton_kernels.linear_run import Tile  # noqa: E402
from offroad.triton_kernels.memory import Memory, dense_bytes, dense_outputs  # noqa: E402


def through(weight: Packed, x: torch.Tensor, **choice) -> torch.Tensor:
    return linear_run.run(x, linear_pack.pack(weight), **choice)


@pytest.mark.parametrize(("n", "k"), [(64, 128), (192, 384), (130, 224)])
@pytest.mark.parametrize("group", [32, 64, 128, 0])
@pytest.mark.parametrize("sym", [True, False])
def test_int4(n: int, k: int, group: int, sym: bool):
    if group and k % group:
        pytest.skip("whole groups only")
    weight = random_weight("affine4", n, k, group or k, sym=sym)
    for rows in (1, 17):
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
    n, k = 66, 640
    weight = random_weight(layout, n, k, group or k, sym=sym)
    weight = replace(weight, bias=torch.randn(n).to(getattr(torch, dtype)), perm=torch.randperm(k))
    x = torch.randn(5, k).to(getattr(torch, dtype))
    expected = linear(x.float(), replace(weight, bias=weight.bias.float()))
    for at in (Tile(64, 16, 1), Tile(64, 16, 3), Tile(64, 16, 1, programs=1), Tile(64, 16, 1, programs=3)):
        check(through(weight, x, choice=at), expected, dtype)
    check(through(weight, x, dense_from=1), expected, dtype)


@pytest.mark.parametrize("programs", [1, 2, 3, 4, 5, 7, 11, 12, 13, 30, 99])
def test_equal_shares_of_all_tiles(programs: int):
    """Shares begin and end anywhere: several tiles of one program, several programs of one tile; blocks beside each
    other have their own; and counters are left as they were found."""
    n, k = 320, 6 * 128  # 5 tiles of 6 steps
    weight = random_weight("affine4", n, k, 128, sym=True)
    x = torch.randn(20, k)
    at = Tile(64, 16, 1, programs=programs)
    tiles = 5
    assert at.grid(n, k) == (tiles, min(programs, 30), 0)
    check(through(weight, x, choice=at), linear(x, weight))
    check(through(weight, x, choice=at), linear(x, weight))
    assert not linear_run.MEMORY.get(x.device, "arrived", 2 * tiles, torch.int32).any()


@pytest.mark.parametrize("tokens", [2, 30])
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


SORTS = {"one launch": linear_grouped.sort, "of many": linear_grouped.sort_many}


@pytest.mark.parametrize("how", SORTS)
@pytest.mark.parametrize(
    ("tokens", "top_k", "count", "size"),
    [(7, 1, 3, 2), (40, 1, 6, 16), (1, 1, 4, 16), (64, 1, 2, 16), (65, 8, 256, 16), (9, 6, 255, 32), (300, 3, 4, 64)],
)
def test_sorting_places_every_pair_once(tokens: int, top_k: int, count: int, size: int, how: str):
    experts, pairs = torch.randint(0, count, (tokens, top_k)), tokens * top_k
    ids, owner = SORTS[how](experts, count, size)
    assert len(ids) == len(owner) * size
    placed = ids < pairs
    assert sorted(ids[placed].tolist()) == list(range(pairs))
    for block, expert in enumerate(owner.tolist()):
        own = ids[block * size : (block + 1) * size]
        assert all(int(experts.flatten()[i]) == expert for i in own[own < pairs])
        assert expert >= 0 or bool((own == pairs).all())


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 5).flatmap(lambda k: st.lists(st.lists(st.integers(0, 8), min_size=k, max_size=k), min_size=1)))
def test_one_launch_sorts_as_many_do(chosen: list[list[int]]):
    """Experts that nobody chose, and one that all did."""
    experts = torch.tensor(chosen)
    for size in (2, 16):
        for found, expected in zip(*(sort(experts, 9, size) for sort in SORTS.values()), strict=True):
            assert torch.equal(found, expected)


def test_every_number_of_rows_and_the_invariant_mode():
    """Each regime, and the same bits for a row in every batch where that is asked for."""
    weight = random_weight("affine4", 66, 256, 128)
    mine = linear_pack.pack(weight)
    x = torch.randn(70, 256)
    expected = linear(x, weight)
    alone = linear_run.run(x[:1], mine, invariant=True)
    for rows in (0, 1, 16, 17, 33, 70):
        check(linear_run.run(x[:rows], mine), expected[:rows])
        assert torch.equal(linear_run.run(x[:rows], mine, invariant=True)[:1], alone[:rows])


@pytest.mark.parametrize("units", [1, 3, 17, 40, 48, 136])
@pytest.mark.parametrize("programs", [1, 40, 112, 272])
def test_splits_are_nearly_even_and_fill_the_device(programs: int, units: int):
    parts = linear_run.splits(programs, units, 132)
    per = -(-units // parts)
    assert per * parts <= 1.1 * units
    assert per * (parts - 1) < units, "a program without work"
    assert linear_run.splits(programs * 1000, units, 132) == 1


def test_parts_that_became_dense_stay_dense():
    weight = Packed("dense", 48, 64, {"w": torch.randn(48, 64)}, bias=torch.randn(48))
    x = torch.randn(3, 64)
    mine = linear_pack.pack(weight)
    torch.testing.assert_close(linear_run.run(x, mine), linear(x, weight))
    assert torch.equal(linear_pack.dequantised_rows(mine, torch.tensor([5])), weight.tensors["w"][5:6])


@pytest.mark.parametrize(
    ("layout", "kind", "group", "sym"),
    [
        ("affine4", "affine4.w4a16-g128", 128, False),
        ("affine4", "affine4.w4a16-g32", 32, False),
        ("affine8", "affine8.w8a16-g128", 128, False),
        ("fp8", "fp8.block128x128", 128, True),
        ("fp4", "fp4.nvfp4", 16, True),
    ],
)
def test_the_plan_knows_the_bytes(layout: str, kind: str, group: int, sym: bool):
    """What the budget reserves for a weight is what its records take, to within 8 % (factors of NVFP4's rows aside)."""
    weight = linear_pack.pack(random_weight(layout, 256, 2048, group, sym=sym))
    planned = _width(kind, weight.layout, 2048) * 256 * 2048
    assert 0 <= planned - weight.nbytes + 4 * 256 <= 0.08 * weight.nbytes, (planned, weight.nbytes)


def problem(op: str, kind: str, **sizes: int) -> Problem:
    return Problem(op, "decode", "bfloat16", sizes=tuple(sorted(sizes.items())), stored=(kind,))


def test_refusals_say_why():
    device = load_profile("h100-80gb")
    kernels = default_registry().kernels
    assert kernels["triton.linear_w4"].check(device, problem("linear", "affine4.w4a16-g128", n=64, k=256)).ok
    refused = kernels["triton.linear_w4"].check(device, problem("linear", "affine4.x-g96", n=64, k=192))
    assert "groups" in refused.reason
    refused = kernels["triton.linear_w8"].check(device, problem("linear", "affine4.w4a16-g128", n=64, k=256))
    assert "the weight is affine4" in refused.reason
    sizes = {"n": 4 * 96, "k": 256, "experts": 4}
    refused = kernels["triton.grouped_w4"].check(device, problem("grouped_linear", "affine4.w4a16-g128", **sizes))
    assert "not 96" in refused.reason


SHARED_SCRIPT = """
from offroad.triton_kernels.compile import compile_variant
from offroad.triton_kernels.linear import SHARED_OF, W4, W8
from offroad.triton_kernels.linear_variants import variants
largest = {
    ("linear int4 g32, more rows", 90): W4,
    ("grouped linear fp8, 32 rows", 120): W8,
    ("grouped linear bf16, 64 rows", 90): "dense",
}
by_label = {variant.label: variant for variant in variants()}
for (label, arch), layout in largest.items():
    needed = compile_variant(by_label[label], arch).shared
    assert needed <= SHARED_OF[layout], (label, needed)
"""


def test_declared_shared_memory_is_enough():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", SHARED_SCRIPT], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def test_dequantised_in_pieces(monkeypatch):
    """Many rows: the weight goes through memory piece by piece, and each piece has its own columns of the result."""
    monkeypatch.setattr(linear_run, "MEMORY", Memory())
    weight = random_weight("affine4", 150, 256, 128, sym=False)
    x, small = torch.randn(4, 256), linear_run.Card(4, True, 64 * 256 * 4)
    check(through(weight, x, dense_from=1, on=small), linear(x, weight))


@given(st.integers(1, 400_000), st.sampled_from((128, 2560, 5120, 17408)), st.sampled_from((2, 4)))
def test_pieces_of_dequantised_weights_fit_and_are_even(n: int, k: int, itemsize: int):
    most = dense_bytes(80 << 30)
    piece = dense_outputs(n, k, itemsize, most)
    assert piece % BLOCK_N == 0
    assert piece * k * itemsize <= most
    pieces = -(-n // piece)
    assert piece <= -(-n // pieces) + 255
