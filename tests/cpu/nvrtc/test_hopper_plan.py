"""Which problems Hopper's kernels take, and why they refuse others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from offroad.device.profile import DeviceProfile, load_profile
from offroad.engine import make_plan
from offroad.nvrtc import hopper
from offroad.ops.registry import default_registry
from offroad.ops.spec import Problem
from offroad.settings import Settings
from offroad.weights.locate import open_path

CONFIG = Path(__file__).parents[3] / "benchmarks" / "configs" / "qwen3.5-27b.json"
H200 = load_profile("h200-141gb")
GATED = (("linear:gate_up", hopper.LINEAR), ("gated_activation", "triton.gated_activation"))


def linear(**changes) -> Problem:
    made = Problem("linear", "decode", "bfloat16", sizes=(("n", 34816), ("k", 5120)), stored=("affine4.ct-g128",))
    return replace(made, **changes)


def delta(features: tuple[str, ...] = ("silu", "replay"), **sizes: int) -> Problem:
    every = {"key_heads": 16, "value_heads": 48, "key_dim": 128, "value_dim": 128, "kernel": 4} | sizes
    return Problem("gated_delta", "decode", "bfloat16", sizes=tuple(every.items()), features=frozenset(features))


def gated(n: int = 34816, parts: tuple = GATED) -> Problem:
    return linear(
        op="gated_linear", sizes=(("n", n), ("k", 5120)), parts=parts, features=frozenset({"silu"}), stored=()
    )


def probed(**tools: str) -> DeviceProfile:
    return replace(H200, source="probe", toolchain=tuple(({"triton": "3.6", "torch": "2.11"} | tools).items()))


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        (hopper.LINEAR, linear()),
        (hopper.LINEAR, linear(stored=("affine4.ct-g32", "affine4.ct-g32"), phase="prefill")),
        (hopper.GATED, gated()),
        (hopper.DELTA, delta()),
        (hopper.DELTA, delta(("sigmoid", "replay"), value_heads=32)),
    ],
)
def test_what_they_take(name: str, problem: Problem):
    kernel = default_registry().kernels[name]
    for device in (H200, load_profile("h100-80gb"), probed(nvrtc="13.0.88")):
        assert kernel.check(device, problem).ok, kernel.check(device, problem).reason


@pytest.mark.parametrize(
    ("name", "problem", "reason"),
    [
        (hopper.LINEAR, linear(dtype="float16"), "bfloat16"),
        (hopper.LINEAR, linear(stored=("gguf.q4_k",)), "gguf.q4_k"),
        (hopper.LINEAR, linear(stored=("affine4.ct-g128", "bf16")), "bf16"),
        (hopper.LINEAR, linear(stored=("affine4.ct-g16",)), "groups of 32"),
        (hopper.LINEAR, linear(sizes=(("n", 64), ("k", 1156)), stored=("affine4.ct-g128",)), "multiple of 8"),
        (hopper.GATED, gated(n=2 * 96), "multiple of 64"),
        (hopper.GATED, gated(parts=(("linear:gate_up", "triton.linear_w4"), GATED[1])), "triton.linear_w4"),
        (hopper.DELTA, delta(("silu",)), "written at every token"),
        (hopper.DELTA, delta(key_dim=64), "128 by 128"),
        (hopper.DELTA, delta(kernel=3), "convolution of 4"),
    ],
)
def test_what_they_refuse(name: str, problem: Problem, reason: str):
    verdict = default_registry().kernels[name].check(H200, problem)
    assert not verdict.ok
    assert reason in verdict.reason


@pytest.mark.parametrize("name", ["rtx5090", "gb10", "v100-32gb"])
def test_other_devices_have_none(name: str):
    for kernel, problem in ((hopper.LINEAR, linear()), (hopper.DELTA, delta())):
        assert not default_registry().kernels[kernel].check(load_profile(name), problem).ok


def test_a_machine_without_nvrtc_says_how_to_have_it():
    verdict = default_registry().kernels[hopper.LINEAR].check(probed(), linear())
    assert not verdict.ok
    assert "pip install 'offroad[sm70]'" in verdict.reason


def test_sums_of_a_row_depend_on_the_number_of_rows():
    assert not default_registry().invariant(hopper.LINEAR)


def test_a_plan_has_them_for_what_is_stored_in_4_bits():
    made = make_plan(Settings.of(model="qwen3.5-27b", device="h200-141gb"), open_path(CONFIG))
    linears = {cell.op.removeprefix("linear:"): choice.kernel for cell, choice in made.cells.items()}
    assert {linears[name] for name in ("gate_up", "down", "qkvz", "qkv", "o")} == {hopper.LINEAR}
    assert hopper.LINEAR not in {linears[name] for name in ("head", "ba")}
    assert linears["gated_linear"] == hopper.GATED
    assert linears["gated_delta"] == hopper.DELTA


def test_a_plan_that_keeps_rows_apart_has_none():
    settings = Settings.of(model="qwen3.5-27b", device="h200-141gb", batch_invariant=True)
    made = make_plan(settings, open_path(CONFIG))
    assert not any(choice.kernel.startswith("hopper.") for choice in made.cells.values())
