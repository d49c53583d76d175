"""Records sent again: the same requests where their texts are known, else as many tokens in the same rhythm."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "serve"))

from serve_stack import Stack, Wire

from offroad.cli.main import make_app
from offroad.errors import OffroadError
from offroad.evidence.replay import replay, summary
from offroad.serve.record import read_record

CHAT = {"messages": [{"role": "user", "content": "one"}], "max_tokens": 4}
LATER = [*CHAT["messages"], {"role": "assistant", "content": "two"}, {"role": "user", "content": "three"}]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A server, and the records of what it was asked: without texts, and with them."""
    paths = [tmp_path_factory.mktemp("records") / name for name in ("redacted", "whole")]
    for path, content in zip(paths, (False, True), strict=True):
        wire = Wire(Stack(record_requests=str(path), record_content=content))
        with httpx.Client(base_url=wire.url) as http:
            http.post("/v1/chat/completions", json=CHAT)
            http.post("/v1/chat/completions", json=CHAT | {"messages": LATER, "stream": True, "n": 2})
            http.post("/v1/completions", json={"prompt": "something else", "max_tokens": 3})
            http.post("/v1/completions", json={"prompt": "", "max_tokens": 3})
            http.post("/v1/completions", content=b"no json")
        wire.close()
    wire = Wire(Stack())
    yield wire, *paths
    wire.close()


def test_without_texts_there_are_as_many_tokens(recorded):
    wire, redacted, _ = recorded
    wire.stack.engine.seen.clear()
    sent, left_out = asyncio.run(replay(read_record(redacted), wire.url, 100, None))
    assert ([one.status for one in sent], left_out) == ([200] * 3, 2)
    seen = sorted(wire.stack.engine.seen, key=lambda r: len(r.prompt_ids))
    shapes = [(len(r.prompt_ids), r.params.n, r.params.max_tokens) for r in seen]
    assert shapes == [(3, 1, 4), (11, 2, 4), (14, 1, 3)]
    first, later, other = [bytes(r.prompt_ids) for r in seen]
    assert later.startswith(first)  # they began with the same message
    assert not other.startswith(first) or len(set(first)) == 1


def test_with_texts_they_are_the_same(recorded):
    wire, _, whole = recorded
    wire.stack.engine.seen.clear()
    entries = read_record(whole)
    sent, left_out = asyncio.run(replay(entries[:-1], wire.url, 100, None))
    assert ([one.status for one in sent], left_out) == ([200, 200, 200, 400], 0)
    assert {bytes(r.prompt_ids) for r in wire.stack.engine.seen} == {b"one", b"onetwothree", b"something else"}


def test_they_keep_their_distance(recorded):
    wire, redacted, _ = recorded
    entries = [entry | {"at": 1000 + i} for i, entry in enumerate(read_record(redacted)[:3])]
    began = time.monotonic()
    asyncio.run(replay(entries, wire.url, 10, None))
    assert 0.2 <= time.monotonic() - began < 5


def test_command(recorded):
    wire, redacted, _ = recorded
    result = CliRunner().invoke(make_app(), ["replay", str(redacted), "--url", wire.url, "--json", "--speed", "50"])
    told = json.loads(result.output)
    assert (told["sent"], told["left_out"], told["statuses"]) == (3, 2, {"200": 3})
    assert 0 < told["first_byte_seconds"]["p50"] <= told["seconds"]["max"]
    text = CliRunner().invoke(make_app(), ["replay", str(redacted), "--url", wire.url, "--speed", "50"]).output
    assert "3 x 200" in text


def test_a_server_that_is_not_there(recorded):
    _, redacted, whole = recorded
    with pytest.raises(OffroadError, match="is the server running"):
        asyncio.run(replay(read_record(redacted), "http://127.0.0.1:9", 100, None))
    sent, _ = asyncio.run(replay(read_record(whole)[:2], "http://127.0.0.1:9", 100, None))
    assert summary(sent, 0) == {
        "sent": 2,
        "left_out": 0,
        "statuses": {"0": 2},
        "first_byte_seconds": None,
        "seconds": None,
    }
