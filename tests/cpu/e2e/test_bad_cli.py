"""The command line on damaged files and impossible settings: exit codes, and a text that says what to do."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from safetensors.torch import load_file, save_file
from served import CLI


def run(*arguments: str | Path, code: int) -> str:
    """What the command writes to stderr; it must end with `code`, write no traceback and serve nothing."""
    done = subprocess.run([*CLI, *map(str, arguments)], capture_output=True, text=True, timeout=120)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return " ".join(done.stderr.split())


@pytest.fixture
def gguf_file(tmp_path: Path) -> Path:
    writer = GGUFWriter(tmp_path / "tiny.gguf", "llama")
    writer.add_tensor("token_embd.weight", np.zeros((300, 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tmp_path / "tiny.gguf"


@pytest.mark.parametrize(("left", "words"), [(-1000, ["token_embd.weight"]), (40, ["bytes left"]), (10, ["10 bytes"])])
def test_truncated_gguf(gguf_file: Path, left: int, words: list[str]):
    gguf_file.write_bytes(gguf_file.read_bytes()[:left])
    text = run("run", gguf_file, "hello", "--device", "cpu", code=2)
    for word in ["tiny.gguf", "download the file again", *words]:
        assert word in text


def test_gguf_of_an_unknown_architecture_lists_the_known_ones(tmp_path: Path):
    writer = GGUFWriter(tmp_path / "m.gguf", "mamba")
    writer.add_tensor("token_embd.weight", np.zeros((8, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    text = run("plan", tmp_path / "m.gguf", "--device", "cpu", code=2)
    for word in ["mamba", "llama", "qwen2", "qwen3", "gemma3"]:
        assert word in text


def test_a_non_finite_weight_ends_the_server_before_it_serves(tiny, tmp_path: Path):
    folder = Path(shutil.copytree(tiny("llama")[0], tmp_path / "model"))
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.2.mlp.down_proj.weight"][7, 1] = torch.inf
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    text = run("serve", folder, "--device", "cpu", "--port", "0", code=2)
    for word in ["model.layers.2.mlp.down_proj.weight", "inf", "finite values"]:
        assert word in text


def test_an_unknown_config_field_is_named(tiny, tmp_path: Path):
    folder = Path(shutil.copytree(tiny("llama")[0], tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"attention_sinks": 4}))
    assert "attention_sinks" in run("plan", folder, "--device", "cpu", code=2)


def test_a_context_larger_than_memory_names_both_numbers(tiny):
    # 3 layers x (K and V) x 2 heads x 16 x 4 bytes: 768 bytes a token, so 512 tokens need 393,216 bytes.
    text = run(
        "plan", tiny("llama")[0], "--device", "cpu", "--max-model-len", "512", "--kv-cache-memory-bytes", "100000",
        code=3,
    )  # fmt: skip
    assert "512 tokens" in text
    assert "100,000" in text or "100000" in text


def test_an_unknown_device_lists_the_known_ones(tiny):
    text = run("serve", tiny("llama")[0], "--device", "tpu-v9", "--port", "0", code=2)
    for word in ["tpu-v9", "cpu", "cuda", "v100-32gb"]:
        assert word in text
