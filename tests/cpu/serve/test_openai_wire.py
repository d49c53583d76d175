"""What OpenAI's own client accepts from a real port."""

from __future__ import annotations

import json
import random
import socket
import threading
import time

import httpx
import openai
import pytest

ABC = [{"role": "user", "content": "abc"}]


@pytest.fixture
def client(wire):
    with openai.OpenAI(base_url=f"{wire.url}/v1", api_key="none", max_retries=0, timeout=20) as made:
        yield made


def idle(wire) -> None:
    """Waits until nothing is unfinished; then the engine must hold nothing."""
    end = time.monotonic() + 5
    while wire.stack.client.unfinished and time.monotonic() < end:
        time.sleep(0.01)
    assert wire.stack.client.unfinished == 0
    wire.do(wire.stack.client.call("check"))


def test_chat(client):
    answer = client.chat.completions.create(model="fake", messages=ABC, max_tokens=5)
    [choice] = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "abcab", "length")
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (3, 5, 8)
    assert answer.usage.prompt_tokens_details.cached_tokens == 1
    assert answer.id.startswith("chatcmpl-")
    timings = answer.timings
    assert (timings["prompt_n"], timings["predicted_n"], timings["cached_n"]) == (2, 5, 1)
    assert timings["predicted_ms"] >= 4 * 2  # four more steps of 2 ms
    assert timings["predicted_per_second"] == pytest.approx(4 / timings["predicted_ms"] * 1e3, rel=0.01)


def test_chat_stream_of_several_choices_interleaves(client, wire):
    stream = client.chat.completions.create(
        model="fake", messages=ABC, max_completion_tokens=4, n=3, stream=True, stream_options={"include_usage": True}
    )
    texts, roles, ends, order, usage = {}, {}, {}, [], None
    for chunk in stream:
        if not chunk.choices:
            usage = chunk.usage
            continue
        assert usage is None
        [choice] = chunk.choices
        if choice.delta.role:
            roles[choice.index] = choice.delta.role
        if choice.delta.content:
            order.append(choice.index)
        texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
        if choice.finish_reason:
            ends[choice.index] = choice.finish_reason
    assert texts == {0: "abca", 1: "bcab", 2: "cabc"}
    assert roles == dict.fromkeys(range(3), "assistant")
    assert ends == dict.fromkeys(range(3), "length")
    assert order == [0, 1, 2] * 4
    assert (usage.prompt_tokens, usage.completion_tokens) == (3, 12)
    idle(wire)


