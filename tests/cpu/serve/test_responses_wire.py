"""/v1/responses as OpenAI's own client gets it, streamed and not, from an engine that says a script."""

from __future__ import annotations

import json
from itertools import pairwise

import httpx
import openai
import pytest
from fake_engine import FakeEngine, Scripted
from serve_stack import Stack, Wire

from offroad.text.answer import Notation
from offroad.text.reasoning import THINK

SEARCH = {
    "type": "function",
    "name": "search",
    "description": "Looks things up.",
    "parameters": {"type": "object", "properties": {"query": {"type": "string"}, "limit": {"type": "integer"}}},
    "strict": None,
}
NOW = {"type": "function", "name": "now", "parameters": {"type": "object", "properties": {}}}
XML = (
    "Let me look.\n<tool_call>\n<function=search>\n<parameter=query>\na < b\n</parameter>\n"
    "<parameter=limit>\n7\n</parameter>\n</function>\n</tool_call>\n"
)
XML_NOW = "<tool_call>\n<function=now>\n</function>\n</tool_call>"
READS = frozenset({"tools", "enable_thinking", "reasoning_effort"})
THINKING = "<think>\n"


class Either(Scripted):
    """Says its script, or what the prompt steers if there is none."""

    def submit(self, request) -> None:
        (super().submit if self.says else super(Scripted, self).submit)(request)

    def _event(self, key, entry):
        told = super()._event if isinstance(entry[1], list) else super(Scripted, self)._event
        return told(key, entry)


@pytest.fixture(scope="module")
def scripted():
    assert issubclass(Either, FakeEngine)
    running = Wire(Stack(make=Either))
    yield running
    running.close()


@pytest.fixture
def client(scripted):
    set_up(scripted, "")
    with openai.OpenAI(base_url=f"{scripted.url}/v1", api_key="none", max_retries=0, timeout=20) as made:
        yield made


def set_up(scripted, says: str, ending: str = "") -> None:
    scripted.stack.engine.says = says
    text = scripted.stack.service.text
    text.notation, text.ending = Notation(THINK, "qwen3_xml", READS), ending
    text.tokens = {"<think>": 199, "</think>": 200}


def ask(client, stream: bool, **more):
    """The response; a stream is put together by the client, and compared with what its last event says."""
    given = dict(model="fake", input="abc") | more
    if not stream:
        return client.responses.create(**given)
    with client.responses.stream(**given) as events:
        seen = list(events)
        assert [event.sequence_number for event in seen] == list(range(len(seen)))
        done = [event.item for event in seen if event.type == "response.output_item.done"]
        last = seen[-1].response
    assert [(item.id, item.status) for item in last.output] == [(item.id, item.status) for item in done]
    return last


def events_of(scripted, **body) -> list[dict]:
    with httpx.stream("POST", f"{scripted.url}/v1/responses", json={"input": "abc", "stream": True} | body) as answer:
        assert answer.status_code == 200, answer.read()
        lines = list(answer.iter_lines())
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    assert [line.removeprefix("event: ") for line in lines if line.startswith("event: ")] == [e["type"] for e in events]
    return events


def messages_of(scripted, client, **more) -> list[dict]:
    """The messages that the chat template gets."""
    seen: list[dict] = []
    text = scripted.stack.service.text
    render = text.chat
    text.chat = lambda messages, **options: (seen.extend(messages), render(messages, **options))[1]
    try:
        ask(client, False, **more)
    finally:
        text.chat = render
    return seen


both = pytest.mark.parametrize("stream", [False, True])


@both
def test_text(client, scripted, stream):
    set_up(scripted, "Hello.")
    answer = ask(client, stream, instructions="Be kind.", metadata={"a": "b"}, temperature=0.5)
    [message] = answer.output
    assert (message.type, message.role, message.status) == ("message", "assistant", "completed")
    assert (answer.output_text, answer.status, answer.incomplete_details) == ("Hello.", "completed", None)
    assert (answer.instructions, answer.metadata, answer.temperature) == ("Be kind.", {"a": "b"}, 0.5)
    assert (answer.id[:5], message.id[:4], answer.model, answer.object) == ("resp_", "msg_", "fake", "response")
    usage = answer.usage
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (11, 7, 18)
    assert usage.output_tokens_details.reasoning_tokens == 0


