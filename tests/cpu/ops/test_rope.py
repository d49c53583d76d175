"""Rotary embedding and the split of the fused projection, against transformers and against plain formulas."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from transformers import Gemma4TextConfig, Qwen3_5TextConfig
from transformers.modeling_rope_utils import _compute_proportional_rope_parameters
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen

from offroad.models.qwen3_5 import model_spec
from offroad.models.spec import AttentionSpec, RopeSpec
from offroad.ops.activation import output_gate
from offroad.ops.rope import qkv_rope, rope_table

EPS = 1e-6


def qwen_config(**changes) -> Qwen3_5TextConfig:
    rope = dict(
        rope_type="default",
        rope_theta=1e7,
        partial_rotary_factor=0.25,
        mrope_interleaved=True,
        mrope_section=[11, 11, 10],
    )
    values = dict(
        hidden_size=48,
        num_hidden_layers=1,
        layer_types=["full_attention"],
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=256,
        rope_parameters=rope,
    )
    return Qwen3_5TextConfig(**(values | changes))


def spec_of(config: Qwen3_5TextConfig) -> AttentionSpec:
    mixer = model_spec(config.to_dict() | {"mamba_ssm_dtype": "float32"}).layers[0].mixer
    assert isinstance(mixer, AttentionSpec)
    return mixer


def image_positions() -> torch.Tensor:
    """Positions [3, tokens] of four words, a picture of 2 by 3, three words, then far into a document."""
    row, column = torch.arange(2).repeat_interleave(3), torch.arange(3).repeat(2)
    picture = torch.stack((torch.full((6,), 4), 4 + row, 4 + column))
    words = [torch.arange(a, b).expand(3, -1) for a, b in ((0, 4), (7, 10), (3000, 3003))]
    return torch.cat((words[0], picture, *words[1:]), dim=1)


@torch.inference_mode()
@pytest.mark.parametrize(
    ("head_dim", "sections", "theta"), [(256, [11, 11, 10], 1e7), (32, [2, 1, 1], 1e4), (128, [8, 3, 5], 1e6)]
)
def test_three_streams_turn_the_angles_as_in_transformers(head_dim: int, sections: list[int], theta: float):
    """Queries, keys, values and gates of transformers' attention, out of a fused projection like its three."""
    rope = qwen_config().rope_parameters | dict(mrope_section=sections, rope_theta=theta)
    config = qwen_config(head_dim=head_dim, rope_parameters=rope)
    torch.manual_seed(0)
    reference = qwen.Qwen3_5Attention(config, 0)
    reference.q_norm.weight.normal_(0.0, 0.3)
    reference.k_norm.weight.normal_(0.0, 0.3)
    positions = image_positions()
    x = torch.randn(positions.shape[1], 48)
    cos, sin = qwen.Qwen3_5TextRotaryEmbedding(config)(x, positions[:, None])
    q, gate = reference.q_proj(x).view(len(x), 3, 2 * head_dim).chunk(2, dim=-1)
    k, v = reference.k_proj(x).view(len(x), 1, head_dim), reference.v_proj(x).view(len(x), 1, head_dim)
    expected_q, expected_k = qwen.apply_rotary_pos_emb(
        reference.q_norm(q).transpose(0, 1)[None], reference.k_norm(k).transpose(0, 1)[None], cos, sin
    )

    spec = spec_of(config)
    assert spec.rope.dim == head_dim // 4
    qkv = torch.cat([reference.q_proj(x), reference.k_proj(x), reference.v_proj(x)], dim=-1)
    norms = (1.0 + reference.q_norm.weight, 1.0 + reference.k_norm.weight)
    found = qkv_rope(qkv, positions, rope_table(spec.rope, 3010), spec, *norms, EPS)
    torch.testing.assert_close(found[0], expected_q[0].transpose(0, 1), atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(found[1], expected_k[0].transpose(0, 1), atol=2e-5, rtol=1e-5)
    assert torch.equal(found[2], v)
    assert torch.equal(found[0][..., spec.rope.dim :], reference.q_norm(q)[..., spec.rope.dim :])
    out = torch.randn(len(x), 3 * head_dim)
    torch.testing.assert_close(output_gate(out, qkv, spec), out * torch.sigmoid(gate.flatten(1)))


def test_equal_streams_are_the_rope_without_sections():
    spec = AttentionSpec(2, 1, 32, 1.0, RopeSpec(16, 1e4, sections=(3, 2)))
    plain = replace(spec, rope=RopeSpec(16, 1e4))
    qkv, positions, table = torch.randn(9, 4 * 32), torch.randint(0, 50, (9,)), rope_table(plain.rope, 50)
    found = qkv_rope(qkv, positions.expand(3, -1), table, spec, None, None, EPS)
    for one, other in zip(found, qkv_rope(qkv, positions, table, plain, None, None, EPS), strict=True):
        assert torch.equal(one, other)


def turned(x: torch.Tensor, position: int, dim: int, base: float) -> list[float]:
    """A head's vector after rotation: each pair (i, i + dim / 2) by position * base^(-2i / dim), in float64."""
    out = x.double().tolist()
    for i in range(dim // 2):
        angle = position * base ** (-2 * i / dim)
        a, b = float(x[i]), float(x[i + dim // 2])
        out[i] = a * math.cos(angle) - b * math.sin(angle)
        out[i + dim // 2] = b * math.cos(angle) + a * math.sin(angle)
    return out


def normed(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    return x / (x.square().mean() + EPS).sqrt() * (1.0 if weight is None else weight)


@pytest.mark.parametrize("output_gates", [False, True])
@pytest.mark.parametrize("v_norm", [False, True])
@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("kv", ["own", "k_eq_v", "q_only"])
def test_features_are_the_plain_formulas(kv: str, qk_norm: bool, v_norm: bool, output_gates: bool):
    heads, kv_heads, dim, base = 4, 2, 12, 100.0
    spec = AttentionSpec(
        heads,
        kv_heads,
        dim,
        1.0,
        RopeSpec(8, base),
        qk_norm=qk_norm,
        v_norm=v_norm,
        k_eq_v=kv == "k_eq_v",
        own_kv=kv != "q_only",
        output_gate=output_gates,
    )
    torch.manual_seed(1)
    per_head = 2 * dim if output_gates else dim
    groups = {"own": 2, "k_eq_v": 1, "q_only": 0}[kv]
    qkv = torch.randn(5, heads * per_head + groups * kv_heads * dim) * 2
    q_norm, k_norm = (torch.rand(dim) + 0.5, torch.rand(dim) + 0.5) if qk_norm else (None, None)
    positions = torch.tensor([0, 1, 7, 30, 12])
    q, k, v = qkv_rope(qkv, positions, rope_table(spec.rope, 31), spec, q_norm, k_norm, EPS)
    assert (k is None) == (v is None) == (kv == "q_only")

    def head(token: int, at: int, weight: torch.Tensor | None) -> torch.Tensor:
        raw = qkv[token, at : at + dim]
        return torch.tensor(turned(normed(raw, weight) if qk_norm else raw, int(positions[token]), 8, base))

    for token in range(5):
        for h in range(heads):
            torch.testing.assert_close(q[token, h], head(token, h * per_head, q_norm), atol=1e-5, rtol=1e-5)
        for h in range(kv_heads if k is not None else 0):
            at = heads * per_head + h * dim
            torch.testing.assert_close(k[token, h], head(token, at, k_norm), atol=1e-5, rtol=1e-5)
            raw = qkv[token, at if kv == "k_eq_v" else at + kv_heads * dim :][:dim]
            torch.testing.assert_close(v[token, h], normed(raw, None) if v_norm else raw)


def test_each_head_s_gates_follow_its_queries():
    spec = AttentionSpec(3, 1, 4, 1.0, RopeSpec(4, 1e4), output_gate=True)
    x, qkv = torch.randn(2, 12), torch.randn(2, 3 * 8 + 2 * 4)
    found = output_gate(x, qkv, spec)
    for token in range(2):
        for h in range(3):
            for i in range(4):
                expected = float(x[token, h * 4 + i]) / (1 + math.exp(-float(qkv[token, h * 8 + 4 + i])))
                assert float(found[token, h * 4 + i]) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("head_dim", "factor"), [(512, 0.25), (96, 0.5), (32, 1.0)])
def test_proportional_angles_are_transformers(head_dim: int, factor: float):
    """Gemma 4's global layers: head dim 512, of whose angles the first quarter turn and the others stand still."""
    parameters = {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": factor}
    config = Gemma4TextConfig(
        num_hidden_layers=1,
        layer_types=["full_attention"],
        global_head_dim=head_dim,
        rope_parameters={"full_attention": parameters},
    )
    inverse, scale = _compute_proportional_rope_parameters(
        config.per_layer_config["full_attention"], layer_type="full_attention"
    )
    assert len(inverse) == head_dim // 2
    assert scale == 1.0
    angles = torch.arange(3000).float()[:, None] * inverse
    spec = RopeSpec(head_dim, 1e6, (("partial_rotary_factor", factor), ("rope_type", "proportional")))
    assert torch.equal(rope_table(spec, 3000), torch.cat((angles.cos(), angles.sin()), dim=-1))
    still = int(head_dim * factor) // 2
    assert torch.equal(inverse == 0, torch.arange(head_dim // 2) >= still)
