"""Structured output through a whole server over a tiny model, by OpenAI's client: whatever the weights, it is in the
language. And Gemma 4's marks, which are special tokens, through a real tokenizer."""

from __future__ import annotations

import asyncio
import json
import re

import openai
import pytest
from fake_engine import Scripted
from serve_stack import Stack, Wire
from test_model_text import files
from tokenizers import AddedToken, Tokenizer

from offroad.engine import Engine
from offroad.serve.text import model_text
from offroad.settings import Settings
from offroad.weights.source import TokenizerFiles

TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}{% for m in messages %}{{ m.role }}: {{ m.content }}\n"
    "{% endfor %}{# <tool_call>{} #}"
)
ASK = [{"role": "user", "content": "Say it."}]
SIDE = {"enum": ["left", "right"]}
PARAMETERS = {
    "type": "object",
    "properties": {"side": {"$ref": "#/$defs/side"}},
    "required": ["side"],
    "additionalProperties": False,
    "$defs": {"side": SIDE},
}
PICK = {"type": "function", "function": {"name": "pick", "parameters": PARAMETERS}}
STAY = {"type": "function", "function": {"name": "stay", "parameters": PARAMETERS}}
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}, "ok": {"type": "boolean"}},
    "required": ["n", "ok"],
    "additionalProperties": False,
}
# Blanks are unlikely, so that JSON comes to its end: line breaks, tabs, returns and the space of this vocabulary.
DRY = {"top_p": 0.9}


@pytest.fixture(scope="module")
def client(tiny):
    pytest.importorskip("xgrammar")
    engine = Settings.of(model=str(tiny("llama")[0]), device="cpu", dtype="float32", max_num_seqs=4)
    stack = Stack(make=lambda given, progress: Engine(engine, progress), chat_template=TEMPLATE)
    stack.service._make_text = model_text
    running = Wire(stack)
    id_of = stack.service.text.token_id
    DRY["logit_bias"] = {str(id_of(blank)): -100 for blank in "ĊĉčĠ"}
    yield openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0, timeout=60)
    running.close()


def ask(client, **more):
    given = dict(model="fake", messages=ASK, max_tokens=200, seed=3) | DRY | more
    return client.chat.completions.create(**given).choices[0]


def test_json(client):
    answer = ask(client, response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}})
    said = json.loads(answer.message.content)
    assert (set(said), type(said["n"]), type(said["ok"]), answer.finish_reason) == ({"n", "ok"}, int, bool, "stop")
    again = ask(client, extra_body={"structured_outputs": {"json": SCHEMA}})
    assert again.message.content == answer.message.content
    anything = ask(client, response_format={"type": "json_object"}, max_tokens=20)
    assert anything.message.content.startswith("{")


def test_regex_choice_and_grammar(client):
    assert re.fullmatch("[ab]{3}-[0-9]", ask(client, extra_body=outputs(regex="[ab]{3}-[0-9]")).message.content)
    choice = ["schön", 'a "b"', "c\\d"]
    said = {ask(client, extra_body=outputs(choice=choice), seed=seed).message.content for seed in range(12)}
    assert said <= set(choice)
    assert len(said) > 1
    assert ask(client, extra_body=outputs(grammar='root ::= "x" y\ny ::= "1" | "2"')).message.content in ("x1", "x2")
    whole = client.completions.create(
        model="fake", prompt="a", seed=1, extra_body=outputs(regex="(no|yes)"), max_tokens=9
    )
    assert whole.choices[0].text in ("no", "yes")


def outputs(**kind) -> dict:
    return {"structured_outputs": kind}


def test_a_choice_that_must_be_a_call(client):
    for seed in range(4):
        answer = ask(client, tools=[PICK, STAY], tool_choice="required", seed=seed, parallel_tool_calls=False)
        [call] = answer.message.tool_calls
        assert call.function.name in ("pick", "stay")
        assert json.loads(call.function.arguments)["side"] in SIDE["enum"]
        assert (answer.finish_reason, answer.message.content) == ("tool_calls", None)
    named = ask(client, tools=[PICK, STAY], tool_choice={"type": "function", "function": {"name": "stay"}})
    [call] = named.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)["side"] in SIDE["enum"]) == ("stay", True)
    either = PARAMETERS | {"anyOf": [{"required": ["side"]}, {"required": ["else"]}]}  # it would be all that is read
    turn = {"type": "function", "function": {"name": "turn", "parameters": either}}
    for choice in ("required", {"type": "function", "function": {"name": "turn"}}):
        [call] = ask(client, tools=[turn], tool_choice=choice, parallel_tool_calls=False).message.tool_calls
        assert json.loads(call.function.arguments)["side"] in SIDE["enum"]


