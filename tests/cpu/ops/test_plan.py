"""The plan: goldens for every profile, refusals with reasons, budgets with both numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from real_specs import CONFIGS, headers_of, real_spec

from offroad.device.profile import DeviceProfile, load_profile, profile_names
from offroad.errors import PlanError, SettingsError
from offroad.ops.budget import Dtypes, block_bytes, kv_bytes_per_token
from offroad.ops.plan import Plan, layer_ranges, plan
from offroad.ops.registry import default_registry
from offroad.settings import Settings

GOLDEN = Path(__file__).parent / "golden"
GIB = 1024**3
BF16, FP32 = Dtypes("bfloat16", "bfloat16"), Dtypes("float32", "float32")


def make(model: str, device: DeviceProfile, **settings) -> Plan:
    spec = real_spec(model)
    return plan(
        model, spec, headers_of(spec), device, Settings.of(model=model, **settings), default_registry(), "bfloat16"
    )


def golden(model: str, profile: str) -> str:
    """The plan's text, or why there is none."""
    try:
        return make(model, load_profile(profile), allow_reference=True).explain() + "\n"
    except PlanError as error:
        return f"{error}\n"


def cpu(memory: int = 16 * GIB) -> DeviceProfile:
    return DeviceProfile("cpu-test", "cpu", memory, frozenset({"avx2", "fma"}), units=2, source="probe")


@pytest.mark.parametrize("profile", profile_names())
@pytest.mark.parametrize("model", CONFIGS)
def test_golden_plan(profile: str, model: str):
    """What runs where, and why not otherwise, for GPUs that are not here. Rewrite with scripts/write_goldens.py."""
    assert golden(model, profile) == (GOLDEN / f"{profile}.{model}.txt").read_text()


def test_a_gpu_without_kernels_is_refused_before_weights_with_every_reason():
    pascal = replace(load_profile("v100-32gb"), name="pascal", compute_capability=(6, 1))
    with pytest.raises(PlanError) as error:
        make("qwen3-8b", pascal)
    text = str(error.value)
    assert "attention.decode" in text
    assert "torch.reference_attention: a reference kernel" in text
    assert "torch.sdpa: gathers pages row by row on the host" in text
    assert "--allow-reference" in text


def test_v100_computes_in_float16_and_says_why():
    made = make("qwen3-8b", load_profile("v100-32gb"))
    assert {choice.kernel for cell, choice in made.cells.items() if cell.op == "attention"} == {"cuda.sm70_attention"}
    assert made.dtype == "float16"
    assert any("no mma_bf16" in note for note in made.notes)
    with pytest.raises(PlanError, match="no mma_bf16"):
        make("qwen3-8b", load_profile("v100-32gb"), allow_reference=True, dtype="bfloat16")


def test_a_named_kernel_is_used_or_the_plan_fails():
    made = make("smollm2-135m", cpu(), kernel=["attention=torch.reference_attention"])
    used = {choice.kernel for cell, choice in made.cells.items() if cell.op == "attention"}
    assert used == {"torch.reference_attention"}
    spec = real_spec("gemma3-270m")
    with pytest.raises(SettingsError, match=r"torch\.reference_attention"):
        make("smollm2-135m", cpu(), kernel=["attention=flash"])
    with pytest.raises(SettingsError, match="qkv_rope"):
        make("smollm2-135m", cpu(), kernel=["attn=torch.sdpa"])
    assert spec.layers[0].mixer.softcap is None


def test_all_uses_of_a_weight_agree_on_its_layout():
    made = make("smollm2-135m", cpu(), kernel=["linear:head=torch.linear"])
    assert {made.layout(-1, "embed"), made.layout(-1, "linear:head")} == {"dense"}


def test_bytes_of_the_cache_by_the_models_numbers():
    spec = real_spec("qwen3-8b")
    assert kv_bytes_per_token(spec, BF16) == 36 * 2 * 8 * 128 * 2
    spec = real_spec("gemma3-270m")
    row = 2 * 1 * 256 * 4
    assert kv_bytes_per_token(spec, FP32) == 3 * row
    assert block_bytes(spec, FP32, 64) == (3 * row * 64, 15 * row * 64)


