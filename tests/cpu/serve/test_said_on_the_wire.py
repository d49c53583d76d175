"""Thoughts and calls of tools as OpenAI's own client gets them, streamed and not, from an engine that says a script."""

from __future__ import annotations

import json
from types import SimpleNamespace

import httpx
import openai
import pytest
from fake_engine import Scripted
from serve_stack import Stack, Wire

from offroad.text.answer import Notation
from offroad.text.reasoning import CHANNEL, DSML_THINK, THINK

ABC = [{"role": "user", "content": "abc"}]
SEARCH = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Looks things up.",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}, "limit": {"type": "integer"}}},
    },
}
NOW = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
XML = (
    "Let me look.\n<tool_call>\n<function=search>\n<parameter=query>\na < b\n</parameter>\n"
    "<parameter=limit>\n7\n</parameter>\n</function>\n</tool_call>\n"
)
XML_NOW = "<tool_call>\n<function=now>\n</function>\n</tool_call>"
CALLS = [("search", {"query": "a < b", "limit": 7}), ("now", {})]
READS = frozenset({"tools", "enable_thinking", "reasoning_effort"})


@pytest.fixture(scope="module")
def scripted():
    running = Wire(Stack(make=Scripted))
    yield running
    running.close()


@pytest.fixture
def client(scripted):
    set_up(scripted, "")
    with openai.OpenAI(base_url=f"{scripted.url}/v1", api_key="none", max_retries=0, timeout=20) as made:
        yield made


def set_up(scripted, says: str, notation: Notation = Notation(THINK, "qwen3_xml", READS), ending: str = "") -> None:
    scripted.stack.engine.says = says
    scripted.stack.service.text.notation = notation
    scripted.stack.service.text.ending = ending


def asked(client, stream: bool, **more) -> SimpleNamespace:
    """(reasoning, content, calls, finish reason) of one answer; a stream is put together as clients do it."""
    given = dict(model="fake", messages=ABC) | more
    answer = client.chat.completions.create(**given, stream=stream)
    if not stream:
        [choice] = answer.choices
        message = choice.message
        calls = [(c.id, c.function.name, c.function.arguments) for c in message.tool_calls or ()]
        reasoning = getattr(message, "reasoning_content", None)
        assert getattr(message, "reasoning", None) == reasoning
        return SimpleNamespace(
            reasoning=reasoning or "", content=message.content, calls=calls, finish=choice.finish_reason
        )
    said = SimpleNamespace(reasoning="", content="", calls=[], finish=None)
    for chunk in answer:
        [choice] = chunk.choices
        delta = choice.delta
        said.content += delta.content or ""
        said.reasoning += getattr(delta, "reasoning_content", None) or ""
        assert getattr(delta, "reasoning", None) == getattr(delta, "reasoning_content", None)
        for call in delta.tool_calls or ():
            if call.index == len(said.calls):
                assert call.type == "function"
                said.calls.append((call.id, call.function.name, ""))
            id, name, arguments = said.calls[call.index]
            said.calls[call.index] = (id, name, arguments + call.function.arguments)
        said.finish = choice.finish_reason or said.finish
    return said


def told(calls: list[tuple[str, str, str]]) -> list:
    assert all(id.startswith("call_") for id, _, _ in calls)
    assert len({id for id, _, _ in calls}) == len(calls)
    return [(name, json.loads(arguments)) for _, name, arguments in calls]


both = pytest.mark.parametrize("stream", [False, True])


@both
@pytest.mark.parametrize(
    ("says", "ending", "reasoning", "content"),
    [
        ("I think.\n</think>\n\nAnswer.", "<think>\n", "I think.", "Answer."),
        ("<think>\nhm\n</think>\nyes", "", "hm", "yes"),
        ("Answer </think> only.", "<think>\n\n</think>\n\n", "", "Answer </think> only."),
        ("I see <tool_call> in the text.\n</think>ok", "<think>\n", "I see <tool_call> in the text.", "ok"),
    ],
)
def test_thoughts(client, scripted, stream, says, ending, reasoning, content):
    set_up(scripted, says, ending=ending)
    said = asked(client, stream)
    assert (said.reasoning, said.content, said.finish) == (reasoning, content, "stop")


