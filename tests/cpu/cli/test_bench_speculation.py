"""Dummy drafts on the command line: measured by `offroad bench engine`, refused by every verb that gives answers."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from bench_config import CONFIG

from offroad.evidence import engine_bench
from offroad.evidence.engine_bench import ANSWER, Case

DRAFTS = '{"method": "dummy", "num_speculative_tokens": 3, "acceptance": 0.7}'


def test_verify_steps_are_measured(offroad, tmp_path: Path, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    monkeypatch.setattr(engine_bench, "CASES", {"decode_c1": Case(1, 20, True), "decode_c8": Case(8, 20, True)})
    out = tmp_path / "record.json"
    words = ["bench", "engine", "--config", str(tmp_path / "config.json"), "--dummy-weights", "--device", "cpu"]
    words += ["--json", str(out), "--speculative-config", DRAFTS, "--repeat", "1"]
    code, text, _ = offroad(*words, "--profile", "--profile-rows", "4")
    assert code == 0
    record = json.loads(out.read_text())
    drafts = record["speculation"]
    assert (drafts["method"], drafts["num_speculative_tokens"], drafts["acceptance"]) == ("dummy", 3, 0.7)
    assert drafts["tokens_per_step_expected"] == pytest.approx(2.533)
    assert 2.3 < drafts["tokens_per_step"]["decode_c8"] < 2.7
    assert all(0.6 < rate < 0.8 for rate in drafts["acceptance_by_place"])
    [first], [whole] = (record["rounds"][f"8 x 20 + {count}"] for count in (1, ANSWER + 1))
    assert record["decode_c8"] == pytest.approx(8 * ANSWER / (whole - first))
    profile = record["profile"]["decode"]
    assert (profile["rows"], profile["drafts"]) == (4, 3)
    assert "one decode step of 4 rows of up to 3 drafts" in text
    assert "set 0.70, with which 2.53 tokens a step are expected" in text
    assert "TOKENS A STEP" in text
    assert not any(name.startswith("decode") for name in record["roofline_share"])


@pytest.mark.parametrize("verb", ["serve", "run", "plan", "bench"])
def test_refused_where_answers_are_given(offroad, tiny, verb, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("hello"))
    code, _, err = offroad(verb, str(tiny("llama")[0]), "--speculative-config", DRAFTS)
    assert code == 2
    assert "dummy, whose answers mean nothing" in err
    assert "offroad bench engine" in err
