"""W8A8 linears in plans: taken where they are asked for by name, refused with the reason elsewhere."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from real_specs import headers_of, real_spec

from offroad.device.profile import load_profile
from offroad.engine import make_plan
from offroad.errors import PlanError, SettingsError
from offroad.ops.cells import Cell, Resolver, groups
from offroad.ops.linear import round_activations
from offroad.ops.plan import Plan
from offroad.ops.registry import default_registry
from offroad.ops.spec import Load, Problem, Verdict
from offroad.settings import Settings
from offroad.triton_kernels.linear import W8A8, fp8_parts
from offroad.triton_kernels.memory import split_bytes
from offroad.weights.dummy import DummySource

CONFIG = Path(__file__).parents[3] / "benchmarks/configs/qwen3.5-27b.json"
ASKED = f"linear@fp8={W8A8}"
PROBED = replace(
    load_profile("h100-80gb"), source="probe", toolchain=(("triton", "3.6"), ("torch", "2.11"), ("cuda", "13.0"))
)
LINEARS = {"linear:qkvz", "linear:qkv", "linear:o", "linear:gate_up", "linear:down"}


@cache
def _source(scheme: str) -> DummySource:
    return DummySource(json.loads(CONFIG.read_text()), "cpu", scheme)


def planned(scheme: str = "fp8-block", device: str = "h100-80gb", **settings) -> Plan:
    wanted = dict(model="dummy", device=device, max_model_len=16384, max_num_seqs=8, memory_utilization=1.0)
    return make_plan(Settings.of(**(wanted | settings)), _source(scheme))


def verdict(n: int = 4096, k: int = 5120, stored: tuple[str, ...] = ("fp8.block128x128",), **more) -> Verdict:
    device = more.pop("device", load_profile("h100-80gb"))
    sizes = {"n": n, "k": k} | more.pop("sizes", {})
    problem = Problem("linear", "prefill", more.pop("dtype", "bfloat16"), sizes=tuple(sizes.items()), stored=stored)
    return default_registry().kernels[W8A8].check(device, replace(problem, **more))


def test_it_is_taken_in_both_phases_where_it_is_asked_for_and_nowhere_else():
    """By weights that are kept as fp8; the dense ones beside them keep their kernels. The activation is behind sums of
    the same family's kernels."""
    plan, plain = planned(kernel=[ASKED]), planned()
    taken = {cell.op for cell, choice in plan.cells.items() if choice.kernel == W8A8}
    assert taken == LINEARS
    for cell, choice in plan.cells.items():
        if cell.op in LINEARS:
            assert (choice.kernel, choice.layout) == (W8A8, "triton.w8")
            assert plain.cells[cell].kernel == "hopper.linear_w8"
            reasons = {refusal.kernel: refusal.reason for refusal in plain.cells[cell].refused}
            assert f"--kernel {ASKED}" in reasons[W8A8]
        elif cell.op == "gated_linear":
            assert choice.kernel == plain.cells[cell].kernel == "hopper.gated_linear"
        else:
            assert choice.kernel == plain.cells[cell].kernel
    assert plan.fingerprint != plain.fingerprint
    assert "activations rounded to e4m3" in plan.explain()


@pytest.mark.parametrize(
    ("device", "dtype", "said"),
    [
        (load_profile("h100-80gb"), "bfloat16", "else as hopper.linear_w8"),
        (
            load_profile("h100-80gb"),
            "float16",
            "else as triton.linear_w8 (hopper.linear_w8 needs activations in bfloat16",
        ),
        (PROBED, "bfloat16", "else as triton.linear_w8 (hopper.linear_w8 needs NVRTC"),
    ],
    ids=["own", "float16", "without NVRTC"],
)
def test_the_plan_says_who_widens_weights_of_few_tokens_and_the_bound_kernel_does(device, dtype: str, said: str):
    pytest.importorskip("triton")
    problem = Problem("linear", "decode", dtype, sizes=(("n", 5120), ("k", 17408)), stored=("fp8.block128x128",))
    kernels = default_registry().kernels
    assert said in kernels[W8A8].check(device, problem).reason
    name = said.split()[2]
    assert kernels[W8A8].prepare(device, problem).func is kernels[name].prepare(device, problem).func


def test_the_plan_has_memory_for_both_operands():
    plan, plain = planned(kernel=[ASKED], max_num_batched_tokens=8192), planned(max_num_batched_tokens=8192)
    most = max(sum(fp8_parts(8192, n, k)) for n, k in ((34816, 5120), (5120, 17408)))
    assert most == 5120 * 17408 + 8192 * 17408 + 4 * 8192 * 136 + 40 * 136 * 4
    assert plan.memory.workspaces.kept == most
    assert plan.memory.workspace - plain.memory.workspace == most - plain.memory.workspaces.kept
    few = replace(plan.cells[Cell(0, "linear:down", "prefill")].problem, load=Load(8, 1, 64, 100))
    assert default_registry().kernels[W8A8].check(plan.device, few).workspace == split_bytes(132)


@pytest.mark.parametrize(
    ("device", "whose"),
    [("h100-80gb", "cuBLASLt"), ("rtx5090", "a Triton kernel"), ("gb10", "a Triton kernel")],
)
def test_units_of_each_device_that_has_them(device: str, whose: str):
    found = verdict(device=load_profile(device))
    assert found.ok, found.reason
    assert f"on FP8 units by {whose}" in found.reason


