"""The app without a socket: which bodies are refused and how, which fields reach the engine, health and metrics."""

from __future__ import annotations

import asyncio
import json

from fake_engine import SlowLoad

ABC = [{"role": "user", "content": "abc"}]
SAID = {"role": "assistant", "content": "x"}
NOW = {"type": "function", "function": {"name": "now"}}
CALL = {"id": "1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def post(stack, path: str, body, **settings):
    """The answer to one body, and the stack that gave it."""
    made = stack(**settings)

    async def main():
        async with made.http() as http:
            raw = body if isinstance(body, bytes) else json.dumps(body).encode()
            return await http.post(path, content=raw)

    return asyncio.run(main()), made


async def submitted(made, count: int) -> None:
    """Waits until the client has sent so many requests to the engine."""
    while made.client.unfinished < count:
        await asyncio.sleep(0.005)


def many(stack, path: str, bodies: list):
    made = stack()

    async def main():
        async with made.http() as http:
            return [await http.post(path, content=b if isinstance(b, bytes) else json.dumps(b)) for b in bodies]

    return asyncio.run(main())


REFUSED_CHAT = [
    # body beside messages, param, code
    ({"tools": [{"type": "function"}]}, "tools.0.function", "missing_field"),
    ({"tools": [{"type": "web_search"}]}, "tools.0.type", "invalid_value"),
    ({"tools": [NOW | {"function": {"name": "a b"}}]}, "tools.0.function.name", "invalid_value"),
    ({"tools": [NOW, NOW]}, "tools", "invalid_request"),
    ({"tools": [NOW]}, "tools", "unsupported_field"),  # the template has no place for them
    ({"tool_choice": "required"}, "tool_choice", "invalid_request"),
    ({"tool_choice": "sometimes"}, "tool_choice", "invalid_value"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice", "invalid_request"),
    ({"parallel_tool_calls": 1}, "parallel_tool_calls", "invalid_value"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "invalid_value"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "missing_field"),
    (
        {"response_format": {"type": "text", "json_schema": {"name": "x"}}},
        "response_format.json_schema",
        "invalid_request",
    ),
    ({"structured_outputs": {}}, "structured_outputs", "invalid_request"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "invalid_request"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "invalid_value"),
    ({"structured_outputs": {"choice": [""]}}, "structured_outputs.choice", "invalid_request"),
    ({"structured_outputs": {"json": "no"}}, "structured_outputs.json", "invalid_request"),
    ({"structured_outputs": {"json": {"not": {}}}}, "structured_outputs", "invalid_grammar"),
    ({"structured_outputs": {"json": '{"allOf": [{}, {}]}'}}, "structured_outputs", "invalid_grammar"),
    ({"structured_outputs": {"jsn": {}}}, "structured_outputs.jsn", "unknown_field"),
    (
        {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
        "structured_outputs",
        "invalid_request",
    ),
    ({"structured_outputs": {"regex": "a"}, "min_tokens": 2}, "min_tokens", "invalid_request"),
    ({"top_k": 10**30}, "top_k", "invalid_request"),
    ({"min_tokens": 10**30}, "min_tokens", "invalid_request"),
    ({"guided_json": {}}, "guided_json", "unsupported_field"),
    ({"guided_regex": "a"}, "guided_regex", "unsupported_field"),
    ({"enable_thinking": True}, "enable_thinking", "unsupported_field"),  # the model does not think
    ({"thinking": {"type": "enabled"}}, "thinking", "unsupported_field"),
    ({"thinking": {"type": "on"}}, "thinking.type", "invalid_value"),
    ({"enable_thinking": False, "reasoning_effort": "low"}, "reasoning_effort", "invalid_request"),
    ({"reasoning_effort": "lots"}, "reasoning_effort", "invalid_value"),
    ({"thinking_token_budget": -1}, "thinking_token_budget", "invalid_value"),
    ({"audio": {}}, "audio", "unsupported_field"),
    ({"modalities": ["text", "audio"]}, "modalities", "unsupported_field"),
    ({"functions": [{}]}, "functions", "unsupported_field"),
    ({"prediction": {}}, "prediction", "unsupported_field"),
    ({"web_search_options": {}}, "web_search_options", "unsupported_field"),
    ({"store": True}, "store", "unsupported_field"),
    ({"priority": False}, "priority", "unsupported_field"),
    ({"service_tier": "flex"}, "service_tier", "unsupported_field"),
    ({"reasoning_effort": "low"}, "reasoning_effort", "unsupported_field"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "invalid_request"),
    ({"prompt_logprobs": 21}, "prompt_logprobs", "invalid_request"),
    ({"chat_template": "{{ x }}"}, "chat_template", "unsupported_field"),
    ({"max_tokns": 3}, "max_tokns", "unknown_field"),
    ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage", "unknown_field"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_request"),
    ({"temperature": "hot"}, "temperature", "invalid_value"),
    ({"temperature": True}, "temperature", "invalid_value"),
    ({"max_tokens": 1.5}, "max_tokens", "invalid_value"),
    ({"stream": 1}, "stream", "invalid_value"),
    ({"stop": [1]}, "stop.0", "invalid_value"),
    ({"stop": 1}, "stop", "invalid_value"),
    ({"stop": ["x"] * 17}, "stop", "invalid_request"),
    ({"temperature": -1}, "temperature", "invalid_request"),
    ({"top_p": 0}, "top_p", "invalid_request"),
    ({"n": 0}, "n", "invalid_request"),
    ({"max_tokens": 0}, "max_tokens", "invalid_request"),
    ({"seed": 2**63}, "seed", "invalid_request"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_request"),
    ({"top_logprobs": 2}, "top_logprobs", "invalid_request"),
    ({"logit_bias": {"257": 1}}, "logit_bias", "invalid_request"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "invalid_request"),
    ({"logit_bias": {"1": 101}}, "logit_bias", "invalid_request"),
    ({"stop_token_ids": [-1]}, "stop_token_ids", "invalid_request"),
    ({"min_tokens": 5, "max_tokens": 3}, "min_tokens", "invalid_request"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens", "invalid_request"),
    ({"max_completion_tokens": 0}, "max_completion_tokens", "invalid_request"),
    ({"max_tokens": 510}, "max_tokens", "context_length_exceeded"),
    ({"max_completion_tokens": 510}, "max_completion_tokens", "context_length_exceeded"),
    ({"chat_template_kwargs": {"add_generation_prompt": True}}, "chat_template_kwargs", "invalid_request"),
    ({"messages": []}, "messages", "invalid_value"),
    ({"messages": None}, "messages", "invalid_value"),
    ({"messages": [{"role": "user"}]}, "messages.0.content", "missing_field"),
    ({"messages": [{"role": "alien", "content": "x"}]}, "messages.0.role", "invalid_value"),
    ({"messages": [{"role": "tool"}]}, "messages.0.content", "missing_field"),
    ({"messages": [ABC[0] | {"tool_call_id": "x"}]}, "messages.0.tool_call_id", "invalid_request"),
    ({"messages": [ABC[0] | {"tool_calls": [CALL]}]}, "messages.0.tool_calls", "invalid_request"),
    (
        {"messages": [SAID | {"tool_calls": [CALL | {"function": {}}]}]},
        "messages.0.tool_calls.0.function.name",
        "missing_field",
    ),
    ({"messages": [*ABC, {"role": "user", "content": 3}]}, "messages.1.content", "invalid_value"),
    ({"messages": [{"role": "user", "content": "x", "mood": 1}]}, "messages.0.mood", "unknown_field"),
    ({"messages": [SAID | {"tool_calls": [{}]}]}, "messages.0.tool_calls.0.function", "missing_field"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages.0.content.0.type",
        "unsupported_content",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text", "missing_field"),
    ({"messages": [ABC[0] | {"reasoning_content": "x"}]}, "messages.0.reasoning_content", "invalid_request"),
    ({"messages": [ABC[0] | {"reasoning": ""}]}, "messages.0.reasoning", "invalid_request"),
    ({"messages": [SAID | {"reasoning": 5}]}, "messages.0.reasoning", "invalid_value"),
    ({"messages": [SAID | {"reasoning": "x", "reasoning_content": "y"}]}, "messages.0.reasoning", "invalid_request"),
    ({"messages": [SAID | {"content": None}]}, "messages.0.content", "invalid_value"),
    ({"messages": [{"reasoning": "x", "content": "x"}]}, "messages.0.role", "missing_field"),
    ({"messages": [{"role": "user", "content": "!bad"}]}, "messages", "invalid_request"),
    ({"messages": [{"role": "user", "content": ""}]}, "messages", "invalid_request"),
    ({"messages": [{"role": "user", "content": "x" * 512}]}, "messages", "context_length_exceeded"),
]
REFUSED_COMPLETION = [
    ({"suffix": "x"}, "suffix", "unsupported_field"),
    ({"best_of": 2}, "best_of", "unsupported_field"),
    ({"tools": [NOW]}, "tools", "unsupported_field"),
    ({"guided_grammar": "root ::= x"}, "guided_grammar", "unsupported_field"),
    ({"structured_outputs": {}}, "structured_outputs", "invalid_request"),
    ({"prompt": []}, "prompt", "invalid_request"),
    ({"prompt": [[]]}, "prompt", "invalid_request"),
    ({"prompt": ""}, "prompt", "invalid_request"),
    ({"prompt": [257]}, "prompt", "invalid_request"),
    ({"prompt": [True]}, "prompt", "invalid_value"),
    ({"prompt": [1, "x"]}, "prompt", "invalid_value"),
    ({"prompt": {"text": "x"}}, "prompt", "invalid_value"),
    ({"logprobs": 21}, "logprobs", "invalid_request"),
    ({"echo": True, "logprobs": 1, "stream": True}, "logprobs", "invalid_request"),
    ({"max_tokens": 0}, "max_tokens", "invalid_request"),
    ({"echo": True, "max_tokens": -1}, "max_tokens", "invalid_request"),
    ({"messages": ABC}, "messages", "unknown_field"),
    ({"prompt": "x" * 500}, "max_tokens", "context_length_exceeded"),
]


def test_refused_fields_are_named(stack):
    for path, base, table in (
        (CHAT, {"messages": ABC}, REFUSED_CHAT),
        (COMPLETIONS, {"prompt": "abc"}, REFUSED_COMPLETION),
    ):
        answers = many(stack, path, [base | {"model": "fake"} | more for more, _, _ in table])
        for answer, (more, param, code) in zip(answers, table, strict=True):
            error = answer.json()["error"]
            assert (answer.status_code, error["param"], error["code"]) == (400, param, code), (more, error)
            assert error["type"] == "invalid_request_error"
            assert error["message"]


def test_broken_bodies(stack):
    bodies = [b"", b"{", b"[]", b'"x"', b'{"messages": NaN}', b'{"a": "\xff"}', b"[" * 100_000, b'{"n": 1e999}']
    for body, answer in zip(bodies, many(stack, CHAT, bodies), strict=True):
        assert answer.status_code == 400, body
        assert answer.json()["error"]["code"] in ("invalid_json", "missing_field", "invalid_value"), body


def test_fields_that_change_nothing_are_accepted(stack):
    harmless = {
        "user": "me",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "parallel_tool_calls": True,
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "modalities": ["text"],
        "tools_": None,
        "priority": 0,
        "functions": None,
        "reasoning_effort": None,
        "safety_identifier": "x",
        "prompt_cache_key": "k",
        "temperature": None,
        "length_penalty": 1.0,
        "spaces_between_special_tokens": True,
        "use_beam_search": False,
        "logit_bias": {},
        "stop": None,
    }
    del harmless["tools_"]
    said = {"role": "assistant", "content": "x", "refusal": None, "tool_calls": None, "annotations": [], "audio": None}
    answer, _ = post(stack, CHAT, {"messages": [*ABC, said], "max_tokens": 2} | harmless)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["content"] == "ab"


def test_fields_reach_the_engine(stack):
    body = {
        "messages": [
            {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            *ABC,
        ],
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "presence_penalty": 1,
        "frequency_penalty": -1,
        "repetition_penalty": 1.1,
        "logit_bias": {"5": 2, "6": -3.5},
        "seed": 11,
        "stop": ["x", "y"],
        "stop_token_ids": [3],
        "ignore_eos": True,
        "min_tokens": 1,
        "max_tokens": 9,
        "skip_special_tokens": False,
        "include_stop_str_in_output": True,
        "logprobs": True,
        "top_logprobs": 3,
        "n": 2,
        "cache_salt": "s",
        "chat_template_kwargs": {"enable_thinking": False},
        "continue_final_message": True,
    }
    answer, made = post(stack, CHAT, body)
    assert answer.status_code == 200, answer.text
    [request] = made.engine.seen
    p = request.params
    assert (p.temperature, p.top_p, p.top_k, p.min_p, p.repetition_penalty) == (0.5, 0.9, 7, 0.1, 1.1)
    assert (p.presence_penalty, p.frequency_penalty, p.logit_bias) == (1.0, -1.0, {5: 2.0, 6: -3.5})
    assert (p.stop, p.stop_token_ids, p.ignore_eos, p.min_tokens, p.max_tokens) == (("x", "y"), (3,), True, 1, 9)
    assert (p.skip_special_tokens, p.include_stop_str_in_output, p.logprobs, p.n) == (False, True, 3, 2)
    assert (request.seed, request.salt, request.marks, request.eos_ids) == (11, "s", (3,), (256,))
    assert bytes(request.prompt_ids) == b"a\nbabc"
    assert made.service.text.options == {"enable_thinking": False, "add": False, "continue": True}


def test_defaults(stack):
    _, made = post(
        stack, CHAT, {"messages": ABC, "temperature": 0}, generation={"temperature": 0.7, "top_k": 20, "top_p": 0.8}
    )
    [chat] = made.engine.seen
    # A chat may use the rest of the context; the checkpoint's defaults fill what the request leaves open.
    assert (chat.params.max_tokens, chat.params.temperature, chat.params.top_k, chat.params.top_p) == (
        509,
        0.0,
        20,
        0.8,
    )
    _, made = post(stack, COMPLETIONS, {"prompt": "abc"})
    [completion] = made.engine.seen
    assert (completion.params.max_tokens, completion.params.temperature) == (16, 1.0)
    assert 0 <= completion.seed < 2**63
    _, made = post(stack, CHAT, {"messages": ABC}, generation={"max_new_tokens": 5})
    assert made.engine.seen[0].params.max_tokens == 5


def test_the_last_token_of_the_context_can_be_used(stack):
    answer, _ = post(stack, COMPLETIONS, {"prompt": "x" * 500, "max_tokens": 12})
    assert answer.json()["usage"]["total_tokens"] == 512
    answer, _ = post(stack, COMPLETIONS, {"prompt": "x" * 500, "max_tokens": 13})
    assert answer.status_code == 400


def test_routes_methods_and_size(stack):
    made = stack(served_model_name=("alias", "other"), max_body_mib=1)

    async def main():
        async with made.http() as http:
            unknown, method = await http.get("/v1/nothing"), await http.get(CHAT)
            large = await http.post(CHAT, content=b" " * (2**20 + 1))

            async def chunks():
                for _ in range(17):
                    yield b" " * 2**16

            chunked = await http.post(CHAT, content=chunks())
            models, version, plan = [(await http.get(p)).json() for p in ("/v1/models", "/version", "/plan")]
            wrong = await http.post(CHAT, json={"model": "fake", "messages": ABC})
            second = await http.post(CHAT, json={"model": "other", "messages": ABC, "max_tokens": 1})
            card = await http.get("/v1/models/other")
            return unknown, method, large, chunked, models, version, plan, wrong, second, card

    unknown, method, large, chunked, models, version, plan, wrong, second, card = asyncio.run(main())
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "route_not_found")
    assert (method.status_code, method.json()["error"]["code"], method.headers["allow"]) == (
        405,
        "method_not_allowed",
        "POST",
    )
    assert [(a.status_code, a.json()["error"]["code"]) for a in (large, chunked)] == [(413, "body_too_large")] * 2
    assert [(m["id"], m["root"], m["max_model_len"]) for m in models["data"]] == [
        ("alias", "fake", 512),
        ("other", "fake", 512),
    ]
    assert (second.status_code, second.json()["model"], card.json()["id"]) == (200, "alias", "other")
    assert set(version) == {"version"}
    assert plan == {"cells": []}
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (404, "model")


def test_health_through_the_life_of_an_engine(stack):
    made = stack(make=SlowLoad)

    async def main():
        async with made.http(start=False) as http:
            starting = asyncio.create_task(made.service.start())
            await asyncio.sleep(0.05)
            seen = [await http.get("/health"), await http.post(CHAT, json={"messages": ABC}), await http.get("/plan")]
            assert (await http.get("/v1/models")).json()["data"][0]["max_model_len"] is None
            await starting
            seen.append(await http.get("/health"))
            running = asyncio.create_task(http.post(COMPLETIONS, json={"prompt": "abc", "max_tokens": 100}))
            await submitted(made, 1)
            draining = asyncio.create_task(made.client.drain(10))
            await asyncio.sleep(0)
            seen += [await http.get("/health"), await http.post(CHAT, json={"messages": ABC})]
            assert (await running).json()["usage"]["completion_tokens"] == 100
            assert await draining
            await made.client.close()
            seen += [await http.get("/health"), await http.post(CHAT, json={"messages": ABC})]
            return seen

    seen = asyncio.run(main())
    assert [answer.status_code for answer in seen] == [503, 503, 503, 200, 503, 503, 503, 503]
    assert [seen[i].json()["status"] for i in (0, 3, 4, 6)] == ["loading", "ready", "draining", "dead"]
    assert all(answer.headers["retry-after"] for answer in seen if answer.status_code == 503)


def test_death_is_503_for_running_requests(stack):
    made = stack()

    async def main():
        async with made.http() as http:
            body = {"prompt": "!raise", "max_tokens": 9}
            return (
                await http.post(COMPLETIONS, json=body),
                await http.post(COMPLETIONS, json=body),
                await http.get("/health"),
            )

    first, second, health = asyncio.run(main())
    assert [a.status_code for a in (first, second, health)] == [503, 503, 503]
    assert "a device error" in first.json()["error"]["message"]
    assert "a device error" in health.json()["reason"]


def test_queue_full_is_429(stack):
    made = stack(max_num_seqs=1, max_waiting=1)

    async def main():
        async with made.http() as http:
            running = [
                asyncio.create_task(http.post(COMPLETIONS, json={"prompt": "abc", "max_tokens": 250})) for _ in range(2)
            ]
            await submitted(made, 2)
            full = await http.post(COMPLETIONS, json={"prompt": "abc"})
            done = [(await task).status_code for task in running]
            again = await http.post(COMPLETIONS, json={"prompt": "abc"})
            several = await http.post(COMPLETIONS, json={"prompt": ["a", "b", "c"]})  # can never be taken
            return full, done, again, several

    full, done, again, several = asyncio.run(main())
    assert (full.status_code, full.headers["retry-after"], full.json()["error"]["code"]) == (429, "1", "queue_full")
    assert (done, again.status_code, several.status_code) == ([200, 200], 200, 400)


def test_waiting_streams_are_pinged(stack, monkeypatch):
    monkeypatch.setattr("offroad.serve.openai.PING_SECONDS", 0.02)
    made = stack()

    async def main():
        async with made.http() as http:
            task = asyncio.create_task(http.post(COMPLETIONS, json={"prompt": "!never", "stream": True}))
            await submitted(made, 1)
            await asyncio.sleep(0.2)
            await made.client.drain(0)
            return (await task).text

    text = asyncio.run(main())
    frames = text.split("\n\n")
    assert frames[0] == ": ping"
    assert "shutting down" in json.loads(frames[-3].removeprefix("data: "))["error"]["message"]
    assert frames[-2:] == ["data: [DONE]", ""]


def test_metrics(stack):
    made = stack()

    async def main():
        async with made.http() as http:
            await http.post(COMPLETIONS, json={"prompt": "abc", "max_tokens": 5, "n": 2})
            await http.post(COMPLETIONS, json={"prompt": "x!eos2"})
            return (await http.get("/metrics")).text

    lines = dict(line.rsplit(" ", 1) for line in asyncio.run(main()).splitlines() if not line.startswith("#"))
    expected = {
        "offroad_num_requests_running": 0,
        "offroad_kv_cache_usage_ratio": 0,
        "offroad_prompt_tokens_total": 9,
        "offroad_generation_tokens_total": 13,
        "offroad_prefix_cache_matched_tokens_total": 8,
        "offroad_prefix_cache_resumed_tokens_total": 4,
        "offroad_preemptions_total": 0,
        "offroad_engine_restarts_total": 0,
        'offroad_request_success_total{finished_reason="length"}': 2,
        'offroad_request_success_total{finished_reason="stop"}': 1,
        "offroad_time_to_first_token_seconds_count": 2,
        "offroad_inter_token_latency_seconds_count": 4 * 2 + 2,
        "offroad_e2e_request_latency_seconds_count": 3,
        "offroad_prefix_cache_queries_total": 0,
        "offroad_num_requests_waiting": 0,
    }
    assert {name: float(lines[name]) for name in expected} == expected


def test_defects_are_500_without_details(stack, monkeypatch):
    made = stack()

    async def main():
        async with made.http() as http:
            monkeypatch.setattr(made.service.text, "chat", lambda *a, **k: 1 / 0)
            return await http.post(CHAT, json={"messages": ABC})

    answer = asyncio.run(main())
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")
