"""LangChain's ChatOpenAI, where it is installed: `pip install langchain-openai`."""

from __future__ import annotations

import openai
import pytest
from played import SCHEMA, played

langchain = pytest.importorskip("langchain_openai")

messages = pytest.importorskip("langchain_core.messages")

ASKED = messages.HumanMessage("What is the weather in Oslo and Rome?")
DEGREES = {"Oslo": "Oslo: -3 degrees", "Rome": "Rome: 18 degrees"}
TOOL = {"name": "get_weather", "description": "The weather.", "parameters": SCHEMA}


@pytest.fixture(scope="module")
def server():
    running = played()
    yield running
    running.close()


@pytest.fixture(params=[False, True], ids=["chat", "responses"])
def model(server, request):
    return langchain.ChatOpenAI(
        model="fake", base_url=f"{server.url}/v1", api_key="none", use_responses_api=request.param, max_retries=0
    )


def test_a_tool_in_two_rounds(model):
    bound = model.bind_tools([TOOL])
    said = bound.invoke([ASKED])
    assert [(call["name"], call["args"]) for call in said.tool_calls] == [
        ("get_weather", {"city": "Oslo"}),
        ("get_weather", {"city": "Rome"}),
    ]
    results = [messages.ToolMessage(DEGREES[call["args"]["city"]], tool_call_id=call["id"]) for call in said.tool_calls]
    assert bound.invoke([ASKED, said, *results]).text == "It is -3 in Oslo and 18 in Rome."


def test_a_stream(model):
    parts = list(model.bind_tools([TOOL]).stream([ASKED]))
    whole = parts[0]
    for part in parts[1:]:
        whole += part
    assert [call["args"] for call in whole.tool_calls] == [{"city": "Oslo"}, {"city": "Rome"}]
    assert "".join(part.text for part in model.stream("hi")) == "Hello, you < 3."
    assert model.invoke("hi").usage_metadata["output_token_details"]["reasoning"] == len("Let me think.\n</think>")


def test_choice_and_format(model):
    one = model.bind_tools([TOOL], tool_choice="get_weather").invoke([ASKED])
    assert [call["args"] for call in one.tool_calls] == [{"city": "Oslo"}]
    schema = {"title": "City", **SCHEMA}
    assert model.with_structured_output(schema, method="json_schema").invoke("JSON please") == {"city": "Oslo"}


def test_errors(model):
    with pytest.raises(openai.BadRequestError):
        model.invoke("hi", temperature=500.0)