@both
def test_thoughts_that_are_cut_off_are_thoughts(client, scripted, stream):
    set_up(scripted, "I think for a long time.</think>Answer", ending="<think>\n")
    said = asked(client, stream, max_tokens=12)
    assert (said.reasoning, said.content, said.finish) == ("I think for", "", "length")
    stopped = asked(client, stream, stop=["long"])
    assert (stopped.reasoning, stopped.content, stopped.finish) == ("I think for a", "", "stop")


@pytest.mark.parametrize(
    ("says", "ending", "more", "count"),
    [
        ("I think.</think>\n\nAnswer.", "<think>\n", {}, len("I think.</think>")),
        ("<think>\nhm</think>yes", "", {}, len("<think>\nhm</think>")),
        ("  no thoughts", "", {}, 0),
        ("<thin", "", {}, 0),
        ("Answer </think> only.", "<think>\n\n</think>\n\n", {}, 0),
        ("</think>", "<think>\n", {}, len("</think>")),
        ("I think for long", "<think>\n", {"max_tokens": 7}, 7),
        ("I think for long", "<think>\n", {"stop": "for"}, len("I think for")),
        ("I think.</think>Answer", "<think>\n", {"n": 2}, 2 * len("I think.</think>")),
        (f"Hm.{XML_NOW}", "<think>\n", {"tools": [NOW]}, len("Hm.<tool_call>")),
    ],
)
def test_tokens_of_thoughts_are_counted(client, scripted, says, ending, more, count):
    set_up(scripted, says, ending=ending)
    usage = client.chat.completions.create(model="fake", messages=ABC, **more).usage
    assert usage.completion_tokens_details.reasoning_tokens == count


@both
def test_thoughts_need_not_be_shown(client, scripted, stream):
    set_up(scripted, "I think.</think>Answer", ending="<think>\n")
    said = asked(client, stream, extra_body={"include_reasoning": False})
    assert (said.reasoning, said.content) == ("", "Answer")


@both
def test_channels(client, scripted, stream):
    set_up(scripted, "<|channel>thought\nhm\n<channel|>yes", Notation(CHANNEL, "gemma4", READS))
    said = asked(client, stream)
    assert (said.reasoning, said.content) == ("hm", "yes")


DSML = Notation(DSML_THINK, "deepseek_v4", frozenset({"tools", "thinking", "reasoning_effort"}))


@both
def test_dsml(client, scripted, stream):
    call = (
        '<｜DSML｜invoke name="search">\n<｜DSML｜parameter name="query" string="true">a < b</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="limit" string="false">7</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
    )
    says = f"Hm.</think>Let me look.\n\n<｜DSML｜tool_calls>\n{call}{call}</｜DSML｜tool_calls>"
    set_up(scripted, says, DSML, "<think>")
    said = asked(client, stream, tools=[SEARCH, NOW], extra_body={"thinking": {"type": "enabled"}})
    assert (said.reasoning, said.content, said.finish) == ("Hm.", "Let me look.", "tool_calls")
    assert told(said.calls) == [CALLS[0]] * 2


@pytest.mark.parametrize(
    ("more", "options"),
    [
        ({"thinking": {"type": "disabled"}}, {"thinking": False}),
        ({"thinking": True, "reasoning_effort": "max"}, {"thinking": True, "reasoning_effort": "max"}),
        ({"reasoning_effort": "none"}, {"thinking": False}),
        ({"enable_thinking": True}, {"thinking": True}),
        ({"chat_template_kwargs": {"thinking": True}}, {"thinking": True}),
    ],
)
def test_switches_of_a_template_that_calls_them_otherwise(client, scripted, more, options):
    set_up(scripted, "x", DSML)
    asked(client, False, extra_body=more)
    given = scripted.stack.service.text.options
    assert {name: given[name] for name in given if name not in ("add", "continue")} == options


@both
def test_a_model_without_thoughts_says_tags_as_text(client, scripted, stream):
    set_up(scripted, "a</think>b", Notation())
    assert asked(client, stream).content == "a</think>b"


