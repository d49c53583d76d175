"""`offroad doctor --kernels`: inputs for every op, kernels that are right, and wrong ones that are noticed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch

from offroad.device.profile import load_profile
from offroad.evidence import kernel_trials
from offroad.evidence.kernel_check import Subject, _error, check, standard, usual_problems
from offroad.evidence.kernel_trials import trials
from offroad.ops import blocks
from offroad.ops.cells import Choice
from offroad.ops.registry import default_registry
from offroad.ops.spec import Problem, Tolerance
from offroad.quant.scheme import layout_of

BLOCKS = {op.name for op in blocks.OPS}
V100, CPU = load_profile("v100-32gb"), load_profile("cpu-avx2")


@dataclass(frozen=True)
class Wrong:
    """A kernel of which `change` makes another one's output."""

    inner: object
    change: object

    def __getattr__(self, name: str):
        return getattr(self.inner, name)

    def prepare(self, device, problem):
        bound = self.inner.prepare(device, problem)
        return lambda *args: self.change(bound(*args))


def small(problem: Problem) -> Problem:
    """The problem with sizes that take no time."""
    less = {"k": 128, "n": 8 * 32 if problem.op == "grouped_linear" else 96, "hidden": 72, "size": 40}
    less |= {"value_heads": 4, "key_heads": 2, "key_dim": 16, "value_dim": 8, "block": 16}
    sizes = tuple((name, min(size, less.get(name, size))) for name, size in problem.sizes)
    return replace(problem, sizes=sizes)


def problems(dtype: str) -> list[Problem]:
    usual = [small(p) for p in usual_problems(dtype, V100)]
    usual = [p for p in usual if p.op != "attention" or dict(p.sizes)["head_dim"] == 64]
    delta = next(p for p in usual if p.op == "gated_delta" and p.phase == "decode")
    attention = next(p for p in usual if p.op == "attention")
    more = [
        replace(delta, features=frozenset({"sigmoid", "replay"})),
        replace(attention, features=frozenset({"pages_only", "softcap"})),
        replace(attention, features=frozenset({"first"}), kv_dtype="float8_e4m3fn"),
        Problem("linear", "decode", dtype, sizes=(("k", 64), ("n", 40)), stored=("affine4.x-g32+order",)),
        Problem("linear", "decode", dtype, sizes=(("k", 64), ("n", 40)), features=frozenset({"bias"}), stored=("f16",)),
    ]
    return [*usual, *more]


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_every_op_has_trials_that_its_reference_passes(dtype: str):
    """In half precision the reference is a kernel like another; its twin in fp32 judges it."""
    registry, seen = default_registry(), set()
    for problem in problems(dtype):
        op, layout = registry.ops[problem.op], layout_of(problem.stored) if problem.stored else ""
        for trial in trials(problem, layout, torch.device("cpu")):
            seen.add(problem.op)
            found, wanted = trial.run(op.reference, False), trial.run(op.reference, True)
            assert len(found) == len(wanted)
            assert found[0].dtype == torch.float32 or dtype == "float16"
            for ours, theirs in zip(found, wanted, strict=True):
                assert torch.isfinite(ours.float()).all(), (problem, trial.shape)
                torch.testing.assert_close(ours.float(), theirs.float(), atol=0.05, rtol=0.05)
            trial.bare(op.reference)
    computed = {name for name, op in registry.ops.items() if op.reference is not None}
    assert seen == computed - BLOCKS


def test_the_standard_set_asks_every_kernel_of_a_device():
    registry = default_registry()
    for device, prefix in ((V100, "cuda."), (load_profile("h100-80gb"), "triton."), (CPU, "cpu.")):
        device = replace(device, toolchain=(("cc", "1"),))
        found = {subject.kernel for subject in standard(registry, device)}
        wanted = {name for name, kernel in registry.kernels.items() if name.startswith(prefix)}
        wanted -= {kernel.name for op in BLOCKS for kernel in registry.candidates(op)}  # tried as parts of a plan
        missing = wanted - found
        assert not missing, missing


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda x: x.clone().fill_(float("nan")), "times what is allowed"),
        (lambda x: x[:-1], "times what is allowed"),
        (lambda x: x / 0, "times what is allowed"),
        (lambda x: (_ for _ in ()).throw(RuntimeError("no such instruction")), "RuntimeError: no such instruction"),
    ],
)
def test_what_is_wrong_with_a_kernel_is_said(change, said: str, monkeypatch):
    kernels = default_registry().kernels
    monkeypatch.setitem(kernels, "torch.linear", Wrong(kernels["torch.linear"], change))
    problem = Problem("linear", "decode", "float32", sizes=(("k", 64), ("n", 40)), stored=("f32",))
    results = check([Subject("torch.linear", problem, "dense")], default_registry(), CPU)
    assert results
    assert not any(result.passed for result in results)
    assert said in results[0].problem


