"""Anthropic's own client against an engine that says a script; and the routes that count and cut into tokens."""

from __future__ import annotations

import httpx
import pytest
from fake_engine import Scripted
from serve_stack import Stack, Wire

from offroad.text.answer import Notation
from offroad.text.reasoning import THINK

anthropic = pytest.importorskip("anthropic")

ABC = [{"role": "user", "content": "abc"}]
TOOL = {
    "name": "search",
    "description": "Looks.",
    "input_schema": {"type": "object", "properties": {"n": {"type": "integer"}}},
}
READS = frozenset({"tools", "enable_thinking", "reasoning_effort"})
CALL = "<tool_call>\n<function=search>\n<parameter=n>\n{}\n</parameter>\n</function>\n</tool_call>"
SAYS = "I think.</think>\n\nLet me look.\n" + CALL.format(1) + "\n" + CALL.format(2)


@pytest.fixture(scope="module")
def scripted():
    running = Wire(Stack(make=Scripted))
    yield running
    running.close()


@pytest.fixture
def client(scripted):
    set_up(scripted, "")
    with anthropic.Anthropic(base_url=scripted.url, api_key="none", max_retries=0, timeout=20) as made:
        yield made


def set_up(scripted, says: str, ending: str = "") -> None:
    scripted.stack.engine.says = says
    text = scripted.stack.service.text
    text.notation, text.ending, text.tokens = (
        Notation(THINK, "qwen3_xml", READS),
        ending,
        {"<think>": 199, "</think>": 200},
    )


def ask(client, stream: bool, **more):
    given = dict(model="fake", messages=ABC, max_tokens=300) | more
    if not stream:
        return client.messages.create(**given)
    with client.messages.stream(**given) as events:
        return events.get_final_message()


both = pytest.mark.parametrize("stream", [False, True])


@both
def test_text(client, scripted, stream):
    set_up(scripted, "Hello.")
    message = ask(
        client, stream, system=[{"type": "text", "text": "Be kind. ", "cache_control": {"type": "ephemeral"}}]
    )
    [block] = message.content
    assert (block.type, block.text, message.stop_reason, message.role) == ("text", "Hello.", "end_turn", "assistant")
    usage = message.usage
    assert (usage.input_tokens + usage.cache_read_input_tokens, usage.output_tokens) == (len("Be kind. abc"), 7)
    assert message.id.startswith("msg_")
    cut = ask(client, stream, max_tokens=3)
    assert (cut.content[0].text, cut.stop_reason) == ("Hel", "max_tokens")
    stopped = ask(client, stream, stop_sequences=["lo"])
    assert (stopped.content[0].text, stopped.stop_reason, stopped.stop_sequence) == ("Hel", "stop_sequence", "lo")


