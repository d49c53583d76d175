"""Where one op does all that a layer's experts do, what the plan says of it, and why it does not elsewhere."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_family_plans import make

from offroad.device.profile import load_profile
from offroad.ops.cells import Cell
from offroad.ops.plan import Plan
from offroad.ops.registry import default_registry
from offroad.ops.spec import Problem

DEVICE, MODELS = "h100-80gb", {"qwen3_5-35b-a3b-fp8": "triton.grouped_w8", "gemma4-26b-a4b-nvfp4": "triton.grouped_w4"}
H100 = load_profile(DEVICE)
WHOLE, PARTS = "triton.experts", "parts.experts"
PROBLEM = Problem(
    "experts",
    "decode",
    "bfloat16",
    sizes=(("k", 256), ("n", 8 * 192), ("experts", 8), ("hidden", 256), ("top_k", 2)),
    features=frozenset({"silu", "shared"}),
    stored=("affine4.w4a16-g128",),
    parts=(
        ("grouped_linear:experts_gate_up", "triton.grouped_w4"),
        ("gated_activation:experts", "triton.gated_activation"),
        ("grouped_linear:experts_down", "triton.grouped_w8"),
        ("moe_combine", "triton.moe_combine"),
    ),
)


def used(made: Plan) -> set[str]:
    return {choice.kernel for cell, choice in made.cells.items() if cell.op == "experts"}


@pytest.mark.parametrize("device", ["gb10", "h100-80gb", "rtxpro6000"])
@pytest.mark.parametrize("model", MODELS)
def test_every_layer_of_a_triton_plan(model: str, device: str):
    made = make(model, device, max_num_seqs=4)
    layers = {cell.layer for cell in made.cells if cell.op == "grouped_linear:experts_down"}
    assert layers
    assert {(cell.layer, cell.phase) for cell in made.cells if cell.op == "experts"} == {
        (layer, phase) for layer in layers for phase in ("prefill", "decode")
    }
    assert used(made) == {WHOLE}
    for layer in layers:  # what stores the weights is named too
        assert made.cells[Cell(layer, "grouped_linear:experts_gate_up", "decode")].kernel == MODELS[model]


@pytest.mark.parametrize(
    ("model", "device"),
    [("qwen3_5-27b-w4a16", DEVICE), ("gemma4-26b-a4b-nvfp4", "v100-32gb")],
)
def test_no_such_op_without_experts_or_where_no_kernel_could_do_it(model: str, device: str):
    assert used(make(model, device, max_num_seqs=4, max_model_len=2048)) == set()


def test_refusals_say_why():
    made = make("qwen3_5-35b-a3b-fp8", DEVICE, kernel=[f"experts={PARTS}"])
    assert used(made) == {PARTS}
    made = make("qwen3_5-35b-a3b-fp8", DEVICE, batch_invariant=True)
    assert used(made) == {PARTS}
    assert f"refused {WHOLE}: --batch-invariant" in made.explain()
    kernel = default_registry().kernels[WHOLE]
    assert kernel.check(H100, PROBLEM).ok
    refused = kernel.check(H100, replace(PROBLEM, sizes=(*PROBLEM.sizes[:1], ("n", 8 * 160), *PROBLEM.sizes[2:])))
    assert "a multiple of 32 outputs of gate and up each, not 80" in refused.reason
    refused = kernel.check(H100, replace(PROBLEM, parts=(*PROBLEM.parts[:3], ("moe_combine", "torch.moe_combine"))))
    assert "is for triton.moe_combine as moe_combine; the plan has torch.moe_combine" in refused.reason
    refused = kernel.check(load_profile("v100-32gb"), PROBLEM)
    assert "compute capability 8.0" in refused.reason
