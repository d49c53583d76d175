"""Messages as callers give them, made into what chat templates expect. As `transformers` does it, and beyond that:
arguments of tool calls may be JSON text, and a missing content is an empty one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from offroad.errors import RequestError

# The names that clients and templates use for the thoughts of a message; templates read the first, a few the second.
_REASONING = ("reasoning_content", "thinking", "reasoning")


def prepared(message: Mapping[str, Any], index: int) -> dict[str, Any]:
    """A message without null fields; content is a string or a list of text parts, arguments of tool calls are objects,
    reasoning has the names that templates read. RequestError (param `messages`) for anything else."""
    where = f"messages[{index}]"
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RequestError(where, param="messages", found=message, accepted="an object with a role")
    out = {name: value for name, value in message.items() if value is not None}
    out["content"] = _content(message.get("content"), where)
    if out.get("tool_calls"):
        out["tool_calls"] = _tool_calls(out["tool_calls"], where)
    reasoning = next((out[name] for name in _REASONING if name in out), None)
    if reasoning is not None:
        out = {"thinking": reasoning, **out, "reasoning_content": reasoning}
    return out


def joined(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its text parts as one string, for templates that know strings only."""
    if isinstance(message["content"], str):
        return message
    return {**message, "content": "\n".join(part["text"] for part in message["content"])}


def extended(message: dict[str, Any], text: str) -> dict[str, Any]:
    """The message with `text` at the end of its content."""
    content = message["content"]
    if isinstance(content, str):
        return {**message, "content": content + text}
    *parts, last = content
    return {**message, "content": [*parts, {**last, "text": last["text"] + text}]}


def _content(content: Any, where: str) -> str | list[dict[str, str]]:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    accepted = 'a string, or parts {"type": "text", "text": ...}'
    if not isinstance(content, Sequence):
        raise RequestError(f"{where}.content", param="messages", found=type(content).__name__, accepted=accepted)
    for part in content:
        text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
        if not isinstance(text, str):
            found = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise RequestError(f"{where}.content", param="messages", found=found, accepted=accepted)
    return [{"type": "text", "text": part["text"]} for part in content] or ""


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        found = type(calls).__name__
        raise RequestError(f"{where}.tool_calls", param="messages", found=found, accepted="a list of calls")
    return [_tool_call(call, where) for call in calls]


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise RequestError(f"{where}.tool_calls", param="messages", found=call, accepted="calls of functions")
    arguments = function.get("arguments")
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        arguments = {}
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):  # then it is still a string, and refused below
            arguments = json.loads(arguments)
    if not isinstance(arguments, Mapping):
        found = str(function["arguments"])[:200]
        raise RequestError(f"{where}.tool_calls arguments", param="messages", found=found, accepted="a JSON object")
    return {**call, "function": {**function, "arguments": dict(arguments)}}
