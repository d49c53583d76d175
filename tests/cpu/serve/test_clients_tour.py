"""The clients of OpenAI and Anthropic, as they come, on a tour: talks with tools, streams, formats, errors, retries."""

from __future__ import annotations

import json

import openai
import pytest
from played import SCHEMA, played
from pydantic import BaseModel

anthropic = pytest.importorskip("anthropic")

TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}
ASKED = "What is the weather in Oslo and Rome?"
DEGREES = {"Oslo": "Oslo: -3 degrees", "Rome": "Rome: 18 degrees"}
TOLD = "It is -3 in Oslo and 18 in Rome."


class City(BaseModel):
    city: str


@pytest.fixture(scope="module")
def server():
    running = played()
    yield running
    running.close()


@pytest.fixture
def gpt(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=20) as made:
        yield made


@pytest.fixture
def claude(server):
    with anthropic.Anthropic(base_url=server.url, api_key="none", timeout=20) as made:
        yield made


def test_chat_with_tools(gpt):
    messages: list = [{"role": "user", "content": ASKED}]
    first = gpt.chat.completions.create(model="fake", messages=messages, tools=[TOOL]).choices[0]
    assert (first.finish_reason, first.message.reasoning_content) == ("tool_calls", "Let me think.")
    messages.append(first.message)
    for call in first.message.tool_calls:
        city = json.loads(call.function.arguments)["city"]
        messages.append({"role": "tool", "tool_call_id": call.id, "content": DEGREES[city]})
    assert len(messages) == 4
    last = gpt.chat.completions.create(model="fake", messages=messages, tools=[TOOL])
    assert last.choices[0].message.content == TOLD
    assert last.usage.completion_tokens_details.reasoning_tokens == len("Let me think.\n</think>")


def test_chat_streamed(gpt):
    with gpt.chat.completions.stream(
        model="fake",
        messages=[{"role": "user", "content": ASKED}],
        tools=[TOOL | {"function": TOOL["function"] | {"strict": True}}],
    ) as stream:
        final = stream.get_final_completion()
    calls = final.choices[0].message.tool_calls
    assert [call.function.parsed_arguments for call in calls] == [{"city": "Oslo"}, {"city": "Rome"}]


def test_formats(gpt):
    messages = [{"role": "user", "content": "JSON please"}]
    answer = gpt.chat.completions.parse(model="fake", messages=messages, response_format=City)
    assert answer.choices[0].message.parsed == City(city="Oslo")
    assert gpt.responses.parse(model="fake", input="JSON please", text_format=City).output_parsed == City(city="Oslo")


def test_responses_with_tools(gpt):
    tool = {"type": "function", "name": "get_weather", "parameters": SCHEMA, "strict": None}
    items: list = [{"role": "user", "content": ASKED}]
    with gpt.responses.stream(model="fake", input=items, tools=[tool]) as stream:
        first = stream.get_final_response()
    assert [item.type for item in first.output] == ["reasoning", "function_call", "function_call"]
    items += first.output
    for call in first.output[1:]:
        output = DEGREES[json.loads(call.arguments)["city"]]
        items.append({"type": "function_call_output", "call_id": call.call_id, "output": output})
    assert gpt.responses.create(model="fake", input=items, tools=[tool]).output_text == TOLD


def test_messages_with_tools(claude):
    tool = {"name": "get_weather", "input_schema": SCHEMA}
    messages: list = [{"role": "user", "content": ASKED}]
    with claude.messages.stream(model="fake", messages=messages, tools=[tool], max_tokens=300) as stream:
        first = stream.get_final_message()
    assert [block.type for block in first.content] == ["thinking", "tool_use", "tool_use"]
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": DEGREES[block.input["city"]]}
        for block in first.content[1:]
    ]
    messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
    last = claude.messages.create(model="fake", messages=messages, tools=[tool], max_tokens=300)
    assert (last.content[-1].text, last.stop_reason) == (TOLD, "end_turn")
    count = claude.messages.count_tokens(model="fake", messages=messages, tools=[tool])
    assert count.input_tokens == last.usage.input_tokens + last.usage.cache_read_input_tokens


def test_errors(gpt, claude):
    for ask in (
        lambda **more: gpt.chat.completions.create(messages=[{"role": "user", "content": "x"}], **more),
        lambda **more: gpt.responses.create(input="x", **more),
    ):
        with pytest.raises(openai.NotFoundError):
            ask(model="other")
        with pytest.raises(openai.BadRequestError) as refused:
            ask(model="fake", temperature=-1.0)
        assert refused.value.body["param"] == "temperature"
    with pytest.raises(anthropic.NotFoundError):
        claude.messages.create(model="other", messages=[{"role": "user", "content": "x"}], max_tokens=3)


@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
def test_a_client_tries_again(gpt, claude, server, api):
    server.stack.engine.busy = 1
    if api == "chat":
        answer = gpt.chat.completions.create(model="fake", messages=[{"role": "user", "content": "x"}])
        text = answer.choices[0].message.content
    elif api == "responses":
        text = gpt.responses.create(model="fake", input="x").output_text
    else:
        answer = claude.messages.create(model="fake", messages=[{"role": "user", "content": "x"}], max_tokens=99)
        text = answer.content[-1].text
    assert (text, server.stack.engine.busy) == ("Hello, you < 3.", 0)
