"""Every way of marking thoughts on a table of answers, however they are cut, and at whatever place they end."""

from __future__ import annotations

from os.path import commonprefix

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offroad.text.reasoning import CHANNEL, DSML_THINK, THINK, ReasoningParser, Thoughts
from offroad.text.tools.registry import REASONING_PARSERS

Case = tuple[str, bool, str, str]  # answer, whether the prompt has opened the thoughts, thoughts, content

THOUGHTS = [
    "I think.",
    "One.\n\nTwo.\n  - three",
    "if a < b && c > d: x<y>()",
    "Привет 你好 👩‍🚀 é",
    'The user wants {"name": "f"}; I could say <b>so</b>.',
    "`</thinking>` and <thin and </thin are no tags",
    "<|im_start|>user is a tag of chats",
    "a" * 300,
    "```python\nfor i in range(3):\n\tprint(i)\n```",
    "Is it 3 < 4? Yes.",
]
ANSWERS = [
    "Answer.",
    "Two lines:\n\n    indented\n",
    "x < y </b> & z",
    "雪 ❄️",
    '{"a": 1}',
]


def common(tags: Thoughts) -> list[Case]:
    """Thoughts opened by the prompt, by the answer, and none at all; with and without blanks at their edges."""
    start, end = tags.start, tags.end
    table = []
    for i, thoughts in enumerate(THOUGHTS):
        answer = ANSWERS[i % len(ANSWERS)]
        table.append((f"{thoughts}\n{end}\n\n{answer}", True, thoughts, answer))
        table.append((f"{start}{thoughts}{end}{answer}", False, thoughts, answer))
    table += [(answer, False, "", answer) for answer in ANSWERS]
    return [
        *table,
        (f"\n{start}\n\n hm \n\n{end} \n yes\n", False, "hm", "yes\n"),
        (f"{start}{end}yes", False, "", "yes"),
        (f"{start}\n \n{end}\n\nyes", False, "", "yes"),
        (f"{end}yes", True, "", "yes"),
        ("cut off in the mid", True, "cut off in the mid", ""),
        (f"cut off in the tag {end[:-1]}", True, f"cut off in the tag {end[:-1]}", ""),
        (start[:-2], False, "", start[:-2]),
        ("", True, "", ""),
        ("", False, "", ""),
        (" \n\n", True, "", ""),
        (" \n\n", False, "", " \n\n"),
        *((f"hm {mark}x", True, "hm", f"{mark}x") for mark in tags.breaks),
        *((f"{start}hm\n\n{mark}x{end}", False, "hm", f"{mark}x{end}") for mark in tags.breaks),
    ]


GOLDEN: dict[str, list[Case]] = {
    "qwen3": [
        *common(THINK),
        ("a</think>b</think>c", True, "a", "b</think>c"),
        ("a<think>b</think>c", True, "a<think>b", "c"),
        ("say <think>x</think>", False, "", "say <think>x</think>"),
    ],
    "gemma4": [
        *common(CHANNEL),
        ("<|channel>final\nyes<channel|>", False, "", "<|channel>final\nyes<channel|>"),
        ("<|channel>thought\nhm<channel|><|channel>thought\n", False, "hm", "<|channel>thought\n"),
        ("yes<channel|>", False, "", "yes<channel|>"),
    ],
    "deepseek_v4": [
        *common(DSML_THINK),
        ("<think>hm</think>yes", True, "hm", "yes"),  # opened twice
        ("a <think> b</think>c", True, "a  b", "c"),
        ("a</think>b</think>c", True, "a", "bc"),  # closed twice
        ("b </think>c", False, "", "b c"),
        ("a</think>b <think>\nmore\n</think>\nc", True, "a\nmore", "b c"),  # thinks again
        ("b<think>more", False, "more", "b"),
        ("b<think>more</think>c<think>d", False, "more\nd", "bc"),
        (
            'a</think>b<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f"><think></think>',
            True,
            "a",
            'b<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f"><think></think>',
        ),  # a value is no place for thoughts
        ("a</think>b <think", True, "a", "b <think"),
        ("<<think>", True, "<", ""),  # a tag that is left out makes none of what is around it
        ("<<think>/think>a</think>b", True, "</think>a", "b"),
        ("a</think><</think>think>b", True, "a", "<think>b"),
    ],
}
GOLDEN["deepseek_r1"] = GOLDEN["qwen3"]
CASES = [pytest.param(name, *case, id=f"{name}-{i}") for name, table in GOLDEN.items() for i, case in enumerate(table)]


def told(name: str, pieces: list[str], opened: bool) -> tuple[str, str]:
    parser = ReasoningParser(REASONING_PARSERS[name], opened)
    said = [*map(parser.feed, pieces), parser.finish()]
    return "".join(piece.reasoning for piece in said), "".join(piece.content for piece in said)


def test_every_notation_has_thirty_answers():
    assert GOLDEN.keys() == REASONING_PARSERS.keys()
    for name, table in GOLDEN.items():
        assert len({case[:2] for case in table}) >= 30, name


@pytest.mark.parametrize(("name", "answer", "opened", "thoughts", "content"), CASES)
def test_what_is_in_an_answer(name, answer, opened, thoughts, content):
    for size in (len(answer) + 1, 1, 2, 5):
        pieces = [answer[i : i + size] for i in range(0, len(answer), size)]
        assert told(name, pieces, opened) == (thoughts, content)


@pytest.mark.parametrize(("name", "answer", "opened", "thoughts", "content"), CASES)
def test_an_answer_that_ends_anywhere(name, answer, opened, thoughts, content):
    """Thoughts and content begin as those of the whole answer do, and go on as the answer was cut."""
    for end in range(len(answer)):
        part = answer[:end]
        for found, whole in zip(told(name, [part], opened), (thoughts, content), strict=True):
            same = commonprefix([found, whole])
            assert part.endswith(found[len(same) :]), (part, found)


@given(
    st.sampled_from(sorted(REASONING_PARSERS)),
    st.lists(
        st.sampled_from(
            [
                "<think>",
                "</think>",
                "<|channel>thought\n",
                "<channel|>",
                "<tool_call>",
                "<|tool_call>",
                "<｜DSML｜tool_calls>",
            ]
            + ["<", "</", "think>", "x", " ", "\n", "<｜DSML｜"]
        ),
        max_size=12,
    ),
    st.lists(st.integers(1, 5), min_size=1, max_size=4),
    st.booleans(),
)
def test_pieces_do_not_matter(name, parts, sizes, opened):
    text, pieces, at = "".join(parts), [], 0
    while at < len(text):
        pieces.append(text[at : at + sizes[len(pieces) % len(sizes)]])
        at += len(pieces[-1])
    assert told(name, pieces, opened) == told(name, [text], opened)
