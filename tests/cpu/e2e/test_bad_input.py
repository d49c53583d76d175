"""Bad checkpoints, settings and requests: each a clear error, a non-zero exit or a 4xx, and the server goes on."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file
from served import CLI, served

from offroad import LLM
from offroad.errors import ModelError, ModelNotFound, OffroadError, PlanError, SettingsError


def edit_config(folder: Path, **changes) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def drop(tensors):
    del tensors["model.layers.1.mlp.up_proj.weight"]


def add(tensors):
    tensors["model.layers.9.extra.weight"] = torch.zeros(2, 2)


def reshape(tensors):
    tensors["model.norm.weight"] = torch.zeros(63)


def spoil(tensors):
    tensors["model.layers.0.self_attn.k_proj.weight"][3, 5] = float("nan")


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


DAMAGE = {
    "missing tensor": (lambda f: edit_tensors(f, drop), ["model.layers.1.mlp.up_proj.weight", "absent"]),
    "extra tensor": (lambda f: edit_tensors(f, add), ["model.layers.9.extra.weight"]),
    "wrong shape": (lambda f: edit_tensors(f, reshape), ["model.norm.weight", "63", "64"]),
    "non-finite weight": (lambda f: edit_tensors(f, spoil), ["model.layers.0.self_attn.k_proj.weight", "finite"]),
    "truncated file": (truncate, ["model.safetensors"]),
    "unknown architecture": (
        lambda f: edit_config(f, architectures=["MambaForCausalLM"], model_type="mamba"),
        ["MambaForCausalLM", "LlamaForCausalLM", "Gemma3ForCausalLM"],
    ),
    "unknown config field": (lambda f: edit_config(f, attention_chunk_size=128), ["attention_chunk_size"]),
    "another activation": (lambda f: edit_config(f, hidden_act="relu"), ["hidden_act", "relu", "silu"]),
}


@pytest.fixture
def copy(tiny, tmp_path: Path) -> Path:
    folder, _ = tiny("llama")
    return Path(shutil.copytree(folder, tmp_path / "model"))


@pytest.mark.parametrize("what", DAMAGE)
def test_damaged_checkpoints_are_refused_with_what_was_found(copy: Path, what: str):
    damage, words = DAMAGE[what]
    damage(copy)
    with pytest.raises(ModelError) as error:
        LLM(str(copy), device="cpu")
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("settings", "kind", "words"),
    [
        (dict(max_model_len=512, kv_cache_memory_bytes=100_000), PlanError, ["512 tokens", "bytes"]),
        (dict(max_model_len=4096), PlanError, ["4096", "512"]),
        (dict(device="h100-80gb", allow_reference=True), PlanError, ["offroad plan --device h100-80gb"]),
        (dict(device="tpu"), SettingsError, ["tpu", "v100-32gb"]),
        (dict(kernel=["attention=fast"]), SettingsError, ["fast", "torch.sdpa"]),
        (dict(max_modellen=5), SettingsError, ["max_modellen", "max_model_len"]),
        (dict(max_num_seqs="4"), SettingsError, ["max_num_seqs", "int"]),
    ],
)
def test_settings_that_cannot_be_met_say_what_can(tiny, settings: dict, kind: type[OffroadError], words: list[str]):
    folder, _ = tiny("llama")
    with pytest.raises(kind) as error:
        LLM(str(folder), **({"device": "cpu"} | settings))
    for word in words:
        assert word in str(error.value)


def test_a_model_that_is_not_there_lists_what_was_tried():
    with pytest.raises(ModelNotFound, match="smollm2-135m"):
        LLM("no-such-model", device="cpu", offline=True)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["plan", "MODEL", "--device", "v100-32gb"], 3, ["no kernel", "allow-reference"]),
        (["serve", "MODEL", "--max-model-len", "9999"], 3, ["9999", "512"]),
        (["serve", "nowhere/nothing", "--offline"], 2, ["nowhere/nothing"]),
        (["serve", "MODEL", "--no-such-flag"], 2, ["no-such-flag"]),
    ],
)
def test_the_command_line_ends_with_an_exit_code_and_a_reason(tiny, arguments: list[str], code: int, words: list[str]):
    folder, _ = tiny("llama")
    command = [*CLI, *(str(folder) if word == "MODEL" else word for word in arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == code, done.stderr
    for word in words:
        assert word in done.stderr + done.stdout


def test_bad_requests_are_refused_and_the_server_goes_on(tiny):
    folder, _ = tiny("llama")
    good = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0}
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
    with served(folder, "--max-model-len", "256") as address, httpx.Client(base_url=address, timeout=60) as client:
        first = client.post("/v1/completions", json=good).json()["choices"][0]["text"]

        def refused(path: str, status: int, param: str | None, body: dict | None = None, **more) -> str:
            answer = client.post(path, json=body, **more) if body is not None else client.post(path, **more)
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (status, param), answer.text
            return error["message"] + str(error["code"])

        text = refused("/v1/completions", 400, "prompt", good | {"prompt": [5] * 300})
        assert "300" in text
        assert "256" in text
        assert "context_length_exceeded" in text
        refused("/v1/completions", 400, None, content=b"{not json", headers={"content-type": "application/json"})
        assert "foo" in refused("/v1/completions", 400, "foo", good | {"foo": 1})
        refused("/v1/completions", 400, "temperature", good | {"temperature": -1})
        refused("/v1/completions", 400, "max_tokens", good | {"max_tokens": "many"})
        refused("/v1/completions", 400, "prompt", good | {"prompt": [5, 100_000]})
        refused("/v1/completions", 400, "logit_bias", good | {"logit_bias": {"100000": 1}})
        refused(
            "/v1/chat/completions", 400, "tools", chat | {"tools": [{"type": "function", "function": {"name": "f"}}]}
        )
        refused("/v1/chat/completions", 400, "response_format.type", chat | {"response_format": {"type": "xml"}})
        refused("/v1/completions", 400, "structured_outputs", good | {"structured_outputs": {"regex": "(a"}})
        refused("/v1/completions", 404, "model", good | {"model": "other"})
        assert client.post("/v1/completions", json=good).json()["choices"][0]["text"] == first
        metrics = client.get("/metrics").text
        assert "offroad_num_requests_running 0.0" in metrics
