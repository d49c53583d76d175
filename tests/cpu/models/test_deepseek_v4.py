"""DeepSeek-V4 as a spec: tensors to the byte, both spellings of its config, what a token and a sequence take, and that
nothing starts before its ops have kernels."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path

import pytest

from offroad.engine import Engine, make_plan
from offroad.errors import ModelError, PlanError
from offroad.models import registry
from offroad.models.registry import resolve_model, resolve_source
from offroad.models.shard import shard
from offroad.models.spec import ModelSpec, Paged, Ring
from offroad.ops.budget import Dtypes, block_bytes, block_of, checkpoint_bytes, kv_bytes_per_token, state_bytes
from offroad.ops.cells import groups
from offroad.ops.registry import default_registry
from offroad.settings import Settings
from offroad.weights.config_source import ConfigSource
from offroad.weights.load import expected_tensors, verify_headers
from offroad.weights.locate import open_path

CONFIG = Path(__file__).parents[1] / "ops" / "configs" / "deepseek-v4-flash.json"
RELEASED = json.loads(CONFIG.read_text())
FP8, BF16 = Dtypes("bfloat16", "float8_e4m3fn"), Dtypes("bfloat16", "bfloat16")
TINY = dict(
    vocab_size=512,
    hidden_size=64,
    moe_intermediate_size=32,
    num_hidden_layers=6,
    num_attention_heads=4,
    num_key_value_heads=1,
    head_dim=32,
    q_lora_rank=24,
    partial_rotary_factor=0.25,
    num_experts_per_tok=2,
    n_routed_experts=8,
    max_position_embeddings=4096,
    rope_parameters=dict(rope_type="yarn", factor=16, beta_fast=32, beta_slow=1, original_max_position_embeddings=256),
    layer_types=["sliding_attention"] * 2 + ["compressed_sparse_attention", "heavily_compressed_attention"] * 2,
    compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 16},
    mlp_layer_types=["hash_moe"] * 2 + ["moe"] * 4,
    sliding_window=8,
    o_groups=2,
    o_lora_rank=16,
    index_n_heads=4,
    index_head_dim=16,
    index_topk=6,
)


@pytest.fixture(scope="module")
def flash() -> ModelSpec:
    return resolve_model(RELEASED).spec


def nbytes(name: str, shape: tuple[int, ...]) -> int:
    """What a tensor takes in the release, with its scales: bytes of e8m0, for 32 columns or for 128 x 128."""
    leaf = name.removesuffix(".weight").rpartition(".")[2]
    if ".ffn.experts." in name:
        return prod(shape) // 2 + prod(shape) // 32
    if leaf == "tid2eid":
        return 8 * prod(shape)
    if leaf in ("attn_sink", "ape", "bias") or leaf.startswith("hc_"):
        return 4 * prod(shape)
    if leaf in ("wq_a", "wq_b", "wo_a", "wo_b", "w1", "w2", "w3", "e_proj", "h_proj") or name.endswith(
        "attn.wkv.weight"
    ):
        assert all(size % 128 == 0 for size in shape), name
        return prod(shape) + prod(shape) // 128**2
    return 2 * prod(shape)


def test_tensors_are_those_of_the_release_to_the_byte(flash):
    """159,609,485,896 is what the published index says."""
    expected = expected_tensors(flash, {}, flash.draft)
    assert sum(nbytes(name, shape) for name, shape in expected.items()) == 159_609_485_896
    assert expected["layers.2.attn.compressor.wkv.weight"] == (1024, 4096)
    assert expected["layers.3.attn.compressor.wgate.weight"] == (512, 4096)
    assert expected["mtp.0.ffn.experts.255.w2.weight"] == (4096, 2048)
    assert expected["layers.2.ffn.gate.tid2eid"] == (129280, 6)
    assert "layers.3.ffn.gate.bias" in expected
    assert "layers.2.ffn.gate.bias" not in expected


def items(spec: ModelSpec) -> list[Paged | Ring]:
    return [item for layer in spec.layers for _, item in layer.items]


def test_kinds_of_layers(flash):
    rates = [layer.mixer.rate for layer in flash.layers]
    assert [rates.count(rate) for rate in (0, 4, 128)] == [2, 21, 20]
    assert [layer.moe.hashed for layer in flash.layers] == [True] * 3 + [False] * 40
    plain, c4, c128 = flash.layers[0].mixer, flash.layers[2].mixer, flash.layers[3].mixer
    assert (plain.rope.base, plain.rope.scaling, plain.index) == (10000.0, (), None)
    assert c4.rope == c128.rope
    assert (c4.rope.base, dict(c4.rope.scaling)["factor"]) == (160000.0, 16.0)
    assert (c4.index.top_k, c4.overlap, c128.overlap, c128.index) == (512, True, False, None)
    [draft] = flash.draft.layers
    assert (draft.mixer.rate, draft.moe.hashed, len(draft.items)) == (0, False, 1)


@pytest.mark.parametrize(("dtypes", "row", "index"), [(FP8, 448 + 2 * 64 + 8, 128 + 4), (BF16, 1024, 256)])
def test_bytes_of_a_token_and_of_a_sequence(flash, dtypes, row, index):
    """21 C4 layers and 20 of C128: 3.85 KB a token in 8 bits. A slot has 128 raw rows a layer, the drafter's too, and
    fp32 values and scores of the open groups: 8 tokens of 1,024 and 256, 128 of 512. 15.5 MB, in bf16 18 MB."""
    assert kv_bytes_per_token(flash, dtypes) == int(21 * (row + index) / 4 + 20 * row / 128)
    states = 2 * 4 * (21 * 8 * (1024 + 256) + 20 * 128 * 512)
    assert state_bytes(flash, dtypes, 0) == 43 * 128 * row + states
    [drafter] = flash.draft.layers
    slot = state_bytes(flash, dtypes, 0) + dict(drafter.items)["rows"].capacity(0) * row
    assert slot == 44 * 128 * row + states
    figures = {3850: 15.5, 6880: 18.0}
    assert round(slot / 1e6, 1) == figures[kv_bytes_per_token(flash, dtypes)]
    # Three drafts need three rows more in each ring.
    grown = state_bytes(flash, dtypes, 3) - state_bytes(flash, dtypes, 0)
    assert grown == 3 * (43 * row + 2 * 4 * (21 * (1024 + 256) + 20 * 512))
    # A resume reads all raw rows, of the open groups the last four tokens in C4, and nothing of C128.
    assert checkpoint_bytes(flash, dtypes) == 43 * 127 * row + 21 * 4 * 2 * 4 * (1024 + 256)


def test_a_block_has_64_compressed_rows(flash):
    assert block_of(flash) == 256
    row, index = 584, 132
    history, window = block_bytes(flash, FP8, 256)
    assert (history, window) == (21 * 64 * (row + index) + 20 * 2 * row, 0)


def test_both_spellings_of_the_config_are_one_model(flash):
    from transformers import DeepseekV4Config

    given = json.loads(CONFIG.read_text())  # which transformers changes in place
    other = DeepseekV4Config(**given).to_dict() | {"architectures": RELEASED["architectures"]}
    assert "compress_ratios" not in other
    assert resolve_model(other).spec == flash
    assert resolve_model({n: v for n, v in RELEASED.items() if n != "expert_dtype"}).spec == flash


def test_tensors_that_transformers_writes_are_those_of_the_spec(tmp_path):
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    DeepseekV4ForCausalLM(DeepseekV4Config(**TINY)).save_pretrained(tmp_path)
    resolved, source = resolve_source(open_path(tmp_path))
    verify_headers(resolved.spec, source)
    assert block_of(resolved.spec) == 256


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"compress_ratios": [0, 8, *RELEASED["compress_ratios"][2:]]}, "compress_ratios"),
        ({"compress_ratios": [0, 4]}, "compress_ratios or layer_types"),
        ({"rope_scaling": {"type": "yarn", "factor": 4}}, "rope_scaling"),
        ({"scoring_func": "sigmoid"}, "scoring_func"),
        ({"n_shared_experts": 2}, "n_shared_experts"),
        ({"o_groups": 7}, "o_groups"),
        ({"dspark_layers": 3}, "dspark_layers"),
        ({"mlp_layer_types": ["dense"] * 43}, "mlp_layer_types"),
    ],
)
def test_other_variants_are_refused(change, message):
    with pytest.raises(ModelError, match=message):
        resolve_model(RELEASED | change)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ranks_hold_heads_and_the_rows_of_all(flash, ranks):
    part = shard(flash, ranks)
    assert kv_bytes_per_token(part, FP8) == kv_bytes_per_token(flash, FP8)
    whole, mine = flash.layers[2], part.layers[2]
    assert (mine.mixer.heads, mine.mixer.out_groups) == (64 // ranks, 8 // ranks)
    sizes = {linear.name: (linear.n, linear.k) for linear in mine.linears}
    assert sizes["q_b"] == (32768 // ranks, 1024)
    assert sizes["o_a"] == (8192 // ranks, 4096)
    assert sizes["o_b"] == (4096, 8192 // ranks)
    assert sizes["experts_down"] == (256 * 4096, 2048 // ranks)
    assert {n: s for n, s in sizes.items() if "index" in n} == {
        li.name: (li.n, li.k) for li in whole.linears if "index" in li.name
    }
    with pytest.raises(PlanError, match="output groups of 8"):
        shard(flash, 16)


def test_no_plan_on_any_device_and_no_start(tmp_path):
    def failed(call) -> str:
        with pytest.raises(PlanError) as error:
            call()
        return str(error.value)

    settings = Settings.of(model=str(CONFIG), device="cpu", allow_reference=True)
    text = failed(lambda: make_plan(settings, open_path(CONFIG)))
    assert text == failed(lambda: Engine(settings))
    assert text.startswith("no kernel for 856 cells")
    specified = {name for name, op in default_registry().ops.items() if op.reference is None}
    spec = resolve_model(RELEASED).spec
    assert specified == {
        problem.op
        for group in groups(spec, ConfigSource(CONFIG).headers, "bfloat16", "bfloat16", 256)
        for _, problem in group.cells
        if not default_registry().candidates(problem.op)
    }
    for op in specified:
        assert f"{op}.decode" in text or f"{op}:" in text
    assert "the op is specified, and nothing computes it yet" in text
    assert "--allow-reference" not in text
    forced = Settings.of(model="m", device="cpu", kernel=["hyper_pre=torch.hyper"])
    with pytest.raises(Exception, match="nothing computes it yet"):
        make_plan(forced, open_path(CONFIG))


def test_families_without_a_class_are_planned_only():
    planned = [module for module, model in registry._FAMILIES if model is None]
    assert [module.__name__.rpartition(".")[2] for module in planned] == ["deepseek_v4"]
    assert not set(planned[0].ARCHITECTURES) & set(registry.architectures())