def test_what_is_no_grammar_is_refused(client):
    for field, more in (
        ("response_format", {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "objet"}}}),
        ("structured_outputs", {"regex": "(a"}),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            ask(client, extra_body={field: more})
        assert (refused.value.param, refused.value.code) == (field, "invalid_grammar")
    with pytest.raises(openai.BadRequestError, match="own"):  # calls begin with no token of this vocabulary
        ask(client, tools=[PICK], extra_body=outputs(regex="a"))


def test_a_grammar_that_takes_too_long_is_ended_and_others_go_on(client, monkeypatch):
    other = client.completions.create(
        model="fake", prompt="a", max_tokens=300, stream=True, extra_body={"ignore_eos": True}
    )
    next(other)
    monkeypatch.setattr("offroad.sample.grammar._SLOW_SECONDS", 0.0)
    slow = {"model": "fake", "prompt": "a", "max_tokens": 200} | {"extra_body": outputs(regex="(x|y){300}")}
    with pytest.raises(openai.BadRequestError, match="take too long") as ended:
        client.completions.create(**slow)
    assert ended.value.code == "request_refused"
    with pytest.raises(openai.BadRequestError, match="take too long") as again:  # it is known now
        client.completions.create(**slow)
    assert again.value.code == "invalid_grammar"
    with pytest.raises(openai.APIError, match="take too long"):
        list(client.completions.create(**slow | {"extra_body": outputs(regex="(y|x){300}")}, stream=True))
    assert list(other)[-1].choices[0].finish_reason == "length"
    monkeypatch.undo()
    assert ask(client, extra_body=outputs(regex="[ab]{3}")).finish_reason == "stop"


MARKS = ["<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>', "<|other|>"]
GEMMA = (
    "{{ tools }}{{ enable_thinking }}{% for m in messages %}{{ m.content }}{% endfor %}"
    "{# <|channel>thought <|tool_call>call #}"
)


def marked() -> TokenizerFiles:
    plain = files()
    tokenizer = Tokenizer.from_str(plain.tokenizer_json)
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in MARKS])
    return TokenizerFiles(tokenizer.to_str(), GEMMA, None, "</s>", (256,), False, {})


class Speaks(Scripted):
    """Says a text in the tokens of a real tokenizer."""

    def __init__(self, settings, progress) -> None:
        super().__init__(settings, progress)
        self.source_tokenizer = marked()
        self.tokenizer = Tokenizer.from_str(self.source_tokenizer.tokenizer_json)

    def tokens(self) -> list[int]:
        return [*self.tokenizer.encode(self.says).ids, 256]


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("pace", [1, 4, 100])
def test_marks_that_are_special_tokens(pace: int, skip: bool):
    stack = Stack(make=Speaks)
    stack.service._make_text = model_text
    call = '<|tool_call>call:search{query:<|"|>a {b}<|"|>,limit:3}<tool_call|>'

    async def main():
        async with stack.http() as http:
            stack.engine.pace = pace
            stack.engine.says = f"<|channel>thought\nhm<|other|>\n<channel|>Yes<|other|>.{call}"
            body = {"messages": ASK, "tools": [search], "skip_special_tokens": skip}
            with_call = (await http.post("/v1/chat/completions", json=body)).json()
            stack.engine.says = "a<channel|>b<|tool_call>broken<tool_call|>"
            return with_call, (await http.post("/v1/chat/completions", json=body)).json()

    parameters = {"type": "object", "properties": {"query": {"type": "string"}, "limit": {"type": "integer"}}}
    search = {"type": "function", "function": {"name": "search", "parameters": parameters}}
    with_call, broken = asyncio.run(main())
    message = with_call["choices"][0]["message"]
    other = "" if skip else "<|other|>"
    assert (message["reasoning_content"], message["content"]) == (f"hm{other}", f"Yes{other}.")
    [told] = message["tool_calls"]
    assert (told["function"]["name"], json.loads(told["function"]["arguments"])) == (
        "search",
        {"query": "a {b}", "limit": 3},
    )
    content = "abbroken" if skip else "a<channel|>b<|tool_call>broken<tool_call|>"
    assert broken["choices"][0]["message"]["content"] == content
