"""The record of requests: nothing that was said is in it unless asked, and what is in it can be sent again."""

from __future__ import annotations

import asyncio
import json
import os
import stat

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offroad.errors import SettingsError
from offroad.serve.logs import Exchange
from offroad.serve.record import Record, read_record
from offroad.serve.security import Keys

KEY = "sk-the-secret-key"
WORD = "Rumpelstilzchen"
FUNCTION = {
    "name": WORD,
    "description": WORD,
    "parameters": {"type": "object", "properties": {WORD: {"type": "string"}}},
}
CALL = {"id": WORD, "type": "function", "function": {"name": WORD, "arguments": json.dumps({WORD: WORD})}}
BODY = {
    "model": "fake",
    "messages": [
        {"role": "system", "content": WORD},
        {"role": "user", "content": [{"type": "text", "text": WORD}]},
        {"role": "assistant", "content": WORD, "reasoning_content": WORD, "tool_calls": [CALL]},
        {"role": WORD, "content": WORD},
    ],
    "tools": [{"type": "function", "function": FUNCTION}],
    "tool_choice": {"type": "function", "function": {"name": WORD}},
    "response_format": {"type": "json_schema", "json_schema": {"name": WORD, "schema": {WORD: 1}}},
    "chat_template_kwargs": {WORD: WORD},
    "stop": [WORD, WORD],
    "temperature": 0.5,
    "stream": True,
    "max_tokens": 7,
    WORD: WORD,
    "metadata": {WORD: WORD},
}


def record(path, content: bool = False) -> Record:
    return Record(str(path), content, Keys((KEY,)), ("fake",))


def exchange(body, path: str = "/v1/chat/completions", id: str = "req-" + "0" * 24, status: int = 200) -> Exchange:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return Exchange(id, "POST", path, 5.0, 0.0, bytearray(raw), status)


def test_shape_without_words(tmp_path):
    kept = record(tmp_path / "r")
    kept.add(exchange(BODY))
    kept.add(exchange(BODY | {"messages": []}, "/v1/models/" + WORD, WORD, 405))
    text = (tmp_path / "r").read_text()
    assert WORD not in text
    first, second = read_record(tmp_path / "r")
    body = first["body"]
    assert (body["model"], body["temperature"], body["stream"], body["max_tokens"]) == ("fake", 0.5, True, 7)
    assert [m["role"] for m in body["messages"][:3]] == ["system", "user", "assistant"]
    size = body["messages"][0]["content"]
    assert size["chars"] == len(WORD)
    assert body["messages"][1]["content"] == [{"type": "text", "text": size}]  # the same text has the same hash
    assert body["others"] == 1
    assert (first["path"], second["path"], first["redacted"]) == ("/v1/chat/completions", None, True)
    other = record(tmp_path / "other")
    other.add(exchange(BODY))
    assert read_record(tmp_path / "other")[0]["body"]["messages"][0]["content"]["hash"] != size["hash"]


words = st.text(st.characters(min_codepoint=0x391, max_codepoint=0x3C9, categories=["L"]), min_size=3)
names = st.sampled_from([*BODY, "prompt", "input", "content", "type", "role", "text", "name", "thinking", "id"])
values = st.recursive(
    words | st.integers(10**6, 10**7),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names | words, inner, max_size=3),
    max_leaves=12,
)


@given(st.dictionaries(names | words, values))
@settings(max_examples=40)
def test_no_word_of_any_body_is_told(body):
    kept = Record(os.devnull, False, Keys(), ("fake",))
    told = json.dumps(kept._redacted(body), ensure_ascii=False)
    kept.close()
    assert not any(0x391 <= ord(c) <= 0x3C9 for c in told)


def test_token_ids_are_words_too(tmp_path):
    kept = record(tmp_path / "r")
    kept.add(exchange({"prompt": [[104, 105], [106]], "logit_bias": {"104": 1}, "stop_token_ids": [104]}))
    body = read_record(tmp_path / "r")[0]["body"]
    assert [part["items"] for part in body["prompt"]] == [2, 1]
    assert (body["logit_bias"]["chars"], body["stop_token_ids"]["items"]) == (len('{"104": 1}'), 1)


def test_content_if_asked_but_never_a_key(tmp_path):
    kept = record(tmp_path / "r", content=True)
    kept.add(exchange(BODY | {"user": f"a {KEY}"}))
    text = (tmp_path / "r").read_text()
    assert KEY not in text
    assert read_record(tmp_path / "r")[0]["body"] == BODY | {"user": "a [key]"}
    assert stat.S_IMODE((tmp_path / "r").stat().st_mode) == 0o600


@pytest.mark.parametrize("body", [b"", b"{", b"[" * 100_000, b"\xff", b"[1]", b'"x"'])
def test_any_body_can_be_recorded(tmp_path, body):
    kept = record(tmp_path / "r")
    kept.add(exchange(body, status=400))
    assert read_record(tmp_path / "r")[0]["status"] == 400


def test_a_server_records(stack, tmp_path):
    path = tmp_path / "r"
    made = stack(record_requests=str(path), api_key=(KEY,))
    headers = {"Authorization": f"Bearer {KEY}"}

    async def main():
        async with made.http() as http:
            await http.get("/v1/models", headers=headers)
            body = {"prompt": WORD, "max_tokens": 3, "stream": True}
            await http.post("/v1/completions", headers=headers, json=body)
            await http.post(f"/v1/{WORD}", headers={"x-api-key": WORD}, json={"prompt": WORD})

    asyncio.run(main())
    assert not any(word in path.read_text() for word in (WORD, KEY))
    done, refused = read_record(path)
    assert (done["prompt_tokens"], done["completion_tokens"], done["finish_reasons"]) == (len(WORD), 3, ["length"])
    assert done["body"]["prompt"]["chars"] == len(WORD)
    assert (refused["status"], refused["path"]) == (401, None)


def test_a_record_that_cannot_be_had(tmp_path):
    with pytest.raises(SettingsError, match="--record-requests"):
        record(tmp_path / "no" / "r")
    (tmp_path / "x").write_text('{"a": 1}\n')
    with pytest.raises(SettingsError, match="line 1"):
        read_record(tmp_path / "x")


def test_a_full_disk_ends_the_record_only(caplog):
    kept = record("/dev/full")
    kept.add(exchange(BODY))
    kept.add(exchange(BODY))
    assert [r.getMessage() for r in caplog.records if "record of requests" in r.getMessage()] == [
        "the record of requests ends here: [Errno 28] No space left on device"
    ]