def test_context_larger_than_memory_is_refused_with_both_numbers():
    with pytest.raises(PlanError) as error:
        make(
            "qwen3-8b", cpu(48 * GIB), max_model_len=40960, dtype="bfloat16", max_num_seqs=1, kv_cache_memory_bytes=GIB
        )
    need = (40960 // 64 + 2) * 64 * kv_bytes_per_token(real_spec("qwen3-8b"), BF16)
    assert f"{need:,} bytes" in str(error.value)
    assert f"{GIB:,} bytes" in str(error.value)


@pytest.mark.parametrize("model", ["gemma3-270m", "qwen3_5-27b"])
def test_the_bytes_that_a_refusal_asks_for_are_enough(model):
    """Windows and checkpoints take theirs of --kv-cache-memory-bytes as well."""
    asked = dict(max_model_len=2048, dtype="float32", max_num_seqs=4, allow_reference=True)
    with pytest.raises(PlanError, match="--kv-cache-memory-bytes for a context of 2048 tokens") as error:
        make(model, cpu(512 * GIB), kv_cache_memory_bytes=1000, **asked)
    enough = int(error.value.accepted.split()[0].replace(",", ""))
    assert make(model, cpu(512 * GIB), kv_cache_memory_bytes=enough, **asked).max_len == 2048


def test_a_context_that_is_not_named_needs_no_more_than_a_short_one():
    with pytest.raises(PlanError, match="memory for a context of 256 tokens"):
        make("qwen3-8b", cpu(20 * GIB), dtype="bfloat16", max_num_seqs=4096)


def test_weights_that_are_too_large_are_refused_as_such():
    """No shorter context helps them."""
    with pytest.raises(PlanError, match="memory for the weights") as error:
        make("qwen3-8b", cpu(16 * GIB), dtype="bfloat16", max_num_seqs=1)
    assert f"less than {int(16 * GIB * 0.8):,} bytes" in str(error.value)
    assert "--max-model-len" not in str(error.value)
    with pytest.raises(PlanError, match="memory for a context") as error:
        make("qwen3-8b", cpu(20 * GIB), dtype="bfloat16", max_model_len=40960)
    assert f"of {int(20 * GIB * 0.8):,} bytes" in str(error.value)


def test_the_context_is_fitted_to_memory_when_not_named():
    made = make("qwen3-8b", cpu(48 * GIB), dtype="bfloat16", max_num_seqs=1, kv_cache_memory_bytes=GIB)
    assert 0 < made.max_len < 40960
    assert made.memory.history_blocks * made.memory.history_block_bytes <= GIB
    assert any("what fits in memory" in note for note in made.notes)


def test_the_fingerprint_names_what_computes():
    one, same = make("smollm2-135m", cpu()), make("smollm2-135m", cpu(32 * GIB))
    other = make("smollm2-135m", cpu(), kernel=["attention=torch.reference_attention"])
    assert one.fingerprint == same.fingerprint != other.fingerprint


def test_layer_ranges():
    assert layer_ranges([0, 1, 2, 4]) == "0-2,4"
    assert layer_ranges([-1]) == "model"


def test_a_block_is_fused_where_all_its_parts_are_c_kernels_and_the_plan_says_why_not():
    def blocks(made: Plan, op: str) -> dict[str, set[str]]:
        return {
            phase: {choice.kernel for cell, choice in made.cells.items() if (cell.op, cell.phase) == (op, phase)}
            for phase in ("prefill", "decode")
        }

    device = load_profile("cpu-avx2")
    for model in ("smollm2-135m", "gemma3-270m"):
        made = make(model, device)
        for op in ("attention_block", "mlp_block"):
            assert blocks(made, op) == {"prefill": {f"cpu.{op}"}, "decode": {f"cpu.{op}"}}
    made = make("smollm2-135m", device, kernel=["attention=torch.sdpa"])
    assert blocks(made, "attention_block") == {phase: {"parts.attention_block"} for phase in ("prefill", "decode")}
    assert blocks(made, "mlp_block") == {phase: {"cpu.mlp_block"} for phase in ("prefill", "decode")}
    refusal = "refused cpu.attention_block: needs cpu.attention for attention; the plan has torch.sdpa"
    assert refusal in made.explain()
    made = make("smollm2-135m", device, kernel=["linear:down=torch.linear"])
    assert blocks(made, "mlp_block") == {phase: {"parts.mlp_block"} for phase in ("prefill", "decode")}
    assert "needs cpu.linear for linear:down; the plan has torch.linear" in made.explain()
    assert blocks(make("smollm2-135m", device, kernel=["mlp_block=parts.mlp_block"]), "mlp_block") == {
        phase: {"parts.mlp_block"} for phase in ("prefill", "decode")
    }


def test_a_named_fused_block_whose_parts_are_others_fails_the_plan():
    kernel = ["attention=torch.sdpa", "attention_block=cpu.attention_block"]
    with pytest.raises(PlanError, match=r"needs cpu\.attention for attention; the plan has torch\.sdpa"):
        make("smollm2-135m", load_profile("cpu-avx2"), kernel=kernel)


def test_layers_that_come_back_regularly_are_short():
    assert layer_ranges([i for i in range(64) if i % 4 == 3]) == "3,7,..63"
    assert layer_ranges([i for i in range(64) if i % 4 != 3]) == "0-2,4-6,..60-62"
    assert layer_ranges([0, 1, 3, 5, 7, 9, 11, 12]) == "0-1,3,5,7,9,11-12"