def test_stream_bytes_on_the_wire(wire):
    body = {"messages": ABC, "max_tokens": 2, "stream": True}
    answer = httpx.post(f"{wire.url}/v1/chat/completions", json=body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = answer.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    first = json.loads(events[0].removeprefix("data: "))
    assert first["object"] == "chat.completion.chunk"
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "usage" not in json.loads(events[-3].removeprefix("data: "))


def test_stop_string_and_stop_token(client, wire):
    stopped = client.chat.completions.create(model="fake", messages=ABC, max_tokens=50, stop=["bca"])
    assert stopped.choices[0].message.content == "a"
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.choices[0].stop_reason == "bca"
    assert stopped.usage.completion_tokens == 4
    idle(wire)
    by_id = client.chat.completions.create(
        model="fake", messages=ABC, max_tokens=50, extra_body={"stop_token_ids": [99]}
    )
    assert (by_id.choices[0].message.content, by_id.choices[0].stop_reason) == ("ab", 99)
    eos = client.completions.create(model="fake", prompt="x!eos2", max_tokens=50)
    assert (eos.choices[0].text, eos.choices[0].finish_reason, eos.usage.completion_tokens) == ("x!", "stop", 3)


def test_stop_string_of_one_choice_lets_the_others_run(client, wire):
    answer = client.completions.create(model="fake", prompt="abcd", max_tokens=6, n=2, stop="bcda")
    # Sequence 1 says bcdabc and stops after 4 tokens; sequence 0 says abcdab and stops after 5.
    assert [(c.text, c.finish_reason) for c in answer.choices] == [("a", "stop"), ("", "stop")]
    idle(wire)


def test_text_is_whole_characters(client):
    stream = client.completions.create(model="fake", prompt="äö€", max_tokens=8, stream=True)
    pieces = [chunk.choices[0].text for chunk in stream]
    assert "".join(pieces) == "äö€\ufffd"
    assert all("\ufffd" not in piece for piece in pieces[:-1])


def test_chat_logprobs(client):
    answer = client.chat.completions.create(model="fake", messages=ABC, max_tokens=2, logprobs=True, top_logprobs=2)
    first, second = answer.choices[0].logprobs.content
    assert (first.token, first.logprob, first.bytes) == ("a", -0.5, [97])
    assert [(t.token, t.logprob) for t in second.top_logprobs] == [("b", -0.5), ("c", -9999.0)]
    none = client.chat.completions.create(model="fake", messages=ABC, max_tokens=2, logprobs=True)
    assert [t.top_logprobs for t in none.choices[0].logprobs.content] == [[], []]


@pytest.mark.parametrize("stream", [False, True])
def test_completion_logprobs_echo_and_offsets(client, stream):
    answer = client.completions.create(model="fake", prompt="ab", max_tokens=3, logprobs=1, stream=stream)
    parts = [chunk.choices[0].logprobs for chunk in answer] if stream else [answer.choices[0].logprobs]
    assert [t for p in parts for t in p.tokens] == ["a", "b", "a"]
    assert [o for p in parts for o in p.text_offset] == [0, 1, 2]
    assert [t for p in parts for t in p.top_logprobs] == [{"a": -0.5}, {"b": -0.5}, {"a": -0.5}]
    echoed = client.completions.create(model="fake", prompt=[97, 98], max_tokens=3, echo=True, stream=stream)
    text = "".join(chunk.choices[0].text for chunk in echoed) if stream else echoed.choices[0].text
    assert text == "ababa"


def test_logprobs_of_prompts(client):
    """The engine says -id for each token of a prompt, with its id as rank."""
    more = {"prompt_logprobs": 1}
    answer = client.completions.create(model="fake", prompt=["abc", "x"], max_tokens=1, n=2, extra_body=more)
    best = {"7": {"logprob": -0.25, "rank": 1, "decoded_token": "\a"}}
    b, c = ({str(ord(x)): {"logprob": -float(ord(x)), "rank": ord(x), "decoded_token": x}} for x in "bc")
    assert [choice.prompt_logprobs for choice in answer.choices] == [[None, b | best, c | best]] * 2 + [[None]] * 2
    chat = client.chat.completions.create(model="fake", messages=ABC, max_tokens=1, extra_body={"prompt_logprobs": 0})
    assert chat.prompt_logprobs == [None, b, c]
    assert not hasattr(client.chat.completions.create(model="fake", messages=ABC, max_tokens=1), "prompt_logprobs")


def test_echo_with_logprobs(client):
    answer = client.completions.create(model="fake", prompt="abc", max_tokens=2, echo=True, logprobs=1)
    [choice] = answer.choices
    assert (choice.text, choice.logprobs.tokens) == ("abcab", ["a", "b", "c", "a", "b"])
    assert choice.logprobs.token_logprobs == [None, -98.0, -99.0, -0.5, -0.5]
    first = {"b": -98.0, "\a": -0.25}, {"c": -99.0, "\a": -0.25}
    assert choice.logprobs.top_logprobs == [None, *first, {"a": -0.5}, {"b": -0.5}]
    assert choice.logprobs.text_offset == [0, 1, 2, 3, 4]
    assert not hasattr(choice, "prompt_logprobs")  # which nobody asked for


@pytest.mark.parametrize("n", [1, 2])
def test_echo_of_prompts_alone(client, n: int):
    """Scores of a text, as evaluations ask for them: nothing is generated."""
    wanted = dict(model="fake", prompt=["abc", "x"], max_tokens=0, echo=True, n=n)
    answer = client.completions.create(**wanted, logprobs=1)
    assert [choice.text for choice in answer.choices] == ["abc"] * n + ["x"] * n
    assert [choice.logprobs.token_logprobs for choice in answer.choices] == [[None, -98.0, -99.0]] * n + [[None]] * n
    assert {choice.finish_reason for choice in answer.choices} == {"length"}
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (4, 0)
    chunks = list(client.completions.create(**wanted, stream=True))
    texts = ["".join(c.text for chunk in chunks for c in chunk.choices if c.index == i) for i in range(2 * n)]
    assert texts == ["abc"] * n + ["x"] * n
    assert [c.finish_reason for chunk in chunks for c in chunk.choices].count("length") == 2 * n


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("ab", ["ab", "ba"]),
        (["ab", "xyz"], ["ab", "ba", "xy", "yz"]),
        ([97, 98], ["ab", "ba"]),
        ([[97], [120]], ["aa", "aa", "xx", "xx"]),
    ],
)
def test_completion_prompts(client, prompt, texts):
    answer = client.completions.create(model="fake", prompt=prompt, max_tokens=2, n=2)
    assert [choice.text for choice in answer.choices] == texts
    assert [choice.index for choice in answer.choices] == list(range(len(texts)))
    assert client.completions.create(model="fake", prompt="ab").usage.completion_tokens == 16