@both
def test_calls(client, scripted, stream):
    set_up(scripted, f"Hm.</think>{XML}{XML_NOW}", ending="<think>\n")
    said = asked(client, stream, tools=[SEARCH, NOW])
    assert (said.reasoning, said.content, said.finish) == ("Hm.", "Let me look.", "tool_calls")
    assert told(said.calls) == CALLS
    assert scripted.stack.service.text.options["tools"] == [SEARCH, NOW]
    one = asked(client, stream, tools=[SEARCH, NOW], parallel_tool_calls=False)
    assert (told(one.calls), one.finish) == (CALLS[:1], "tool_calls")


@pytest.mark.parametrize("behind", ["", "\n\n", "\nThat was it."])
def test_tokens_behind_the_only_call_do_not_count(client, scripted, monkeypatch, behind):
    """As many drafts as were accepted come at once with the token that completes it."""
    set_up(scripted, XML + XML_NOW + behind)
    found = set()
    for pace in (1, 3, 64, 500):
        monkeypatch.setattr(scripted.stack.engine, "pace", pace)
        answer = client.chat.completions.create(
            model="fake", messages=ABC, tools=[SEARCH, NOW], parallel_tool_calls=False
        )
        [choice] = answer.choices
        found.add((answer.usage.completion_tokens, choice.message.content, choice.finish_reason))
        assert len(choice.message.tool_calls) == 1
    assert found == {(len(XML.partition("\n</tool_call>")[0]), "Let me look.", "tool_calls")}


def test_thoughts_amid_an_answer_count_however_many_tokens_come_at_once(client, scripted, monkeypatch):
    set_up(scripted, "why.</think>Look: <think>more</think>so", Notation(DSML_THINK, "deepseek_v4", READS), "<think>")
    counts = set()
    for pace in (1, 5, 14, 500):
        monkeypatch.setattr(scripted.stack.engine, "pace", pace)
        usage = client.chat.completions.create(model="fake", messages=ABC).usage
        counts.add(usage.completion_tokens_details.reasoning_tokens)
    assert len(counts) == 1


@both
def test_a_call_alone_has_no_content(client, scripted, stream):
    set_up(scripted, XML_NOW)
    said = asked(client, stream, tools=[NOW])
    assert (told(said.calls), said.content) == ([("now", {})], "" if stream else None)


@both
@pytest.mark.parametrize("notation", ["qwen3_xml", "hermes", "gemma4"])
def test_what_is_no_call_is_content(client, scripted, stream, notation):
    says = "<tool_call>{nothing</tool_call> <|tool_call>call<tool_call|>"
    set_up(scripted, says, Notation(None, notation, READS))
    said = asked(client, stream, tools=[NOW])
    assert (said.content, said.calls, said.finish) == (says, [], "stop")


@both
def test_a_call_that_is_cut_off_is_not_to_be_followed(client, scripted, stream):
    set_up(scripted, XML.removeprefix("Let me look.\n"))
    said = asked(client, stream, tools=[SEARCH], max_tokens=56)
    [(_, name, arguments)] = said.calls
    assert (name, arguments, said.finish) == ("search", '{"query": "a < b', "length")
    set_up(scripted, XML_NOW + "\n" + XML)
    said = asked(client, stream, tools=[SEARCH, NOW], max_tokens=len(XML_NOW) + 5)
    assert (told(said.calls), said.finish) == ([("now", {})], "tool_calls")


@both
def test_choice(client, scripted, stream):
    set_up(scripted, XML_NOW)
    none = asked(client, stream, tools=[NOW], tool_choice="none")
    assert (none.content, none.calls, none.finish) == (XML_NOW, [], "stop")
    assert "tools" not in scripted.stack.service.text.options
    scripted.stack.service.text.tokens = {"<think>": 199, "</think>": 200}
    set_up(scripted, '[{"name": "now", "parameters": {}}, {"name": "search", "parameters": {"limit": 1}}]')
    required = asked(client, stream, tools=[SEARCH, NOW], tool_choice="required")
    assert (told(required.calls), required.finish) == ([("now", {}), ("search", {"limit": 1})], "tool_calls")
    guide = scripted.stack.engine.seen[-1].guide
    schema = json.loads(guide.grammar.text)
    assert scripted.stack.engine.taught[0][97] == b"a"  # before any grammar came
    assert (guide.param, schema["minItems"], len(schema["items"]["anyOf"])) == ("tool_choice", 1, 2)
    set_up(scripted, '{"limit": 3}')
    choice = {"type": "function", "function": {"name": "search"}}
    named = asked(client, stream, tools=[SEARCH, NOW], tool_choice=choice)
    assert (told(named.calls), named.finish) == ([("search", {"limit": 3})], "tool_calls")
    guide = scripted.stack.engine.seen[-1].guide
    assert json.loads(guide.grammar.text) == SEARCH["function"]["parameters"]


