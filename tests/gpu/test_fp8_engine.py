"""Layers of Qwen3.5-27B in FP8 by an engine that is asked for W8A8: what rounding a prompt moves, and what is planned.

Run with -s to see the figures.
"""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from offroad.device.probe import probe_cuda
from offroad.engine import Engine
from offroad.sample.params import SamplingParams
from offroad.schedule.request import Request
from offroad.settings import Settings
from offroad.triton_kernels import linear_fp8
from offroad.triton_kernels.linear import W8A8, too_old
from offroad.triton_kernels.memory import MEMORY
from offroad.weights.dummy import DummySource

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9), reason="no CUDA device of 8.9"
)
CONFIG = Path(__file__).parents[2] / "benchmarks" / "configs" / "qwen3.5-27b.json"
CHANGES = dict(num_hidden_layers=4, vocab_size=4096, mtp_num_hidden_layers=0)


def make(*kernels: str) -> Engine:
    config = json.loads(CONFIG.read_text())
    config["text_config"].update(CHANGES)
    settings = Settings.of(
        model="dummy", device="cuda", dtype="bfloat16", max_num_seqs=4, max_num_batched_tokens=2048,
        max_model_len=4096, memory_utilization=0.15, kernel=kernels,
    )  # fmt: skip
    return Engine(settings, source=DummySource(config, "cuda", "fp8-block"))


def answer(engine: Engine, prompt: list[int], count: int = 8) -> list[int]:
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    engine.submit(Request(id=str(random.random()), prompt_ids=prompt, params=params))
    tokens: list[int] = []
    while engine.has_work():
        for event in engine.step():
            assert event.error is None, event.error
            tokens += event.token_ids
    return tokens


def behind_layers(engine: Engine, prompt: list[int]) -> list[torch.Tensor]:
    """The residual stream behind each layer, fp32."""
    seen: dict[int, list[torch.Tensor]] = {}
    engine.runner.chunk_graphs = None  # they call what they have captured
    engine.runner.ops = {
        phase: replace(ops, observe=lambda layer, residual: seen.setdefault(layer, []).append(residual.float()))
        for phase, ops in engine.runner.ops.items()
    }
    engine.reset_prefix_cache()
    answer(engine, prompt, 1)
    return [torch.cat(seen[layer]) for layer in sorted(seen)]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("library", [True, False], ids=["as planned", "Triton's"])
def test_prompts_of_many_tokens_are_rounded_and_others_are_not(library: bool, monkeypatch):
    if reason := too_old(probe_cuda()):
        pytest.skip(reason)
    if not library:
        monkeypatch.setattr(linear_fp8, "by_library", lambda device: False)
    prompt = [random.Random(0).randrange(3, 4000) for _ in range(1600)]
    outputs = {}
    for kernels in ((f"linear@fp8={W8A8}",), ()):
        MEMORY.most.clear()
        engine = make(*kernels)
        assert (W8A8 in engine.plan.kernels()) == bool(kernels)
        before = engine.stats().late_compilations
        first = answer(engine, prompt)
        again = answer(engine, prompt)  # resumed: a step of few tokens
        assert len(first) == len(again) == 8
        assert engine.stats().prefix_resumed_tokens > 1000
        assert engine.stats().late_compilations == before
        assert MEMORY.most[torch.device("cuda", 0)] <= engine.plan.memory.workspaces.kept
        outputs[bool(kernels)] = behind_layers(engine, prompt), behind_layers(engine, prompt[:400])
        engine.close()
    for many, (ours, theirs) in enumerate(zip(*(outputs[asked] for asked in (True, False)), strict=True)):
        apart = [float(((a - b).norm(dim=-1) / b.norm(dim=-1)).mean()) for a, b in zip(ours, theirs, strict=True)]
        print("of 1,600 tokens" if not many else "of 400 tokens", [f"{error:.4f}" for error in apart])
        if many:
            assert max(apart) < 1e-3  # the same kernels
        else:
            assert 0.003 < apart[0] < 0.1
            assert max(apart) < 0.2
