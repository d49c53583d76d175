"""Dummy drafts on a GPU: verify steps in graphs and eagerly accept what was decided, and the books balance."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

CPU = Path(__file__).parents[1] / "cpu"
sys.path += [str(CPU), str(CPU / "speculate")]
from engine_runs import tokens  # noqa: E402
from tiny_models import write_tiny  # noqa: E402

from offroad.engine import Engine  # noqa: E402
from offroad.evidence.engine_bench import BenchSettings  # noqa: E402
from offroad.sample.params import SamplingParams  # noqa: E402
from offroad.schedule.request import Request  # noqa: E402

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

DRAFTS = json.dumps({"method": "dummy", "num_speculative_tokens": 3, "acceptance": 0.7})


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_graphs_take_the_steps_of_eager_runs(family: str, tmp_path: Path):
    write_tiny(family, tmp_path / "model")
    found = []
    for eager in (True, False):
        sizes = dict(max_num_seqs=4, max_model_len=256, memory_utilization=0.06)
        chosen = dict(device="cuda", dtype="float32", allow_reference=True, enforce_eager=eager)
        engine = Engine(BenchSettings.of(model=str(tmp_path / "model"), speculative_config=DRAFTS, **sizes, **chosen))
        params = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
        answers: dict[str, list[int]] = {str(i): [] for i in range(4)}
        for i in range(4):
            engine.submit(Request(id=str(i), prompt_ids=tokens(str(i), 20 + 30 * i), params=params, seed=i))
        while engine.has_work():
            for event in engine.step():
                assert event.finish_reason in (None, "length")
                answers[event.request_id] += event.token_ids
            engine.check()
        stats = engine.stats()
        assert 0.6 < stats.accepted_by_place[0] / stats.drafted_by_place[0] < 0.8
        found.append((answers, stats.accepted_by_place, stats.drafted_by_place))
        engine.close()
    assert found[0] == found[1]
