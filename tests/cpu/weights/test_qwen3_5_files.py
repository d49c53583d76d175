"""Forms that a Qwen3.5 checkpoint comes in: experts one by one, multimodal folders, heads, decays, drafters."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import TEMPLATE, tiny_config, tiny_tokenizer

from offroad import LLM, SamplingParams
from offroad.engine import make_plan
from offroad.errors import ModelError
from offroad.models.registry import resolve_source
from offroad.settings import Settings
from offroad.weights.load import Weights, load, verify_headers
from offroad.weights.safetensors_source import SafetensorsSource

CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPTS = [[7], list(range(20, 90)), [5, 250, 31, 31, 8]]
Tensors = dict[str, torch.Tensor]


def rewritten(folder: Path, to: Path, edit: Callable[[Tensors], Tensors], **config: Any) -> Path:
    """A copy of a checkpoint with other tensors and other fields in its config."""
    to.mkdir(exist_ok=True)
    for file in folder.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    tensors = {
        name: tensor.clone().contiguous() for name, tensor in edit(load_file(folder / "model.safetensors")).items()
    }
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    values = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps(values | config))
    return to


def loaded(folder: Path, *, draft: bool = False, dtype: torch.dtype = torch.float32) -> Weights:
    resolved, source = resolve_source(SafetensorsSource(folder))
    verify_headers(resolved.spec, source)
    spec = resolved.spec.with_drafter() if draft else resolved.spec
    return load(spec, source, lambda layer, use: "dense", dtype, CPU, {})


def flat(weights: Any) -> Tensors:
    """Every tensor of weights by where it is."""
    if isinstance(weights, torch.Tensor):
        return {"": weights}
    if isinstance(weights, (list, tuple)):
        items: Any = enumerate(weights)
    elif isinstance(weights, dict):
        items = weights.items()
    elif hasattr(weights, "__dataclass_fields__"):
        items = ((f.name, getattr(weights, f.name)) for f in fields(weights))
    else:
        return {}
    return {f"{key}.{rest}": tensor for key, value in items for rest, tensor in flat(value).items()}


def same(one: Weights, other: Weights) -> bool:
    a, b = flat(one), flat(other)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def tokens(folder: Path) -> list[list[int]]:
    llm = LLM(str(folder), device="cpu", dtype="float32", max_num_seqs=4, max_num_batched_tokens=48)
    out = [result.outputs[0].token_ids for result in llm.generate([{"prompt_token_ids": p} for p in PROMPTS], GREEDY)]
    llm.close()
    return out


@torch.inference_mode()
def greedy(reference: torch.nn.Module, ids: list[int]) -> list[int]:
    """The same by transformers."""
    out = list(ids)
    for _ in range(GREEDY.max_tokens):
        out.append(int(reference(torch.tensor([out])).logits[0, -1].argmax()))
    return out[len(ids) :]


def one_by_one(tensors: Tensors) -> Tensors:
    """Fused experts as a tensor each for gate, up and down; other tensors as they are."""
    out: Tensors = {}
    for name, tensor in tensors.items():
        at, _, last = name.rpartition(".")
        for e, expert in enumerate(tensor if last in ("gate_up_proj", "down_proj") else ()):
            if last == "down_proj":
                out[f"{at}.{e}.down_proj.weight"] = expert
            else:
                out[f"{at}.{e}.gate_proj.weight"], out[f"{at}.{e}.up_proj.weight"] = expert.chunk(2)
        if last not in ("gate_up_proj", "down_proj"):
            out[name] = tensor
    return out


@pytest.fixture
def both_forms(tiny, tmp_path) -> tuple[Path, Path]:
    """(experts fused as in published checkpoints, experts one by one), of transformers' model in memory."""
    folder, reference = tiny("qwen3_5_moe")
    state = {name: tensor.detach() for name, tensor in reference.state_dict().items()}
    assert "model.layers.2.mlp.experts.gate_up_proj" in state
    fused = rewritten(folder, tmp_path / "fused", lambda _: state)
    return fused, rewritten(folder, tmp_path / "apart", lambda _: one_by_one(state))