def test_cached_tokens(client, scripted):
    answer = ask(client, False, max_output_tokens=2)
    assert (answer.usage.input_tokens_details.cached_tokens, answer.output_text) == (1, "ab")


@both
def test_an_answer_that_is_cut_off(client, scripted, stream):
    set_up(scripted, "I think for a while.</think>\n\nHello.", THINKING)
    cut = ask(client, stream, max_output_tokens=32)
    thoughts, message = cut.output
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (thoughts.status, message.status, cut.output_text) == ("completed", "incomplete", "He")
    [thoughts] = ask(client, stream, max_output_tokens=7).output
    assert (thoughts.type, thoughts.status, thoughts.content[0].text) == ("reasoning", "incomplete", "I think")


@both
def test_thoughts_and_calls(client, scripted, stream):
    thoughts_said = "I think.</think>"
    set_up(scripted, f"{thoughts_said}\n\n{XML}{XML_NOW}", THINKING)
    answer = ask(client, stream, tools=[SEARCH, NOW], reasoning={"effort": "low", "summary": "auto"})
    thoughts, message, search, now = answer.output
    assert (thoughts.type, thoughts.content[0].text, thoughts.summary) == ("reasoning", "I think.", [])
    assert (message.content[0].text, answer.output_text) == ("Let me look.", "Let me look.")
    assert (search.type, search.name, json.loads(search.arguments)) == (
        "function_call",
        "search",
        {"query": "a < b", "limit": 7},
    )
    assert (now.name, now.arguments, now.status, answer.status) == ("now", "{}", "completed", "completed")
    assert len({search.call_id, now.call_id, search.id, now.id}) == 4
    assert search.call_id.startswith("call_")
    assert answer.usage.output_tokens_details.reasoning_tokens == len(thoughts_said)
    assert (answer.reasoning.effort, [tool.name for tool in answer.tools]) == ("low", ["search", "now"])
    given = scripted.stack.service.text.options
    assert (given["reasoning_effort"], given["enable_thinking"]) == ("low", True)
    assert given["tools"][1] == {"type": "function", "function": {"name": "now", "parameters": NOW["parameters"]}}
    one = ask(client, stream, tools=[SEARCH, NOW], parallel_tool_calls=False)
    assert [item.type for item in one.output] == ["reasoning", "message", "function_call"]


@both
def test_items_are_in_order_however_many_tokens_come_at_once(client, scripted, stream, monkeypatch):
    set_up(scripted, f"I think.</think>{XML}And now:\n{XML_NOW}\nDone.", THINKING)
    for pace in (1, 2, *range(11, 39, 3), 500):
        monkeypatch.setattr(scripted.stack.engine, "pace", pace)
        answer = ask(client, stream, tools=[SEARCH, NOW])
        said = [
            (item.name, json.loads(item.arguments)) if item.type == "function_call" else item.content[0].text
            for item in answer.output
        ]
        search, now = ("search", {"query": "a < b", "limit": 7}), ("now", {})
        assert said == ["I think.", "Let me look.", search, "And now:", now, "Done."], pace


@both
def test_a_call_that_is_cut_off_is_incomplete(client, scripted, stream):
    set_up(scripted, XML.removeprefix("Let me look.\n"))
    answer = ask(client, stream, tools=[SEARCH], max_output_tokens=56)
    [call] = answer.output
    assert (call.status, call.arguments, answer.status) == ("incomplete", '{"query": "a < b', "incomplete")


@both
def test_choice(client, scripted, stream):
    set_up(scripted, '{"limit": 3}')
    choice = {"type": "function", "name": "search"}
    answer = ask(client, stream, tools=[SEARCH], tool_choice=choice)
    assert (answer.output[0].arguments, answer.tool_choice.name) == ('{"limit": 3}', "search")
    assert json.loads(scripted.stack.engine.seen[-1].guide.grammar.text) == SEARCH["parameters"]
    set_up(scripted, XML_NOW)
    assert ask(client, stream, tools=[NOW], tool_choice="none").output_text == XML_NOW


