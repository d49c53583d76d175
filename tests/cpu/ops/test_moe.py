"""Mixture of experts: routing and grouped linears against plain loops, the whole block against transformers'."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from transformers import Qwen3_5MoeTextConfig
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeRMSNorm, Qwen3_5MoeSparseMoeBlock

from offroad.models.qwen3_5 import Qwen3_5
from offroad.models.spec import FfnSpec, MoeSpec
from offroad.ops.bound import LayerOps
from offroad.ops.moe import grouped_linear, route
from offroad.ops.registry import default_registry
from offroad.quant.packed import Packed, dequantise


def test_route_weighs_the_best_experts_by_their_share():
    """Of the softmax over all experts, the largest, divided by their sum: in a plain loop in float64."""
    torch.manual_seed(0)
    logits = torch.randn(11, 9) * 3
    weights, experts = route(logits, 4, None)
    assert (weights.dtype, experts.dtype) == (torch.float32, torch.int64)
    for token in range(11):
        exponentials = [math.exp(value) for value in logits[token].double().tolist()]
        best = sorted(range(9), key=lambda e: -exponentials[e])[:4]
        assert experts[token].tolist() == best
        total = sum(exponentials[e] for e in best)
        assert weights[token].tolist() == pytest.approx([exponentials[e] / total for e in best], rel=1e-5)


def test_expert_scale_comes_after_the_division():
    logits, scale = torch.randn(5, 6), torch.rand(6) + 0.5
    plain, experts = route(logits, 2, None)
    weights, same = route(logits, 2, scale)
    assert torch.equal(experts, same)
    for token in range(5):
        for choice in range(2):
            expected = float(plain[token, choice]) * float(scale[experts[token, choice]])
            assert float(weights[token, choice]) == pytest.approx(expected, rel=1e-6)


def test_route_of_half_logits_is_in_fp32():
    """The share of each expert is more exact than the logits' own type could tell."""
    logits = (torch.randn(7, 8) * 4).bfloat16()
    weights, experts = route(logits, 3, None)
    expected = logits.double().softmax(-1).gather(1, experts)
    expected = expected / expected.sum(-1, keepdim=True)
    torch.testing.assert_close(weights.double(), expected, atol=1e-6, rtol=1e-6)


def test_large_logits_do_not_overflow():
    weights, experts = route(torch.tensor([[300.0, -300.0, 299.0, 0.0]]), 2, None)
    assert experts.tolist() == [[0, 2]]
    assert weights[0].tolist() == pytest.approx([1 / (1 + math.exp(-1)), 1 / (1 + math.exp(1))])


def packed(layout: str, n: int, k: int) -> Packed:
    if layout == "dense":
        return Packed("dense", n, k, {"w": torch.randn(n, k)})
    scales = {"s": torch.rand(n, k // 16) * 0.02 + 0.01, "m": torch.rand(n, k // 16) - 0.5}
    if layout == "affine4":
        return Packed("affine4", n, k, {"q": torch.randint(0, 256, (n, k // 2), dtype=torch.uint8)} | scales, 16)
    return Packed("affine8", n, k, {"q": torch.randint(-127, 128, (n, k), dtype=torch.int8)} | scales, 16)


@pytest.mark.parametrize("layout", ["dense", "affine4", "affine8"])
@pytest.mark.parametrize("by_choice", [False, True])
def test_grouped_linear_is_each_tokens_experts(layout: str, by_choice: bool):
    """Experts without tokens, tokens that share an expert, and an input for each choice or one for all of a token's."""
    torch.manual_seed(1)
    count, n, k = 6, 5, 32
    weight = packed(layout, count * n, k)
    experts = torch.tensor([[0, 4], [4, 1], [1, 0], [4, 5]])
    x = torch.randn(4, 2, k) if by_choice else torch.randn(4, k)
    found, rows = grouped_linear(x, experts, weight, count), dequantise(weight)
    assert found.shape == (4, 2, n)
    for token in range(4):
        for choice in range(2):
            one, first = x[token, choice] if by_choice else x[token], int(experts[token, choice]) * n
            for i in range(n):
                expected = float(one.double() @ rows[first + i].double())
                assert float(found[token, choice, i]) == pytest.approx(expected, abs=1e-4)


def test_grouped_linear_of_no_tokens():
    assert grouped_linear(
        torch.empty(0, 32), torch.empty(0, 2, dtype=torch.int64), packed("dense", 12, 32), 3
    ).shape == (
        0,
        2,
        4,
    )


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("tokens", [1, 2, 40])
@torch.inference_mode()
def test_the_block_is_transformers(tokens: int, scaled: bool):
    """Router, experts, gated shared expert and the norms around them, as the model's forward strings them together. A
    scale of experts does what it would do to their last matrices."""
    config = Qwen3_5MoeTextConfig(
        hidden_size=24,
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=20,
        num_hidden_layers=1,
        layer_types=["full_attention"],
    )
    torch.manual_seed(2)
    reference, norms = Qwen3_5MoeSparseMoeBlock(config), [Qwen3_5MoeRMSNorm(24), Qwen3_5MoeRMSNorm(24)]
    for module in (reference, *norms):
        for parameter in module.parameters():
            parameter.normal_(0.0, 0.4)
    x, residual = torch.randn(tokens, 24), torch.randn(tokens, 24)
    scale, added = torch.rand(8) + 0.5, residual + x
    down = reference.experts.down_proj.clone()
    if scaled:
        reference.experts.down_proj.mul_(scale[:, None, None])
    expected_residual = added + reference(norms[0](added)[None])[0]

    def dense(*parts: torch.Tensor) -> Packed:
        w = torch.cat([part.flatten(0, -2) for part in parts])
        return Packed("dense", *w.shape, {"w": w})

    shared, experts = reference.shared_expert, reference.experts
    linears = {
        "router": dense(reference.gate.weight, reference.shared_expert_gate.weight),
        "gate_up": dense(shared.gate_proj.weight, shared.up_proj.weight),
        "down": dense(shared.down_proj.weight),
        "experts_gate_up": dense(experts.gate_up_proj),
        "experts_down": dense(down),
    }
    ops = default_registry().ops
    bounds = {name: ops[name].reference for name in ("add_norm", "route", "gated_activation", "moe_combine")}
    bounds["gated_activation:experts"] = bounds["gated_activation"]
    for name in linears:
        op = "grouped_linear" if name.startswith("experts") else "linear"
        bounds[f"{op}:{name}"] = ops[op].reference
    tensors = {"mlp_norm": 1.0 + norms[0].weight}
    if scaled:
        tensors["expert_scale"] = scale
    layer = LayerOps(bounds, linears, tensors, 1e-6, ffn=FfnSpec(20, "silu"), moe=MoeSpec(8, 3, 16, "silu"))
    layer = replace(layer, following=1.0 + norms[1].weight)
    found, moved = Qwen3_5.moe_block(layer, x, residual)
    torch.testing.assert_close(moved, expected_residual, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(found, norms[1](expected_residual), atol=2e-5, rtol=1e-5)
