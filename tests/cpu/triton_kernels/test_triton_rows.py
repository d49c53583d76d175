"""Row kernels in Triton's interpreter against the references, over odd shapes, dtypes and features."""

from __future__ import annotations

import pytest
import torch
from rows_cases import EPS, ROPES, SMALL, Check

pytest.importorskip("triton")

from offroad.device.profile import load_profile  # noqa: E402
from offroad.ops.registry import default_registry  # noqa: E402
from offroad.ops.spec import Problem  # noqa: E402

DTYPES = ("float32", "bfloat16", "float16")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "hidden"), SMALL)
def test_norms(dtype: str, tokens: int, hidden: int):
    Check(dtype).norms(tokens, hidden)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "size"), [(1, 96), (3, 1000), (2, 1030)])
def test_activations(dtype: str, tokens: int, size: int):
    Check(dtype).activations(tokens, size)


def test_activations_far_from_zero():
    far = torch.tensor([[-300.0, -30.0, 0.0, 30.0, 300.0] + [2.0] * 5])
    for kind in ("silu", "gelu_tanh"):
        Check("float32").op("gated_activation", far, kind)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ROPES)
def test_rope(dtype: str, name: str):
    for tokens in (1, 7):
        Check(dtype).rope(ROPES[name], tokens)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32])
def test_embeddings(dtype: str, stored: torch.dtype):
    Check(dtype).embed(5, 50, 1030, 1.0, stored)
    Check(dtype).embed(3, 50, 96, 73.321, stored)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("experts", "top_k"), [(8, 2), (60, 4), (128, 8), (5, 5)])
def test_routes(dtype: str, experts: int, top_k: int):
    Check(dtype).route(3, experts, top_k)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "top_k", "hidden"), [(1, 8, 512), (3, 1, 96), (5, 6, 1030)])
def test_sums_of_experts(dtype: str, tokens: int, top_k: int, hidden: int):
    Check(dtype).combine(tokens, top_k, hidden)


def test_equal_logits_choose_the_first_experts_and_nan_some_that_exist():
    kernel = default_registry().kernels["triton.route"].prepare(None, Problem("route", "decode", "float32"))
    weights, experts = kernel(torch.zeros(1, 6), 3, None)
    assert experts.tolist() == [[0, 1, 2]]
    torch.testing.assert_close(weights, torch.full((1, 3), 1 / 3))
    _, experts = kernel(torch.full((1, 6), float("nan")), 3, None)
    assert int(experts.min()) >= 0
    assert int(experts.max()) < 6


def test_no_tokens():
    check = Check("bfloat16")
    check.op("norm", check.normal(0, 64), check.weight(64), EPS)
    check.op("gated_activation", check.normal(0, 64), "silu")
    check.op("moe_combine", check.normal(0, 4, 64), check.normal(0, 4, dtype=torch.float32), None, None)


def test_a_row_has_the_same_bits_alone_and_among_others():
    check = Check("bfloat16")
    x, weight = check.normal(6, 1000), check.weight(1000)
    norm = default_registry().kernels["triton.norm"].prepare(None, Problem("norm", "decode", "bfloat16"))
    assert torch.equal(norm(x, weight, EPS)[4:5], norm(x[4:5].clone(), weight, EPS))
    problem = Problem("moe_combine", "decode", "bfloat16")
    combine = default_registry().kernels["triton.moe_combine"].prepare(None, problem)
    all_of = (check.normal(6, 8, 1030), check.normal(6, 8, dtype=torch.float32), x[:, :1].repeat(1, 1030), x[:, 1:2])
    assert torch.equal(combine(*all_of)[4:5], combine(*(t[4:5].clone() for t in all_of)))


def test_what_they_refuse():
    registry, h100 = default_registry(), load_profile("h100-80gb")
    long = Problem("norm", "decode", "bfloat16", sizes=(("hidden", 20000),))
    assert "20,000" in registry.kernels["triton.norm"].check(h100, long).reason
    packed = Problem("embed", "decode", "bfloat16", stored=("affine4.gptq-g128",))
    assert "affine4" in registry.kernels["triton.embed"].check(h100, packed).reason
    assert registry.kernels["triton.embed"].check(h100, Problem("embed", "decode", "bfloat16", stored=("bfloat16",))).ok
    old = registry.kernels["triton.norm"].check(load_profile("v100-32gb"), long)
    assert not old.ok
    assert "8.0" in old.reason
    assert not registry.kernels["triton.norm"].check(load_profile("cpu-avx2"), long).ok
