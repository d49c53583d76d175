"""Hopper's Gated DeltaNet of rows of one token, emulated, beside the reference: folds, both gates, any order."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from sm70_emulated import ORDER, load, needs_compiler

pytest.importorskip("triton")  # of which the kernel's entry is made too
sys.path.append(str(Path(__file__).parents[1] / "triton_kernels"))
from delta_pair import EPS, Pair, copied, rows_of, spec_of, tensors_of  # noqa: E402

from offroad.nvrtc import launch  # noqa: E402

pytestmark = needs_compiler
KERNEL = "hopper.gated_delta"


@pytest.fixture(autouse=True)
def _emulated(monkeypatch):
    monkeypatch.setattr(launch, "load", load)
    monkeypatch.setattr(Pair, "_checkpoints", lambda *_: None)  # another kernel's


@pytest.mark.parametrize("lag", [1, 3, 8])
@pytest.mark.parametrize("gate", ["silu", "sigmoid"])
def test_rounds_of_some_rows(gate: str, lag: int, monkeypatch):
    """From the first token on, through more than one fold; two and three heads have a key."""
    monkeypatch.setattr(ORDER, "seed", lag)
    pair = Pair(spec_of(1, 2 + lag % 2, 128, 128, gate=gate), "bfloat16", slots=3, lag=lag, kernel=KERNEL)
    pair.rounds((1,), (0, 0, 0), 2 * lag + 3)


def test_rows_that_sit_out():
    pair = Pair(spec_of(2, 1, 128, 128), "bfloat16", lag=3, kernel=KERNEL)
    for start in range(5):
        pair.step(verify=[(4, start, 1), (0, 0, 0), (1, start, 1)])


@pytest.mark.parametrize("without", [None, 0, 1])
def test_the_same_in_any_order_and_a_missing_barrier_is_noticed(without: int | None, monkeypatch):
    pair = Pair(spec_of(1, 2, 128, 128), "bfloat16", slots=2, lag=3, kernel=KERNEL)
    for start in range(3):
        pair.step(verify=[(0, start, 1), (1, start, 1)])
    rows, (qkvz, ba) = rows_of([(1, 3, 1), (0, 3, 1)], 2, "cpu"), pair.inputs(2)
    monkeypatch.setattr(ORDER, "without", without)
    found = []
    for seed in range(4):
        monkeypatch.setattr(ORDER, "seed", seed)
        rings = [copied(ring) for ring in pair.rings]
        out = pair.kernel(qkvz, ba, *rings, rows, pair.spec, pair.weights, EPS)
        found.append([tensor.nan_to_num(-77) for tensor in (out, *tensors_of(rings[1]))])
    same = all(torch.equal(a, b) for one in found for a, b in zip(one, found[0], strict=True))
    assert same == (without is None)
