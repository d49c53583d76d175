"""`offroad doctor --kernels MODEL`: the kernels of a plan, and the exit code if one is wrong."""

from __future__ import annotations

import json
from pathlib import Path

from offroad.ops.registry import default_registry

CONFIG = dict(
    architectures=["Qwen3ForCausalLM"],
    model_type="qwen3",
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=32,
    vocab_size=300,
    max_position_embeddings=512,
    tie_word_embeddings=False,
)


def test_a_model_s_kernels(offroad, tmp_path: Path, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    words = ["doctor", "--kernels", str(tmp_path / "config.json"), "--device", "cpu"]
    code, out, _ = offroad(*words, "--json")
    facts = json.loads(out)
    assert code == 0
    assert facts["passed"]
    tried = [result for result in facts["results"] if result["passed"] is not None]
    assert {result["kernel"] for result in tried} >= {"cpu.linear", "cpu.attention", "cpu.norm", "cpu.qkv_rope"}
    assert all(result["repeats"] and result["error"] <= 1 and result["milliseconds"] > 0 for result in tried)
    assert {result["kernel"] for result in tried} >= {"cpu.attention_block", "cpu.mlp_block"}

    kernels = default_registry().kernels
    prepare = type(kernels["cpu.norm"]).prepare

    def wrong(kernel, device, problem):
        bound = prepare(kernel, device, problem)
        return (lambda *args: bound(*args) * 1.001) if kernel.name == "cpu.norm" else bound

    monkeypatch.setattr(type(kernels["cpu.norm"]), "prepare", wrong)
    code, out, _ = offroad(*words)
    assert code == 1
    assert "FAIL cpu.norm" in out
    assert "times what is allowed" in out
    assert "FAIL cpu.linear" not in out


def test_a_block_that_is_not_its_parts(offroad, tmp_path: Path, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    kernel = default_registry().kernels["cpu.mlp_block"]
    prepare = type(kernel).prepare

    def wrong(kernel, device, problem):
        bound = prepare(kernel, device, problem)
        return (lambda x, *rest: bound(2 * x, *rest)) if kernel.name == "cpu.mlp_block" else bound

    monkeypatch.setattr(type(kernel), "prepare", wrong)
    code, out, _ = offroad("doctor", "--kernels", str(tmp_path / "config.json"), "--device", "cpu")
    assert code == 1
    assert "FAIL cpu.mlp_block" in out
    assert "FAIL cpu.attention_block" not in out


def test_wrong_words(offroad):
    code, _, err = offroad("doctor", "smollm2-135m")
    assert code == 2
    assert "--kernels" in err
