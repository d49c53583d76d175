"""Targets, ignore lists, several schemes in one checkpoint; where a list and the tensors disagree, the tensors win."""

from __future__ import annotations

import json
import re

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.utils.match import match_name
from ct_files import PROJECTIONS, by_library, compress, oracle, prefixed, scheme, write
from test_compressed_tensors import FORCED, check_logits, check_weights
from test_ct_traps import normal, opened, ordered, weight

from offroad.models.registry import resolve_source
from offroad.quant.formats.base import FLOAT
from offroad.quant.formats.ct_config import names
from offroad.weights.load import load
from offroad.weights.locate import open_path
from offroad.weights.quantised import quantisation

MODULE = "model.language_model.layers.1.mlp.experts.10.up_proj"
ENTRIES = [
    MODULE,
    "model.language_model.layers.1.mlp.experts.1",
    "model.layers.1.mlp.experts.10.up_proj",
    "experts.10.up_proj",
    "re:model.*up_proj$",
    "re:.*experts.*",
    "re:experts.*",
    r"re:model\.language_model\.layers\.1\.mlp\.experts\.1",
    "re:.*down_proj",
]


@pytest.mark.parametrize("entry", ENTRIES)
def test_names_match_as_in_the_library(entry):
    """Whole names, or patterns from the start: neither parts of names nor patterns anywhere."""
    assert names([entry], "ignore").named(MODULE) == match_name(MODULE, entry)


def test_classes_match_by_what_a_module_is():
    """Headers have no classes: a matrix is a linear's, unless its name is an embedding's."""
    linear, embedding = names(["Linear"], "ignore"), names(["Embedding"], "ignore")
    for module, is_embedding in [("a.q_proj", False), ("model.embed_tokens", True), ("m.embed_tokens_per_layer", True)]:
        assert (module in embedding) == is_embedding
        assert (module in linear) != is_embedding
    assert "a.embed_tokens" not in names(["LlamaRMSNorm"], "ignore")


def groups(**schemes: tuple[str, tuple[str, ...]]) -> dict:
    return {group: scheme(name, targets) for group, (name, targets) in schemes.items()}


def test_names_come_before_patterns_and_patterns_before_classes(tmp_path):
    """Schemes that all fit the tensors, so that only the order decides which one is meant: among patterns, that of the
    alphabet, as in the library."""
    made = scheme("w4-g32")
    targets = {1: "Linear", 2: "re:^y.*", 3: "re:.*q_proj", 4: "x.q_proj"}
    listed = {f"to{bits}": scheme("w4-g32", (target,)) for bits, target in targets.items()}
    for bits, group in zip(targets, listed.values(), strict=True):
        group.input_activations = QuantizationArgs(num_bits=bits, strategy="token", dynamic=True)
    tensors = {}
    for module in ("x.q_proj", "y.q_proj", "y.k_proj", "x.k_proj"):
        tensors |= prefixed(module, compress(normal(8, 64), made))
    source = opened(tmp_path, tensors, listed)
    assert {name: header.kind for name, header in source.headers.items()} == {
        "x.q_proj.weight": "affine4.w4a4-g32",
        "y.q_proj.weight": "affine4.w4a3-g32",
        "y.k_proj.weight": "affine4.w4a2-g32",
        "x.k_proj.weight": "affine4.w4a1-g32",
    }
    assert not any("the file decides" in note for note in source.notes)


def test_lists_that_name_each_expert_say_nothing_of_all_in_one_tensor(tmp_path):
    made = scheme("w4-g32", (r"re:.*experts\.\d+\..*",))
    parts = {part: value[None] for part, value in compress(normal(8, 64), made).items() if part != "weight_shape"}
    assert opened(tmp_path, prefixed("x.experts.down_proj", parts), {"a": made}).notes == ()