def test_token_ids_on_request(client):
    answer = client.chat.completions.create(
        model="fake", messages=ABC, max_tokens=2, extra_body={"return_token_ids": True}
    )
    assert (answer.prompt_token_ids, answer.choices[0].token_ids) == ([97, 98, 99], [97, 98])


def test_errors_have_the_classes_of_the_client(client, wire):
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="other", messages=ABC)
    assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model="fake", prompt="a" * 600, max_tokens=7)
    assert long.value.code == "context_length_exceeded"
    assert "512" in long.value.message
    assert "600" in long.value.message
    with pytest.raises(openai.RateLimitError) as full:
        client.chat.completions.create(model="fake", messages=[{"role": "user", "content": "!full"}])
    assert full.value.response.headers["retry-after"] == "1"
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(
                model="fake", messages=[{"role": "user", "content": "!refuse"}], stream=stream
            )
        assert refused.value.param == "prompt"
    with pytest.raises(openai.InternalServerError, match="layer 3 is not finite"):
        client.completions.create(model="fake", prompt="!nan", max_tokens=9)
    idle(wire)


def test_error_in_the_middle_of_a_stream_is_an_event(client, wire):
    got = []
    with pytest.raises(openai.APIError, match="layer 3 is not finite"):
        for chunk in client.completions.create(model="fake", prompt="!nan", max_tokens=9, stream=True):
            got.append(chunk.choices[0].text)
    assert got == ["!", "n"]
    text = httpx.post(f"{wire.url}/v1/completions", json={"prompt": "!nan", "max_tokens": 9, "stream": True}).text
    assert text.endswith("data: [DONE]\n\n")
    idle(wire)


def test_models(client):
    [model] = client.models.list()
    assert (model.id, model.max_model_len) == ("fake", 512)
    assert client.models.retrieve("fake").owned_by == "offroad"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


@pytest.mark.parametrize("stream", [False, True])
def test_disconnect_aborts(wire, stream):
    body = json.dumps({"prompt": "abc", "max_tokens": 500, "stream": stream}).encode()
    before = len(wire.stack.engine.aborted)
    host, port = wire.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as sock:
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        end = time.monotonic() + 5
        while not wire.stack.client.unfinished and time.monotonic() < end:
            time.sleep(0.005)
        assert wire.stack.client.unfinished == 1
        if stream:
            assert b"200 OK" in sock.recv(4096)
    idle(wire)
    assert len(wire.stack.engine.aborted) == before + 1


def test_random_requests_and_disconnects_leave_nothing(wire):
    rng = random.Random(7)
    failures = []

    def one(http: httpx.Client, seed: int) -> None:
        mine = random.Random(seed)
        chat = mine.random() < 0.5
        body = {"max_tokens": mine.randint(1, 60), "n": mine.randint(1, 3), "stream": mine.random() < 0.6}
        body |= {"messages": ABC} if chat else {"prompt": mine.choice(["abc", ["ab", "c"], [97], "!eos3"])}
        if mine.random() < 0.3:
            body["stop"] = "ca"
        patience = mine.choice([0.005, 0.02, 0.05, 5])
        try:
            with http.stream("POST", f"{wire.url}/v1/{'chat/' if chat else ''}completions", json=body) as answer:
                assert answer.status_code == 200, answer.read()
                began = time.monotonic()
                for _ in answer.iter_raw():
                    if time.monotonic() - began > patience:
                        return
        except Exception as error:
            failures.append(error)

    seeds = [rng.randrange(10**6) for _ in range(200)]

    def several(part: list[int]) -> None:
        with httpx.Client(timeout=20) as http:
            for seed in part:
                one(http, seed)

    threads = [threading.Thread(target=several, args=(seeds[i::12],)) for i in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    idle(wire)
    assert wire.stack.client._open == {}
    assert wire.stack.engine.aborted, "no request was cut off: the test tests nothing"
