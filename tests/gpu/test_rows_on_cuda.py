"""Row kernels on a CUDA device: the shapes of real models, and steps of one token to a long prompt."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "cpu" / "triton_kernels"))
from rows_cases import DTYPES, PLAIN, ROPES, Check  # noqa: E402

from offroad.models.spec import RopeSpec  # noqa: E402

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

QWEN = replace(
    PLAIN, heads=24, kv_heads=4, head_dim=256, rope=RopeSpec(64, 1e7, sections=(11, 10)), qk_norm=True, output_gate=True
)
GEMMA_LOCAL = replace(PLAIN, heads=32, kv_heads=16, head_dim=256, rope=RopeSpec(256, 1e4), qk_norm=True, v_norm=True)
GEMMA_GLOBAL = replace(GEMMA_LOCAL, kv_heads=4, head_dim=512, rope=RopeSpec(512, 1e6), k_eq_v=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 8, 63, 4097])
def test_norms_and_activations(dtype: str, tokens: int):
    for hidden in (96, 576, 1000, 5120, 5376):
        Check(dtype, "cuda").norms(tokens, hidden)
    for size in (96, 1030, 17408, 21504):
        Check(dtype, "cuda").activations(tokens, size)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 8, 63, 4097])
def test_rope_and_gates(dtype: str, tokens: int):
    for spec in (*ROPES.values(), QWEN, GEMMA_LOCAL, GEMMA_GLOBAL):
        Check(dtype, "cuda").rope(spec, tokens, far=40_000)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 8, 63, 4097])
def test_embeddings_and_routes(dtype: str, tokens: int):
    Check(dtype, "cuda").embed(tokens, 20_000, 5376, 73.5, torch.bfloat16)
    Check(dtype, "cuda").embed(tokens, 20_000, 5120, 1.0, torch.bfloat16)
    for experts, top_k in ((8, 2), (128, 8), (256, 8)):
        Check(dtype, "cuda").route(tokens, experts, top_k)
    for top_k, hidden in ((8, 2048), (8, 2816), (6, 1030)):
        Check(dtype, "cuda").combine(tokens, top_k, hidden)