@both
def test_thoughts_and_calls(client, scripted, stream):
    set_up(scripted, SAYS, ending="<think>\n")
    message = ask(client, stream, tools=[TOOL], thinking={"type": "enabled", "budget_tokens": 50})
    thoughts, text, *calls = message.content
    assert (thoughts.type, thoughts.thinking, text.text) == ("thinking", "I think.", "Let me look.")
    assert [(call.type, call.name, call.input) for call in calls] == [("tool_use", "search", {"n": n}) for n in (1, 2)]
    assert message.stop_reason == "tool_use"
    given = scripted.stack.service.text.options
    assert (given["enable_thinking"], given["tools"][0]["function"]["parameters"]) == (True, TOOL["input_schema"])
    assert scripted.stack.engine.seen[-1].guide.thinking.budget == 50
    one = ask(client, stream, tools=[TOOL], tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert [block.type for block in one.content] == ["thinking", "text", "tool_use"]


@both
def test_thoughts_that_are_cut_off(client, scripted, stream):
    set_up(scripted, SAYS, ending="<think>\n")
    message = ask(client, stream, max_tokens=5)
    [thoughts] = message.content
    assert (thoughts.thinking, message.stop_reason) == ("I thi", "max_tokens")


def test_two_rounds(client, scripted):
    set_up(scripted, SAYS, ending="<think>\n")
    first = ask(client, False, tools=[TOOL])
    results = [
        {"type": "tool_result", "tool_use_id": b.id, "content": [{"type": "text", "text": f"r{b.input['n']}"}]}
        for b in first.content
        if b.type == "tool_use"
    ]
    results[1]["is_error"] = True
    seen = []
    text = scripted.stack.service.text
    render = text.chat
    text.chat = lambda messages, **options: (seen.extend(messages), render(messages, **options))[1]
    try:
        set_up(scripted, "Done.")
        again = [*ABC, {"role": "assistant", "content": first.content}]
        again.append({"role": "user", "content": [*results, {"type": "text", "text": "And?"}]})
        assert ask(client, False, messages=again, tools=[TOOL]).content[0].text == "Done."
    finally:
        text.chat = render
    assert [m["role"] for m in seen] == ["user", "assistant", "tool", "tool", "user"]
    answer, one, two = seen[1:4]
    assert (answer["reasoning_content"], answer["content"]) == ("I think.", "Let me look.")
    assert [c["function"] for c in answer["tool_calls"]] == [
        {"name": "search", "arguments": f'{{"n":{n}}}'} for n in (1, 2)
    ]
    assert (one["content"], two["content"]) == ("r1", "Error: r2")
    assert [m["tool_call_id"] for m in (one, two)] == [c["id"] for c in answer["tool_calls"]]


def test_choice_and_prefill(client, scripted):
    set_up(scripted, '{"n": 3}')
    message = ask(client, False, tools=[TOOL], tool_choice={"type": "tool", "name": "search"})
    assert (message.content[0].input, message.stop_reason) == ({"n": 3}, "tool_use")
    set_up(scripted, "lo.")
    ask(client, False, messages=[*ABC, {"role": "assistant", "content": "Hel"}])
    given = scripted.stack.service.text.options
    assert (given["continue"], given["add"]) == (True, False)


def test_errors(client, scripted):
    with pytest.raises(anthropic.NotFoundError) as unknown:
        ask(client, False, model="other")
    assert unknown.value.body["type"] == "error"
    assert unknown.value.body["error"]["type"] == "not_found_error"
    image = {"type": "image", "source": {"type": "url", "url": "x"}}
    for more, param in (
        ({"messages": [{"role": "user", "content": [image]}]}, "messages.0.content.0.type"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "x", "name": "y", "input": {}}]}]},
            "messages.0.content.0.type",
        ),
        ({"extra_body": {"temperature": 500.0}}, "temperature"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"extra_body": {"colour": 1}}, "colour"),
        ({"max_tokens": 9999}, "max_tokens"),
        ({"stop_sequences": [""]}, "stop_sequences"),
    ):
        for stream in (False, True):
            with pytest.raises(anthropic.BadRequestError) as refused:
                ask(client, stream, **more)
            assert refused.value.body["error"]["param"] == param


def test_events_on_the_wire(scripted):
    set_up(scripted, "Hi.")
    body = {"messages": ABC, "max_tokens": 9, "stream": True}
    text = httpx.post(f"{scripted.url}/v1/messages", json=body).text
    kinds = [line.removeprefix("event: ") for line in text.splitlines() if line.startswith("event: ")]
    assert kinds == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]


def test_counting_and_cutting_into_tokens(client, scripted):
    set_up(scripted, "", ending="<think>\n")
    count = client.messages.count_tokens(model="fake", messages=ABC, system="Hi ", tools=[TOOL])
    assert count.input_tokens == len("Hi abc<think>\n")

    def post(path: str, **body):
        return httpx.post(f"{scripted.url}{path}", json=body).json()

    cut = post("/tokenize", prompt="aé", return_token_strs=True)
    assert (cut["count"], cut["tokens"], cut["max_model_len"]) == (3, list("aé".encode()), 512)
    assert len(cut["token_strs"]) == 3
    assert post("/tokenize", messages=ABC)["tokens"] == list(b"abc<think>\n")
    assert post("/detokenize", tokens=cut["tokens"]) == {"prompt": "aé"}
    assert post("/detokenize", tokens=[9999])["error"]["param"] == "tokens"
    assert post("/tokenize", prompt="a", messages=ABC)["error"]["param"] == "prompt"
    assert post("/tokenize", messages=[{"role": "x"}])["error"]["param"].startswith("messages.0")


def test_blocks_are_in_order_however_many_tokens_come_at_once(client, scripted, monkeypatch):
    set_up(scripted, f"I think.</think>\n\nLook.\n{CALL.format(1)}\nAgain:\n{CALL.format(2)}\nDone.", "<think>\n")
    for pace in (1, 2, *range(11, 39, 3), 500):
        monkeypatch.setattr(scripted.stack.engine, "pace", pace)
        answer = ask(client, True, tools=[TOOL])
        said = [(block.type, getattr(block, "text", None) or getattr(block, "input", None)) for block in answer.content]
        assert said == [
            ("thinking", None),
            ("text", "Look."),
            ("tool_use", {"n": 1}),
            ("text", "Again:"),
            ("tool_use", {"n": 2}),
            ("text", "Done."),
        ], pace