def test_two_rounds(client, scripted):
    set_up(scripted, XML_NOW)
    first = client.chat.completions.create(model="fake", messages=ABC, tools=[NOW]).choices[0].message
    result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "noon"}
    set_up(scripted, "It is noon.")
    second = client.chat.completions.create(model="fake", messages=[*ABC, first, result], tools=[NOW])
    assert (second.choices[0].message.content, second.choices[0].finish_reason) == ("It is noon.", "stop")
    assert second.choices[0].message.tool_calls is None


def test_arguments_are_streamed(client, scripted):
    set_up(scripted, XML)
    stream = client.chat.completions.create(model="fake", messages=ABC, tools=[SEARCH], stream=True)
    deltas = [call for chunk in stream for call in chunk.choices[0].delta.tool_calls or ()]
    assert len(deltas) > 3
    assert deltas[0].id
    assert not any(delta.id for delta in deltas[1:])


def refusal(scripted, **more) -> dict:
    answer = httpx.post(f"{scripted.url}/v1/chat/completions", json={"messages": ABC} | more)
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


def test_what_a_template_cannot_do_is_refused(scripted):
    set_up(scripted, "", Notation(THINK, "hermes", frozenset()))
    assert "has no place for tools" in refusal(scripted, tools=[NOW])["message"]
    assert "always thinks" in refusal(scripted, reasoning_effort="none")["message"]
    set_up(scripted, "", Notation(None, None, READS))
    assert "--tool-call-parser" in refusal(scripted, tools=[NOW])["message"]
    set_up(scripted, "", Notation())
    assert refusal(scripted, reasoning_effort="low")["param"] == "reasoning_effort"


@pytest.mark.parametrize(
    ("more", "options"),
    [
        ({}, {}),
        ({"enable_thinking": False}, {"enable_thinking": False}),
        ({"thinking": {"type": "enabled"}}, {"enable_thinking": True}),
        ({"reasoning_effort": "none"}, {"enable_thinking": False}),
        ({"reasoning_effort": "minimal"}, {"enable_thinking": True, "reasoning_effort": "minimal"}),
        ({"chat_template_kwargs": {"enable_thinking": False}}, {"enable_thinking": False}),
    ],
)
def test_switches_of_thoughts_reach_the_template(client, scripted, more, options):
    set_up(scripted, "x")
    asked(client, False, extra_body=more)
    given = scripted.stack.service.text.options
    assert {name: given[name] for name in given if name not in ("add", "continue")} == options


def test_defaults_of_the_server_give_way_to_the_request():
    made = Wire(Stack(make=Scripted, default_chat_template_kwargs='{"enable_thinking": false, "style": "x"}'))
    try:
        set_up(made, "x")
        for more, expected in (({}, False), ({"enable_thinking": True}, True), ({"reasoning_effort": "low"}, True)):
            body = {"messages": ABC} | more
            assert httpx.post(f"{made.url}/v1/chat/completions", json=body).status_code == 200
            options = made.stack.service.text.options
            assert (options["enable_thinking"], options["style"]) == (expected, "x")
    finally:
        made.close()


def test_a_budget_of_thoughts_reaches_the_engine(client, scripted):
    set_up(scripted, "a</think>b", ending="<think>\n")
    scripted.stack.service.text.tokens = {"</think>": 200}
    asked(client, False, extra_body={"thinking_token_budget": 5})
    guide = scripted.stack.engine.seen[-1].guide
    assert (guide.grammar, guide.thinking.end_id, guide.thinking.opened, guide.thinking.budget) == (None, 200, True, 5)
    scripted.stack.service.text.tokens = {}
    assert refusal(scripted, thinking_token_budget=5)["param"] == "thinking_token_budget"
