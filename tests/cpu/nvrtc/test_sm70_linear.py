"""Packed linears for SM70: the packer loses nothing that it should not, and the emulated kernel gives x W^T."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sm70_emulated import ORDER, load, needs_compiler
from sm70_weight_cases import CASES, Case, tokens, weight

from offroad.device.profile import load_profile
from offroad.errors import PlanError
from offroad.nvrtc import launch, linear, workspace
from offroad.nvrtc.pack import LAYOUT, pack, unfit, unpack
from offroad.ops.linear import TOLERANCE
from offroad.ops.spec import Problem
from offroad.quant.packed import dequantise

V100 = load_profile("v100-32gb")
LIMIT = TOLERANCE["float16"]


@given(
    st.sampled_from(["affine4", "affine8", "fp8", "fp4"]),
    st.integers(1, 70),
    st.sampled_from([16, 32, 64, 1 << 20]),
    st.integers(1, 6),
    st.sampled_from([1e-7, 1.0, 1e6]),
    st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_packing_keeps_weights(layout: str, n: int, group: int, units: int, size: float, whole: bool):
    k = 32 * units
    case = Case(layout, n, k, min(group, k), 1, whole=whole or layout.startswith("fp"))
    given_weight = weight(case, n)
    tensors = given_weight.tensors
    scaled = {name: tensor if name == "q" else tensor * size for name, tensor in tensors.items()}
    given_weight = replace(given_weight, tensors=scaled)
    packed = pack(given_weight)
    assert packed.layout == LAYOUT
    wanted, found = dequantise(given_weight), unpack(packed)
    largest = float(scaled["s"].max())  # w is the difference of numbers up to 16 times that, in fp32
    limit = 2.0**-10 * (wanted.abs() + (0 if whole else 1) * 16 * largest) + 2.0**-22 * 256 * largest
    assert ((found - wanted).abs() <= limit).all()


@pytest.mark.parametrize(("layout", "group"), [("affine4", 32), ("affine8", 16), ("affine8", 32)])
def test_groups_of_one_number_keep_it(layout: str, group: int):
    """GGUF's K-quants: minima of their own, also where the scale is 0, or so small that fp16 has no zero for it."""
    given_weight = weight(Case(layout, 40, 128, group, 1, whole=False))
    s, m = given_weight.tensors["s"].clone(), given_weight.tensors["m"]
    s[3, 1], s[7, 0], s[8, 2] = 0, m.abs()[7, 0] / 1e6, m.abs()[8, 2] / 2e4
    s[9], m[9] = 0, 0
    given_weight = replace(given_weight, tensors=given_weight.tensors | {"s": s})
    wanted, found = dequantise(given_weight), unpack(pack(given_weight))
    limit = 2.0**-9 * (wanted.abs() + m.abs().repeat_interleave(group, dim=1)) + 1e-7
    assert ((found - wanted).abs() <= limit).all()
    assert not found[9].any()


@pytest.mark.parametrize(
    ("stored", "k", "taken"),
    [
        (("gguf.q4_k",), 256, True),
        (("gguf.q4_k", "gguf.q6_k"), 256, True),
        (("gguf.q5_0", "gguf.q8_0"), 96, True),
        (("gguf.q6_k",), 256, True),
        (("affine4.x-g128", "affine4.x-g32"), 256, True),
        (("affine4.x-g128", "affine4.x-g32"), 160, False),
        (("gguf.q4_0", "bf16"), 256, False),
    ],
)
def test_parts_stored_in_other_ways(stored: tuple[str, ...], k: int, taken: bool):
    problem = Problem("linear", "decode", "float16", sizes=(("k", k), ("n", 64)), stored=stored)
    assert (linear.limits(problem) is None) == taken


