"""Models of an H100's plan in the interpreter: one kernel for gate_up and its activation gives the tokens of two."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
sys.path.append(str(Path(__file__).parents[1] / "run"))

from warm_script import CASES, DENSE, QWEN3, SMALL, runner_of  # noqa: E402

from offroad.ops.bound import Ops  # noqa: E402
from offroad.run.warm import Shape  # noqa: E402
from offroad.triton_kernels import linear_gated  # noqa: E402

pytestmark = pytest.mark.usefixtures("exact_products")
ONE = dict(num_hidden_layers=1, vocab_size=64, hidden_size=128, num_attention_heads=2, num_key_value_heads=1)
GEMMA = SMALL | DENSE | dict(num_kv_shared_layers=0, hidden_size_per_layer_input=0, global_head_dim=64)
FP32 = dict(dtype="float32")  # products of bf16 are too much for the interpreter
MODELS = {
    "qwen3": (QWEN3[0], QWEN3[1] | ONE, "w4a16-g128", FP32),
    "gemma": ("gemma-4-e4b", GEMMA | ONE | dict(layer_types=["full_attention"]), "w4a16-g32", FP32),
}


def by_two(ops: Ops) -> Ops:
    layers = [
        replace(layer, bounds={name: bound for name, bound in layer.bounds.items() if name != "gated_linear"})
        for layer in ops.layers
    ]
    return replace(ops, layers=layers)


@pytest.mark.parametrize("name", MODELS)
def test_one_kernel_gives_the_logits_of_two(name: str, monkeypatch):
    monkeypatch.setitem(CASES, name, MODELS[name])
    launched, fused = [], linear_gated.fused
    monkeypatch.setattr(linear_gated, "fused", lambda *args, **more: (launched.append(1), fused(*args, **more))[1])
    _, runner = runner_of(name)
    runner.arrays.all_tables.fill_(1)  # block 0 is the bin, which is not written
    for shape, phase in ((Shape((), (1,) * 17), "prefill"), (Shape((1,) * 17), "decode")):
        found = []
        for ops in (runner.ops[phase], by_two(runner.ops[phase])):
            launched.clear()
            hidden = runner.model.forward(shape.rows(runner.arrays), ops)
            found.append((ops.logits(hidden), len(launched)))
        (one, of_one), (two, of_two) = found
        assert (of_one, of_two) == (len(runner.ops[phase].layers), 0)
        assert torch.equal(one, two)
        assert one.isfinite().all()
        assert one.std() > 0
