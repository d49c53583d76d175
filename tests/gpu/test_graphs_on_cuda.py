"""CUDA graphs of decode steps: same tokens as eager steps, nothing allocated by a replay, memory as planned.

Needs kernels that can be captured for every decode cell; run with -s to see the figures.
"""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "cpu"))
from tiny_models import write_tiny  # noqa: E402

from offroad import LLM, SamplingParams  # noqa: E402
from offroad.models.spec import AttentionSpec  # noqa: E402
from offroad.ops.capture import GraphPlan  # noqa: E402
from offroad.run.graphs import CudaRecorder, Graphs  # noqa: E402

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

DRAFTS = '{"method": "ngram", "num_speculative_tokens": 3}'
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.8, seed=7, max_tokens=24, ignore_eos=True, presence_penalty=0.4)


def prompts() -> list[dict]:
    rng = random.Random(5)
    fresh = [[rng.randrange(3, 290) for _ in range(n)] for n in (1, 63, 90, 130)]
    return [{"prompt_token_ids": ids} for ids in [*fresh, [7, 8, 9, 10] * 9, [11, 12, 13] * 20]]


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen3_5", "gemma3"])
def test_graphs_give_the_tokens_of_eager_steps(family: str, drafts: bool, tmp_path: Path):
    write_tiny(family, tmp_path)
    settings = dict(device="cuda", dtype="float32", max_num_seqs=5, max_num_batched_tokens=64, allow_reference=True)
    settings |= dict(speculative_config=DRAFTS) if drafts else {}
    eager = LLM(str(tmp_path), **settings, enforce_eager=True)
    graphed = LLM(str(tmp_path), **settings)
    if graphed.engine.runner.graphs is None:
        pytest.skip(f"no graphs: {graphed.engine.plan.graphs.reason}")
    for params in (GREEDY, SAMPLED):
        expected, found = (llm.generate(prompts(), params) for llm in (eager, graphed))
        assert [r.outputs[0].token_ids for r in found] == [r.outputs[0].token_ids for r in expected]
    graphed.engine.check()
    print(graphed.engine.info.memory_summary)


def test_capture_works_without_any_kernel_but_torch_s(tmp_path: Path):
    """The recorder alone: the model's attention is left out, so that what remains is torch's own, and a replay gives
    what the same step gives eagerly."""
    write_tiny("llama", tmp_path)
    llm = LLM(str(tmp_path), device="cuda", dtype="float32", max_num_seqs=4, allow_reference=True, enforce_eager=True)
    runner = llm.engine.runner

    def without(ops):
        layers = [
            replace(
                layer,
                attention_verify=lambda q, k, v, view, rows, mixer: q.flatten(1),
                attention_chunk=lambda q, k, v, view, rows, mixer: q.flatten(1),
            )
            for layer in ops.layers
        ]
        assert all(isinstance(layer.mixer, AttentionSpec) for layer in layers)
        return replace(ops, layers=layers)

    runner.ops = {phase: without(ops) for phase, ops in runner.ops.items()}
    expected = llm.generate(prompts(), GREEDY)
    plan = GraphPlan((1, 2, 4), (1,), "")
    runner.graphs = Graphs(plan, runner.model, runner.ops["decode"], runner.arrays, CudaRecorder())
    before = torch.cuda.memory_allocated()
    found = llm.generate(prompts(), GREEDY)
    assert [r.outputs[0].token_ids for r in found] == [r.outputs[0].token_ids for r in expected]
    assert torch.cuda.memory_allocated() <= before + 2**20
    print(f"graphs took {runner.graphs.nbytes / 2**20:.1f} MiB for {len(runner.graphs.graphs)} sizes")