def test_what_has_no_units_is_refused_and_other_blackwells_plan_it():
    rtx = load_profile("rtx5090")
    without = replace(rtx, name="older", capabilities=rtx.capabilities - {"mma_fp8"})
    assert "from compute capability 8.9 on; device: older" in verdict(device=without).reason
    with pytest.raises(PlanError, match=rf"refused {W8A8}: needs compute capability 8\.0"):
        planned(device="v100-32gb", kernel=[ASKED], max_model_len=1024)
    plan = planned(device="rtxpro6000", kernel=[ASKED])
    assert {cell.op for cell, choice in plan.cells.items() if choice.kernel == W8A8} == LINEARS


def test_batch_invariant_is_refused():
    with pytest.raises(PlanError, match=f"refused {W8A8}: --batch-invariant"):
        planned(kernel=[ASKED], batch_invariant=True)


def test_other_weights_keep_their_kernels_and_those_named_without_blocks_are_refused():
    assert W8A8 not in planned("w4a16-g128", kernel=[ASKED]).kernels()
    with pytest.raises(PlanError, match=r"reads fp8\.block128x128; stored: bf16"):
        planned(kernel=[f"linear={W8A8}"])


def test_what_it_does_not_read_is_refused_with_the_reason():
    assert verdict().ok
    assert verdict(stored=("fp8.block128x128",) * 3, dtype="float16").ok
    for refused, said in (
        (verdict(dtype="float32"), "needs activations in"),
        (verdict(stored=("fp8.channel",)), "stored: fp8.channel"),
        (verdict(stored=("fp8.block128x128", "bf16")), "stored: bf16, fp8.block128x128"),
        (verdict(k=5184), "whole blocks"),
        (verdict(n=4100), "whole blocks"),
        (verdict(sizes={"part": 48}), "parts of multiples of 48"),
        (verdict(n=131_072), "up to 65,536 outputs"),
    ):
        assert not refused.ok
        assert said in refused.reason


def test_old_libraries_are_refused_where_cublaslt_would_multiply_and_nowhere_else():
    hopper, blackwell = (replace(load_profile(name), source="probe") for name in ("h100-80gb", "rtx5090"))
    tools = (("cuda", "13.0"), ("torch", "2.11.0+cu130"), ("triton", "3.6.0"))
    assert "by cuBLASLt" in verdict(device=replace(hopper, toolchain=tools)).reason
    for old in (("cuda", "12.8"), ("torch", "2.9.1+cu128")):
        there = tuple((dict(tools) | dict([old])).items())
        oldest = {"cuda": "12.9", "torch": "2.10"}[old[0]]
        assert (
            f"needs {old[0]} {oldest} or later, not {old[1]}" in verdict(device=replace(hopper, toolchain=there)).reason
        )
        assert "by a Triton kernel" in verdict(device=replace(blackwell, toolchain=there)).reason
    assert "needs cuda 12.9 or later, and there is none" in verdict(device=replace(hopper, toolchain=tools[1:])).reason
    stand_in = replace(hopper, source="stand-in", toolchain=(("cuda", "12.8"), *tools[1:]))
    assert "needs cuda 12.9 or later, not 12.8" in verdict(device=stand_in).reason


def test_parts_that_end_within_a_block_are_told_to_kernels():
    """Weights of 27B have whole blocks in each part, and no size is added."""
    problems = {choice.problem for choice in planned().cells.values() if choice.problem.op == "linear"}
    assert not [problem for problem in problems if "part" in dict(problem.sizes)]
    spec = real_spec("smollm2-135m")  # heads of 576, 192 and 192 rows, blocks of each counted from its own first
    found = groups(spec, headers_of(spec, "fp8.block128x128", 1), "bfloat16", "bfloat16", 64)
    parts = {cell.op: dict(problem.sizes).get("part") for group in found for cell, problem in group.cells}
    assert parts["linear:qkv"] == 192
    assert parts["linear:gate_up"] is None
    assert parts["linear:down"] == 576


def test_the_most_exact_name_counts_and_unknown_ones_are_refused():
    plan = planned(kernel=[ASKED, "linear:down=triton.linear_w8"])
    assert plan.cells[Cell(0, "linear:down", "prefill")].kernel == "triton.linear_w8"
    assert plan.cells[Cell(0, "linear:gate_up", "prefill")].kernel == W8A8
    with pytest.raises(SettingsError, match=r"affine4.*fp8"):
        Resolver(default_registry(), load_profile("h100-80gb"), Settings.of(model="m", kernel=[f"linear@w8={W8A8}"]))


def test_activations_are_rounded_by_token_and_128():
    """Three significant bits and the sign, of sizes up to the largest of their group; what is not finite is NaN."""
    x = torch.zeros(2, 256, dtype=torch.float64)
    x[0, :4] = torch.tensor([448.0, 17.0, 18.0, 0.001])
    x[0, 128:] = 1e-30
    x[1, 5] = torch.inf
    found = round_activations(x)
    assert found[0, :4].tolist() == [448.0, 16.0, 18.0, 2.0**-9]
    torch.testing.assert_close(found[0, 128:], x[0, 128:], rtol=1e-6, atol=0)
    assert bool(found[1, :128].isnan().all())
    assert bool((found[1, 128:] == 0).all())
