"""What a sequence may say, as a request asks for it: data that travels to the engine."""

from __future__ import annotations

from typing import Literal

import msgspec

MAX_CHARS = 128 * 1024


class Grammar(msgspec.Struct, frozen=True):
    """A language. `text` is a JSON schema, a regular expression, or EBNF with a rule `root`; nothing for any object."""

    kind: Literal["json_schema", "json_object", "regex", "ebnf"]
    text: str = ""


class Thinking(msgspec.Struct, frozen=True):
    """Thoughts before the answer, to which no grammar applies. They end with the token `end_id`.

    `opened`: the prompt has begun them; else they may begin with the token `start_id` as the first of all. `budget`:
    how many tokens they may have before the one that ends them is forced; None: any number.
    """

    end_id: int
    start_id: int | None = None
    opened: bool = False
    budget: int | None = None


class Guide(msgspec.Struct, frozen=True):
    """Limits of what a sequence may say. `escapes`: tokens with which an answer may begin instead of what the grammar
    wants (a call of a tool); it is free from there on. `blanks`: tokens of line breaks, one of which may stand between
    thoughts and answer, as models put it. `param`: the request's field, for errors."""

    grammar: Grammar | None = None
    thinking: Thinking | None = None
    escapes: tuple[int, ...] = ()
    blanks: tuple[int, ...] = ()
    param: str = "structured_outputs"
