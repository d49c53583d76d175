"""A Hugging Face folder: headers, shards, damage, tokenizer files."""

from __future__ import annotations

import json
import struct
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from tiny_models import TEMPLATE, tiny_config, tiny_tokenizer

from offroad.errors import ModelError
from offroad.weights.safetensors_source import INDEX, SafetensorsSource


def folder_of(path: Path, tensors: dict[str, torch.Tensor], name: str = "model.safetensors") -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    save_file(tensors, path / name)
    return path


TENSORS = {"a": torch.randn(3, 4), "b": torch.randn(5).bfloat16(), "c": torch.randn(2, 2).half(), "d": torch.randn(())}


def test_headers_and_data_are_those_of_the_file(tmp_path):
    source = SafetensorsSource(folder_of(tmp_path / "m", TENSORS))
    assert {name: (h.shape, h.kind, h.nbytes) for name, h in source.headers.items()} == {
        "a": ((3, 4), "f32", 48),
        "b": ((5,), "bf16", 10),
        "c": ((2, 2), "f16", 8),
        "d": ((), "f32", 4),
    }
    for name, tensor in TENSORS.items():
        assert torch.equal(source.read(name).data, tensor)
        assert source.read(name).data.dtype == tensor.dtype


def test_shards_written_by_transformers(tmp_path):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(tiny_config("qwen2"))
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    source = SafetensorsSource(tmp_path)
    state = model.state_dict()
    assert set(source.headers) == set(state) - {"lm_head.weight"}
    for name in source.headers:
        assert torch.equal(source.read(name).data, state[name])
    gone = next(tmp_path.glob("*-00002-of-*.safetensors"))
    gone.unlink()
    with pytest.raises(ModelError, match=f"shards.*{gone.name}"):
        SafetensorsSource(tmp_path)


def test_index_that_disagrees_with_its_shards(tmp_path):
    folder = folder_of(tmp_path / "m", {"a": TENSORS["a"]}, "one.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": "one.safetensors", "b": "one.safetensors"}}))
    with pytest.raises(ModelError, match="tensor b; found: not in one.safetensors"):
        SafetensorsSource(folder)
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": "../one.safetensors"}}))
    with pytest.raises(ModelError, match="weight_map"):
        SafetensorsSource(folder)


def test_a_tensor_in_two_files_is_refused(tmp_path):
    folder = folder_of(tmp_path / "m", {"a": TENSORS["a"]}, "one.safetensors")
    folder_of(folder, {"a": TENSORS["a"]}, "two.safetensors")
    with pytest.raises(ModelError, match="tensor a; found: in one.safetensors and in two.safetensors"):
        SafetensorsSource(folder)


def test_a_folder_without_weights(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="no safetensors file"):
        SafetensorsSource(tmp_path)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}, "F99"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}, "found: 4 bytes; accepted: 8"),
        ({"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}, "whole numbers"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, "accepted: .* bytes, as its header says"),
        ({"dtype": "F32"}, "shape None"),
        ([], "dtype None"),
    ],
)
def test_bad_entries(tmp_path, entry, message):
    header = json.dumps({"a": entry}).encode()
    folder = folder_of(tmp_path / "m", {"a": TENSORS["a"]})
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    with pytest.raises(ModelError, match=message):
        SafetensorsSource(folder)


def test_a_name_twice_in_one_header(tmp_path):
    one = '"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}'
    header = f"{{{one}, {one}}}".encode()
    folder = folder_of(tmp_path / "m", {"a": TENSORS["a"]})
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    with pytest.raises(ModelError, match="'a' twice"):
        SafetensorsSource(folder)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 400), st.binary(max_size=6))
def test_cut_or_overwritten_files_never_crash(tmp_path_factory, at, junk):
    folder = folder_of(tmp_path_factory.mktemp("st"), TENSORS)
    path = folder / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:at])
    if at < len(data):
        with pytest.raises(ModelError):
            SafetensorsSource(folder)
    path.write_bytes(data[:at] + junk + data[at + len(junk) :])
    with suppress(ModelError):
        source = SafetensorsSource(folder)
        for name in source.headers:
            source.read(name)


def test_tokenizer_files(tmp_path):
    folder = folder_of(tmp_path / "m", TENSORS)
    with pytest.raises(ModelError, match="tokenizer.json"):
        SafetensorsSource(folder).tokenizer()
    (folder / "tokenizer.json").write_text(tiny_tokenizer())
    settings = {
        "bos_token": {"content": "<bos>"},
        "eos_token": "<eos>",
        "add_bos_token": True,
        "chat_template": [{"name": "tool_use", "template": "no"}, {"name": "default", "template": TEMPLATE}],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7], "temperature": 0.6}))
    files = SafetensorsSource(folder).tokenizer()
    assert (files.bos_token, files.eos_token, files.eos_ids, files.add_bos) == ("<bos>", "<eos>", (2, 7), True)
    assert files.chat_template == TEMPLATE
    assert files.generation["temperature"] == 0.6
    (folder / "chat_template.jinja").write_text("{{ jinja }}")
    (folder / "generation_config.json").unlink()
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 2}))
    files = SafetensorsSource(folder).tokenizer()
    assert (files.chat_template, files.eos_ids) == ("{{ jinja }}", (2,))


@pytest.mark.parametrize(
    ("config", "generation", "ids"),
    [
        # Qwen3.5: the chat's end is in generation_config alone.
        ({"eos_token_id": 248044}, {"eos_token_id": [248046, 248044]}, (248046, 248044)),
        ({"text_config": {"eos_token_id": 248044}}, {"eos_token_id": [248046, 248044]}, (248046, 248044)),
        # Gemma-4
        ({"eos_token_id": [1, 106], "text_config": {"eos_token_id": 1}}, {"eos_token_id": [1, 106, 50]}, (1, 106, 50)),
        # Without a generation_config, or with one that names none.
        ({"eos_token_id": [1, 106], "text_config": {"eos_token_id": 1}}, None, (1, 106)),
        ({"text_config": {"eos_token_id": 248044}}, None, (248044,)),
        ({"eos_token_id": None, "text_config": {"eos_token_id": [5, 0]}}, {"temperature": 0.6}, (5, 0)),
        ({"eos_token_id": 3}, {"eos_token_id": None}, (3,)),
        ({"eos_token_id": 0}, {"eos_token_id": []}, (0,)),
        ({"text_config": None}, None, ()),
    ],
)
def test_stop_ids(tmp_path, config, generation, ids):
    folder = folder_of(tmp_path / "m", TENSORS)
    (folder / "tokenizer.json").write_text(tiny_tokenizer())
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    assert SafetensorsSource(folder).tokenizer().eos_ids == ids


def test_config_that_is_no_json(tmp_path):
    folder = folder_of(tmp_path / "m", TENSORS)
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelError, match="config.json"):
        SafetensorsSource(folder)
