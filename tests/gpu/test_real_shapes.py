"""Layers of real sizes with random weights: bf16 on a GPU agrees with fp32 on the CPU, and memory is as planned.

Run with -s to see the figures.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from offroad.engine import Engine
from offroad.sample.params import SamplingParams
from offroad.schedule.request import Request
from offroad.settings import Settings
from offroad.weights.dummy import DummySource

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

GIB = 1024**3
CONFIGS = {
    "Qwen3.5-27B, 16 layers": dict(
        architectures=["Qwen3_5ForCausalLM"],
        model_type="qwen3_5_text",
        hidden_size=5120,
        intermediate_size=17408,
        num_hidden_layers=16,
        num_attention_heads=24,
        num_key_value_heads=4,
        head_dim=256,
        linear_num_key_heads=16,
        linear_num_value_heads=48,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_conv_kernel_dim=4,
        mamba_ssm_dtype="float32",
        vocab_size=248320,
        max_position_embeddings=262144,
        tie_word_embeddings=False,
        dtype="bfloat16",
        mtp_num_hidden_layers=0,
    ),
    "Gemma-4-31B, 12 layers": dict(
        architectures=["Gemma4ForCausalLM"],
        model_type="gemma4_text",
        hidden_size=5376,
        intermediate_size=21504,
        num_hidden_layers=12,
        num_attention_heads=32,
        num_key_value_heads=16,
        num_global_key_value_heads=4,
        head_dim=256,
        global_head_dim=512,
        attention_k_eq_v=True,
        sliding_window=1024,
        final_logit_softcapping=30.0,
        hidden_size_per_layer_input=0,
        vocab_size=262144,
        max_position_embeddings=262144,
        tie_word_embeddings=True,
        dtype="bfloat16",
    ),
}


def make(config: dict, device: str) -> Engine:
    settings = Settings.of(
        model="random",
        device=device,
        dtype="bfloat16" if device == "cuda" else "float32",
        allow_reference=True,
        max_model_len=8192,
        max_num_seqs=2,
        kernel=[] if device == "cuda" else ["linear=torch.linear", "embed=torch.embed"],
    )
    return Engine(settings, source=DummySource(config, "cuda"))


def generate(engine: Engine, prompt: list[int], count: int, scores: int | None = None) -> list[int]:
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, prompt_logprobs=scores)
    engine.submit(Request(id=str(random.random()), prompt_ids=prompt, params=params))
    tokens: list[int] = []
    while engine.has_work():
        for event in engine.step():
            assert event.error is None, event.error
            tokens += event.token_ids
    return tokens


def layer_outputs(engine: Engine, prompt: list[int]) -> list[torch.Tensor]:
    """The residual stream behind each layer, fp32 on the CPU; behind the last one that of the last token."""
    seen: dict[int, list[torch.Tensor]] = {}
    engine.runner.chunk_graphs = None  # they call what they have captured
    engine.runner.ops = {
        phase: replace(ops, observe=lambda layer, residual: seen.setdefault(layer, []).append(residual.float().cpu()))
        for phase, ops in engine.runner.ops.items()
    }
    engine.reset_prefix_cache()
    generate(engine, prompt, 1)
    return [torch.cat(seen[layer]) for layer in sorted(seen)]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", CONFIGS)
def test_real_shapes(name: str):
    config, rng = CONFIGS[name], random.Random(0)
    prompt = [rng.randrange(3, 240000) for _ in range(4096)]
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    gpu = make(config, "cuda")
    memory = gpu.plan.memory
    resident, planned = torch.cuda.memory_allocated(), memory.used - memory.workspace
    answer = generate(gpu, prompt, 64)
    generate(gpu, prompt, 1, scores=0)  # its chunks are no graphs, which have their memory already
    peak = torch.cuda.max_memory_allocated()
    before = gpu.stats().prefix_resumed_tokens
    again = generate(gpu, prompt, 64)  # resumed from the prefix cache
    assert len(answer) == 64
    resumed = gpu.stats().prefix_resumed_tokens - before
    print(f"\n{name}: planned {planned / GIB:.3f} GiB, resident {resident / GIB:.3f}; planned with workspace", end=" ")
    print(f"{memory.used / GIB:.3f}, peak {peak / GIB:.3f}; resumed {resumed} of 4096; {gpu.info.memory_summary}")
    assert resumed >= 4032
    assert len(again) == 64  # which tokens is a matter of rounding: random weights prefer none
    assert abs(resident / planned - 1) < 0.03
    assert abs(peak / memory.used - 1) < 0.03
    outputs = layer_outputs(gpu, prompt[:256])
    gpu.close()
    torch.cuda.empty_cache()
    cpu = make(config, "cpu")
    expected = layer_outputs(cpu, prompt[:256])
    assert len(outputs) == len(expected) == config["num_hidden_layers"]
    for layer, (ours, theirs) in enumerate(zip(outputs, expected, strict=True)):
        error = ((ours - theirs).norm(dim=-1) / theirs.norm(dim=-1)).mean().item()
        print(f"  layer {layer}: mean relative difference {error:.4f}")
        assert error < 0.05, layer