def test_experts_one_by_one_are_the_same_model(both_forms):
    fused, apart = both_forms
    names = [set(SafetensorsSource(folder).headers) for folder in both_forms]
    assert "model.layers.2.mlp.experts.gate_up_proj" in names[0] - names[1]
    assert "model.layers.2.mlp.experts.7.up_proj.weight" in names[1] - names[0]
    assert same(loaded(fused), loaded(apart))
    assert tokens(fused) == tokens(apart)


def test_experts_partly_fused_or_incomplete(both_forms, tmp_path):
    """One layer may be stored one way and another the other; a lost expert is named, and so is a surplus one."""
    fused, _ = both_forms
    at = "model.layers.1.mlp.experts"

    def some(tensors: Tensors) -> Tensors:
        return {k: v for k, v in tensors.items() if not k.startswith(at)} | one_by_one(
            {k: v for k, v in tensors.items() if k.startswith(at)}
        )

    assert same(loaded(fused), loaded(rewritten(fused, tmp_path / "mixed", some)))
    lost = f"{at}.3.up_proj.weight"
    folder = rewritten(fused, tmp_path / "lost", lambda t: {k: v for k, v in some(t).items() if k != lost})
    with pytest.raises(ModelError, match=f"tensor {lost}; found: absent"):
        loaded(folder)
    folder = rewritten(fused, tmp_path / "both", lambda t: t | some(t))
    with pytest.raises(ModelError, match=rf"does not use; found: {at}.0.down_proj.weight"):
        loaded(folder)
    wrong = {f"{at}.gate_up_proj": torch.zeros(8, HIDDEN, 64).mT[:7]}
    with pytest.raises(ModelError, match=rf"tensor {at}.gate_up_proj; found: shape \[7, 64, 64\]"):
        loaded(rewritten(fused, tmp_path / "short", lambda t: t | wrong))


VISION = dict(
    depth=2,
    hidden_size=32,
    intermediate_size=48,
    num_heads=4,
    in_channels=3,
    patch_size=4,
    spatial_merge_size=2,
    temporal_patch_size=2,
    out_hidden_size=64,
    num_position_embeddings=16,
)