@pytest.mark.parametrize("factor", [1.0, 1.2])
def test_a_gated_linear_is_judged_by_its_parts(factor: float, monkeypatch):
    """A kernel that does both parts is called with what the plan's layers call it with."""
    registry = default_registry()
    linear = Problem("linear", "decode", "float32", sizes=(("k", 64), ("n", 80)), stored=("f32",))
    gate = Problem("gated_activation", "decode", "float32", sizes=(("size", 40),), features=frozenset({"gelu_tanh"}))
    parts = (
        ("linear:gate_up", Choice("torch.linear", "", linear, "dense")),
        ("gated_activation", Choice("torch.reference_gated_activation", "", gate)),
    )
    both = SimpleNamespace(
        name="both", op="gated_linear", reference=False,
        prepare=lambda device, problem: lambda x, layer: factor * blocks.gated_linear(x, layer),
    )  # fmt: skip
    monkeypatch.setitem(registry.kernels, "both", both)
    results = check([Subject("both", replace(linear, op="gated_linear"), "", parts)], registry, CPU)
    assert [result.shape for result in results] == [f"{tokens} x 64 by 40" for tokens in (1, 3, 16, 32)]
    assert all(result.passed == (factor == 1.0) and result.repeats for result in results)


@pytest.mark.parametrize("features", [("silu",), ("silu", "shared")])
@pytest.mark.parametrize("factor", [1.0, 1.2])
def test_experts_are_judged_by_their_parts(factor: float, features: tuple, monkeypatch):
    """More of them than are tried."""
    registry = default_registry()

    def linear(n: int, k: int) -> Choice:
        sizes = (("k", k), ("n", 16 * n), ("experts", 16))
        problem = Problem("grouped_linear", "decode", "float32", sizes=sizes, stored=("f32",))
        return Choice("torch.reference_grouped_linear", "", problem, "dense")

    gate = Problem("gated_activation", "decode", "float32", sizes=(("size", 24),), features=frozenset({"silu"}))
    combine = Problem("moe_combine", "decode", "float32", sizes=(("hidden", 64), ("top_k", 3)))
    combine = replace(combine, features=frozenset(features[1:]))
    parts = (
        ("grouped_linear:experts_gate_up", linear(48, 64)),
        ("gated_activation:experts", Choice("torch.reference_gated_activation", "", gate)),
        ("grouped_linear:experts_down", linear(64, 24)),
        ("moe_combine", Choice("torch.reference_moe_combine", "", combine)),
    )
    both = SimpleNamespace(
        name="both", op="experts", reference=False,
        prepare=lambda device, problem: lambda *args: factor * blocks.experts(*args),
    )  # fmt: skip
    monkeypatch.setitem(registry.kernels, "both", both)
    problem = replace(parts[0][1].problem, op="experts", features=frozenset(features))
    results = check([Subject("both", problem, "", parts)], registry, CPU)
    assert [result.shape for result in results] == [f"{tokens} x 3 of 8 experts, 64 by 24" for tokens in (1, 3, 16, 32)]
    assert all(result.passed == (factor == 1.0) and result.repeats for result in results)


@pytest.mark.parametrize("features", [(), ("qk_norm", "output_gate", "mrope"), ("qk_norm", "v_norm", "k_eq_v")])
@pytest.mark.parametrize("factor", [1.0, 1.2])
def test_a_rotation_with_attention_behind_it_is_judged_by_its_parts(factor: float, features: tuple, monkeypatch):
    registry = default_registry()
    sizes = (("heads", 4), ("kv_heads", 2), ("head_dim", 32), ("rope_dim", 24), ("block", 64))
    rope = Problem("qkv_rope", "decode", "float32", "float32", sizes, frozenset(features))
    attention = replace(rope, op="attention", features=frozenset())
    parts = (
        ("qkv_rope", Choice("torch.reference_qkv_rope", "", rope)),
        ("attention", Choice("torch.reference_attention", "", attention)),
    )
    both = SimpleNamespace(
        name="both", op="rope_attention", reference=False,
        prepare=lambda device, problem: lambda qkv, rows, layer: factor * blocks.rope_attention(qkv, rows, layer),
    )  # fmt: skip
    monkeypatch.setitem(registry.kernels, "both", both)
    results = check([Subject("both", replace(rope, op="rope_attention"), "", parts)], registry, CPU)
    assert results
    assert all(result.passed == (factor == 1.0) and result.repeats for result in results)


def test_a_kernel_that_gives_other_bits_each_time(monkeypatch):
    kernels, calls = default_registry().kernels, iter(range(1000))
    wobbly = Wrong(kernels["torch.linear"], lambda x: x + 1e-7 * next(calls))
    monkeypatch.setitem(kernels, "torch.linear", wobbly)
    problem = Problem("linear", "decode", "float32", sizes=(("k", 64), ("n", 40)), stored=("f32",))
    results = check([Subject("torch.linear", problem, "dense")], default_registry(), CPU)
    assert all(result.passed and result.repeats is False for result in results)


def test_large_weights_are_tried_in_part(monkeypatch):
    monkeypatch.setattr(kernel_trials, "MOST_WEIGHTS", 64 * 64)
    problem = Problem("linear", "decode", "float32", sizes=(("k", 64), ("n", 1000)), stored=("f32",))
    first = next(trials(problem, "dense", torch.device("cpu")))
    assert "of 1,000" in first.shape
    assert first.run(default_registry().ops["linear"].reference, True)[0].shape == (1, 64)


def test_a_limit_is_no_finer_than_the_numbers_next_to_0():
    relative = Tolerance(0.0, 2e-3)
    assert _error(torch.tensor([6e-8]).half(), torch.tensor([9e-8]), relative) <= 1
    assert _error(torch.tensor([6e-4]).half(), torch.tensor([9e-4]), relative) > 1
