"""`offroad bench` on a tiny model and a server: the figures of a chat, and of both names of the verb."""

import json

import pytest

from offroad.evidence import perf
from offroad.evidence.perf import Sample

CHAT = ("--turns", "3", "--prompt-tokens", "80", "--output-tokens", "30")


def test_a_chat_is_resumed_from_turn_to_turn(offroad, tiny, tmp_path):
    folder, _ = tiny("qwen3_5")
    path = tmp_path / "chat.json"
    code, out, err = offroad("bench", str(folder), "--device", "cpu", *CHAT, "--json", "--output", str(path))
    record = json.loads(out)
    assert code == 0
    assert json.loads(path.read_text()) == record
    assert record["load"]["turns"] == 3
    # 80 new tokens and 30 of an answer a turn: the last boundary of 64 below what the turn before has run.
    assert [(turn["prompt"], turn["resumed"]) for turn in record["points"]] == [(80, 0), (190, 64), (300, 192)]
    assert [turn["matched"] for turn in record["points"]] == [0, 64, 192]
    assert "turn 3 of 3, cold" in err
    code, _, err = offroad("bench", "x", *CHAT, "--baseline", str(path))
    assert code == 2
    assert "--turns" in err
    code, _, err = offroad("bench", str(folder), "--baseline", str(path))
    assert code == 2
    assert "another kind of file" in err


def test_a_chat_as_a_table(offroad, tiny):
    folder, _ = tiny("qwen3_5")
    code, out, _ = offroad("bench", str(folder), "--device", "cpu", *CHAT)
    assert code == 0
    assert [line.split()[:4] for line in out.splitlines()[1:]] == [
        ["TURN", "PROMPT", "MATCHED", "RESUMED"],
        ["1", "80", "0", "0"],
        ["2", "190", "64", "64"],
        ["3", "300", "192", "192"],
    ]


class Server:
    """A server that gives each request its tokens, one every 10 ms."""

    def __init__(self, url):
        self.url = url

    def facts(self):
        return {"kind": "server", "model": self.url, "device": None, "plan_fingerprint": None}

    def vocab(self):
        return 100

    def round(self, prompts, output_tokens):
        return [Sample([0.01 * (i + 1) for i in range(output_tokens)], [1] * output_tokens) for _ in prompts]

    def close(self):
        pass


def test_a_server_is_measured_under_both_names(offroad, monkeypatch):
    monkeypatch.setattr(perf, "ServerTarget", Server)
    found = []
    for verb in (["bench", "serve"], ["bench"]):
        code, text, _ = offroad(*verb, "http://test", "--concurrency", "3", "--output-tokens", "11", "--json")
        assert code == 0
        found.append(json.loads(text))
    assert found[0]["target"]["model"] == "http://test"
    assert found[0]["points"] == found[1]["points"]
    assert found[0]["points"][0]["summary"]["decode_tok_s"] == pytest.approx(300)


def test_bench_serve_measures_servers_only(offroad):
    code, _, err = offroad("bench", "serve", "some-model")
    assert code == 2
    assert "the address of a server" in err
    assert offroad("bench", "serve", "http://test", "--max-num-seqs", "3")[0] == 2
