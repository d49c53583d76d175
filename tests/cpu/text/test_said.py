"""Thoughts and calls of tools in what models say: the same however the text is cut into pieces."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offroad.text.reasoning import CHANNEL, THINK, ReasoningParser
from offroad.text.tools.registry import TOOL_PARSERS, make_tool_parser, reasoning_parser_of, tool_parser_of

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "search",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string"},
                    "limit": {"type": "integer"},
                    "exact": {"type": "boolean"},
                    "tags": {"type": "array", "items": {"type": "string"}},
                    "filter": {"type": "object"},
                    "rate": {"anyOf": [{"type": "number"}, {"type": "null"}]},
                },
            },
        },
    },
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
]


def cut(text: str, sizes: list[int]) -> list[str]:
    """The text in pieces of these sizes, over and over."""
    out, at, i = [], 0, 0
    while at < len(text):
        out.append(text[at : at + sizes[i % len(sizes)]])
        at, i = at + sizes[i % len(sizes)], i + 1
    return out


def taken_apart(name: str, pieces: list[str]) -> tuple[str, list[list[str]]]:
    """(content, [name, arguments] of each call) of an answer in pieces."""
    parser = make_tool_parser(name, TOOLS)
    content, calls = "", []
    for said in [*map(parser.feed, pieces), parser.finish()]:
        content += said.content
        for piece in said.calls:
            if piece.index == len(calls):
                assert piece.name
                calls.append([piece.name, ""])
            else:
                assert piece.name is None
            assert piece.index == len(calls) - 1
            calls[-1][1] += piece.arguments
    assert parser.complete == len(calls)
    return content, calls


def read(name: str, text: str) -> tuple[str, list[tuple[str, Any]]]:
    content, calls = taken_apart(name, [text])
    return content, [(function, json.loads(arguments)) for function, arguments in calls]


XML = """Let me look.