def test_what_cannot_be_packed_is_refused():
    assert unfit("affine4", 72, 8) is not None
    assert unfit("dense", 64, 1) is not None
    assert unfit("fp8", 256, 24) is not None
    case = weight(Case("affine4", 8, 48, 16, 1))
    with pytest.raises(PlanError, match="multiple of 32"):
        pack(case)
    with pytest.raises(PlanError, match="actorder"):
        pack(replace(weight(CASES[0]), perm=torch.arange(64)))


@needs_compiler
@pytest.mark.parametrize("case", CASES, ids=str)
def test_as_the_reference_and_the_same_in_any_order(case: Case, monkeypatch):
    monkeypatch.setattr(launch, "load", load)
    packed, x = pack(weight(case)), tokens(case)
    wanted = x.float() @ dequantise(weight(case)).T + (0 if packed.bias is None else packed.bias.float())
    bound = linear.bind(V100, case.problem)
    outputs = []
    for seed in (0, 1):
        ORDER.seed = seed
        outputs.append(bound(x, packed))
    torch.testing.assert_close(outputs[0].float(), wanted, atol=LIMIT.absolute, rtol=LIMIT.relative)
    assert torch.equal(outputs[0], outputs[1])


@needs_compiler
def test_splits_give_the_same_whatever_block_comes_last(monkeypatch):
    monkeypatch.setattr(launch, "load", load)
    case = Case("affine4", 32, 6144, 128, 1)
    assert linear.splits_of(V100.units, case.n, case.k, "q4", 1, 1) > 1
    bound, packed, x = linear.bind(V100, case.problem), pack(weight(case)), tokens(case)
    outputs = []
    for seed in range(4):
        ORDER.seed = seed
        outputs.append(bound(x, packed))
    assert all(torch.equal(out, outputs[0]) for out in outputs)


@needs_compiler
@pytest.mark.parametrize("by_choice", [False, True])
def test_experts(by_choice: bool, monkeypatch):
    monkeypatch.setattr(launch, "load", load)
    monkeypatch.setattr(linear, "MAX_GRID", 7)
    case = Case("affine4", 3 * 32, 512, 64, 4)
    sizes = (("experts", 3), ("k", case.k), ("n", case.n))
    problem = replace(case.problem, op="grouped_linear", sizes=sizes)
    assert linear.grouped_limits(problem) is None
    experts = torch.tensor([[0, 2], [1, 0], [2, 1], [2, 0]])
    x = tokens(replace(case, tokens=8)).unflatten(0, (4, 2)) if by_choice else tokens(case)
    w = dequantise(weight(case)).view(3, 32, case.k)
    wanted = torch.einsum("tcnk,tck->tcn", w[experts], (x if by_choice else x[:, None].expand(4, 2, -1)).float())
    found = linear.bind_grouped(V100, problem)(x, experts, pack(weight(case)), 3)
    torch.testing.assert_close(found.float(), wanted, atol=LIMIT.absolute, rtol=LIMIT.relative)
    with pytest.raises(launch.LaunchError, match="multiple of 32"):
        linear.bind_grouped(V100, problem)(x, experts, pack(weight(case)), 2)


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_no_tokens_need_no_launch(phase: str, monkeypatch):
    """A chunk that wants nothing, in layers that store nothing."""
    monkeypatch.setattr(launch, "load", load)
    case = Case("affine4", 4 * 32, 512, 64, 1)
    problem, x, packed = replace(case.problem, phase=phase), tokens(case)[:0], pack(weight(case))
    assert linear.bind(V100, problem)(x, packed).shape == (0, 128)
    problem = replace(problem, op="grouped_linear", sizes=(("experts", 4), ("k", 512), ("n", 128)))
    experts = torch.zeros(0, 2, dtype=torch.int64)
    assert linear.bind_grouped(V100, problem)(x, experts, packed, 4).shape == (0, 2, 32)
    assert linear.bind_grouped(V100, problem)(x.new_empty(0, 2, 512), experts, packed, 4).shape == (0, 2, 32)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=60), st.sampled_from(linear.TILES))
