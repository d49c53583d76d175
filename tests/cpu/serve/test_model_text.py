"""The server's text layer over a real tokenizer and template, from a body to an answer."""

from __future__ import annotations

import asyncio
import json

import pytest
from fake_engine import FakeEngine
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from offroad.execute.client import EngineClient
from offroad.execute.launch import in_thread
from offroad.serve.service import Service
from offroad.serve.text import ModelText, model_text
from offroad.settings import Settings
from offroad.weights.source import TokenizerFiles

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}"
    "{{ m['content'] }}</>{% endfor %}{% if add_generation_prompt %}<assistant>"
    "{{ '<no thoughts>' if enable_thinking is defined and enable_thinking is false }}{% endif %}"
)


def files() -> TokenizerFiles:
    """One token a byte; id 256 is eos."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: i for i, symbol in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab | {"</s>": 256}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["</s>"])
    return TokenizerFiles(tokenizer.to_str(), TEMPLATE, None, "</s>", (256,), False, {})


class TextEngine(FakeEngine):
    def __init__(self, settings, progress) -> None:
        super().__init__(settings, progress)
        self.source_tokenizer = files()


def ask(stack, path: str, body: dict):
    made = stack(make=TextEngine)
    made.service._make_text = model_text

    async def main():
        async with made.http() as http:
            return (await http.post(path, content=json.dumps(body))).json()

    return asyncio.run(main()), made.engine.seen[0]


def shown_to_model(request) -> str:
    return ModelText(files(), None).decode(request.prompt_ids)


def test_chat_goes_through_template_tokenizer_and_back(stack):
    messages = [{"role": "system", "content": "be ö"}, {"role": "user", "content": "hi a"}]
    text = "<system>be ö</><user>hi a</><assistant>"
    answer, request = ask(stack, "/v1/chat/completions", {"messages": messages, "max_tokens": 44, "logprobs": True})
    assert answer["choices"][0]["message"]["content"] == (text * 2)[:43]  # one character has two tokens
    assert answer["usage"]["prompt_tokens"] == len(text.encode()) == len(request.prompt_ids)
    assert request.marks == (len("<system>be ö</>".encode()), len("<system>be ö</><user>hi a</>".encode()))
    content = answer["choices"][0]["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in content) == (text * 2).encode()[:44]
    assert content[10]["token"] == " "
    assert content[11]["token"] == "\ufffd"


@pytest.mark.parametrize(
    ("kwargs", "end"),
    [
        ({}, ""),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "<no thoughts>"),
        ({"chat_template_kwargs": {"enable_thinking": True}}, ""),
    ],
)
def test_variables_of_the_template_are_the_requests(stack, kwargs, end):
    body = {"messages": [{"role": "user", "content": "hi a"}], "max_tokens": 1} | kwargs
    _, request = ask(stack, "/v1/chat/completions", body)
    assert shown_to_model(request) == "<user>hi a</><assistant>" + end


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ({"content": "a", "reasoning_content": "why ö"}, "(why ö)a"),
        ({"content": "a", "reasoning": "why"}, "(why)a"),
        ({"content": "a", "reasoning": "why", "reasoning_content": "why"}, "(why)a"),
        ({"content": None, "reasoning": "why"}, "(why)"),
        ({"reasoning_content": "why"}, "(why)"),
        ({"content": "a", "reasoning": None, "reasoning_content": ""}, "a"),
        ({"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "reasoning": "why"}, "(why)a\nb"),
    ],
)
def test_thoughts_of_an_answer_reach_the_template(stack, said, shown):
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", **said}, {"role": "user", "content": "r"}]
    _, request = ask(stack, "/v1/chat/completions", {"messages": messages, "max_tokens": 1})
    assert shown_to_model(request) == f"<user>q</><assistant>{shown}</><user>r</><assistant>"


def test_completion_stops_at_a_string_over_tokens(stack):
    answer, request = ask(stack, "/v1/completions", {"prompt": "one two", "max_tokens": 50, "stop": "twoone"})
    assert answer["choices"][0]["text"] == "one "
    assert answer["choices"][0]["stop_reason"] == "twoone"
    assert answer["usage"]["completion_tokens"] == 10
    assert request.eos_ids == (256,)


def test_a_checkpoint_that_cannot_be_read_fails_the_start(stack):
    client = EngineClient(Settings(model="fake"), launch=in_thread(FakeEngine))  # its tokenizer.json is {}

    async def main():
        try:
            await Service(client.settings, client).start()
        except Exception as error:
            return error, client.state.value
        finally:
            await client.close()

    error, state = asyncio.run(main())
    assert type(error).__name__ == "ModelError"
    assert state == "loading"
