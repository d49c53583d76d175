"""Calls as Gemma 4 writes them: `<|tool_call>call:NAME{key:<|"|>text<|"|>,n:42,list:[..]}<tool_call|>`."""

from __future__ import annotations

import re
from typing import Any

from offroad.text.tools.blocks import BlockParser, Call
from offroad.text.tools.json_text import first_value, loads

_QUOTE = '<|"|>'
_NAME = re.compile(r"\s*(?:call:)?\s*([\w.-]+)\s*")
_CLOSERS = re.compile(r"[\s}\])]*\Z")
_MOST_CLOSERS = 64
_KEY = re.compile(r"\s*([^:{}\[\],]+?)\s*:\s*")
_BARE = re.compile(r"[^,{}\[\]]*")
_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?", re.ASCII)
_WORDS: dict[str, Any] = {"true": True, "false": False, "null": None}


class Gemma4Parser(BlockParser):
    """A JSON-like notation: keys without quotes, strings between quote tokens. Taken also with what models do to it: no
    `call:`, parentheses for the outer braces, plain quotes, and a last string that is not closed."""

    start, end = "<|tool_call>", "<tool_call|>"
    tags = (start, end, _QUOTE)

    def quotes(self, body: str) -> bool:
        return body.count(_QUOTE) % 2 == 1

    def read(self, body: str) -> list[Call] | None:
        return _read(body)

    def mend(self, body: str) -> list[Call] | None:
        if not self.quotes(body):
            return None
        tail = _CLOSERS.search(body)
        assert tail is not None, "the pattern takes an empty text"
        first = max(tail.start(), len(body) - _MOST_CLOSERS)
        closed = (_read(body[:at] + _QUOTE + body[at:]) for at in range(first, len(body)))
        return next((calls for calls in closed if calls), None)


def _read(body: str) -> list[Call] | None:
    named = _NAME.match(body)
    if named is None:
        return None
    at, last = named.end(), body.rstrip()
    if body.startswith("(", at) and last.endswith(")"):
        body = body[:at] + "{" + last[at + 1 : -1] + "}"
    try:
        arguments, at = _object(body, at)
    except (ValueError, RecursionError):
        return None
    return None if body[at:].strip() else [(named.group(1), arguments)]


def _object(text: str, at: int) -> tuple[dict[str, Any], int]:
    """(the object that begins at `at`, where it ends). Raises ValueError."""
    at = _expect(text, at, "{")
    made: dict[str, Any] = {}
    while not text.startswith("}", at := _blank(text, at)):
        if made:
            at = _expect(text, at, ",")
        key = _KEY.match(text, at)
        if key is None:
            raise ValueError(at)
        name = key.group(1).removeprefix(_QUOTE).removesuffix(_QUOTE)
        made[name.strip('"')], at = _value(text, key.end())
    return made, at + 1


def _list(text: str, at: int) -> tuple[list[Any], int]:
    at = _expect(text, at, "[")
    made: list[Any] = []
    while not text.startswith("]", at := _blank(text, at)):
        if made:
            at = _expect(text, at, ",")
        value, at = _value(text, _blank(text, at))
        made.append(value)
    return made, at + 1


def _value(text: str, at: int) -> tuple[Any, int]:
    if text.startswith(_QUOTE, at):
        first = at + len(_QUOTE)
        last = text.index(_QUOTE, first)
        return text[first:last], last + len(_QUOTE)
    if text.startswith('"', at):
        value, size = first_value(text[at:])
        return value, at + size
    if text.startswith("{", at):
        return _object(text, at)
    if text.startswith("[", at):
        return _list(text, at)
    found = _BARE.match(text, at)
    assert found is not None, "the pattern takes an empty text"
    word = found.group().strip()
    if word in _WORDS:
        return _WORDS[word], found.end()
    if not word:
        raise ValueError(at)
    return loads(word) if _NUMBER.fullmatch(word) else word, found.end()


def _expect(text: str, at: int, mark: str) -> int:
    at = _blank(text, at)
    if not text.startswith(mark, at):
        raise ValueError(at)
    return at + len(mark)


def _blank(text: str, at: int) -> int:
    while at < len(text) and text[at].isspace():
        at += 1
    return at
