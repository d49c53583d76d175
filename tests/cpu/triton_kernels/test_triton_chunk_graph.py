"""A graph's chunk in the interpreter, with an H100's kernels: dead tokens full of NaN change no number that is read."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
sys.path.append(str(Path(__file__).parents[1] / "run"))

from warm_script import CASES, DENSE, QWEN, SMALL, runner_of  # noqa: E402

from offroad.run.chunk_graphs import ChunkGraphs  # noqa: E402
from offroad.run.runner import Runner  # noqa: E402

pytestmark = pytest.mark.usefixtures("exact_products")
ONE = dict(vocab_size=64, hidden_size=128, num_attention_heads=2, num_key_value_heads=1)
FP32 = dict(dtype="float32")  # products of bf16 are too much for the interpreter
HYBRID = SMALL | DENSE | QWEN | ONE | dict(mtp_num_hidden_layers=0, num_hidden_layers=2)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, shared_expert_intermediate_size=64)
GEMMA = SMALL | DENSE | ONE | dict(hidden_size_per_layer_input=32, vocab_size_per_layer_input=64, global_head_dim=64)
MODELS = {
    "qwen": (
        "qwen3.5-35b-a3b",
        HYBRID | EXPERTS | dict(layer_types=["linear_attention", "full_attention"]),
        "w4a16-g128",
        FP32,
    ),
    "gemma": (
        "gemma-4-e4b",
        GEMMA
        | dict(num_hidden_layers=4, num_kv_shared_layers=2, sliding_window=16)
        | dict(layer_types=["sliding_attention", "full_attention"] * 2),
        "w4a16-g32",
        FP32,
    ),
}
START, WIDTH, SIZE, SLOT = 21, 5, 16, 2


def state(runner: Runner) -> list[torch.Tensor]:
    """Copies of all that a step leaves but the bin's part: pages, rings, and where their states are."""
    arrays, found = runner.arrays, []
    for views in arrays.views:
        for view in views.values():
            found += [value[1:].clone() for name, value in vars(view).items() if name in ("k", "v", "data", "state")]
    return [*found, arrays.base[1:].clone()]


def begin(runner: Runner) -> None:
    """A slot with tokens, and with caches of small numbers as if the first of them had run."""
    arrays, random = runner.arrays, torch.Generator().manual_seed(0)
    arrays.tokens[SLOT, : START + SIZE] = torch.randint(3, 60, (START + SIZE,), generator=random)
    arrays.all_tables[:, SLOT, :2] = torch.tensor([3, 4], dtype=torch.int32)
    arrays.length[SLOT] = arrays.base[SLOT] = START
    for views in arrays.views:
        for view in views.values():
            for name in {"k", "v", "data", "state"} & vars(view).keys():
                tensor = getattr(view, name)
                tensor.copy_(torch.randn(tensor.shape, generator=random) * 0.1)


@pytest.fixture
def uninitialised():
    """What nobody has written is NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(64).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::RuntimeWarning")
@pytest.mark.parametrize("name", MODELS)
@torch.inference_mode()
def test_dead_tokens_change_nothing(name: str, monkeypatch, uninitialised):
    monkeypatch.setitem(CASES, name, MODELS[name])
    _, runner = runner_of(name)
    arrays, ops, one = runner.arrays, runner.ops["prefill"], np.ones(1, np.int32)
    assert "triton.paged_prefill" in runner.plan.kernels()
    begin(runner)
    rows = arrays.rows_of(SLOT * one, START * one, WIDTH * one, 0, one)
    hidden = runner.model.forward(rows, ops)
    arrays.settle(rows)
    expected, left = ops.logits(hidden), state(runner)

    begin(runner)
    embed = ops.embed

    class Poisoned(type(ops)):
        def embed(self, ids: torch.Tensor) -> torch.Tensor:
            found = embed(ids)
            found[WIDTH:] = torch.nan
            return found

    poisoned = Poisoned(**{name: getattr(ops, name) for name in vars(ops)})
    graphs = ChunkGraphs((SIZE,), runner.model, poisoned, arrays, lambda body: body)
    graph = graphs.graphs[SIZE]
    graph.rows = replace(graph.rows, width=np.full(1, SIZE, np.int32))  # as on a GPU
    ran = graph.run(SLOT, START, WIDTH, True)
    torch.testing.assert_close(ran.logits, expected, atol=1e-5, rtol=1e-4)
    assert ran.answers.tolist() == expected.argmax(-1).tolist()
    assert arrays.tokens[SLOT, START + WIDTH] == ran.answers[0]
    for found, wanted in zip(state(runner), left, strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)
