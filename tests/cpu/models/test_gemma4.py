"""Gemma-4: shared keys and values are only read, what checkpoints vary in, and configs that are refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import write_tiny

from offroad import LLM, SamplingParams
from offroad.errors import ModelError
from offroad.models.registry import resolve_model
from offroad.models.spec import Paged, Shared

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPTS = [[3 + (i * 7 + n) % 280 for i in range(n)] for n in (1, 15, 16, 17, 32, 90)]


def tokens(folder, **settings) -> list[list[int]]:
    llm = LLM(str(folder), device="cpu", dtype="float32", max_num_seqs=4, max_num_batched_tokens=40, **settings)
    results = llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], GREEDY)
    llm.engine.check()
    return [result.outputs[0].token_ids for result in results]


def config_of(folder) -> dict:
    return json.loads((folder / "config.json").read_text())


def changed(folder, to, tensors: dict[str, torch.Tensor] | None = None, **config):
    """A copy of a checkpoint with some tensors and config fields replaced or added."""
    shutil.copytree(folder, to)
    (to / "config.json").write_text(json.dumps(config_of(folder) | config))
    if tensors:
        save_file(load_file(to / "model.safetensors") | tensors, to / "model.safetensors", metadata={"format": "pt"})
    return to


def test_readers_of_shared_pages_have_none_and_never_write(tiny):
    folder, _ = tiny("gemma4_e")
    llm = LLM(str(folder), device="cpu", dtype="float32", max_num_batched_tokens=40)
    views = [layer["kv"] for layer in llm.engine.runner.arrays.views]
    # The last layer of each type before layer 5 is read by all later ones of that type.
    assert [view.k.data_ptr() for view in views[5:]] == [views[i].k.data_ptr() for i in (3, 3, 3, 3, 4)]
    calls = []

    def guarded(attention):
        def call(q, k, v, view, rows, spec):
            before = [layer.k.clone() for layer in views] + [layer.v.clone() for layer in views]
            out = attention(q, k, v, view, rows, spec)
            after = [layer.k for layer in views] + [layer.v for layer in views]
            calls.append(
                all(
                    torch.equal(
                        a,
                        b,
                    )
                    for a, b in zip(bits(before), bits(after), strict=True)
                )
            )
            return out

        return call

    def bits(tensors):  # pages are not cleared: what nobody wrote may be NaN
        return [tensor.view(torch.int32) for tensor in tensors]

    for ops in llm.engine.runner.ops.values():
        for layer in ops.layers[5:]:
            layer.attention_verify, layer.attention_chunk = map(
                guarded, (layer.attention_verify, layer.attention_chunk)
            )
    llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], GREEDY)
    assert calls
    assert all(calls)


def test_layers_that_store_nothing_run_at_wanted_tokens_only(tiny):
    folder, _ = tiny("gemma4_e")
    llm = LLM(str(folder), device="cpu", dtype="float32", max_num_batched_tokens=40)
    seen: dict[int, int] = dict.fromkeys(range(10), 0)

    def look(layer: int, residual: torch.Tensor) -> None:
        seen[layer] += len(residual)

    runner = llm.engine.runner
    runner.ops = {phase: replace(ops, observe=look) for phase, ops in runner.ops.items()}
    llm.generate({"prompt_token_ids": PROMPTS[-1]}, GREEDY)
    assert [seen[i] for i in range(5)] == [90 + 11] * 5
    assert [seen[i] for i in range(5, 10)] == [12] * 5


def test_redundant_tensors_of_shared_layers_change_nothing(tiny, tmp_path):
    folder, _ = tiny("gemma4_e")
    redundant = {}
    for i, dim in ((5, 16), (9, 32)):
        at = f"model.layers.{i}.self_attn"
        redundant |= {f"{at}.k_proj.weight": torch.ones(dim, 64), f"{at}.v_proj.weight": torch.ones(dim, 64)}
        redundant[f"{at}.k_norm.weight"] = torch.ones(dim)
    assert tokens(changed(folder, tmp_path / "m", redundant)) == tokens(folder)
    with pytest.raises(ModelError, match=r"layers\.4\.self_attn\.extra"):
        tokens(changed(folder, tmp_path / "n", {"model.layers.4.self_attn.extra.weight": torch.ones(4)}))


def test_the_older_spelling_of_full_layers(tiny, tmp_path):
    folder, _ = tiny("gemma4")
    older = changed(folder, tmp_path / "m", per_layer_config=None, global_head_dim=32, num_global_key_value_heads=1)
    assert tokens(older) == tokens(folder)


@pytest.mark.parametrize("family", ["gemma4", "gemma4_e"])
def test_layer_scalars_matter(family: str, tiny, tmp_path):
    folder, _ = tiny(family)
    plain = {f"model.layers.{i}.layer_scalar": torch.ones(1) for i in range(6)}
    assert tokens(changed(folder, tmp_path / "m", plain)) != tokens(folder)


def test_a_multimodal_checkpoint_serves_its_text(tmp_path):
    from transformers import Gemma4Config, Gemma4ForConditionalGeneration

    write_tiny("gemma4", tmp_path / "text", seed=3)
    vision = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4)
    vision |= dict(num_key_value_heads=4, head_dim=8, patch_size=4, pooling_kernel_size=2, position_embedding_size=64)
    text = config_of(tmp_path / "text")
    ids = dict(image_token_id=290, video_token_id=291, audio_token_id=292, boi_token_id=293, eoi_token_id=294)
    model = Gemma4ForConditionalGeneration(
        Gemma4Config(text_config=text, vision_config=vision, audio_config=None, **ids)
    ).float()
    state = load_file(tmp_path / "text" / "model.safetensors")
    own = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in state.items()}
    missing = model.load_state_dict(own, strict=False)
    assert not missing.unexpected_keys
    model.save_pretrained(tmp_path / "both")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tmp_path / "text" / name, tmp_path / "both")
    assert tokens(tmp_path / "both") == tokens(tmp_path / "text")
    llm = LLM(str(tmp_path / "both"), device="cpu")
    assert any("text only" in note for note in llm.engine.plan.notes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_kv_shared_layers": 6}, "num_kv_shared_layers"),
        ({"num_kv_shared_layers": 10}, "num_kv_shared_layers"),
        (
            {"layer_types": ["sliding_attention"] * 4 + ["chunked_attention"] + ["full_attention"] * 5},
            "chunked_attention",
        ),
        ({"layer_types": ["full_attention"] * 9}, "9 entries"),
        ({"per_layer_config": {"4": {"head_dim": 32, "sliding_window": 8}}}, "sliding_window"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
        ({"hidden_activation": "silu"}, "hidden_activation"),
        ({"attention_sinks": True}, "attention_sinks"),
        ({"vocab_size_per_layer_input": 200}, "vocab_size_per_layer_input"),
        ({"enable_moe_block": True}, "num_experts"),
        ({"attention_bias": True}, "attention_bias"),
    ],
)
def test_configs_that_are_refused_by_name(change: dict, message: str, tiny):
    config = config_of(tiny("gemma4_e")[0])
    if change.get("num_kv_shared_layers") == 6:  # layers 0 to 3 are all sliding: nobody produces for full ones
        config["layer_types"] = ["sliding_attention"] * 4 + ["full_attention"] * 6
    with pytest.raises(ModelError, match=message):
        resolve_model(config | change)


def test_items_of_the_layers(tiny):
    spec = resolve_model(config_of(tiny("gemma4_e")[0])).spec
    items = [dict(layer.items)["kv"] for layer in spec.layers]
    assert [item for item in items if isinstance(item, Shared)] == [Shared(3)] * 4 + [Shared(4)]
    windows = [item.window for item in items if isinstance(item, Paged)]
    assert windows == [16] * 4 + [None]
    assert [layer.ffn.size for layer in spec.layers] == [96] * 5 + [192] * 5
