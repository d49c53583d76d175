"""The chat formats of Qwen3.5 and Gemma-4 by our own templates, rendered by us and by transformers."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from small_tokenizers import byte_level, files
from tokenizers import Tokenizer as Backend

from offroad.text.chat_template import ChatTemplate

FOLDER = Path(__file__).parent / "templates"
QWEN = (FOLDER / "qwen3_5.jinja").read_text(encoding="utf-8")
GEMMA = (FOLDER / "gemma4.jinja").read_text(encoding="utf-8")


def flagged(template: str, **flags: bool) -> str:
    """The template with flags at its top changed."""
    for name, value in flags.items():
        old = f"set {name} = {str(not value).lower()} "
        assert old in template
        template = template.replace(old, f"set {name} = {str(value).lower()} ")
    return template


def ours(template: str, messages: list[dict], **more: Any):
    """What we render; bos is `<s>`."""
    return ChatTemplate(files("", chat_template=template)).render(messages, **more)


@cache
def _tokenizer():
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=Backend.from_str(byte_level()), bos_token="<s>", eos_token="</s>")


def theirs(template: str, messages: list[dict], **more: Any) -> str:
    """What the `apply_chat_template` of a tokenizer renders; arguments of calls as objects, since it takes no JSON."""
    options = {"add_generation_prompt": not more.get("continue_final_message"), **more}
    return _tokenizer().apply_chat_template(
        [_with_objects(m) for m in messages], chat_template=template, tokenize=False, **options
    )


def _with_objects(message: dict) -> dict:
    def parsed(call: dict) -> dict:
        function = call["function"]
        given = function.get("arguments", {})
        return {**call, "function": {**function, "arguments": json.loads(given) if isinstance(given, str) else given}}

    if not message.get("tool_calls"):
        return message
    return {**message, "tool_calls": [parsed(call) for call in message["tool_calls"]]}


def user(content: Any) -> dict:
    return {"role": "user", "content": content}


def system(content: Any) -> dict:
    return {"role": "system", "content": content}


def assistant(content: Any, *calls: dict, **more: Any) -> dict:
    return {"role": "assistant", "content": content} | ({"tool_calls": list(calls)} if calls else {}) | more


def call(name: str, arguments: Any, id: str = "c1") -> dict:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def result(content: Any, id: str = "c1") -> dict:
    return {"role": "tool", "tool_call_id": id, "content": content}


def tool(name: str, description: str, properties: dict, required: list[str]) -> dict:
    parameters = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}
