"""Calls as Gemma 4 writes them: `<|tool_call>call:NAME{key:<|"|>text<|"|>,n:42,list:[..]}<tool_call|>`."""

from __future__ import annotations

import re
from typing import Any

from offroad.text.tools.blocks import BlockParser, Call

_QUOTE = '<|"|>'
_NAME = re.compile(r"\s*call:([\w.-]+)\s*")
_KEY = re.compile(r"\s*([^:{}\[\],]+?)\s*:\s*")
_BARE = re.compile(r"[^,{}\[\]]*")
_WORDS: dict[str, Any] = {"true": True, "false": False, "null": None}


class Gemma4Parser(BlockParser):
    """A JSON-like notation: keys without quotes, strings between quote tokens."""

    start, end = "<|tool_call>", "<tool_call|>"

    def read(self, body: str) -> list[Call] | None:
        named = _NAME.match(body)
        if named is None:
            return None
        try:
            arguments, at = _object(body, named.end())
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
        made[key.group(1).removeprefix(_QUOTE).removesuffix(_QUOTE)], at = _value(text, key.end())
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
    if text.startswith("{", at):
        return _object(text, at)
    if text.startswith("[", at):
        return _list(text, at)
    found = _BARE.match(text, at)
    assert found is not None, "the pattern takes an empty text"
    word = found.group().strip()
    if word in _WORDS:
        return _WORDS[word], found.end()
    for kind in (int, float):
        try:
            return kind(word), found.end()
        except ValueError:
            continue
    if not word:
        raise ValueError(at)
    return word, found.end()


def _expect(text: str, at: int, mark: str) -> int:
    at = _blank(text, at)
    if not text.startswith(mark, at):
        raise ValueError(at)
    return at + len(mark)


def _blank(text: str, at: int) -> int:
    while at < len(text) and text[at].isspace():
        at += 1
    return at