<tool_call>
<function=search>
<parameter=query>
a < b & "c" \\ </p> 雪
two lines
</parameter>
<parameter=limit>
7
</parameter>
<parameter=tags>
["x", "y"]
</parameter>
</function>
</tool_call>
<tool_call>
<function=now>
</function>
</tool_call>"""
SAMPLES = {
    "qwen3_xml": [
        XML,
        "no call at all <tool_cal",
        "<tool_call>\nnot a function\n</tool_call> then text",
        "<function=search>\n<parameter=query>\nbare\n</function>",
        "<tool_call><function=search><parameter=query>\nx\n<parameter=exact>True</parameter></function></tool_call> ok",
        "text <function= and <function=now></function></tool_call>\n\n more ",
        "<tool_call>\n<function=search>\n<parameter=query>\ncut off in the mid",
    ],
    "hermes": [
        'Hm.\n<tool_call>\n{"name": "search", "arguments": {"query": "q", "limit": 3}}\n</tool_call>',
        '<tool_call>{"name": "now", "arguments": {}}</tool_call>\n<tool_call>{"name": "now"}</tool_call>',
        '<tool_call>{"name": "now", "arguments": {"x": }</tool_call> and on',
        '<tool_call>{"name": "search", "arguments": {"query": "unended"}}',
        "a <tool b  \n",
    ],
    "gemma4": [
        '<|tool_call>call:search{query:<|"|>a, {b}: [c]<|"|>,limit:3,exact:true,tags:[<|"|>x<|"|>,2.5],'
        'filter:{k:<|"|>v<|"|>,n:null}}<tool_call|><|tool_call>call:now{}<tool_call|>',
        "text <|tool_call>call:broken{a:<tool_call|> more",
        "<|tool_call>call:search{limit:1}",
    ],
    "llama3_json": [
        '{"name": "search", "parameters": {"query": "x"}}',
        '<|python_tag|>{"name": "now", "parameters": {}}; {"name": "search", "parameters": {"limit": 2}}',
        '{"not": "a call"}',
        "  plain text {",
    ],
    "deepseek_v4": [
        'Hm.\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="search">\n<｜DSML｜parameter name="query" string="true">'
        'a < b</｜DSML｜parameter>\n<｜DSML｜parameter name="limit" string="false">3</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜tool_calls>",
        "text <｜DSML｜tool_calls> and <｜DSML｜invoke name=> more",
        '<｜DSML｜invoke name="search"><｜DSML｜parameter name="arguments">{"limit": 1}</｜DSML｜parameter>',
    ],
    "json": [
        '[{"name": "now", "parameters": {}}, {"name": "search", "parameters": {"query": "[x]"}}]',
        '[{"name": "now"',
        "text [",
    ],
    "pythonic": [
        '[search(query="a, b", limit=2, tags=["x"], filter={"k": None}), now()]',
        "[1, 2, 3]",
        "[search(query=open('x'))]",
        "text",
    ],
}
CASES = [(name, text) for name, texts in SAMPLES.items() for text in texts]


@given(st.sampled_from(CASES), st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_pieces_do_not_matter(case: tuple[str, str], sizes: list[int]):
    name, text = case
    assert taken_apart(name, cut(text, sizes)) == taken_apart(name, [text])


@given(st.sampled_from(sorted(SAMPLES)), st.data())
def test_mixtures_of_tags_never_raise_and_pieces_do_not_matter(name: str, data: st.DataObject):
    tags = ["<tool_call>", "</tool_call>", "<function=search>", "<function=", "<parameter=query>", "</parameter>"]
    tags += [
        "</function>",
        "<|tool_call>",
        "<tool_call|>",
        "call:now{",
        "}",
        '<|"|>',
        "{",
        '"name": "now"',
        "[",
        "now()",
    ]
    tags += ["<｜DSML｜tool_calls>", '<｜DSML｜invoke name="search">', "</｜DSML｜invoke>", "</｜DSML｜tool_calls>"]
    tags += ['<｜DSML｜parameter name="limit" string="', 'true">', 'false">', "</｜DSML｜parameter>", "<｜DSML｜invoke"]
    tags += ['<｜DSML｜parameter name="arguments">', '{"limit": 1}', '"']
    tags += ["]", " ", "\n", "x", "<", "12", ",", ":"]
    text = "".join(data.draw(st.lists(st.sampled_from(tags), max_size=14)))
    sizes = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    content, calls = taken_apart(name, cut(text, sizes))
    assert (content, calls) == taken_apart(name, [text])
    for _, arguments in calls:
        assert isinstance(json.loads(arguments), dict)
    if not calls:
        assert content == text  # nothing is lost


def test_xml():
    content, calls = read("qwen3_xml", XML)
    assert content == "Let me look."
    query = 'a < b & "c" \\ </p> 雪\ntwo lines'
    assert calls == [("search", {"query": query, "limit": 7, "tags": ["x", "y"]}), ("now", {})]
    texts = SAMPLES["qwen3_xml"]
    assert read("qwen3_xml", texts[2]) == (texts[2], [])
    assert read("qwen3_xml", texts[3]) == ("", [("search", {"query": "bare"})])
    assert read("qwen3_xml", texts[4]) == ("ok", [("search", {"query": "x", "exact": True})])
    assert read("qwen3_xml", texts[5]) == ("text <function= andmore ", [("now", {})])
    assert read("qwen3_xml", texts[6]) == ("", [("search", {"query": "cut off in the mid"})])


def test_arguments_come_as_they_are_said():
    parser = make_tool_parser("qwen3_xml", TOOLS)
    parser.feed("<tool_call>\n<function=search>\n<parameter=query>\n")
    told = "".join(call.arguments for text in ("first ", "second ") for call in parser.feed(text).calls)
    assert told == '"query": "first second '


def test_other_notations():
    hermes, gemma, llama, python = (SAMPLES[name] for name in ("hermes", "gemma4", "llama3_json", "pythonic"))
    assert read("hermes", hermes[0]) == ("Hm.", [("search", {"query": "q", "limit": 3})])
    assert read("hermes", hermes[1]) == ("", [("now", {}), ("now", {})])
    assert read("hermes", hermes[2]) == (hermes[2], [])
    assert read("hermes", hermes[3]) == ("", [("search", {"query": "unended"})])
    values = {"query": "a, {b}: [c]", "limit": 3, "exact": True, "tags": ["x", 2.5], "filter": {"k": "v", "n": None}}
    assert read("gemma4", gemma[0]) == ("", [("search", values), ("now", {})])
    assert read("gemma4", gemma[1]) == (gemma[1], [])
    assert read("gemma4", gemma[2]) == ("", [("search", {"limit": 1})])
    assert read("llama3_json", llama[1]) == ("", [("now", {}), ("search", {"limit": 2})])
    values = {"query": "[x]"}
    assert read("json", SAMPLES["json"][0]) == ("", [("now", {}), ("search", values)])
    assert read("llama3_json", llama[2]) == (llama[2], [])
    values = {"query": "a, b", "limit": 2, "tags": ["x"], "filter": {"k": None}}
    assert read("pythonic", python[0]) == ("", [("search", values), ("now", {})])
    assert read("pythonic", python[2]) == (python[2], [])


def test_calls_before_a_cut_are_kept():
    """As a grammar makes them where a call is required: a small model may call until its tokens are used up."""
    one, other = '{"name": "now", "parameters": {}}', '{"name": "search", "parameters": {"query": "x, ]"}}'
    for behind in ("", ",", ', {"name": "sea', ', {"name": "search", "parameters": {"query": "y'):
        parser = make_tool_parser("json", TOOLS)
        said = [parser.feed(f"[\n{one},\n{other}{behind}"), parser.finish(cut=True)]
        calls = [(piece.name, json.loads(piece.arguments)) for part in said for piece in part.calls]
        assert calls == [("now", {}), ("search", {"query": "x, ]"})]
        assert "".join(part.content for part in said) == behind.removeprefix(",").lstrip()
        assert parser.complete == 2


@pytest.mark.parametrize(
    ("parameter", "text", "value"),
    [
        ("limit", "12", 12),
        ("limit", "12.0", 12),
        ("limit", "twelve", "twelve"),
        ("limit", "true", "true"),
        ("exact", "False", False),
        ("rate", "0.5", 0.5),
        ("rate", "None", None),
        ("query", "12", "12"),
        ("unheard_of", "12", "12"),
        ("filter", '{"a": [1]}', {"a": [1]}),
        ("filter", "[1]", "[1]"),
    ],
)
def test_values_by_schema(parameter: str, text: str, value: Any):
    call = f"<function=search><parameter={parameter}>\n{text}\n</parameter></function>"
    assert read("qwen3_xml", call)[1] == [("search", {parameter: value})]


def thoughts(pieces: list[str], opened: bool, tags=THINK) -> tuple[str, str]:
    parser = ReasoningParser(tags, opened)
    said = [*map(parser.feed, pieces), parser.finish()]
    return "".join(piece.reasoning for piece in said), "".join(piece.content for piece in said)


@pytest.mark.parametrize(
    ("text", "opened", "expected"),
    [
        ("\nI think.\n\nSo.\n</think>\n\nAnswer.\n", True, ("I think.\n\nSo.", "Answer.\n")),
        ("<think>\nhm\n</think>\nyes", False, ("hm", "yes")),
        ("  <think></think>yes", False, ("", "yes")),
        ("no thoughts < at all", False, ("", "no thoughts < at all")),
        ("cut off in the middle </thi", True, ("cut off in the middle </thi", "")),
        ("never closed\n<tool_call>\n<function=f>", True, ("never closed", "<tool_call>\n<function=f>")),
        ("", True, ("", "")),
        ("\n\n", True, ("", "")),
        ("a</think>b</think>c", True, ("a", "b</think>c")),
        ("<thin", False, ("", "<thin")),
    ],
)
def test_thoughts(text: str, opened: bool, expected: tuple[str, str]):
    assert thoughts([text], opened) == expected
    assert thoughts(list(text), opened) == expected


def test_channels():
    text = "<|channel>thought\nhm<channel|>yes"
    assert thoughts(list(text), False, CHANNEL) == ("hm", "yes")
    assert thoughts(["<|channel>thought\n<channel|>yes"], False, CHANNEL) == ("", "yes")
    assert thoughts(["yes"], False, CHANNEL) == ("", "yes")


def test_what_a_template_asks_for():
    assert set(SAMPLES) == set(TOOL_PARSERS)
    assert tool_parser_of("... <tool_call>\\n<function=example> ...") == "qwen3_xml"
    assert tool_parser_of('<tool_call>{"name"') == "hermes"
    assert tool_parser_of("</think> <｜DSML｜tool_calls>") == reasoning_parser_of("</think> <｜DSML｜") == "deepseek_v4"
    assert tool_parser_of("{{ messages }}") is None
    assert reasoning_parser_of("{% if '</think>' in content %}") == "qwen3"
    assert reasoning_parser_of("<|channel>thought") == "gemma4"
    assert reasoning_parser_of("plain") is None
