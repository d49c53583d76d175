"""Which problems Hopper's kernels take, and why they refuse others."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from offroad.device.profile import DeviceProfile, load_profile
from offroad.engine import make_plan
from offroad.nvrtc import attention_few, hopper
from offroad.ops.plan import Plan
from offroad.ops.registry import default_registry
from offroad.ops.spec import Load, Problem
from offroad.quant.packed import FP8_BLOCKS
from offroad.settings import Settings
from offroad.triton_kernels.linear import W8A8
from offroad.weights.dummy import DummySource

CONFIG = Path(__file__).parents[3] / "benchmarks" / "configs" / "qwen3.5-27b.json"
H200 = load_profile("h200-141gb")
GATED = (("linear:gate_up", hopper.LINEAR_W4), ("gated_activation", "triton.gated_activation"))


def linear(**changes) -> Problem:
    made = Problem("linear", "decode", "bfloat16", sizes=(("n", 34816), ("k", 5120)), stored=("affine4.ct-g128",))
    return replace(made, **changes)


def delta(features: tuple[str, ...] = ("silu", "replay"), **sizes: int) -> Problem:
    every = {"key_heads": 16, "value_heads": 48, "key_dim": 128, "value_dim": 128, "kernel": 4} | sizes
    return Problem("gated_delta", "decode", "bfloat16", sizes=tuple(every.items()), features=frozenset(features))


def paged(dim: int = 128, block: int = 64, features: tuple[str, ...] = (), **changes) -> Problem:
    sizes = (("heads", 32), ("kv_heads", 8), ("head_dim", dim), ("window", 1024), ("block", block))
    made = Problem("attention", "decode", "bfloat16", "bfloat16", sizes, frozenset(features))
    return replace(made, **changes)


def gated(n: int = 34816, parts: tuple = GATED) -> Problem:
    return linear(
        op="gated_linear", sizes=(("n", n), ("k", 5120)), parts=parts, features=frozenset({"silu"}), stored=()
    )


def probed(**tools: str) -> DeviceProfile:
    return replace(H200, source="probe", toolchain=tuple(({"triton": "3.6", "torch": "2.11"} | tools).items()))


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        (hopper.LINEAR_W4, linear()),
        (hopper.LINEAR_W4, linear(stored=("affine4.ct-g32", "affine4.ct-g32"), phase="prefill")),
        (hopper.LINEAR_W8, linear(stored=(FP8_BLOCKS, FP8_BLOCKS))),
        (hopper.LINEAR_W8, linear(stored=("fp8.channel", "fp8.tensor"), features=frozenset({"bias"}))),
        (hopper.LINEAR_W8, linear(stored=("fp8.g256",), phase="prefill")),
        (hopper.LINEAR_W8, linear(sizes=(("n", 200), ("k", 72)), stored=("fp8.channel",))),
        (hopper.GATED, gated()),
        (hopper.GATED, gated(parts=(("linear:gate_up", hopper.LINEAR_W8), GATED[1]))),
        (hopper.GATED, gated(parts=(("linear:gate_up", W8A8), GATED[1]))),
        (hopper.DELTA, delta()),
        (hopper.DELTA, delta(("sigmoid", "replay"), value_heads=32)),
        (hopper.ATTENTION, paged(64)),
        (hopper.ATTENTION, paged(512, 16, ("window", "softcap", "pages_only"), kv_dtype="float8_e5m2", phase="verify")),
        (hopper.ATTENTION, paged(256, 128, kv_dtype="float8_e4m3fn", phase="draft")),
    ],
)
def test_what_they_take(name: str, problem: Problem):
    kernel = default_registry().kernels[name]
    for device in (H200, load_profile("h100-80gb"), probed(nvrtc="13.0.88")):
        assert kernel.check(device, problem).ok, kernel.check(device, problem).reason


@pytest.mark.parametrize(
    ("name", "problem", "reason"),
    [
        (hopper.LINEAR_W4, linear(dtype="float16"), "bfloat16"),
        (hopper.LINEAR_W4, linear(stored=("gguf.q4_k",)), "gguf.q4_k"),
        (hopper.LINEAR_W4, linear(stored=("affine4.ct-g128", "bf16")), "bf16"),
        (hopper.LINEAR_W4, linear(stored=("affine4.ct-g16",)), "groups of 32"),
        (hopper.LINEAR_W4, linear(sizes=(("n", 64), ("k", 1156)), stored=("affine4.ct-g128",)), "multiple of 8"),
        (hopper.LINEAR_W8, linear(), "reads numbers in e4m3"),
        (hopper.LINEAR_W8, linear(stored=(FP8_BLOCKS,), dtype="float16"), "bfloat16"),
        (hopper.LINEAR_W8, linear(stored=(FP8_BLOCKS, "bf16")), "bf16"),
        (hopper.LINEAR_W8, linear(stored=("affine8.ct-g128",)), "affine8.ct-g128"),
        (hopper.LINEAR_W8, linear(stored=("fp8.block64x64",)), "groups of 128"),
        (hopper.LINEAR_W8, linear(stored=("fp8.mxfp8",)), "groups of 128"),
        (hopper.LINEAR_W8, linear(stored=("fp8.modelopt-block1x32",)), "groups of 128"),
        (hopper.LINEAR_W8, linear(stored=("fp8.g192",)), "a multiple of 128"),
        (hopper.LINEAR_W8, linear(sizes=(("n", 64), ("k", 1156)), stored=(FP8_BLOCKS,)), "multiple of 8"),
        (hopper.GATED, gated(n=2 * 96), "multiple of 64"),
        (hopper.GATED, gated(parts=(("linear:gate_up", "triton.linear_w4"), GATED[1])), "triton.linear_w4"),
        (hopper.DELTA, delta(("silu",)), "written at every token"),
        (hopper.ATTENTION, paged(80), "64, 128, 256, 512"),
        (hopper.ATTENTION, paged(64, kv_dtype="float8_e5m2"), "takes heads of 128, 256, 512"),
        (hopper.ATTENTION, paged(kv_dtype="float16"), "reads rows in bfloat16"),
        (hopper.ATTENTION, paged(dtype="float16"), "bfloat16"),
        (hopper.ATTENTION, paged(phase="prefill"), "asked: prefill"),
        (hopper.ATTENTION, paged(block=48), "power of 2"),
        (hopper.ATTENTION, paged(block=8), "16 tokens and more"),
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
    eight = (hopper.LINEAR_W8, linear(stored=(FP8_BLOCKS,)))
    for kernel, problem in ((hopper.LINEAR_W4, linear()), eight, (hopper.DELTA, delta()), (hopper.ATTENTION, paged())):
        assert not default_registry().kernels[kernel].check(load_profile(name), problem).ok


def test_a_machine_without_nvrtc_says_how_to_have_it():
    verdict = default_registry().kernels[hopper.LINEAR_W4].check(probed(), linear())
    assert not verdict.ok
    assert "pip install 'offroad[sm70]'" in verdict.reason


def test_sums_of_a_row_depend_on_the_number_of_rows():
    assert not any(default_registry().invariant(name) for name in (hopper.LINEAR_W4, hopper.LINEAR_W8))


def planned(scheme: str, **settings) -> Plan:
    source = DummySource(json.loads(CONFIG.read_text()), "cpu", scheme)
    return make_plan(Settings.of(model="dummy", device="h200-141gb", **settings), source)


@pytest.mark.parametrize(("scheme", "kernel"), [("w4a16-g128", hopper.LINEAR_W4), ("fp8-block", hopper.LINEAR_W8)])
def test_a_plan_has_them_for_what_is_stored_in_4_bits_or_in_e4m3(scheme: str, kernel: str):
    linears = {cell.op.removeprefix("linear:"): choice.kernel for cell, choice in planned(scheme).cells.items()}
    assert {linears[name] for name in ("gate_up", "down", "qkvz", "qkv", "o")} == {kernel}
    assert not any(linears[name].startswith("hopper.") for name in ("head", "ba"))
    assert linears["gated_linear"] == hopper.GATED
    assert linears["gated_delta"] == hopper.DELTA


def test_a_plan_has_attention_of_few_queries_only():
    cells = {(cell.op, cell.phase): choice for cell, choice in planned("w4a16-g128").cells.items()}
    assert cells["attention", "decode"].kernel == hopper.ATTENTION
    assert cells["attention", "prefill"].kernel == "triton.paged_prefill"


def test_memory_for_what_partitions_give_is_planned_for_either_kernel():
    """Of both kernels that rows go to, whichever takes more."""
    problem = replace(paged(512, phase="verify"), load=Load(rows=32, tokens=96, width=3, length=40_000))
    ours, triton = (
        default_registry().kernels[name].check(H200, problem) for name in (hopper.ATTENTION, "triton.paged_decode")
    )
    assert ours.workspace == max(attention_few.partials(H200, problem), triton.workspace) > 0


@pytest.mark.parametrize("scheme", ["w4a16-g128", "fp8-block"])
def test_a_plan_that_keeps_rows_apart_has_none(scheme: str):
    made = planned(scheme, batch_invariant=True)
    assert not any(choice.kernel.startswith("hopper.") for choice in made.cells.values())
