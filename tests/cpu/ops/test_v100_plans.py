"""Plans for V100s, one, two and four of them, with caches in fp16 and e5m2: its own kernels wherever it has some."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest

from offroad.engine import make_plan
from offroad.errors import PlanError
from offroad.ops.plan import Plan
from offroad.settings import Settings
from offroad.weights.dummy import DummySource

CONFIGS = Path(__file__).parents[3] / "benchmarks" / "configs"
MODELS = {
    "Qwen3.5-27B W4A16": ("qwen3.5-27b", "w4a16-g128"),
    "Qwen3.5-27B FP8": ("qwen3.5-27b", "fp8-block"),
    "Qwen3.5-35B-A3B W4A16": ("qwen3.5-35b-a3b", "w4a16-g128"),
    "Gemma-4-31B W4A16": ("gemma-4-31b", "w4a16-g32"),
    "Gemma-4-E4B": ("gemma-4-e4b", None),
}
# Models whose weights and windows leave no room for a context on one card of 32 GB, by cache.
TOO_LARGE = {("Qwen3.5-27B FP8", "auto"), ("Qwen3.5-27B FP8", "fp8_e5m2"), ("Gemma-4-31B W4A16", "auto")}
# What torch's own kernels compute there (docs/perf/volta.md), and blocks made of other cells.
TORCHS = {"torch.embed", "torch.route", "torch.moe_combine", "parts.attention_block", "parts.mlp_block"}


@cache
def source(model: str) -> DummySource:
    name, scheme = MODELS[model]
    return DummySource(json.loads((CONFIGS / f"{name}.json").read_text()), "cuda", scheme)


def make(model: str, kv: str, ranks: int) -> Plan:
    wanted = dict(model=model, device="v100-32gb", kv_cache_dtype=kv, tensor_parallel_size=ranks, max_num_seqs=4)
    return make_plan(Settings.of(**wanted), source(model))


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("kv", ["auto", "fp8_e5m2"])
@pytest.mark.parametrize("model", MODELS)
def test_its_own_kernels(model: str, kv: str, ranks: int):
    if ranks == 1 and (model, kv) in TOO_LARGE:
        with pytest.raises(PlanError, match="memory for (a context|the weights)"):
            make(model, kv, ranks)
        return
    plan = make(model, kv, ranks)
    assert plan.dtype == "float16"
    assert plan.kv_dtype == ("float16" if kv == "auto" else "float8_e5m2")
    for cell, choice in plan.cells.items():
        if choice.kernel.startswith("cuda.sm70_") or choice.kernel in TORCHS:
            continue
        # Linears that are not quantised are cuBLAS's.
        assert choice.kernel == "torch.linear", (cell, choice.kernel)
        assert set(choice.problem.stored) <= {"bf16", "f16", "f32"}, cell
    ops = {cell.op for cell in plan.cells}
    assert "attention" in ops
    assert ("gated_delta" in ops) == model.startswith("Qwen")
    assert ("grouped_linear:experts_down" in ops) == ("A3B" in model)
