"""Where keys and values are rotated into their pages by one launch, and what the plan says where they are not."""

from __future__ import annotations

import pytest
from test_plan import make

from offroad.device.profile import load_profile, profile_names
from offroad.errors import PlanError
from offroad.ops.cells import Cell
from offroad.ops.plan import Plan

H100 = load_profile("h100-80gb")
FUSED, PARTS = "triton.rope_attention", "parts.rope_attention"


def cells(made: Plan) -> dict[Cell, str]:
    return {cell: choice.kernel for cell, choice in made.cells.items() if cell.op == "rope_attention"}


@pytest.mark.parametrize("model", ["qwen3-8b", "gemma3-270m", "qwen3_5-27b"])
@pytest.mark.parametrize("profile", ["h100-80gb", "h200-141gb", "gb10"])
def test_every_layer_of_a_triton_plan_that_decodes(model: str, profile: str):
    made = make(model, load_profile(profile))
    attention = {cell.layer for cell in made.cells if cell.op == "attention" and cell.phase == "decode"}
    assert attention
    assert cells(made) == {Cell(layer, "rope_attention", "decode"): FUSED for layer in attention}


@pytest.mark.parametrize("profile", [name for name in profile_names() if name.startswith(("cpu", "v100"))])
def test_no_such_op_where_no_kernel_could_do_it(profile: str):
    made = make("smollm2-135m", load_profile(profile))
    assert not cells(made)
    assert "rope_attention" not in made.explain()


def test_refusals_say_why():
    assert set(cells(make("smollm2-135m", H100, kernel=[f"rope_attention={PARTS}"])).values()) == {PARTS}
    made = make("smollm2-135m", H100, kernel=["attention=torch.reference_attention"], allow_reference=True)
    assert set(cells(made).values()) == {PARTS}
    assert (
        f"refused {FUSED}: is for triton.paged_decode and hopper.paged_decode, which read pages alone; the plan has"
        in (made.explain())
    )
    with pytest.raises(PlanError, match="which read pages alone; the plan has torch.reference_attention"):
        make(
            "smollm2-135m", H100, kernel=["attention=torch.reference_attention", f"rope_attention={FUSED}"],
            allow_reference=True,
        )  # fmt: skip
