"""Notations whose calls stand between two tags; each call is read when it is whole."""

from __future__ import annotations

import json
from abc import abstractmethod
from typing import Any

from offroad.text.said import CallPiece, Margin, Said, held, together
from offroad.text.tools.schema import Tools

Call = tuple[str, dict[str, Any]]


class BlockParser:
    """Text outside of blocks is content; a block that cannot be read is content too, its tags included."""

    start: str
    end: str
    tags: tuple[str, ...]

    def __init__(self, tools: Tools) -> None:
        self.tools = tools
        self.complete = 0
        self._text = ""
        self._inside = False
        self._margin = Margin()

    @abstractmethod
    def read(self, body: str) -> list[Call] | None:
        """The calls of a block's body; None: it cannot be read."""

    def feed(self, text: str) -> Said:
        self._text += text
        said: list[Said] = []
        while (at := self._text.find(self.end if self._inside else self.start)) >= 0:
            before = self._text[:at]
            said.append(self._block(before, self.end) if self._inside else self._margin.say(before))
            self._text = self._text[at + len(self.end if self._inside else self.start) :]
            self._inside = not self._inside
        if not self._inside:
            keep = len(self._text) - held(self._text, (self.start,))
            said.append(self._margin.say(self._text[:keep]))
            self._text = self._text[keep:]
        return together(said)

    def finish(self, cut: bool = False) -> Said:
        text, self._text = self._text, ""
        last = self._block(text, "") if self._inside else self._margin.say(text)
        return together([last, self._margin.end()])

    def _block(self, body: str, end: str) -> Said:
        calls = self.read(body)
        if not calls:
            return self._margin.say(self.start + body + end)
        self._margin.called()
        first, self.complete = self.complete, self.complete + len(calls)
        return Said(calls=pieces(calls, first))


class HermesParser(BlockParser):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>` (Qwen2.5, Qwen3, Hermes)."""

    start, end = "<tool_call>", "</tool_call>"
    tags = (start, end)

    def read(self, body: str) -> list[Call] | None:
        return json_calls(body, "arguments", "parameters")


def pieces(calls: list[Call], first: int) -> tuple[CallPiece, ...]:
    """Whole calls as pieces, numbered from `first`."""
    return tuple(
        CallPiece(first + i, name, json.dumps(arguments, ensure_ascii=False))
        for i, (name, arguments) in enumerate(calls)
    )


def json_calls(text: str, *names: str) -> list[Call] | None:
    """A call, or a list of them, as JSON; its arguments under one of `names`, as an object or as JSON text."""
    try:
        value = json.loads(text)
    except ValueError:
        return None
    calls: list[Call] = []
    for entry in value if isinstance(value, list) else [value]:
        if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
            return None
        arguments = next((entry[name] for name in names if name in entry), {})
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except ValueError:
                return None
        if not isinstance(arguments, dict):
            return None
        calls.append((entry["name"], arguments))
    return calls
