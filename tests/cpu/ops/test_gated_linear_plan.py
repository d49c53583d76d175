"""Where one kernel does gate_up and its activation, what the plan says of it, and why it does not elsewhere."""

from __future__ import annotations

from dataclasses import replace

import pytest
from real_specs import headers_of, real_spec
from test_plan import make

from offroad.device.profile import load_profile, profile_names
from offroad.errors import PlanError
from offroad.ops.cells import Cell
from offroad.ops.plan import Plan, plan
from offroad.ops.registry import default_registry
from offroad.ops.spec import Problem
from offroad.settings import Settings

H100 = load_profile("h100-80gb")
FUSED, PARTS = "triton.gated_linear", "parts.gated_linear"


def used(made: Plan) -> set[str]:
    return {choice.kernel for cell, choice in made.cells.items() if cell.op == "gated_linear"}


@pytest.mark.parametrize("model", ["qwen3-8b", "gemma3-270m", "qwen3_5-27b"])
def test_every_layer_of_a_triton_plan(model: str):
    made = make(model, H100)
    layers = {cell.layer for cell in made.cells if cell.op == "linear:gate_up"}
    assert layers
    assert {(cell.layer, cell.phase) for cell in made.cells if cell.op == "gated_linear"} == {
        (layer, phase) for layer in layers for phase in ("prefill", "decode")
    }
    assert used(made) == {FUSED}
    for layer in layers:  # what more tokens get is named too
        assert made.cells[Cell(layer, "linear:gate_up", "decode")].kernel == "triton.linear_dense"
        assert made.cells[Cell(layer, "gated_activation", "decode")].kernel == "triton.gated_activation"


@pytest.mark.parametrize("profile", [name for name in profile_names() if name.startswith(("cpu", "v100"))])
def test_no_such_op_where_no_kernel_could_do_it(profile: str):
    made = make("smollm2-135m", load_profile(profile))
    assert used(made) == set()
    assert "gated_linear" not in made.explain()


def test_refusals_say_why():
    made = make("smollm2-135m", H100, batch_invariant=True)
    assert used(made) == {PARTS}
    assert f"refused {FUSED}: --batch-invariant" in made.explain()
    made = make("smollm2-135m", H100, kernel=[f"gated_linear={PARTS}"])
    assert used(made) == {PARTS}
    made = make("smollm2-135m", H100, kernel=["linear:gate_up=torch.linear"], allow_reference=True)
    assert used(made) == {PARTS}
    assert "the plan has torch.linear" in made.explain()
    with pytest.raises(PlanError, match="the plan has torch.linear"):
        make("smollm2-135m", H100, kernel=["linear:gate_up=torch.linear", f"gated_linear={FUSED}"])


def problem(**changes) -> Problem:
    parts = (("linear:gate_up", "triton.linear_w4"), ("gated_activation", "triton.gated_activation"))
    whole = Problem("gated_linear", "decode", "bfloat16", sizes=(("k", 256), ("n", 192)), parts=parts)
    return replace(whole, features=frozenset({"silu", "bias"}), stored=("affine4.w4a16-g128",), **changes)


def test_sizes_and_parts():
    kernel = default_registry().kernels[FUSED]
    assert kernel.check(H100, problem()).ok
    eight = (("linear:gate_up", "triton.linear_w8a8"), *problem().parts[1:])  # few tokens are not rounded there
    assert kernel.check(H100, problem(parts=eight)).ok
    refused = kernel.check(H100, problem(sizes=(("k", 256), ("n", 160))))
    assert "a multiple of 32 outputs of gate and up each, not 80" in refused.reason
    refused = kernel.check(H100, problem(parts=(*problem().parts[:1], ("gated_activation", "cpu.gated_activation"))))
    assert "the plan has cpu.gated_activation" in refused.reason
    refused = kernel.check(load_profile("v100-32gb"), problem())
    assert "compute capability 8.0" in refused.reason


def test_each_rank_has_its_own_halves():
    """Tensor parallel: gate and up are cut alike, so a rank's first half is still the gate's."""
    spec = real_spec("qwen3-8b")
    settings = Settings.of(model="qwen3-8b", tensor_parallel_size=2)
    made = plan("qwen3-8b", spec, headers_of(spec), H100, settings, default_registry(), "bfloat16")
    assert used(made) == {FUSED}
    sizes = {choice.problem.size("n") for cell, choice in made.cells.items() if cell.op == "gated_linear"}
    assert sizes == {spec.layers[0].ffn.size}