def test_a_module_may_have_the_scheme_of_a_group_that_does_not_target_it(tmp_path):
    listed = groups(a=("w4-g32", ("re:.*q_proj",)), b=("w8-channel", ("re:.*k_proj",)))
    parts = compress(normal(8, 64), scheme("w8-channel"))
    tensors = prefixed("q_proj", parts) | prefixed("v_proj", parts)
    source = opened(tmp_path, tensors, listed)
    assert torch.equal(weight(source, "q_proj.weight"), oracle(parts, scheme("w8-channel")))
    assert source.notes == (
        "q_proj: a target of another group, and quantised in the file as b says: the file decides",
        "v_proj: no target of the config, and quantised in the file as b says: the file decides",
    )


def test_an_ignored_module_that_is_quantised_is_read_with_a_note(tmp_path):
    made = scheme("w4-g32")
    parts = compress(normal(8, 64), made)
    tensors = prefixed("a.mlp.up", parts) | prefixed("b.mlp.up", parts)
    source = opened(tmp_path, tensors, {"a": made}, ignore=["re:.*mlp.*"])
    assert torch.equal(weight(source, "a.mlp.up.weight"), oracle(parts, made))
    assert source.notes == ("a.mlp.up and 1 more: ignored by the config, and quantised in the file: the file decides",)


def test_a_target_that_is_not_quantised_is_read_with_a_note(tmp_path):
    """As routers are whose lists forget them. Ignored modules, embeddings, norms and convolutions are no surprise."""
    made = scheme("w4-g32")
    plain = {name: normal(4, 4) for name in ("a.gate.weight", "lm_head.weight", "model.embed_tokens.weight")}
    plain |= {"a.norm.weight": torch.ones(4), "a.conv1d.weight": torch.ones(4, 1, 4)}
    tensors = plain | prefixed("m", compress(normal(8, 64), made))
    source = opened(tmp_path, tensors, {"a": made}, ignore=["lm_head"])
    assert source.notes == ("a.gate: targets of the config, and not quantised in the file: the file decides",)
    assert all(source.headers[name].kind in FLOAT for name in plain)


def test_lists_hold_the_file_s_names_not_the_model_s(tiny, tmp_path):
    """A multimodal checkpoint: its lists name modules as the file does, before prefixes are changed."""
    pattern = r"(?!.*k_proj)" + PROJECTIONS
    written = write(tiny("qwen3_5"), tmp_path / "m", {pattern: "w4-g32"})
    written.tensors = {_long(name): tensor for name, tensor in written.tensors.items()}
    written.tensors["model.visual.proj.weight"] = normal(4, 4)
    path = written.folder / "config.json"
    config = json.loads(path.read_text())
    quantisation, inner = config.pop("quantization_config"), config
    quantisation["config_groups"]["group_0"]["targets"] = ["Linear"]
    plain = [name.removesuffix(".weight") for name in written.tensors if name.endswith(".weight")]
    quantisation["ignore"] = [*plain, "re:model.visual.*"]
    outer = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "text_config": inner}
    path.write_text(json.dumps(outer | {"vision_config": {}, "quantization_config": quantisation}))
    written.save()
    _, source = resolve_source(open_path(written.folder))
    assert not any("the file decides" in note for note in source.notes)
    check_weights(written, "affine4.w4a16-g32")
    check_logits(written)


def _long(name: str) -> str:
    return name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name


MIXED = {r".*(q|o|up)_proj": "w4-g32", r".*k_proj": "w8-channel", r".*v_proj": "fp8-channel", r".*gate_proj": "nvfp4"}


def test_mixed_precision_also_within_a_fused_layer(tiny, tmp_path):
    """q, k and v (and gate and up) in three layouts become one dense weight with the same values."""
    written = write(tiny("llama"), tmp_path / "m", MIXED)
    check_weights(written, None)
    for forced in FORCED.values():
        check_logits(written, forced)


def test_embeddings_and_heads(tiny, tmp_path):
    names = {r"model\.embed_tokens|lm_head": "w8-channel", PROJECTIONS: "w4-g32-asym"}
    written = write(tiny("llama"), tmp_path / "m", names)
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= written.weights.keys()
    check_weights(written, None)
    for forced in FORCED.values():
        check_logits(written, forced)


