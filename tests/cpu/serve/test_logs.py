"""Log lines: one JSON object a line if asked, ids that go all the way, and no line that a client can forge."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import re

import pytest

from offroad.serve import logs
from offroad.settings import Settings

COMPLETIONS = "/v1/completions"


@pytest.fixture
def lines(monkeypatch):
    """Configures logging to a buffer; gives a function that returns its lines."""
    kept = {
        name: (logging.getLogger(name).handlers, logging.getLogger(name).propagate) for name in ("offroad", "uvicorn")
    }

    def configure(**settings):
        buffer = io.StringIO()
        monkeypatch.setattr("sys.stderr", buffer)
        logs.configure(Settings(model="m", **settings))
        return lambda: buffer.getvalue().splitlines()

    yield configure
    for name, (handlers, propagate) in kept.items():
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(logging.NOTSET)


def run(made, *requests):
    async def main():
        async with made.http() as http:
            return [await http.request(m, path, headers=headers, json=body) for m, path, headers, body in requests]

    return asyncio.run(main())


def test_json_lines_tell_what_a_request_did(stack, lines):
    written = lines(log_json=True)
    answers = run(
        stack(),
        ("POST", COMPLETIONS, {"X-Request-Id": "mine-1"}, {"prompt": "abc", "max_tokens": 3}),
        ("POST", COMPLETIONS, {}, {"prompt": "abcd", "max_tokens": 2, "n": 2, "stream": True}),
        ("POST", COMPLETIONS, {"X-Request-Id": 'forged"\t}'}, {"prompt": ""}),
        ("GET", "/v1/models", {}, None),
        ("GET", "/health", {}, None),
    )
    told = [json.loads(line) for line in written()]
    assert [line["message"] for line in told] == ["POST /v1/completions"] * 3 + ["GET /v1/models"]
    assert [line["request_id"] for line in told] == [a.headers["x-request-id"] for a in answers[:-1]]
    assert told[0]["request_id"] == "mine-1"
    assert re.fullmatch("req-[0-9a-f]{24}", told[2]["request_id"])
    first, second, third, _ = told
    assert {name: first[name] for name in ("status", "prompt_tokens", "completion_tokens", "finish_reasons")} == {
        "status": 200,
        "prompt_tokens": 3,
        "completion_tokens": 3,
        "finish_reasons": ["length"],
    }
    assert (second["prompt_tokens"], second["completion_tokens"], len(second["finish_reasons"])) == (4, 4, 2)
    assert 0 < second["first_token_seconds"] <= second["seconds"]
    assert (third["status"], "prompt_tokens" in third) == (400, False)
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line["time"]) for line in told)
    assert {(line["level"], line["logger"]) for line in told} == {("info", "offroad.access")}


def test_text_lines_and_polls_only_when_debugging(stack, lines):
    written = lines()
    run(stack(), ("GET", "/health", {}, None), ("GET", "/x%0afake", {}, None))
    [line] = written()
    assert re.match(r"\d\d:\d\d:\d\d info GET /x\\nfake status=404 seconds=[\d.]+ request_id=req-", line)
    written = lines(log_level="debug")
    run(stack(), ("GET", "/health", {}, None))
    assert any("GET /health" in line for line in written())
    written = lines(log_level="warning")
    run(stack(), ("GET", "/v1/models", {}, None))
    assert written() == []


def test_defects_are_one_object_with_their_traceback(stack, lines, monkeypatch):
    written = lines(log_json=True)
    made = stack()

    async def main():
        async with made.http() as http:
            monkeypatch.setattr(made.service.text, "prompt", lambda *a, **k: 1 / 0)
            return await http.post(COMPLETIONS, json={"prompt": "x"}, headers={"X-Request-Id": "a"})

    assert asyncio.run(main()).status_code == 500
    [line] = [json.loads(line) for line in written()]
    assert (line["status"], line["request_id"]) == (500, "a")
    logging.getLogger("offroad.serve").error("a defect", exc_info=ZeroDivisionError("x"))
    logging.getLogger("uvicorn.error").warning("a\nb")
    defect, warning = [json.loads(line) for line in written()[1:]]
    assert "ZeroDivisionError" in defect["exception"]
    assert warning["message"] == "a\nb"


def test_anthropics_header(stack):
    [answer] = run(stack(), ("POST", "/v1/messages", {"X-Request-Id": "a"}, {}))
    assert answer.headers["request-id"] == answer.headers["x-request-id"] == "a"