def write_multimodal(folder: Path, reference: torch.nn.Module, tied: bool) -> None:
    """A checkpoint with a vision tower, as transformers writes it, around the weights of a text model."""
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    ids = dict(image_token_id=296, video_token_id=297, vision_start_token_id=298, vision_end_token_id=299)
    text = tiny_config("qwen3_5_tied" if tied else "qwen3_5").to_dict()
    config = Qwen3_5Config(text_config=text, vision_config=VISION, tie_word_embeddings=tied, **ids)
    model = Qwen3_5ForConditionalGeneration(config)
    model.model.language_model.load_state_dict(reference.model.state_dict())
    model.lm_head.load_state_dict(reference.lm_head.state_dict())
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(tiny_tokenizer())
    settings = {"chat_template": TEMPLATE, "bos_token": "<bos>", "eos_token": "<eos>", "add_bos_token": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


@pytest.mark.parametrize("tied", [False, True])
def test_a_multimodal_checkpoint_answers_as_its_text_model(tiny, tmp_path, tied: bool):
    text, reference = tiny("qwen3_5_tied" if tied else "qwen3_5")
    write_multimodal(tmp_path, reference, tied)
    names = SafetensorsSource(tmp_path).headers
    assert any(name.startswith("model.language_model.layers.0.") for name in names)
    assert any(name.startswith("model.visual.") for name in names)
    assert ("lm_head.weight" in names) == (not tied)
    weights = loaded(tmp_path)
    assert same(weights, loaded(text))
    assert (weights.head is weights.embed) == tied
    assert tokens(tmp_path) == [greedy(reference, prompt) for prompt in PROMPTS]
    notes = []
    for folder in (tmp_path, text):
        plan = make_plan(Settings.of(model=str(folder), device="cpu"), SafetensorsSource(folder))
        notes.append([line for line in plan.explain().splitlines() if "vision" in line])
    assert notes == [["note            text only: the vision tower is not loaded"], []]


def test_a_tied_head_that_is_stored_too_is_not_used(tiny, tmp_path):
    folder, _ = tiny("qwen3_5_tied")
    stored = rewritten(folder, tmp_path, lambda t: t | {"lm_head.weight": t["model.embed_tokens.weight"].clone()})
    assert same(loaded(stored), loaded(folder))


def test_an_untied_head_must_be_there(tiny, tmp_path):
    folder, _ = tiny("qwen3_5")
    lost = rewritten(folder, tmp_path, lambda t: {k: v for k, v in t.items() if k != "lm_head.weight"})
    with pytest.raises(ModelError, match="tensor lm_head.weight; found: absent"):
        loaded(lost)


def test_a_name_that_stands_for_two_tensors(tiny, tmp_path):
    folder, _ = tiny("qwen3_5")
    name = "model.norm.weight"
    twice = rewritten(folder, tmp_path, lambda t: t | {"model.language_model.norm.weight": t[name].clone()})
    with pytest.raises(ModelError, match=f"tensor {name}; found: .*model.language_model.norm.weight"):
        loaded(twice)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_decays_are_as_exact_as_they_are_stored(tiny, tmp_path, stored: torch.dtype):
    """In fp32 where the file has fp32, whatever the activations are in; 3.6 stores them in bf16."""
    folder, _ = tiny("qwen3_5")
    small = ("A_log", "dt_bias", "linear_attn.norm.weight")

    def edit(tensors: Tensors) -> Tensors:
        return {k: v.to(stored if k.endswith(small) else torch.bfloat16) for k, v in tensors.items()}

    changed = rewritten(folder, tmp_path, edit, dtype="bfloat16")
    source, weights = load_file(changed / "model.safetensors"), loaded(changed, dtype=torch.bfloat16)
    for i in range(3):
        tensors = weights.layers[i].tensors
        for name, target in zip(small, ("a_log", "dt_bias", "delta_norm"), strict=True):
            at = f"model.layers.{i}.{'' if '.' in name else 'linear_attn.'}{name}"
            assert (source[at].dtype, tensors[target].dtype) == (stored, torch.float32)
            assert torch.equal(tensors[target], source[at].float())
    exact = load_file(folder / "model.safetensors")["model.layers.0.linear_attn.A_log"]
    assert torch.equal(weights.layers[0].tensors["a_log"], exact) == (stored is torch.float32)


HIDDEN, HEADS, KV_HEADS, DIM = 64, 4, 2, 32  # of the tiny checkpoints
BLOCK = {
    "input_layernorm.weight": [HIDDEN],
    "post_attention_layernorm.weight": [HIDDEN],
    "self_attn.q_proj.weight": [2 * HEADS * DIM, HIDDEN],
    "self_attn.k_proj.weight": [KV_HEADS * DIM, HIDDEN],
    "self_attn.v_proj.weight": [KV_HEADS * DIM, HIDDEN],
    "self_attn.o_proj.weight": [HIDDEN, HEADS * DIM],
    "self_attn.q_norm.weight": [DIM],
    "self_attn.k_norm.weight": [DIM],
}
DENSE_MLP = {
    "mlp.gate_proj.weight": [96, HIDDEN],
    "mlp.up_proj.weight": [96, HIDDEN],
    "mlp.down_proj.weight": [HIDDEN, 96],
}
MOE_MLP = {
    "mlp.gate.weight": [8, HIDDEN],
    "mlp.experts.gate_up_proj": [8, 64, HIDDEN],
    "mlp.experts.down_proj": [8, HIDDEN, 32],
    "mlp.shared_expert.gate_proj.weight": [48, HIDDEN],
    "mlp.shared_expert.up_proj.weight": [48, HIDDEN],
    "mlp.shared_expert.down_proj.weight": [HIDDEN, 48],
    "mlp.shared_expert_gate.weight": [1, HIDDEN],
}
OUTSIDE = {
    "mtp.fc.weight": [HIDDEN, 2 * HIDDEN],
    "mtp.pre_fc_norm_embedding.weight": [HIDDEN],
    "mtp.pre_fc_norm_hidden.weight": [HIDDEN],
    "mtp.norm.weight": [HIDDEN],
}


def drafter(family: str) -> Tensors:
    """The tensors of a drafter, random; another seed for each name."""
    shapes = BLOCK | (MOE_MLP if family == "qwen3_5_moe" else DENSE_MLP)
    shapes = OUTSIDE | {f"mtp.layers.0.{name}": shape for name, shape in shapes.items()}
    assert len(shapes) == (19 if family == "qwen3_5_moe" else 15)
    return {
        name: torch.randn(shape, generator=torch.Generator().manual_seed(i)) / math.sqrt(shape[-1])
        for i, (name, shape) in enumerate(shapes.items())
    }


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_a_drafter_is_loaded_where_it_belongs(tiny, tmp_path, family: str, apart: bool):
    folder, made = tiny(family)[0], drafter(family)
    with_it = rewritten(folder, tmp_path, lambda t: t | (one_by_one(made) if apart else made))
    weights = loaded(with_it, draft=True)
    draft, [*_, layer] = weights.draft, weights.layers
    assert draft is not None
    at = "mtp.layers.0."

    def stacked(*names: str) -> torch.Tensor:
        return torch.cat([made[at + name].flatten(0, -2) for name in names])

    expected = {
        "qkv": stacked(*(f"self_attn.{n}_proj.weight" for n in "qkv")),
        "o": stacked("self_attn.o_proj.weight"),
    }
    mlp = "mlp." if family == "qwen3_5" else "mlp.shared_expert."
    expected["gate_up"] = stacked(f"{mlp}gate_proj.weight", f"{mlp}up_proj.weight")
    expected["down"] = stacked(f"{mlp}down_proj.weight")
    if family == "qwen3_5_moe":
        expected |= {
            "router": stacked("mlp.gate.weight", "mlp.shared_expert_gate.weight"),
            "experts_gate_up": stacked("mlp.experts.gate_up_proj"),
            "experts_down": stacked("mlp.experts.down_proj"),
        }
    assert layer.linears.keys() == expected.keys()
    for name, packed in layer.linears.items():
        assert (packed.n, packed.k) == tuple(expected[name].shape)
        assert torch.equal(packed.tensors["w"], expected[name])
    norms = {"input_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    norms |= {"q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm"}
    assert layer.tensors.keys() == norms.keys()
    for target, name in norms.items():
        assert torch.equal(layer.tensors[target], 1.0 + made[f"{at}{name}.weight"])
    assert draft.linears.keys() == {"fc"}
    assert torch.equal(draft.linears["fc"].tensors["w"], made["mtp.fc.weight"])
    outside = {
        name: 1.0 + made[f"mtp.{name}.weight"] for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    }
    assert draft.tensors.keys() == outside.keys()
    assert all(torch.equal(draft.tensors[name], tensor) for name, tensor in outside.items())


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_a_drafter_changes_nothing_else(tiny, tmp_path, family: str):
    folder = tiny(family)[0]
    with_it = rewritten(folder, tmp_path, lambda t: t | drafter(family))
    assert loaded(with_it).draft is None
    assert same(loaded(with_it), loaded(folder))
    assert tokens(with_it) == tokens(folder)


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_a_drafter_that_lacks_a_tensor_or_has_a_wrong_one(tiny, tmp_path, family: str):
    folder, made = tiny(family)[0], drafter(family)
    for name, tensor in made.items():
        rest = {key: value for key, value in made.items() if key != name}
        lacking = rewritten(folder, tmp_path, lambda t, rest=rest: t | rest)
        at = "mtp.layers.0.mlp.experts"  # a fused tensor may be stored as others instead: then the first is named
        absent = {f"{at}.gate_up_proj": f"{at}.0.gate_proj.weight", f"{at}.down_proj": f"{at}.0.down_proj.weight"}
        with pytest.raises(ModelError, match=f"tensor {absent.get(name, name)}; found: absent"):
            loaded(lacking)
        wrong = {name: torch.cat((tensor, tensor))}
        with pytest.raises(ModelError, match=rf"tensor {name}; found: shape \[{2 * len(tensor)}"):
            loaded(rewritten(folder, tmp_path, lambda t, wrong=wrong: t | made | wrong))
    surplus = rewritten(folder, tmp_path, lambda t: t | made | {"mtp.layers.1.mlp.gate.weight": torch.zeros(2, 2)})
    with pytest.raises(ModelError, match=r"does not use; found: mtp.layers.1.mlp.gate.weight"):
        loaded(surplus)
