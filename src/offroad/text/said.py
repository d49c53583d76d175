"""What a model has said, taken apart: thoughts, content and calls of tools, piece by piece."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class CallPiece:
    """A part of the call number `index`: its first one names the function, all of them add to the arguments (JSON)."""

    index: int
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True)
class Said:
    """What a piece of text was: thoughts, then content, then calls."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[CallPiece, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.calls)


class ToolParser(Protocol):
    """Takes the text behind the thoughts apart. What it gives does not depend on how the text is cut into pieces.
    `tags`: what marks calls, which must be in the text even if a tokenizer calls them special."""

    tags: tuple[str, ...]

    @property
    def complete(self) -> int:
        """How many calls were said to their end."""

    def feed(self, text: str) -> Said: ...

    def finish(self, cut: bool = False) -> Said:
        """What is left when the text has ended; a call without an end is completed if it can be read, else content.

        `cut`: the text did not end by itself. Then a call of which parts were told stays as it is, not complete.
        """


def held(text: str, tags: Iterable[str]) -> int:
    """How many characters at the end of `text` may be the beginning of a tag."""
    for size in range(min(len(text), max(len(tag) for tag in tags) - 1), 0, -1):
        if any(tag.startswith(text[-size:]) for tag in tags):
            return size
    return 0


def together(pieces: Iterable[Said]) -> Said:
    """Several pieces as one; pieces of calls stay apart."""
    pieces = list(pieces)
    return Said(
        "".join(piece.reasoning for piece in pieces),
        "".join(piece.content for piece in pieces),
        tuple(call for piece in pieces for call in piece.calls),
    )


def runs(pieces: Iterable[Said]) -> list[list[Said]]:
    """Neighbours that are the same as one: within a run thoughts come before content, and content before calls."""
    found: list[list[Said]] = []
    last = 0
    for piece in pieces:
        kinds = [kind for kind, part in enumerate((piece.reasoning, piece.content, piece.calls)) if part]
        if not found or (kinds and kinds[0] < last):
            found.append([])
            last = 0
        found[-1].append(piece)
        last = max([last, *kinds])
    return found


class Margin:
    """Content around calls: blanks beside a call are no part of it."""

    def __init__(self) -> None:
        self._blanks = ""
        self._fresh = False  # nothing but blanks since a call

    def say(self, text: str) -> Said:
        """Content, but for blanks at its end, which may be the last before a call."""
        text = self._blanks + (text.lstrip() if self._fresh else text)
        told = text.rstrip()
        self._blanks, self._fresh = text[len(told) :], self._fresh and not told
        return Said(content=told)

    def called(self) -> None:
        """A call stands here."""
        self._blanks, self._fresh = "", True

    def end(self) -> Said:
        """Blanks at the end of all."""
        blanks, self._blanks = self._blanks, ""
        return Said(content=blanks)
