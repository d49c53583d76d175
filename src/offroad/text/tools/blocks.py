"""Notations whose calls stand between two tags; each call is read when it is whole."""

from __future__ import annotations

import re
from abc import abstractmethod
from typing import Any

from offroad.text.said import CallPiece, Margin, Said, held, together
from offroad.text.tools.json_text import dumps, loads
from offroad.text.tools.schema import Tools

Call = tuple[str, dict[str, Any]]
_JSON_QUOTE = re.compile(r'(?<!\\)(?:\\\\)*"')


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

    def mend(self, body: str) -> list[Call] | None:
        """The calls of a body that cannot be read as it is, but which the model has ended itself."""
        return None

    def quotes(self, body: str) -> bool:
        """Whether a string is open at the end of a body, so that a tag there is a part of it."""
        return False

    def feed(self, text: str) -> Said:
        self._text += text
        said: list[Said] = []
        while (at := self._ends() if self._inside else self._text.find(self.start)) >= 0:
            said.append(self._close(at) if self._inside else self._margin.say(self._text[:at]))
            if not self._inside:
                self._text, self._inside = self._text[at + len(self.start) :], True
            else:
                self._inside = False
        if not self._inside:
            keep = len(self._text) - held(self._text, (self.start,))
            said.append(self._margin.say(self._text[:keep]))
            self._text = self._text[keep:]
        return together(said)

    def finish(self, cut: bool = False) -> Said:
        said: list[Said] = []
        while self._inside:
            if self.end in self._text and not self.read(self._text):
                # A string that was never closed has taken an end tag in: the block ends there after all.
                said.append(self._close(self._text.index(self.end)))
                self._inside = False
                said.append(self.feed(""))
            else:
                said.append(self._block(self._text, "", not cut))
                self._text, self._inside = "", False
        text, self._text = self._text, ""
        return together([*said, self._margin.say(text), self._margin.end()])

    def _ends(self) -> int:
        """Where the open block ends, -1: not yet."""
        at = self._text.find(self.end)
        while at >= 0 and self.quotes(self._text[:at]):
            at = self._text.find(self.end, at + len(self.end))
        return at

    def _close(self, at: int) -> Said:
        """The block up to `at`, or up to the first end tag if only so it can be read."""
        first = self._text.find(self.end)
        if first < at and not self.read(self._text[:at]):
            at = first
        body, self._text = self._text[:at], self._text[at + len(self.end) :]
        return self._block(body, self.end, True)

    def _block(self, body: str, end: str, mend: bool) -> Said:
        calls = self.read(body) or (self.mend(body) if mend else None)
        if not calls:
            return self._margin.say(self.start + body + end)
        self._margin.called()
        first, self.complete = self.complete, self.complete + len(calls)
        return Said(calls=pieces(calls, first))


class HermesParser(BlockParser):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>` (Qwen2.5, Qwen3, Hermes)."""

    start, end = "<tool_call>", "</tool_call>"
    tags = (start, end)

    def quotes(self, body: str) -> bool:
        return len(_JSON_QUOTE.findall(body)) % 2 == 1

    def read(self, body: str) -> list[Call] | None:
        return json_calls(body, "arguments", "parameters")


def pieces(calls: list[Call], first: int) -> tuple[CallPiece, ...]:
    """Whole calls as pieces, numbered from `first`."""
    return tuple(CallPiece(first + i, name, dumps(arguments)) for i, (name, arguments) in enumerate(calls))


def json_calls(text: str, *names: str) -> list[Call] | None:
    """A call, or a list of them, as JSON; its arguments under one of `names`, as an object or as JSON text."""
    try:
        value = loads(text)
    except ValueError:
        return None
    calls: list[Call] = []
    for entry in value if isinstance(value, list) else [value]:
        if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
            return None
        arguments = next((entry[name] for name in names if name in entry), {})
        if isinstance(arguments, str):
            try:
                arguments = loads(arguments)
            except ValueError:
                return None
        if not isinstance(arguments, dict):
            return None
        calls.append((entry["name"], arguments))
    return calls
