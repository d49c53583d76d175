"""`LLM.chat` over a tiny model: what reaches its chat template."""

from __future__ import annotations

import pytest

from offroad import LLM, SamplingParams
from offroad.errors import EngineDead

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ '(' + m.reasoning_content + ')' if m.reasoning_content }}{{ m.content }}"
    "{% endfor %}{{ tools | length if tools }}"
    "{{ '<no thoughts>' if enable_thinking is defined and enable_thinking is false }}"
)
TALK = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "a", "reasoning": "why"}]
ONE = SamplingParams(temperature=0.0, max_tokens=1)


@pytest.fixture(scope="module")
def llm(tiny):
    made = LLM(str(tiny("qwen2")[0]), device="cpu", chat_template=TEMPLATE)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("given", "end"),
    [
        ({}, ""),
        ({"enable_thinking": False}, "<no thoughts>"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "<no thoughts>"),
        ({"chat_template_kwargs": {"enable_thinking": False}, "tools": [{}, {}]}, "2<no thoughts>"),
        ({"chat_template_kwargs": {"enable_thinking": True}}, ""),
        ({"chat_template_kwargs": None}, ""),
    ],
)
def test_variables_reach_the_template(llm, given, end):
    text = "<user>hi<assistant>(why)a" + end
    assert [result.prompt for result in llm.chat(TALK, ONE, **given)] == [text]
    assert [result.prompt for result in llm.chat([TALK, TALK[:1]], ONE, **given)] == [text, "<user>hi" + end]
    assert {chunk.output.prompt for chunk in llm.stream_chat(TALK, ONE, **given)} == {text}


def test_a_variable_given_twice_is_an_error(llm):
    with pytest.raises(TypeError, match="enable_thinking"):
        llm.chat(TALK, ONE, chat_template_kwargs={"enable_thinking": True}, enable_thinking=True)


def test_streams_that_are_open_at_the_same_time_tell_all(llm):
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    talks = [[{"role": "user", "content": text}] for text in ("hi", "what", "who")]
    expected = [llm.chat(talk, params)[0].outputs[0].token_ids for talk in talks]

    def told(chunks) -> list[int]:
        *_, last = chunks
        return last.output.outputs[0].token_ids

    first, second, dropped = (llm.stream_chat(talk, params) for talk in talks)
    next(first), next(second), next(dropped)
    assert llm.chat(talks[2], params)[0].outputs[0].token_ids == expected[2]
    dropped.close()
    assert told(second) == expected[1]
    assert told(first) == expected[0]
    assert not llm.engine.has_work()
    llm.engine.check()


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.timeout(60)
def test_an_interrupted_step_is_told_to_whoever_asks_next(tiny, monkeypatch, error):
    llm = LLM(str(tiny("qwen2")[0]), device="cpu")
    llm.chat(TALK, ONE)
    launch, steps = llm.engine.runner.launch, []

    def interrupted(step) -> None:
        steps.append(step)
        if len(steps) == 2:
            raise error
        launch(step)

    monkeypatch.setattr(llm.engine.runner, "launch", interrupted)
    with pytest.raises(error):
        llm.chat(TALK, SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True))
    with pytest.raises(EngineDead, match="interrupted"):
        llm.chat(TALK, ONE)