def test_two_rounds(client, scripted):
    """The items of an answer go back as they are, with results."""
    set_up(scripted, f"I think.</think>{XML}{XML_NOW}", THINKING)
    first = ask(client, False, tools=[SEARCH, NOW], input=[{"role": "user", "content": "abc"}])
    calls = [item for item in first.output if item.type == "function_call"]
    results = [{"type": "function_call_output", "call_id": c.call_id, "output": f"of {c.name}"} for c in calls]
    results[1]["output"] = [{"type": "input_text", "text": "noon"}]
    history = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "abc"}]},
        *first.output,
        *results,
    ]
    set_up(scripted, "It is noon.")
    seen = messages_of(scripted, client, tools=[SEARCH, NOW], input=history, instructions="Be kind.")
    assert [m["role"] for m in seen] == ["system", "user", "assistant", "tool", "tool"]
    system, _, said, one, two = seen
    assert system["content"] == "Be kind.\n\nBe brief."
    assert (said["reasoning_content"], said["content"]) == ("I think.", "Let me look.")
    assert [c["id"] for c in said["tool_calls"]] == [c.call_id for c in calls]
    assert [json.loads(c["function"]["arguments"]) for c in said["tool_calls"]] == [{"query": "a < b", "limit": 7}, {}]
    assert [(m["tool_call_id"], m["content"]) for m in (one, two)] == [
        (calls[0].call_id, "of search"),
        (calls[1].call_id, "noon"),
    ]


def test_items_make_messages(client, scripted):
    def thought(text):
        return {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}

    def answer(text):
        return {"role": "assistant", "content": [{"type": "output_text", "text": text, "annotations": []}]}

    def call(id):
        return {"type": "function_call", "call_id": id, "name": "now", "arguments": "{}"}

    set_up(scripted, "x")
    history = [
        {"type": "message", "role": "user", "content": "u"},
        *(thought("t1"), call("c1"), call("c2")),
        *({"type": "function_call_output", "call_id": id, "output": "r"} for id in ("c1", "c2")),
        *(thought("t2"), call("c3")),
        {"type": "function_call_output", "call_id": "c3", "output": "r"},
        *(answer("a1"), answer("a2"), thought("t3"), answer("a3"), call("c4"), answer("a4")),
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}], "encrypted_content": None},
        {"role": "user", "content": "go on"},
    ]
    seen = messages_of(scripted, client, input=history)
    found = [
        (m["role"], m.get("reasoning_content"), m["content"], [c["id"] for c in m.get("tool_calls", ())]) for m in seen
    ]
    assert found == [
        ("user", None, "u", []),
        ("assistant", "t1", "", ["c1", "c2"]),
        ("tool", None, "r", []),
        ("tool", None, "r", []),
        ("assistant", "t2", "", ["c3"]),
        ("tool", None, "r", []),
        ("assistant", None, "a1", []),
        ("assistant", None, "a2", []),
        ("assistant", "t3", "a3\na4", ["c4"]),
        ("assistant", "s", "", []),
        ("user", None, "go on", []),
    ]


def test_the_order_of_events(scripted):
    set_up(scripted, f"Hm.</think>\n\nSo.\n{XML_NOW}", THINKING)
    events = events_of(scripted, tools=[NOW])
    kinds = [event["type"].removeprefix("response.") for event in events]
    once = [kinds[0], *(new for old, new in pairwise(kinds) if new != old or not new.endswith(".delta"))]
    assert once == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"),
        "completed",
    ]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    texts: dict[int, str] = {}
    for event in events:
        if event["type"].endswith(".delta"):
            texts[event["output_index"]] = texts.get(event["output_index"], "") + event["delta"]
        if event["type"].endswith("item.added"):
            assert event["item"]["status"] == "in_progress"
            assert not event["item"].get("content")
            assert not event["item"].get("arguments")
    assert texts == {0: "Hm.", 1: "So.", 2: "{}"}
    added, parts, done = (
        [e for e in events if e["type"] == f"response.{kind}"]
        for kind in ("output_item.added", "content_part.added", "output_item.done")
    )
    assert [part["part"]["text"] for part in parts] == ["", ""]
    assert [e["item"]["id"] for e in added] == [e["item"]["id"] for e in done]
    assert events[-1]["response"]["output"] == [e["item"] for e in done]
    assert (events[0]["response"]["status"], events[0]["response"]["output"]) == ("in_progress", [])
    assert (events[0]["response"]["usage"], events[-1]["response"]["usage"]["input_tokens"]) == (None, 11)