@settings(max_examples=60, deadline=None)
def test_parts_have_each_row_once_and_one_expert(experts: list[int], tiles: int):
    chosen = torch.tensor(experts)
    parts = linear.Parts.of(chosen, 5, tiles)
    seen = []
    for expert, begin, count in parts.table.tolist():
        assert 0 <= count <= 8 * tiles
        rows = parts.order[begin : begin + count].tolist()
        assert len(rows) == count
        assert all(experts[row] == expert for row in rows)
        seen += rows
    assert sorted(seen) == list(range(len(experts)))


@needs_compiler
@pytest.mark.parametrize(("rows", "by_choice"), [(5, False), (13, True), (40, False)])
def test_experts_of_chunks_are_sorted(rows: int, by_choice: bool, monkeypatch):
    """Uneven shares, one expert without rows; tiles of 8, 16 and 32 rows."""
    monkeypatch.setattr(launch, "load", load)
    case = Case("affine4", 4 * 32, 512, 64, rows)
    problem = replace(
        case.problem, op="grouped_linear", phase="prefill", sizes=(("experts", 4), ("k", 512), ("n", 128))
    )
    experts = torch.tensor([[0, 1 + 2 * (row % 5 == 0)] for row in range(rows)])
    x = tokens(replace(case, tokens=2 * rows)).unflatten(0, (rows, 2)) if by_choice else tokens(case)
    w = dequantise(weight(case)).view(4, 32, case.k)
    wanted = torch.einsum("tcnk,tck->tcn", w[experts], (x if by_choice else x[:, None].expand(rows, 2, -1)).float())
    bound, outputs, made = linear.bind_grouped(V100, problem), [], []
    of = linear.Parts.of
    monkeypatch.setattr(linear.Parts, "of", lambda *args: made.append(args[2]) or of(*args))
    for seed in (0, 1):
        ORDER.seed = seed
        outputs.append(bound(x, experts, pack(weight(case)), 4))
    assert made == [{5: 1, 13: 1, 40: 4}[rows]] * 2
    torch.testing.assert_close(outputs[0].float(), wanted, atol=LIMIT.absolute, rtol=LIMIT.relative)
    assert torch.equal(outputs[0], outputs[1])


@needs_compiler
@pytest.mark.parametrize("case", [case for case in CASES if case.tokens > 2], ids=str)
def test_many_tokens_go_through_a_workspace(case: Case, monkeypatch):
    """In slabs of two tiles of columns; the halves are those of the fused kernel."""
    monkeypatch.setattr(launch, "load", load)
    monkeypatch.setattr(workspace, "CROSSOVER", 3)
    monkeypatch.setattr(workspace, "WORKSPACE", 2 * 64 * case.k)
    problem = replace(case.problem, phase="prefill")
    linears = next(kernel for kernel in linear.KERNELS if kernel.op == "linear")
    assert linears.check(V100, problem).temporary == 2 * case.k * min(64, -(-case.n // 32) * 32)
    assert linears.check(V100, case.problem).temporary == 0
    packed, x, outputs = pack(weight(case)), tokens(case), []
    wanted = x.float() @ dequantise(weight(case)).T + (0 if packed.bias is None else packed.bias.float())
    bound = linear.bind(V100, problem)
    monkeypatch.setattr(linear._Linears, "run", lambda *_: pytest.fail("the fused kernel"))
    for seed in (0, 1):
        ORDER.seed = seed
        outputs.append(bound(x, packed))
    torch.testing.assert_close(outputs[0].float(), wanted, atol=LIMIT.absolute, rtol=LIMIT.relative)
    assert torch.equal(outputs[0], outputs[1])
    halves = torch.full((-(-case.n // 32) * 32, case.k), float("nan"), dtype=torch.float16)
    workspace.Dequantiser.of(packed.kind, 2 if case.group == 16 and packed.kind == "f4" else 1).halves(
        packed, 0, halves
    )
    torch.testing.assert_close(halves[: case.n].float(), unpack(packed), atol=1e-6, rtol=2e-3)
    assert halves[case.n :].isnan().all()
