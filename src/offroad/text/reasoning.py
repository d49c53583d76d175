"""Splits thoughts from the answer, as the text comes."""

from __future__ import annotations

from dataclasses import dataclass

from offroad.text.said import Said, held


@dataclass(frozen=True)
class Thoughts:
    """How a family marks thoughts: tags around them, and tags that end them although nothing closed them, since a model
    at times forgets to (a call of a tool)."""

    start: str
    end: str
    breaks: tuple[str, ...] = ()


THINK = Thoughts("<think>", "</think>", ("<tool_call>",))
CHANNEL = Thoughts("<|channel>thought\n", "<channel|>", ("<|tool_call>",))
_BEFORE, _THINKING, _ANSWER = range(3)


def opened_by(prompt: str, thoughts: Thoughts) -> bool | None:
    """Whether a prompt's end has begun thoughts; None: it has ended them already, so an answer has none.

    Read from the text, since what a template does with its switches is its own affair.
    """
    end = prompt.rstrip()
    if end.endswith(thoughts.end):
        return None
    return end.endswith(thoughts.start.rstrip())


class ReasoningParser:
    """`opened`: the prompt ends with the start tag, so the text begins with thoughts.

    Blank lines around thoughts and before the answer are no part of either. A text that ends within thoughts is all
    thoughts.
    """

    def __init__(self, thoughts: Thoughts, opened: bool) -> None:
        self.thoughts = thoughts
        self._state = _THINKING if opened else _BEFORE
        self.begun = opened
        self._text = ""
        self._blank = True  # nothing but blanks since the state began

    @property
    def ended(self) -> bool:
        """Whether what comes now is the answer."""
        return self._state == _ANSWER

    def feed(self, text: str) -> Said:
        self._text += text
        reasoning, content = "", ""
        while self._text:
            if self._state == _BEFORE and not self._begin():
                break
            if self._state == _ANSWER:
                content += self._answer()
                break
            told, more = self._think()
            reasoning += told
            if not more:
                break
        return Said(reasoning, content)

    def finish(self) -> Said:
        """What was held back."""
        text, self._text = self._text, ""
        if self._state == _THINKING:
            return Said(reasoning="" if self._blank else text.rstrip())
        return Said(content=text)

    def _begin(self) -> bool:
        """Finds out whether thoughts come first; False: not known yet."""
        start, text = self.thoughts.start, self._text.lstrip()
        if text.startswith(start):
            self._text, self._state, self.begun = text[len(start) :], _THINKING, True
            return True
        if start.startswith(text):
            return False
        self._state, self._blank = _ANSWER, False  # no thoughts: blanks are the answer's
        return True

    def _think(self) -> tuple[str, bool]:
        """(thoughts that may be told, whether something follows them that can be looked at)."""
        text = self._text.lstrip() if self._blank else self._text
        tags = (self.thoughts.end, *self.thoughts.breaks)
        found = [(text.find(tag), tag) for tag in tags if tag in text]
        if found:
            at, tag = min(found)
            self._text = text[at + len(tag) :] if tag == self.thoughts.end else text[at:]
            self._state, self._blank = _ANSWER, True
            return text[:at].rstrip(), True
        whole = text[: len(text) - held(text, tags)]
        told = whole.rstrip()  # blanks at the end may be the last before the tag
        self._text = text[len(told) :]
        self._blank = self._blank and not told
        return told, False

    def _answer(self) -> str:
        text = self._text.lstrip() if self._blank else self._text
        self._text = ""
        self._blank = self._blank and not text
        return text
