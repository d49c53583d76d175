"""The Python API with answers that must look like something, as the server has it."""

from __future__ import annotations

import json
import re

import pytest

pytest.importorskip("xgrammar")

from offroad import LLM, SamplingParams
from offroad.errors import RequestError

SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "yes"]}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
BLANKS = (199, 200, 201, 202, 203, 204, 222, 223)  # of the tiny tokenizer: JSON may have any number of them
LIVELY = SamplingParams(temperature=1.0, seed=3, max_tokens=60, logit_bias=dict.fromkeys(BLANKS, -50.0))
TALK = [{"role": "user", "content": "hi"}]
PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
THINKING = PLAIN + (
    "{{ '<think>' if enable_thinking is defined and enable_thinking else '</think>' if enable_thinking is defined }}"
)


@pytest.fixture(scope="module")
def llm(tiny):
    made = LLM(str(tiny("qwen2")[0]), device="cpu", chat_template=PLAIN)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("outputs", "pattern"),
    [
        ({"regex": "[0-9]{3}-[ab]{2}"}, "[0-9]{3}-[ab]{2}"),
        ({"choice": ["yes", "no", "perhaps"]}, "yes|no|perhaps"),
        ({"grammar": 'root ::= "a" root | "b"'}, "a*b?"),  # cut by max_tokens perhaps
        ({"json": SCHEMA}, r'\s*\{\s*"a"\s*:\s*"(x|yes)",\s*"b"\s*:\s*(true|false)\s*\}'),
        ({"json": json.dumps(SCHEMA)}, r'\s*\{\s*"a"\s*:\s*"(x|yes)",\s*"b"\s*:\s*(true|false)\s*\}'),
    ],
)
def test_outputs_have_the_structure(llm, outputs, pattern):
    prompts = ["one", {"prompt_token_ids": [5, 6, 7]}]
    made = llm.generate(prompts, LIVELY, structured_outputs=outputs)
    for result in (*made, *llm.chat(TALK, LIVELY, structured_outputs=outputs)):
        assert re.fullmatch(pattern, result.outputs[0].text), result.outputs[0].text


def test_streams_and_answers_without_structure(llm):
    outputs = {"regex": "[0-9]{3}-[ab]{2}"}
    *_, last = llm.stream_chat(TALK, LIVELY, structured_outputs=outputs)
    [whole], [free] = llm.chat(TALK, LIVELY, structured_outputs=outputs), llm.chat(TALK, LIVELY)
    assert last.output.outputs[0].text == whole.outputs[0].text != free.outputs[0].text


def test_response_format(llm):
    format = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    [result] = llm.chat(TALK, LIVELY, response_format=format)
    assert json.loads(result.outputs[0].text)["a"] in ("x", "yes")


def test_what_is_refused(llm):
    for outputs, param in (
        ({"regex": "a", "choice": ["b"]}, "structured_outputs"),
        ({"regexp": "a"}, "structured_outputs.regexp"),
        ({"regex": "("}, "structured_outputs"),
        ({"json": "no schema"}, "structured_outputs.json"),
    ):
        with pytest.raises(RequestError) as refused:
            llm.generate("x", LIVELY, structured_outputs=outputs)
        assert refused.value.param == param
    with pytest.raises(RequestError, match="min_tokens"):
        llm.generate("x", SamplingParams(max_tokens=9, min_tokens=3), structured_outputs={"regex": "a"})
    assert not llm.engine.has_work()


def test_thoughts_come_before_the_structure(tiny, monkeypatch):
    """A token stands for the end of thoughts: until then anything may be said, for as long as the budget allows."""
    llm = LLM(str(tiny("qwen2")[0]), device="cpu", chat_template=THINKING)
    end = 70
    known = llm.text.token_id
    monkeypatch.setattr(llm.text, "token_id", lambda token: end if token == "</think>" else known(token))
    more = {"structured_outputs": {"choice": ["yes", "no"]}, "thinking_token_budget": 5}
    [result] = llm.chat(TALK, LIVELY, enable_thinking=True, **more)
    out = result.outputs[0]
    at = out.token_ids.index(end)
    assert at <= 5
    assert llm.tokenizer.decode(out.token_ids[at + 1 :]).strip() in ("yes", "no")
    for options in ({"enable_thinking": False}, {"chat_template_kwargs": {"enable_thinking": False}}):
        [plain] = llm.chat(TALK, LIVELY, **options, **more)
        assert plain.outputs[0].text in ("yes", "no")
    llm.close()
