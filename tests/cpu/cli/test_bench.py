"""`offroad bench` on a tiny model: the figures of a chat."""

import json

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
