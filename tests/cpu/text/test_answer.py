"""How answers of the families are read: what is decided from a template, a prompt's end, and pieces of any size."""

from __future__ import annotations

import pytest
from family_templates import GEMMA, QWEN, ours, user
from hypothesis import given
from hypothesis import strategies as st
from small_tokenizers import files

from offroad.text.answer import Hidden, Notation, Reading
from offroad.text.chat_template import ChatTemplate
from offroad.text.reasoning import CHANNEL, DSML_THINK, THINK, opened_by
from offroad.text.said import together

NOW = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
DSML = '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="now">\n\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>'
CALL = "<tool_call>\n<function=now>\n</function>\n</tool_call>"


def notation(template: str, **named: str) -> Notation:
    read = ChatTemplate(files("", chat_template=template))
    return Notation.of(template, read.reads, **named)


def test_what_a_template_tells():
    qwen, gemma = notation(QWEN), notation(GEMMA)
    assert (qwen.thoughts, qwen.tools, gemma.thoughts, gemma.tools) == (THINK, "qwen3_xml", CHANNEL, "gemma4")
    assert {"tools", "enable_thinking"} <= qwen.reads & gemma.reads
    plain = notation("{% for m in messages %}{{ m.content }}{% endfor %}")
    assert (plain.thoughts, plain.tools, "tools" in plain.reads) == (None, None, False)
    assert notation(QWEN, reasoning="none", tools="hermes") == Notation(None, "hermes", qwen.reads)
    assert notation("{% if tools is defined and tools %}{% set tools = tools %}{% endif %}").reads >= {"tools"}


@pytest.mark.parametrize(
    ("template", "options", "opened"),
    [
        (QWEN, {"enable_thinking": True}, True),
        (QWEN, {"enable_thinking": False}, None),
        (GEMMA, {"enable_thinking": True}, False),
    ],
)
def test_whether_a_prompt_opens_thoughts(template: str, options: dict, opened: bool | None):
    prompt = ours(template, [user("Do I end with </think> or <think>")], **options).text
    assert opened_by(prompt, notation(template).thoughts) is opened


ANSWERS = [
    (Reading(THINK, True), "why\n</think>\n\nbecause <tool_call>"),
    (Reading(THINK, True, (NOW,), "qwen3_xml"), f"why\n{CALL}\n{CALL} tail"),
    (Reading(THINK, False, (NOW,), "qwen3_xml", several=False), f"<think>hm</think>text {CALL}{CALL} tail"),
    (Reading(CHANNEL, False, (NOW,), "gemma4"), "<|channel>thought\nhm<channel|>a<|tool_call>call:now{}<tool_call|>"),
    (Reading(None, tools=(NOW,), named="now"), '{"a": 1}'),
    (Reading(None, tools=(NOW,), calls="json"), '[{"name": "now", "parameters": {}}]'),
    (Reading(), "plain"),
    (Reading(DSML_THINK, True, (NOW,), "deepseek_v4"), f"why</think>a <think>b</think>c\n\n{DSML} d <think>e"),
    (Reading(DSML_THINK, True, (NOW,), "deepseek_v4", several=False), f"why, never closed\n\n{DSML}{DSML}"),
    (Reading(DSML_THINK, False), f"<think>hm</think>as text: {DSML}"),
]


@given(st.sampled_from(ANSWERS), st.lists(st.integers(1, 7), min_size=1, max_size=4), st.booleans())
def test_pieces_do_not_matter(answer, sizes, cut):
    reading, text = answer
    hidden = reading.tags if reading.thoughts is CHANNEL else ()

    def told(pieces: list[str]):
        parser = reading.parser(hidden)
        said = together([*map(parser.feed, pieces), parser.finish(cut)])
        calls: dict[int, list] = {}
        for piece in said.calls:
            call = calls.setdefault(piece.index, [piece.name, ""])
            call[1] += piece.arguments
        return said.reasoning, said.content, calls, parser.complete, parser.begun

    pieces, at = [], 0
    while at < len(text):
        size = sizes[len(pieces) % len(sizes)]
        pieces.append(text[at : at + size])
        at += size
    assert told(pieces) == told([text]) == told(list(text))


def test_one_call_is_all_that_is_told():
    reading, text = ANSWERS[2]
    parser = reading.parser()
    said = together([parser.feed(text), parser.finish()])
    assert (said.reasoning, said.content, len({c.index for c in said.calls}), parser.done) == ("hm", "text", 1, True)


@given(st.lists(st.sampled_from(["<a>", "<ab>", "<", "a", "b>", " "]), max_size=10), st.integers(1, 4))
def test_hidden_tags(parts: list[str], size: int):
    text = "".join(parts)
    filter, out = Hidden(("<a>", "<ab>")), ""
    for i in range(0, len(text), size):
        out += filter.feed(text[i : i + size])
    out += filter.finish()
    expected, rest = "", text
    while rest:
        tag = next((tag for tag in ("<a>", "<ab>") if rest.startswith(tag)), "")
        expected, rest = expected + ("" if tag else rest[0]), rest[len(tag) or 1 :]
    assert out == expected


def test_dsml_answers():
    def told(reading: Reading, text: str):
        parser = reading.parser()
        said = together([parser.feed(text), parser.finish()])
        return said.reasoning, said.content, len({piece.index for piece in said.calls})

    again, once, plain = (answer for answer in ANSWERS if answer[0].thoughts is DSML_THINK)
    assert told(*again) == ("why\nb", "a cd <think>e", 1)  # behind calls a tag is text
    assert told(*once) == ("why, never closed", "", 1)
    assert told(*plain) == ("hm", f"as text: {DSML}", 0)
