"""Where prompts of Qwen3.5 and Gemma-4 are marked: ends of system part with tools, of user turns, of tool results."""

from __future__ import annotations

import pytest
from family_templates import GEMMA, QWEN, assistant, call, flagged, ours, result, system, tool, user

TOOL = tool("f", "does", {"a": {"type": "string"}}, ["a"])
THINK = pytest.mark.parametrize("think", [True, False, None])
FAMILIES = {
    # template, how a turn ends, how a user turn begins, how the model's begins, how the whole prompt begins
    "qwen": (QWEN, "<|im_end|>\n", "<|im_start|>user\n", "<|im_start|>assistant\n", ""),
    "gemma": (GEMMA, "<turn|>\n", "<|turn>user\n", "<|turn>model\n", "<s>"),
    "gemma small": (flagged(GEMMA, no_thought_when_off=False), "<turn|>\n", "<|turn>user\n", "<|turn>model\n", "<s>"),
}
FAMILY = pytest.mark.parametrize("family", FAMILIES)


def options(think: bool | None, tools: bool = False, **more) -> dict:
    return ({} if think is None else {"enable_thinking": think}) | ({"tools": [TOOL]} if tools else {}) | more


def pieces(rendered) -> list[str]:
    """The prompt cut at its marks."""
    at = [0, *rendered.marks, len(rendered.text)]
    return [rendered.text[a:b] for a, b in zip(at, at[1:], strict=False)]


@FAMILY
@THINK
@pytest.mark.parametrize("tools", [False, True])
@pytest.mark.parametrize("lead", [[], [system("be ö")]])
def test_the_system_part_and_each_user_turn_end_at_a_mark(family, think, tools, lead):
    template, end, header, model, start = FAMILIES[family]
    talk = [*lead, user("one"), assistant("two", reasoning_content="hm"), user("three")]
    first, *turns, prompt = pieces(ours(template, talk, **options(think, tools)))
    if lead or tools or (think and family != "qwen"):
        assert first.startswith(f"{start}<|im_start|>system\n" if family == "qwen" else f"{start}<|turn>system\n")
        assert first.endswith(end)
        assert first.count(end) == 1
        assert ("be ö" in first, "does" in first) == (bool(lead), tools)
        start = ""
    else:
        turns = [first, *turns]
    assert turns == [f"{start}{header}one{end}", f"{model}two{end}{header}three{end}"]
    assert prompt.startswith(model)
    assert "three" not in prompt


@FAMILY
@THINK
@pytest.mark.parametrize("said", [dict(reasoning_content="hm"), dict(reasoning="hm"), {}])
def test_a_growing_chat_resumes_at_the_last_mark(family, think, said):
    template = FAMILIES[family][0]
    talk, before = [system("be ö")], None
    for turn in range(4):
        talk.append(user(f"question {turn}"))
        rendered = ours(template, talk, **options(think, tools=True))
        if before is not None:
            assert before.marks[-1] in rendered.marks
            assert rendered.text[: before.marks[-1]] == before.text[: before.marks[-1]]
        assert len(rendered.marks) == turn + 2
        talk.append(assistant(f"answer {turn}", **said))
        before = rendered


def agent_prompts(template: str, think: bool | None, loops: int = 3) -> list:
    """The prompts of an agent's loop: a question, then each time a call with thoughts and its results."""
    talk = [system("be ö"), user("what now")]
    prompts = [ours(template, talk, **options(think, tools=True))]
    for i in range(loops):
        calls = [call("f", {"a": f"{i}{side}"}, f"{i}{side}") for side in "xy"]
        talk += [assistant(None, *calls, reasoning_content=f"thought {i}")]
        talk += [result(f"first {i}", f"{i}x"), result(f"second {i}", f"{i}y")]
        prompts.append(ours(template, talk, **options(think, tools=True)))
    talk += [assistant("answer"), user("next")]
    return [*prompts, ours(template, talk, **options(think, tools=True))]


def resumes_at(rendered) -> int:
    """The last mark. A prompt that ends with results has none there: its end is one in any case."""
    return len(rendered.text) if rendered.text.endswith("<tool_response|>") else rendered.marks[-1]


@FAMILY
@THINK
def test_an_agent_resumes_after_its_last_results(family, think):
    template, end, _, model, _ = FAMILIES[family]
    opens = ("", "<|channel>thought\n", model + "<think>\n", model + "<think>\n\n</think>\n\n")
    *loop, after = agent_prompts(template, think)
    for i, (before, now) in enumerate(zip(loop, loop[1:], strict=False)):
        assert resumes_at(before) in now.marks
        assert now.text.startswith(before.text[: resumes_at(before)])
        assert f"second {i}" in now.text[resumes_at(before) : resumes_at(now)]
        assert now.text[resumes_at(now) :] in opens
    # The next question removes the thoughts: what was computed can be used up to the end of the last question.
    assert "thought 0" in loop[-1].text
    assert "thought 0" not in after.text
    question = loop[-1].text.index("what now") + len("what now" + end)
    assert question in loop[-1].marks
    assert question in after.marks
    assert after.text[:question] == loop[-1].text[:question]


@FAMILY
def test_many_results_do_not_displace_the_question(family):
    *_, last, _ = agent_prompts(FAMILIES[family][0], True, loops=12)
    question = last.text.index("what now") + len("what now") + len(FAMILIES[family][1])
    assert question in last.marks
    assert len(last.marks) <= 4  # each costs a rendering


@FAMILY
def test_a_results_run_has_one_mark(family):
    template = FAMILIES[family][0]
    _, now, _ = agent_prompts(template, True, loops=1)
    assert len(now.marks) == 3
    assert "second 0" in now.text[now.marks[1] : now.marks[2]]