def test_a_quantised_embedding_that_is_the_head_too(tiny, tmp_path):
    written = write(tiny("llama3"), tmp_path / "m", {r"model\.embed_tokens": "w8-channel"})
    check_weights(written, "affine8.w8a16-channel")
    check_logits(written)


def test_groups_that_stand_apart_in_a_model(tiny, tmp_path):
    """q, k and v of one order; the C kernels refuse it, and what runs instead gives the reference's logits."""
    written = write(tiny("llama"), tmp_path / "m", {r".*(q|k|v)_proj": "w4-g32-asym"})
    state = written.reference.state_dict()
    for name in list(written.weights):
        seed = int(re.search(r"\d+", name)[0])
        parts, expected = ordered(*state[name].shape, 32, seed)
        written.tensors |= prefixed(name.removesuffix(".weight"), parts)
        written.weights[name] = expected
    written.reference.load_state_dict(written.weights, strict=False)
    written.save()
    check_weights(written, "affine4.w4a16-g32-asym+order")
    for forced in FORCED.values():
        check_logits(written, forced)


@pytest.mark.parametrize("quantised_too", [True, False])
def test_a_drafter_is_plain_or_quantised(quantised_too, tiny, tmp_path):
    """mtp tensors: usually ignored, and dense once loaded in any case."""
    written = write(tiny("qwen3_5"), tmp_path / "m", {PROJECTIONS: "w4-g32"}, ignore=("re:^mtp.*",))
    spec = resolve_source(open_path(written.folder))[0].spec
    made, up = scheme("w4-g32"), "mtp.layers.0.mlp.up_proj"
    drafted = [*spec.draft.layers[0].linears, *spec.draft.linears]
    shapes = {f"{module}.weight": (rows, linear.k) for linear in drafted for module, rows in linear.parts}
    small = [*spec.draft.tensors, *spec.draft.layers[0].tensors]
    shapes |= {tensor.name: tensor.shape for tensor in small}
    written.tensors |= {name: torch.ones(shape) for name, shape in shapes.items()}
    parts = compress(normal(*shapes[f"{up}.weight"]), made)
    if quantised_too:
        del written.tensors[f"{up}.weight"]
        written.tensors |= prefixed(up, parts)
    written.save()
    _, source = resolve_source(open_path(written.folder))
    weights = load(spec.with_drafter(), source, lambda i, use: "dense", torch.float32, torch.device("cpu"), {})
    got = weights.layers[-1].linears["gate_up"].tensors["w"]
    expected = oracle(parts, made) if quantised_too else torch.ones(96, 64)
    assert torch.equal(got[96:], expected)
    assert any(f"{up}: ignored" in note for note in source.notes) == quantised_too


def test_a_checkpoint_of_the_library_s_own_making(tiny, tmp_path):
    written = by_library(tiny("llama"), tmp_path / "m", scheme("w4-g32-asym"), ignore=("lm_head",))
    assert len(written.weights) == 3 * 7
    _, source = resolve_source(open_path(written.folder))
    assert source.notes == ()
    check_weights(written, "affine4.w4a16-g32-asym")
    check_logits(written)


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("name", ["quantization_config", "compression_config"])
def test_where_the_config_stands(name, inside, tiny, tmp_path):
    """Beside the text part of a multimodal config or in it; the first checkpoints call it compression_config."""
    written = write(tiny("llama"), tmp_path / "m", {PROJECTIONS: "w4-g32"})
    config = json.loads((written.folder / "config.json").read_text())
    values = config.pop("quantization_config")
    outer = {"text_config": config | {name: values}} if inside else config | {name: values}
    assert quantisation(outer) == values
    if not inside:
        (written.folder / "config.json").write_text(json.dumps(outer))
        check_weights(written, "affine4.w4a16-g32")


def test_no_config_is_not_quantised():
    assert quantisation({"quantization_config": None, "text_config": {"quantization_config": {}}}) is None
