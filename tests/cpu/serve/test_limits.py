"""Clients that send too much, too deep, too slowly or by halves: they get an answer or are left; others are served."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from contextlib import closing, suppress

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from serve_stack import Stack, Wire

from offroad.errors import RequestError
from offroad.serve import limits
from offroad.serve.protocol.chat import ChatRequest
from offroad.serve.protocol.completion import CompletionRequest
from offroad.serve.protocol.extent import MAX_DEPTH, MAX_IDS, MAX_PARTS, check_extent
from offroad.serve.protocol.parse import parse
from offroad.serve.tokens import DetokenizeRequest

CHAT, COMPLETIONS, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"


@pytest.fixture(scope="module")
def small():
    running = Wire(Stack(max_body_mib=1))
    yield running
    running.close()


def connect(wire: Wire) -> socket.socket:
    url = httpx.URL(wire.url)
    sock = socket.create_connection((url.host, url.port), timeout=10)
    sock.settimeout(10)
    return sock


def received(sock: socket.socket) -> bytes:
    """All until the server closes or resets."""
    data = b""
    with suppress(ConnectionResetError):
        while piece := sock.recv(65536):
            data += piece
    return data


def head(path: str, *lines: str) -> bytes:
    return "\r\n".join([f"POST {path} HTTP/1.1", "Host: x", *lines, "", ""]).encode()


def serves(wire: Wire) -> bool:
    """Whether others are served."""
    return httpx.post(f"{wire.url}{COMPLETIONS}", json={"prompt": "abc", "max_tokens": 1}).status_code == 200


def nested(depth: int, wide: bool) -> object:
    value: object = 1
    for level in range(depth):
        value = {"a": value, "b": 2} if level % 2 or not wide else [0, value, "x"]
    return value


@given(st.integers(1, 3 * MAX_DEPTH), st.booleans())
def test_depth_is_counted(depth, wide):
    if depth <= MAX_DEPTH:
        check_extent({"x": nested(depth - 1, wide)})
    else:
        with pytest.raises(RequestError, match="levels"):
            check_extent({"x": nested(depth - 1, wide)}, "x")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": [1] * (MAX_PARTS + 1)}),
        (CHAT, {"messages": [[]] * (MAX_PARTS + 1)}),
        (CHAT, {"messages": [{"role": "user", "content": "x"}], "stop": [1] * (MAX_PARTS + 1)}),
        (
            CHAT,
            {"messages": [{"role": "user", "content": "x"}], "logit_bias": dict.fromkeys(map(str, range(60_000)), 1)},
        ),
        (COMPLETIONS, {"prompt": [*[1] * MAX_PARTS, "x"]}),
        (COMPLETIONS, {"prompt": [1.5] * (MAX_PARTS + 1)}),
        (COMPLETIONS, {"prompt": [1] * (MAX_IDS + 1)}),
        (COMPLETIONS, {"prompt": [[1] * (MAX_IDS // 4)] * 5}),
        (COMPLETIONS, {"prompt": ["x"] * (MAX_PARTS + 1)}),
        ("/detokenize", {"tokens": [*[1] * MAX_PARTS, None]}),
    ],
)
def test_bodies_of_many_parts_are_refused_at_once(path, body):
    kind = {CHAT: ChatRequest, COMPLETIONS: CompletionRequest, "/detokenize": DetokenizeRequest}[path]
    raw, began = json.dumps(body).encode(), time.thread_time()
    with pytest.raises(RequestError) as refused:
        parse(raw, kind)
    assert refused.value.code == "body_too_complex"
    assert time.thread_time() - began < 1.5


def test_long_prompts_of_ids_are_no_such_bodies():
    ids = [i % 257 for i in range(MAX_IDS)]
    body = parse(json.dumps({"prompt": ids}).encode(), CompletionRequest)
    assert body.prompts(257) == [ids]
    with pytest.raises(RequestError, match="256"):
        body.prompts(256)
    assert parse(json.dumps({"prompt": [ids[:500_000]] * 2}).encode(), CompletionRequest).prompts(257)
    parse(json.dumps({"tokens": ids}).encode(), DetokenizeRequest)


@pytest.mark.parametrize("depth", [MAX_DEPTH + 1, 400, 900, 5000, 100_000])
def test_deep_bodies_are_400(small, depth):
    deep = "[" * depth + "]" * depth
    objects = '{"a":' * depth + "1" + "}" * depth
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a":' + deep + "}"}}
    said = json.dumps([{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": [call]}])
    tool = '[{"type": "function", "function": {"name": "f", "parameters": ' + objects + "}}]"
    schema = json.dumps(objects)
    bodies = [
        (CHAT, deep),
        (CHAT, f'{{"messages": {deep}}}'),
        (CHAT, f'{{"messages": [{{"role": "user", "content": "x"}}], "chat_template_kwargs": {objects}}}'),
        (CHAT, f'{{"messages": [{{"role": "user", "content": "x"}}], "tools": {tool}}}'),
        (COMPLETIONS, f'{{"prompt": "x", "max_tokens": 1, "structured_outputs": {{"json": {schema}}}}}'),
        (COMPLETIONS, f'{{"prompt": {deep}}}'),
        (MESSAGES, f'{{"messages": [{{"role": "user", "content": {deep}}}], "max_tokens": 1}}'),
        ("/tokenize", f'{{"messages": {deep}}}'),
    ]
    with httpx.Client(base_url=small.url) as http:
        for path, body in bodies:
            assert http.post(path, content=body).status_code in (400, 413), (path, body[:80])
        # The fake text layer does not read arguments; what does is tested with the templates.
        assert http.post(CHAT, content=f'{{"messages": {said}, "max_tokens": 1}}').status_code in (200, 400, 413)
    assert serves(small)


def test_large_bodies_are_413_announced_or_not(small):
    with httpx.Client(base_url=small.url) as http:
        assert http.post(COMPLETIONS, content=b" " * (2**20 + 1)).status_code == 413
        chunks = (b" " * 2**16 for _ in range(17))
        assert http.post(COMPLETIONS, content=chunks).status_code == 413
        answer = http.post(MESSAGES, content=b" " * (2**20 + 1))
        assert answer.json()["error"]["type"] == "request_too_large"
    with closing(connect(small)) as sock:  # the answer comes before the body
        sock.sendall(head(COMPLETIONS, f"Content-Length: {10**15}"))
        assert b" 413 " in sock.recv(1000)
    assert serves(small)


def test_a_body_that_stops_is_408(small, monkeypatch):
    monkeypatch.setattr(limits, "PAUSE_SECONDS", 0.1)
    with closing(connect(small)) as sock:
        sock.sendall(head(COMPLETIONS, "Content-Length: 100", "Connection: close") + b'{"prompt"')
        answer = received(sock)
    assert b" 408 " in answer
    assert b"9 bytes" in answer


def test_a_body_in_drops_is_408(small, monkeypatch):
    monkeypatch.setattr(limits, "BODY_SECONDS", 0.2)
    began = time.monotonic()
    with closing(connect(small)) as sock:
        sock.sendall(head(COMPLETIONS, "Content-Length: 100000"))
        sock.settimeout(0.02)
        answer = b""
        while not answer and time.monotonic() - began < 10:
            sock.sendall(b" ")
            try:
                answer = sock.recv(1000)
            except TimeoutError:
                continue
    assert b" 408 " in answer


def test_headers_that_do_not_come_end_the_connection(monkeypatch):
    monkeypatch.setattr(limits, "HEADER_SECONDS", 0.3)
    wire = Wire(Stack())
    try:
        with closing(connect(wire)) as silent, closing(connect(wire)) as slow, closing(connect(wire)) as second:
            slow.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-A")
            # Also behind a request that was answered.
            second.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b" 200 " in second.recv(100)
            second.sendall(b"GET /hea")
            assert serves(wire)
            began = time.monotonic()
            assert (received(silent), received(slow)) == (b"", b"")
            assert received(second).endswith(b'{"status":"ready"}')
            assert time.monotonic() - began < 5
        # A request that takes longer than that is no such thing.
        body = json.dumps({"prompt": "abc", "max_tokens": 300}).encode()
        with closing(connect(wire)) as sock:
            sock.sendall(head(COMPLETIONS, f"Content-Length: {len(body)}", "Connection: close") + body)
            assert b'"completion_tokens":300' in received(sock)
    finally:
        wire.close()


def test_half_closed_and_broken_connections(small):
    body = json.dumps({"prompt": "!never", "max_tokens": 5, "stream": True}).encode()
    whole = head(COMPLETIONS, f"Content-Length: {len(body)}") + body
    for sent in (b"", whole[:20], whole[:-5], whole, b"\x16\x03\x01 no http\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n"):
        with closing(connect(small)) as sock:
            sock.sendall(sent)
            sock.shutdown(socket.SHUT_WR)
            received(sock)  # ends
    for _ in range(200):
        if small.do(unfinished(small)) == 0:
            break
        time.sleep(0.02)
    assert small.do(unfinished(small)) == 0  # nobody waits for `!never`
    assert serves(small)


async def unfinished(wire: Wire) -> int:
    return wire.stack.client.unfinished


def test_a_client_that_does_not_read_holds_up_nobody(small):
    body = json.dumps({"prompt": "abc" * 100, "max_tokens": 200, "n": 16, "stream": True, "logprobs": 5}).encode()
    with closing(connect(small)) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.sendall(head(COMPLETIONS, f"Content-Length: {len(body)}") + body)
        time.sleep(0.2)
        assert serves(small)
    assert serves(small)


def test_many_open_connections(small):
    held = [connect(small) for _ in range(200)]
    try:
        for sock in held:
            sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost")
        assert serves(small)
    finally:
        for sock in held:
            sock.close()


def test_request_timeout(stack):
    made = stack(request_timeout=0.15)
    messages = {"messages": [{"role": "user", "content": "!never"}], "max_tokens": 5}

    async def main():
        async with made.http() as http:
            plain = http.post(COMPLETIONS, json={"prompt": "!never"})
            stream = http.post(COMPLETIONS, json={"prompt": "abc" * 30, "max_tokens": 400, "stream": True})
            anthropic = http.post(MESSAGES, json=messages)
            anthropic_stream = http.post(MESSAGES, json=messages | {"stream": True})
            quick = http.post(COMPLETIONS, json={"prompt": "abc", "max_tokens": 5})
            answers = await asyncio.gather(plain, stream, anthropic, anthropic_stream, quick)
            await made.client.call("check")  # the engine has ended them
            return answers

    plain, stream, anthropic, anthropic_stream, quick = asyncio.run(main())
    assert (plain.status_code, plain.json()["error"]["code"]) == (504, "request_timeout")
    assert "0.15 s" in plain.json()["error"]["message"]
    frames = stream.text.split("\n\n")
    assert stream.status_code == 200
    assert json.loads(frames[0].removeprefix("data: "))["choices"][0]["text"] == "a"
    assert json.loads(frames[-3].removeprefix("data: "))["error"]["code"] == "request_timeout"
    assert frames[-2:] == ["data: [DONE]", ""]
    assert (anthropic.status_code, anthropic.json()["error"]["type"]) == (504, "timeout_error")
    assert anthropic_stream.status_code == 504
    assert quick.status_code == 200
