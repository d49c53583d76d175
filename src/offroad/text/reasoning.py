"""Splits thoughts from the answer, as the text comes."""

from __future__ import annotations

from dataclasses import dataclass

from offroad.text.said import Said, held
from offroad.text.tools.dsml import OPEN as DSML_CALLS


@dataclass(frozen=True)
class Thoughts:
    """How a family marks thoughts: tags around them, and tags that end them although nothing closed them, since a model
    at times forgets to (a call of a tool). `again`: it may think again in the midst of an answer, before it calls; tags
    that are out of place are left out."""

    start: str
    end: str
    breaks: tuple[str, ...] = ()
    again: bool = False


THINK = Thoughts("<think>", "</think>", ("<tool_call>",))
DSML_THINK = Thoughts("<think>", "</think>", (DSML_CALLS,), again=True)
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
        self._calling = not thoughts.again  # from here on all is the answer
        self._joint = ""  # between thoughts and later ones

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
                told, more = self._answer()
                content += told
            else:
                told, more = self._think()
                reasoning += told
            if not more:
                break
        return Said(reasoning, content)

    def finish(self) -> Said:
        """What was held back."""
        text, self._text = self._text, ""
        if self._state == _THINKING:
            return Said(reasoning=self._thought(text.strip() if self._blank else text.rstrip()))
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
        again = (self.thoughts.start,) if self.thoughts.again else ()
        tags = (self.thoughts.end, *self.thoughts.breaks, *again)
        at, tag = _first(text, tags)
        if tag in again:  # left out; what is before it makes no tag with what is behind it
            told = text[:at].rstrip()
            self._text = text[len(told) : at] + text[at + len(tag) :]
            self._blank = self._blank and not told
            return self._thought(told), True
        if at >= 0:
            self._text = text[at + len(tag) :] if tag == self.thoughts.end else text[at:]
            self._state, self._blank = _ANSWER, True
            return self._thought(text[:at].rstrip()), True
        whole = text[: len(text) - held(text, tags)]
        told = whole.rstrip()  # blanks at the end may be the last before the tag
        self._text = text[len(told) :]
        self._blank = self._blank and not told
        return self._thought(told), False

    def _thought(self, text: str) -> str:
        if not text:
            return ""
        joint, self._joint = self._joint, ""
        return joint + text

    def _answer(self) -> tuple[str, bool]:
        """(content, whether something follows it that can be looked at)."""
        text = self._text.lstrip() if self._blank else self._text
        start, end, tags = self.thoughts.start, self.thoughts.end, (self.thoughts.start, self.thoughts.end)
        at, tag = (-1, "") if self._calling else _first(text, (*tags, *self.thoughts.breaks))
        if tag == end:
            self._text, self._blank = text[at + len(end) :], self._blank and not at
            return text[:at], True
        if tag == start:
            self._text, self._state, self._joint = text[at + len(start) :], _THINKING, "\n" if self.begun else ""
            self._blank = self.begun = True
            return text[:at], True
        keep = 0 if self._calling else held(text, (*tags, *self.thoughts.breaks))
        self._calling = self._calling or at >= 0
        told = text if self._calling else text[: len(text) - keep]
        self._text = text[len(told) :]
        self._blank = self._blank and not told
        return told, False


def _first(text: str, tags: tuple[str, ...]) -> tuple[int, str]:
    """(where the first of these tags is, which it is); -1 if there is none."""
    return min(((text.find(tag), tag) for tag in tags if tag in text), default=(-1, ""))
