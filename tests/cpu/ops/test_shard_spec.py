"""A rank's spec: what is divided, what is held by several ranks, and what cannot be divided."""

from __future__ import annotations

import pytest
from real_specs import real_spec

from offroad.errors import PlanError
from offroad.models.registry import resolve_model
from offroad.models.shard import check_groups, shard
from offroad.models.spec import AttentionSpec, GatedDeltaSpec
from offroad.ops.budget import Dtypes, kv_bytes_per_token, state_bytes, window_bytes
from offroad.quant.packed import group_of
from offroad.weights.source import TensorHeader

BF16 = Dtypes("bfloat16", "bfloat16")
QWEN = dict(
    architectures=["Qwen3_5MoeForCausalLM"],
    model_type="qwen3_5_moe_text",
    hidden_size=2048,
    num_hidden_layers=4,
    num_attention_heads=16,
    num_key_value_heads=2,
    head_dim=256,
    linear_num_key_heads=16,
    linear_num_value_heads=32,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
    linear_conv_kernel_dim=4,
    num_experts=256,
    num_experts_per_tok=8,
    moe_intermediate_size=512,
    shared_expert_intermediate_size=512,
    vocab_size=248320,
    max_position_embeddings=4096,
    tie_word_embeddings=False,
)


def weights(spec) -> int:
    return sum(linear.n * linear.k for layer in spec.layers for linear in layer.linears)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_ranks_hold_equal_parts(ranks: int):
    whole = resolve_model(QWEN).spec
    part = shard(whole, ranks)
    delta, full = part.layers[0].mixer, part.layers[3].mixer
    assert isinstance(delta, GatedDeltaSpec)
    assert isinstance(full, AttentionSpec)
    assert (delta.key_heads, delta.value_heads) == (16 // ranks, 32 // ranks)
    assert (full.heads, full.kv_heads) == (16 // ranks, max(1, 2 // ranks))
    for store, k in (("rows", 0), ("rows", 2), ("replay", 2)):
        share, full = (state_bytes(s.storing(store), BF16, k) for s in (part, whole))
        assert share * ranks == full
    # Two KV heads: from 4 ranks on, each is held by several.
    assert kv_bytes_per_token(part, BF16) * min(ranks, 2) == kv_bytes_per_token(whole, BF16)
    kept = sum(li.n * li.k for la in whole.layers for li in la.linears if li.split == "none")
    replicated = (max(1, 2 // ranks) * ranks - 2) * 256 * 2 * 2048  # keys and values of one full layer
    assert weights(part) * ranks == weights(whole) + kept * (ranks - 1) + replicated
    assert part.vocab * ranks == whole.vocab


def test_windows_and_tied_heads():
    whole = real_spec("gemma3-270m")
    part = shard(whole, 4)  # one KV head
    assert window_bytes(part, BF16) == window_bytes(whole, BF16)
    assert (part.layers[0].ffn.size, part.vocab, part.head) == (512, 65536, None)


@pytest.mark.parametrize(
    ("change", "ranks", "message"),
    [
        ({}, 3, "layer 0: linear key heads of 16"),
        ({"linear_num_key_heads": 15, "linear_num_value_heads": 30}, 2, "linear key heads of 15"),
        ({"moe_intermediate_size": 500}, 8, "expert size of 500"),
        ({"num_key_value_heads": 3, "num_attention_heads": 12}, 2, "KV heads of 3"),
        ({"vocab_size": 1001}, 2, "vocab_size of 1001"),
    ],
)
def test_what_cannot_be_divided_is_named_with_what_can(change: dict, ranks: int, message: str):
    with pytest.raises(PlanError, match=message) as error:
        shard(resolve_model(QWEN | change).spec, ranks)
    assert "a divisor of it" in str(error.value)


def test_groups_are_not_cut():
    whole = resolve_model(QWEN).spec
    part = shard(whole, 8)
    name = "model.layers.3.self_attn.o_proj.weight"  # 4096 columns, 512 a rank
    for kind, fits in (("affine4.w4a16-g128", True), ("affine4.w4a16-g1024", False), ("affine4.w4a16-g4096", True)):
        headers = {name: TensorHeader(name, (2048, 4096), kind, 1)}
        if fits:
            check_groups(part, headers, 8)
        else:
            with pytest.raises(PlanError, match="512 columns a rank, in groups of 1024"):
                check_groups(part, headers, 8)


@pytest.mark.parametrize(
    ("kind", "group"),
    [
        ("bf16", 1),
        ("affine4.gptq-g64+order", 64),
        ("fp8.block128x128", 128),
        ("fp8.g64", 64),
        ("fp8.tensor", 256),
        ("fp4.nvfp4", 16),
        ("fp4.mxfp4", 32),
    ],
)
def test_group_of_a_kind(kind: str, group: int):
    assert group_of(kind, 256) == group
