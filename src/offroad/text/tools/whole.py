"""Notations in which an answer is nothing but calls: it is read when it has ended."""

from __future__ import annotations

import ast
from abc import abstractmethod

from offroad.text.said import CallPiece, Said
from offroad.text.tools.blocks import Call, json_calls, pieces
from offroad.text.tools.json_text import dumps, first_value, loads
from offroad.text.tools.schema import Tools


class WholeParser:
    """An answer that begins with one of `openers` is kept until its end; calls if it can be read, content if not."""

    openers: tuple[str, ...]
    tags: tuple[str, ...] = ()

    def __init__(self, tools: Tools) -> None:
        self.tools = tools
        self.complete = 0
        self._text = ""
        self._content = False

    @abstractmethod
    def read(self, text: str) -> list[Call] | None:
        """The calls of an answer; None: it cannot be read."""

    def feed(self, text: str) -> Said:
        if self._content:
            return Said(content=text)
        self._text += text
        begun = self._text.lstrip()
        if any(begun.startswith(opener) or opener.startswith(begun) for opener in self.openers):
            return Said()
        self._content = True
        return Said(content=self._text)

    def finish(self, cut: bool = False) -> Said:
        if self._content or not self._text:
            return Said()
        calls = self.read(self._text.strip())
        if not calls:
            return Said(content=self._text)
        self.complete = len(calls)
        return Said(calls=pieces(calls, 0))


class LlamaJsonParser(WholeParser):
    """`{"name": ..., "parameters": {...}}`, several parted by `;` (Llama 3)."""

    openers = ("{", "<|python_tag|>")
    tags = ("<|python_tag|>",)

    def read(self, text: str) -> list[Call] | None:
        rest, calls = text.removeprefix("<|python_tag|>").strip(), []
        while rest:
            try:
                _, size = first_value(rest)
            except ValueError:
                return None
            one = json_calls(rest[:size], "parameters", "arguments")
            if one is None:
                return None
            calls += one
            rest = rest[size:].strip().removeprefix(";").strip()
        return calls


class JsonListParser(WholeParser):
    """`[{"name": ..., "parameters": {...}}, ...]`: what a grammar makes of an answer that must call."""

    openers = ("[",)

    def read(self, text: str) -> list[Call] | None:
        return json_calls(text, "parameters") if text.startswith("[") else None

    def finish(self, cut: bool = False) -> Said:
        said = super().finish(cut)
        if not cut or not said.content:
            return said
        # A list that was cut off cannot be read, but the calls that were said to their end can.
        calls, rest = _first_calls(self._text.lstrip().removeprefix("["))
        if not calls:
            return said
        self.complete = len(calls)
        return Said(content=rest, calls=pieces(calls, 0))


def _first_calls(entries: str) -> tuple[list[Call], str]:
    """The whole calls that a list begins with, and what is behind them."""
    calls, rest = [], entries.lstrip()
    while rest:
        try:
            _, size = first_value(rest)
        except ValueError:
            break
        one = json_calls(rest[:size], "parameters")
        if one is None:
            break
        calls += one
        rest = rest[size:].lstrip().removeprefix(",").lstrip()
    return calls, rest


class NamedParser:
    """All of the answer is the arguments of one function, as a grammar makes it."""

    tags: tuple[str, ...] = ()

    def __init__(self, function: str) -> None:
        self._function, self._text, self._begun = function, "", False
        self.complete = 0

    def feed(self, text: str) -> Said:
        self._text += text
        if not text:
            return Said()
        name, self._begun = None if self._begun else self._function, True
        return Said(calls=(CallPiece(0, name, text),))

    def finish(self, cut: bool = False) -> Said:
        try:
            self.complete = int(isinstance(loads(self._text), dict))
        except ValueError:
            self.complete = 0
        return Said()


class PythonicParser(WholeParser):
    """A list of calls in Python: `[get(city="Rome"), get(city="Oslo")]` (Llama 3.2 and 4)."""

    openers = ("[",)

    def read(self, text: str) -> list[Call] | None:
        try:
            tree = ast.parse(text, mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None
        if not isinstance(tree, ast.List):
            return None
        calls = [_call(node) for node in tree.elts]
        return None if None in calls else calls


def _call(node: ast.expr) -> Call | None:
    named = isinstance(node, ast.Call) and isinstance(node.func, (ast.Name, ast.Attribute)) and not node.args
    if not named or any(word.arg is None for word in node.keywords):
        return None
    try:
        arguments = {word.arg: ast.literal_eval(word.value) for word in node.keywords}
        dumps(arguments)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None
    return ast.unparse(node.func), arguments