def test_an_answer_of_nothing_is_an_empty_message(scripted):
    set_up(scripted, "</think>", THINKING)
    events = events_of(scripted)
    [item] = events[-1]["response"]["output"]
    assert (item["type"], item["content"][0]["text"], events[-1]["type"]) == ("message", "", "response.completed")


@both
def test_formats(client, scripted, stream):
    set_up(scripted, '{"a": 1}')
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    format = {"type": "json_schema", "name": "thing", "schema": schema, "strict": True}
    answer = ask(client, stream, text={"format": format})
    grammar = scripted.stack.engine.seen[-1].guide.grammar
    assert (grammar.kind, json.loads(grammar.text), answer.output_text) == ("json_schema", schema, '{"a": 1}')
    assert answer.text.format.to_dict()["schema"] == schema
    ask(client, stream, text={"format": {"type": "json_object"}})
    assert scripted.stack.engine.seen[-1].guide.grammar.kind == "json_object"


def test_the_client_parses_a_format(client, scripted):
    from pydantic import BaseModel

    class Thing(BaseModel):
        a: int

    set_up(scripted, '{"a": 1}')
    assert client.responses.parse(model="fake", input="abc", text_format=Thing).output_parsed == Thing(a=1)
    with client.responses.stream(model="fake", input="abc", text_format=Thing) as events:
        assert events.get_final_response().output_parsed == Thing(a=1)


@both
@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"store": True}, "store"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"extra_body": {"colour": 1}}, "colour"),
        ({"max_output_tokens": 9999}, "max_output_tokens"),
        ({"input": "x" * 600}, "input"),
        ({"input": []}, "input"),
        ({"temperature": 500.0}, "temperature"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["file_search_call.results"]}, "include.0"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools.0.name"),
        ({"tools": [NOW, NOW]}, "tools"),
        ({"tool_choice": {"type": "function", "name": "nope"}}, "tool_choice"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"x": "wrong"}}}}, "text.format"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content.0.type"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0.type"),
        ({"input": [{"type": "reasoning", "encrypted_content": "x", "summary": []}]}, "input.0.encrypted_content"),
        ({"input": [{"type": "function_call", "name": "x", "arguments": "{}"}]}, "input.0.call_id"),
        ({"reasoning": {"effort": "none"}, "extra_body": {"enable_thinking": True}}, "reasoning.effort"),
        ({"input": "!refuse"}, "input"),
    ],
)
def test_refusals(client, scripted, stream, more, param):
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(**(dict(model="fake", input="abc", stream=stream) | more))
    assert refused.value.body["param"] == param
    if param == "max_output_tokens":
        assert "lower max_output_tokens" in refused.value.body["message"]


def test_other_errors(client, scripted):
    with pytest.raises(openai.NotFoundError):
        ask(client, False, model="other")
    with pytest.raises(openai.RateLimitError):
        ask(client, False, input="!full")
    with pytest.raises(openai.InternalServerError):
        ask(client, False, input="!nan")


def test_a_stream_that_fails_says_so(scripted):
    set_up(scripted, "")
    *_, error, failed = events_of(scripted, input="!nan and on")
    assert (error["type"], error["code"], failed["type"]) == ("error", "generation_failed", "response.failed")
    assert failed["response"]["error"]["message"] == error["message"]
    assert "layer 3" in error["message"]
    assert (failed["response"]["status"], failed["response"]["output"][0]["status"]) == ("failed", "incomplete")
