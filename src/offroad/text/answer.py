"""How a model's answers are written, and the parser of one answer: thoughts first, then content and calls of tools."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from offroad.text.reasoning import ReasoningParser, Thoughts
from offroad.text.said import Said, ToolParser, held, together
from offroad.text.tools.registry import REASONING_PARSERS, TOOL_PARSERS, reasoning_parser_of, tool_parser_of
from offroad.text.tools.schema import Tools
from offroad.text.tools.whole import NamedParser

AUTO, NONE = "auto", "none"


@dataclass(frozen=True)
class Notation:
    """How a model marks thoughts and writes calls (None: not at all, or in no way that is known), and the variables
    that its chat template reads."""

    thoughts: Thoughts | None = None
    tools: str | None = None
    reads: frozenset[str] = frozenset()

    @classmethod
    def of(cls, template: str, reads: frozenset[str], reasoning: str = AUTO, tools: str = AUTO) -> Notation:
        """The notation of a chat template, or those that are named; "none" turns one off."""
        thoughts = reasoning_parser_of(template) if reasoning == AUTO else None if reasoning == NONE else reasoning
        calls = tool_parser_of(template) if tools == AUTO else None if tools == NONE else tools
        return cls(None if thoughts is None else REASONING_PARSERS[thoughts], calls, reads)


@dataclass(frozen=True)
class Reading:
    """How one answer is taken apart. `thoughts` None: it has none. `opened`: the prompt has begun them. `tools` may be
    called in the notation `calls`, or are all that may be said, as a grammar makes it: `calls` "json", or the arguments
    of the function `named` alone. `several`: more than one call is told."""

    thoughts: Thoughts | None = None
    opened: bool = False
    tools: tuple[dict[str, Any], ...] = ()
    calls: str | None = None
    named: str | None = None
    several: bool = True

    @property
    def tags(self) -> tuple[str, ...]:
        """Texts that the parser must see, also where special tokens are left out of an answer."""
        thoughts = () if self.thoughts is None else (self.thoughts.start, self.thoughts.end)
        return (*thoughts, *(TOOL_PARSERS[self.calls].tags if self.calls else ()))

    def parser(self, hidden: tuple[str, ...] = ()) -> AnswerParser:
        """A parser of one answer; `hidden` are left out of its content."""
        reasoning = None
        if self.thoughts is not None:
            # Where nothing can be called, a tag of calls within thoughts is a thought.
            thoughts = self.thoughts if self.calls or self.named else replace(self.thoughts, breaks=())
            reasoning = ReasoningParser(thoughts, self.opened)
        tools: ToolParser | None = None
        if self.named is not None:
            tools = NamedParser(self.named)
        elif self.calls is not None:
            tools = TOOL_PARSERS[self.calls](Tools(list(self.tools)))
        return AnswerParser(reasoning, tools, hidden, self.several)


class AnswerParser:
    """Feeds a text through the parsers of thoughts, then of calls. `complete`: calls said to their end; `begun`: calls
    that were told of."""

    def __init__(
        self,
        reasoning: ReasoningParser | None,
        tools: ToolParser | None,
        hidden: tuple[str, ...] = (),
        several: bool = True,
    ) -> None:
        self._reasoning, self._tools, self._several = reasoning, tools, several
        self._hidden = Hidden(hidden) if hidden else None
        self.begun = 0

    @property
    def complete(self) -> int:
        return 0 if self._tools is None else min(self._tools.complete, self.begun)

    @property
    def thinking(self) -> bool:
        """Whether thoughts are said, or may still begin."""
        return self._reasoning is not None and not self._reasoning.ended

    @property
    def thought(self) -> bool:
        """Whether there were thoughts."""
        return self._reasoning is not None and self._reasoning.begun

    @property
    def done(self) -> bool:
        """Whether nothing more will be told: one call was asked for and is complete."""
        return not self._several and self._tools is not None and self._tools.complete >= 1

    def feed(self, text: str) -> Said:
        said = Said(content=text) if self._reasoning is None else self._reasoning.feed(text)
        return self._told(said.reasoning, self._behind(said.content))

    def finish(self, cut: bool = False) -> Said:
        """What is left. `cut`: the answer did not end by itself, so a call without an end stays without."""
        last = Said() if self._reasoning is None else self._reasoning.finish()
        said = self._behind(last.content)
        if self._tools is not None and not self.done:
            said = together([said, self._tools.finish(cut)])
        said = self._told(last.reasoning, said)
        rest = self._hidden.finish() if self._hidden else ""
        return replace(said, content=said.content + rest)

    def _behind(self, text: str) -> Said:
        """What a text behind the thoughts is. Behind a call that shall be the only one nothing is told, so where that
        one ends is looked for character by character."""
        if self._tools is None:
            return Said(content=text)
        if self._several:
            return self._tools.feed(text) if text else Said()
        told: list[Said] = []
        for character in text:
            if self.done:
                break
            told.append(self._tools.feed(character))
        return together(told)

    def _told(self, reasoning: str, said: Said) -> Said:
        calls = said.calls if self._several else tuple(piece for piece in said.calls if piece.index == 0)
        self.begun = max([self.begun, *(piece.index + 1 for piece in calls)])
        content = said.content if self._hidden is None else self._hidden.feed(said.content)
        return Said(reasoning, content, calls)


class Hidden:
    """Takes some tags out of a text."""

    def __init__(self, tags: tuple[str, ...]) -> None:
        self._tags, self._text = tags, ""

    def feed(self, text: str) -> str:
        if not text and not self._text:
            return ""
        self._text += text
        out = ""
        while found := [(at, -len(tag)) for tag in self._tags if (at := self._text.find(tag)) >= 0]:
            at, size = min(found)
            out, self._text = out + self._text[:at], self._text[at - size :]
        keep = len(self._text) - held(self._text, self._tags)
        out, self._text = out + self._text[:keep], self._text[keep:]
        return out

    def finish(self) -> str:
        text, self._text = self._text, ""
        return text
