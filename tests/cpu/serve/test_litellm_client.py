"""LiteLLM, where it is installed (`pip install litellm`): as OpenAI's API, its newer one, and Anthropic's."""

from __future__ import annotations

import json
import os

import pytest
from played import SCHEMA, played

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks the network for prices
litellm = pytest.importorskip("litellm")

ASKED = {"role": "user", "content": "What is the weather in Oslo and Rome?"}
DEGREES = {"Oslo": "Oslo: -3 degrees", "Rome": "Rome: 18 degrees"}
TOOL = {"type": "function", "function": {"name": "get_weather", "description": "The weather.", "parameters": SCHEMA}}
TOLD = "It is -3 in Oslo and 18 in Rome."


@pytest.fixture(scope="module")
def server():
    running = played()
    yield running
    running.close()


@pytest.fixture(params=["openai", "hosted_vllm", "anthropic"])
def given(server, request):
    base = server.url if request.param == "anthropic" else f"{server.url}/v1"
    return {"model": f"{request.param}/fake", "api_base": base, "api_key": "none", "max_tokens": 300, "num_retries": 0}


@pytest.mark.parametrize("dumped", [False, True])
def test_a_tool_in_two_rounds(given, dumped):
    said = litellm.completion(messages=[ASKED], tools=[TOOL], **given).choices[0]
    calls = said.message.tool_calls
    assert [json.loads(call.function.arguments) for call in calls] == [{"city": "Oslo"}, {"city": "Rome"}]
    assert (said.finish_reason, said.message.reasoning_content) == ("tool_calls", "Let me think.")
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": DEGREES[json.loads(call.function.arguments)["city"]]}
        for call in calls
    ]
    message = said.message.model_dump() if dumped else said.message
    again = litellm.completion(messages=[ASKED, message, *results], tools=[TOOL], **given)
    assert again.choices[0].message.content == TOLD


def test_a_stream(given):
    chunks = list(litellm.completion(messages=[ASKED], tools=[TOOL], stream=True, **given))
    whole = litellm.stream_chunk_builder(chunks)
    calls = whole.choices[0].message.tool_calls
    assert [json.loads(call.function.arguments) for call in calls] == [{"city": "Oslo"}, {"city": "Rome"}]
    words = litellm.completion(messages=[{"role": "user", "content": "hi"}], stream=True, **given)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in words) == "Hello, you < 3."


def test_errors(given):
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(**given | {"model": given["model"].replace("fake", "other")}, messages=[ASKED])


def test_responses(server):
    given = {"model": "openai/fake", "api_base": f"{server.url}/v1", "api_key": "none"}
    tool = {"type": "function", "name": "get_weather", "parameters": SCHEMA}
    items: list = [ASKED]
    first = litellm.responses(input=items, tools=[tool], **given)
    calls = [item for item in first.output if item.type == "function_call"]
    assert [json.loads(call.arguments) for call in calls] == [{"city": "Oslo"}, {"city": "Rome"}]
    items += [item.model_dump(exclude_none=True) for item in first.output]
    for call in calls:
        output = DEGREES[json.loads(call.arguments)["city"]]
        items.append({"type": "function_call_output", "call_id": call.call_id, "output": output})
    last = litellm.responses(input=items, tools=[tool], **given)
    assert [item.content[0].text for item in last.output if item.type == "message"] == [TOLD]
    kinds = [
        str(getattr(event.type, "value", event.type)) for event in litellm.responses(input="hi", stream=True, **given)
    ]
    assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
