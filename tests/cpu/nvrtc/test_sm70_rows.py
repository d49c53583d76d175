"""Norms, rope and activations for SM70, emulated, against their references."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sm70_emulated import load, needs_compiler

from offroad.device.profile import load_profile
from offroad.evidence.kernel_check import Subject, check
from offroad.models.spec import AttentionSpec, RopeSpec
from offroad.nvrtc import launch, rows
from offroad.ops import activation, norm, rope
from offroad.ops.registry import default_registry
from offroad.ops.spec import Problem

pytestmark = needs_compiler
V100, PROBLEM = load_profile("v100-32gb"), Problem("", "decode", "float16")
EPS = 1e-6


@pytest.fixture(scope="module", autouse=True)
def _emulated():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "load", load)
        yield


def close(found: torch.Tensor, wanted: torch.Tensor, op) -> None:
    limit = op.TOLERANCE["float16"]
    assert found.shape == wanted.shape
    torch.testing.assert_close(found.float(), wanted.float(), atol=limit.absolute, rtol=limit.relative)


@given(st.integers(1, 3), st.sampled_from([8, 72, 576, 2056]), st.integers(0, 99))
@settings(max_examples=12, deadline=None)
def test_norms(tokens: int, hidden: int, seed: int):
    random = torch.Generator().manual_seed(seed)
    wide = torch.randn(2, tokens, hidden + 8, generator=random).half() * 3
    x, residual = wide[..., :hidden]
    post, weight = torch.rand(2, hidden, generator=random) + 0.5
    close(rows.bind_norm(V100, PROBLEM)(x, weight, EPS), norm.norm(x.float(), weight, EPS), norm)
    close(rows.bind_norm(V100, PROBLEM)(x, None, EPS), norm.norm(x.float(), None, EPS), norm)
    for found, wanted in zip(
        rows.bind_add_norm(V100, PROBLEM)(x, residual, weight, EPS),
        norm.add_norm(x, residual, weight, EPS),
        strict=True,
    ):
        close(found, wanted, norm)
    for found, wanted in zip(
        rows.bind_sandwich_norm(V100, PROBLEM)(x, residual, post, weight, EPS),
        norm.sandwich_norm(x, residual, post, weight, EPS),
        strict=True,
    ):
        close(found, wanted, norm)


@given(st.integers(1, 3), st.sampled_from([8, 136, 2064]), st.sampled_from(["silu", "gelu_tanh"]))
@settings(max_examples=8, deadline=None)
def test_gated_activation(tokens: int, size: int, kind: str):
    x = torch.randn(tokens, 2 * size).half() * 4
    close(rows.bind_gated_activation(V100, PROBLEM)(x, kind), activation.gated_activation(x.float(), kind), activation)


SPEC = AttentionSpec(4, 2, 32, 1.0, RopeSpec(16, 1e4), output_gate=True, qk_norm=True)
SPECS = (
    SPEC,
    replace(SPEC, output_gate=False, k_eq_v=True, v_norm=True, rope=RopeSpec(32, 1e4)),
    replace(SPEC, output_gate=False, own_kv=False, heads=9),
    replace(SPEC, head_dim=64, rope=RopeSpec(64, 1e6, sections=(11, 10))),
)


@pytest.mark.parametrize("spec", SPECS, ids=range(len(SPECS)))
@pytest.mark.parametrize("normed", [True, False])
def test_qkv_rope(spec: AttentionSpec, normed: bool):
    random = torch.Generator().manual_seed(0)
    n = spec.q_width + (spec.kv_heads * spec.head_dim * (1 if spec.k_eq_v else 2) if spec.own_kv else 0)
    qkv = torch.randn(5, n, generator=random).half()
    shape = (3, 5) if spec.rope.sections else (5,)
    positions = torch.randint(0, 100, shape, generator=random)
    weights = torch.rand(2, spec.head_dim, generator=random) + 0.5 if normed else (None, None)
    table = rope.rope_table(spec.rope, 100)
    found = rows.bind_qkv_rope(V100, PROBLEM)(qkv, positions, table, spec, *weights, EPS)
    wanted = rope.qkv_rope(qkv, positions, table, spec, *weights, EPS)
    for ours, theirs in zip(found, wanted, strict=True):
        if theirs is None:
            assert ours is None
        else:
            close(ours, theirs, rope)
    if spec.output_gate:
        x = torch.randn(5, spec.heads * spec.head_dim, generator=random).half()
        gated = rows.bind_output_gate(V100, PROBLEM)(x, qkv, spec)
        close(gated, activation.output_gate(x.float(), qkv.float(), spec), activation)


def test_other_shapes_are_refused():
    x = torch.zeros(2, 12).half()
    with pytest.raises(launch.LaunchError, match="multiple of 8"):
        rows.bind_norm(V100, PROBLEM)(x, None, EPS)
    with pytest.raises(launch.LaunchError, match="residual"):
        rows.bind_add_norm(V100, PROBLEM)(x[:, :8], x[:1, :8], torch.ones(8), EPS)
    with pytest.raises(launch.LaunchError, match="table"):
        rows.bind_qkv_rope(V100, PROBLEM)(torch.zeros(1, 384).half(), torch.zeros(1), x, SPEC, None, None, EPS)


def test_the_doctor_tries_them():
    """The way that a V100's owner takes: `offroad doctor --kernels`."""
    names = {"norm": "rms_norm", "output_gate": "output_gate"}
    sizes = (("head_dim", 16), ("heads", 2), ("hidden", 72))
    subjects = [Subject(f"cuda.sm70_{op}", replace(PROBLEM, op=op, sizes=sizes), "") for op in names]
    results = check(subjects, default_registry(), V100, place="cpu")
    assert {result.kernel for result in results} == {"cuda.sm70_norm", "cuda.sm70_output_gate"}
    assert all(result.passed and result.repeats for result in results)
