"""The attention kernel, emulated: the reference's numbers over odd shapes, in whatever order its threads run."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from sm70_attention_cases import CASES, Case, expected, inputs, rows_of
from sm70_emulated import ORDER, load, needs_compiler

from offroad.device.profile import load_profile
from offroad.nvrtc import attention, launch
from offroad.ops.attention import TOLERANCE

pytestmark = needs_compiler
V100 = load_profile("v100-32gb")
LIMIT = TOLERANCE["float16"]


@pytest.fixture(autouse=True)
def _emulated(monkeypatch):
    monkeypatch.setattr(launch, "load", load)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_as_the_reference_and_the_same_in_any_order(case: Case):
    q, k, v, view, rows = inputs(case)
    wanted, after = expected(case, q, k, v, view, rows)
    bound = attention.bind(V100, case.problem)
    outputs = []
    for seed in (0, 1):
        ORDER.seed = seed
        mine = replace(view, k=view.k.clone(), v=view.v.clone())
        outputs.append(bound(q, k, v, mine, rows, case.spec))
        for ours, theirs in ((mine.k, after.k), (mine.v, after.v)):
            assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))
    torch.testing.assert_close(outputs[0].float(), wanted, atol=LIMIT.absolute, rtol=LIMIT.relative)
    assert torch.equal(outputs[0], outputs[1])


@pytest.mark.parametrize("without", [4, 7])
def test_a_missing_barrier_is_noticed(without: int, monkeypatch):
    """Of the loop over keys: before scores are computed, and before the next tile is written."""
    case = Case(128, 2, 1, ((180, 1),))
    q, k, v, view, rows = inputs(case)
    bound = attention.bind(V100, case.problem)
    monkeypatch.setattr(ORDER, "without", without)
    outputs = []
    for seed in range(3):
        monkeypatch.setattr(ORDER, "seed", seed)
        outputs.append(bound(q, k, v, view, rows, case.spec))
    assert any(not torch.equal(out, outputs[0]) for out in outputs)


def test_splits_that_are_not_live_are_not_read(monkeypatch):
    """560 keys in 4 splits are spans of 192 where a step has 64 keys: the fourth has none, and its place holds NaN."""
    case = Case(256, 6, 1, ((560, 1), (20, 2)), e5m2=True, block=64)
    q, k, v, view, rows = inputs(case)
    wanted, _ = expected(case, q, k, v, view, rows)
    monkeypatch.setattr(attention, "MAX_SPLITS", 4)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **kind: empty(*size, **kind).fill_(float("nan")))
    found = attention.bind(V100, case.problem)(q, k, v, view, rows, case.spec)
    torch.testing.assert_close(found.float(), wanted, atol=LIMIT.absolute, rtol=LIMIT.relative)


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_no_rows_need_no_launch(phase: str):
    case = Case(64, 4, 2, ((3, 1),), fresh=False, phase=phase)
    q, k, v, view, _ = inputs(case)
    nothing = replace(
        rows_of(((3, 1),), 1), **{name: np.zeros(0, np.int32) for name in ("slot", "start", "width", "offset")}
    )
    assert attention.bind(V100, case.problem)(q[:0], k, v, view, nothing, case.spec).shape == (0, 256)
