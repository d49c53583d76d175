"""Whole models by a V100's plan on the GPU that is here: SM70 kernels as PTX through the driver, fp16, 32 GB.

As with test_sm70.py, a machine without NVRTC 12 needs build/nvrtc. Run with -s to see figures.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tests/cpu/nvrtc"))
from sm70_models import CONFIGS, PROMPT, answers, compare, engine_of  # noqa: E402

from offroad.engine import Engine  # noqa: E402
from offroad.evidence.quality import log_probabilities  # noqa: E402
from offroad.nvrtc import compile  # noqa: E402
from offroad.settings import Settings  # noqa: E402
from offroad.weights.dummy import DummySource  # noqa: E402

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
GIB = 1024**3
PROMPTS = [PROMPT, PROMPT[3:9], [3 + 7 * i % 290 for i in range(150)]]
QWEN3_5 = dict(
    architectures=["Qwen3_5ForCausalLM"],
    model_type="qwen3_5_text",
    hidden_size=5120,
    intermediate_size=17408,
    num_hidden_layers=4,
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
)


@pytest.fixture(scope="module", autouse=True)
def _precompiled():
    """PTX that came with the checkout joins the cache."""
    brought = ROOT / "build" / "nvrtc"
    if brought.is_dir():
        compile.cache_folder().mkdir(parents=True, exist_ok=True)
        for path in brought.iterdir():
            shutil.copy(path, compile.cache_folder() / path.name)


@pytest.mark.parametrize("family", CONFIGS)
def test_small_models_as_the_cpu_reference(family: str):
    reference = engine_of(CONFIGS[family], "cpu", max_num_batched_tokens=256, kernel=["linear=torch.reference_linear"])
    engine = engine_of(CONFIGS[family], "v100-32gb", max_num_batched_tokens=256)
    assert not [name for name in engine.plan.kernels() if name.startswith("triton.") or "reference" in name]
    assert "run on" in engine.info.device
    compare(engine, reference, CONFIGS[family], PROMPTS, 12)
    engine.check()


@pytest.mark.parametrize("family", CONFIGS)
def test_graphs_give_the_tokens_of_eager_steps(family: str):
    graphed, eager = (engine_of(CONFIGS[family], "v100-32gb", enforce_eager=flag) for flag in (False, True))
    assert graphed.runner.graphs is not None, graphed.plan.graphs.reason
    for count in (1, 2, 3):  # 3 rows of sizes 1, 2 and 3 are captured; fewer live ones leave empty rows
        assert answers(graphed, PROMPTS[:count], 20) == answers(eager, PROMPTS[:count], 20)
    graphed.check()


@pytest.mark.timeout(600)
def test_layers_of_qwen3_5_27b():
    """Four layers of real sizes: close to fp32 on the CPU, whatever the chunks, and memory as planned."""
    source = DummySource(QWEN3_5, "cuda", "w4a16-g128")
    values = dict(model="dummy", max_model_len=8192, max_num_seqs=2)

    def make(device: str, chunk: int) -> Engine:
        more = dict(kernel=["linear=torch.reference_linear"]) if device == "cpu" else {}
        made = Settings.of(device=device, max_num_batched_tokens=chunk, **values, **more)
        return Engine(made, source=source)

    torch.cuda.empty_cache()
    engine = make("v100-32gb", 2048)
    torch.cuda.reset_peak_memory_stats()  # loading widens a head of bf16 beside its halves
    prompt = [3 + i * 7919 % 240_000 for i in range(4000)]
    first = answers(engine, [prompt], 24)
    engine.reset_prefix_cache()
    assert answers(engine, [prompt], 24) == first
    peak, planned = torch.cuda.max_memory_allocated(), engine.plan.memory.used
    print(f"\n{engine.info.device}: planned {planned / GIB:.2f} GiB, peak {peak / GIB:.2f} GiB")
    assert peak < 1.03 * planned
    found = log_probabilities(engine, prompt[:200]).cpu()
    engine.close()
    torch.cuda.empty_cache()
    wanted = log_probabilities(make("cpu", 512), prompt[:200])
    apart = (found - wanted).abs()
    print(
        f"log-probabilities (standard deviation {wanted.std():.2f}): {apart.max():.3f} apart, {apart.mean():.4f} mean"
    )
    assert apart.mean() < 0.05 * wanted.std()
    assert (found.argmax(-1) == wanted.argmax(-1)).float().mean() > 0.8
