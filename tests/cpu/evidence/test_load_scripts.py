"""The scripts that put a GPU under load, on tiny models for a few seconds: they pass, and fail where they should."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
sys.path.append(str(BENCHMARKS))
import long_context  # noqa: E402
import soak  # noqa: E402
from soak_load import config_of  # noqa: E402

from offroad.schedule.scheduler import Scheduler  # noqa: E402


def soaked(monkeypatch) -> int:
    options = ["--model", "tiny", "--device", "cpu", "--dtype", "float32", "--longest", "128", "--chunk", "128"]
    options += ["--marked", "3", "--max-num-seqs", "4", "--minutes", "0.04"]
    monkeypatch.setattr(sys, "argv", ["soak.py", *options])
    monkeypatch.setattr(soak, "BEGAN", time.perf_counter())
    return soak.main()


def test_a_soak_passes(monkeypatch, capsys):
    assert soaked(monkeypatch) == 0
    assert "soak passed" in capsys.readouterr().out


def test_a_soak_tells_an_answer_that_is_another_in_company(monkeypatch, capsys):
    alone = soak.alone

    def others(*arguments):
        found = alone(*arguments)
        return [replace(found[0], tokens=[*found[0].tokens[:-1], 0]), *found[1:]]

    monkeypatch.setattr(soak, "alone", others)
    assert soaked(monkeypatch) == 1
    assert "not what it is alone, in token" in capsys.readouterr().out


def test_a_soak_tells_a_block_that_is_lost(monkeypatch, capsys):
    abort = Scheduler.abort
    monkeypatch.setattr(soak, "alone", lambda *arguments: [])
    monkeypatch.setattr(Scheduler, "abort", lambda self, name: (abort(self, name), self.cache.history.take()))
    assert soaked(monkeypatch) == 1
    said = capsys.readouterr().out
    assert "Engine.check: I1" in said
    assert "history blocks" in said


def test_memory_that_grows():
    memory = soak.Memory(at=list(range(101)), device=[(1 + i // 50) << 20 for i in range(101)])
    assert memory.growth(memory.device, min) == 1.0
    memory.device = [(1 + i % 2) << 20 for i in range(101)]
    assert memory.growth(memory.device, min) == 0.0


def test_a_long_context(monkeypatch, capsys, tmp_path):
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps(config_of("tiny-hybrid")))
    options = [
        "--quantization",
        "none",
        "--device",
        "cpu",
        "--dtype",
        "float32",
        "--context",
        "600",
        "--segment",
        "256",
    ]
    monkeypatch.setattr(sys, "argv", ["long_context.py", str(path), *options, "--chunk", "64", "--answer", "24"])
    assert long_context.main() == 0
    said = capsys.readouterr().out
    assert "prefill of     512 to     532" in said
    assert "long context passed: 532 tokens" in said


def test_segments_and_their_roofline():
    """A chunk of 100 tokens takes 1 s and 1 s more with each; the roofline says half of that."""
    reached = [(0, 0.0), (100, 1.0), (200, 3.0), (300, 6.0), (350, 8.0)]
    times = long_context.Times(reached, [(i, 10 + 0.5 * i) for i in range(1, 41)])

    class Costs:
        def prefill(self, tokens: int) -> float:
            return next(at for count, at in reached if count == tokens) / 2

    found = long_context.segments(times, Costs(), 350, 150)
    assert found == [(0, 200, 200 / 3, 400 / 3), (200, 300, 100 / 3, 200 / 3), (300, 350, 25.0, 50.0)]
    assert times.decode() == pytest.approx(2.0)
