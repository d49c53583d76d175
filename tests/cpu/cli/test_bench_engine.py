"""`offroad bench engine` on a tiny config."""

from __future__ import annotations

import json
import os
from pathlib import Path

from bench_config import CONFIG

from offroad.evidence import engine_bench
from offroad.evidence.engine_bench import Case


def test_the_command(offroad, tmp_path: Path, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    monkeypatch.setattr(engine_bench, "CASES", {"decode_c1": Case(1, 20, True), "prefill_8k": Case(1, 40, False)})
    out = tmp_path / "record.json"
    written, replace = [], os.replace

    def seen(part, path):
        written.append(json.loads(Path(part).read_text()))
        replace(part, path)

    monkeypatch.setattr(os, "replace", seen)
    words = ["bench", "engine", "--config", str(tmp_path / "config.json"), "--quantization", "w4a16-g128"]
    code, text, _ = offroad(*words, "--dummy-weights", "--device", "cpu", "--json", str(out), "--profile")
    assert code == 0
    record = json.loads(out.read_text())
    assert min(record["decode_c1"], record["prefill_8k"], record["ready_s"]) > 0
    assert [record["missing"] for record in written] == [["prefill_8k"], [], []]
    assert "prefill_8k" not in written[0]
    assert written[0]["decode_c1"] == record["decode_c1"]
    assert record["decode_steady_c1"] > 0
    assert record["format"] == engine_bench.FORMAT
    assert record["plan_fingerprint"] in text
    assert {entry["op"] for entry in record["profile"]["decode"]["ops"]} >= {"embed", "linear:head"}
    assert offroad(*words)[0] == 2
    code, _, err = offroad(*words, "--dummy-weights", "--cases", "decode_c3")
    assert code == 2
    assert "decode_c1" in err
