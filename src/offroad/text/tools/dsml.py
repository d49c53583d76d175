"""Calls as DeepSeek-V4 writes them; arguments are told as they come.

    <｜DSML｜tool_calls>
    <｜DSML｜invoke name="NAME">
    <｜DSML｜parameter name="ARG" string="true">VALUE</｜DSML｜parameter>
    </｜DSML｜invoke>
    </｜DSML｜tool_calls>

A value is text as it is where `string` is true, else JSON. Taken with what models leave out: the outer tags, and ends
of parameters and calls before what follows them. What stands between parameters and calls is content, but for blanks.
"""

from __future__ import annotations

import re
from enum import Enum

from offroad.text.said import CallPiece, Margin, Said, held, together
from offroad.text.tools.json_text import dumps, loads, quoted
from offroad.text.tools.schema import Tools

OPEN, _CLOSE = "<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>"
_INVOKE, _END_INVOKE = "<｜DSML｜invoke", "</｜DSML｜invoke>"
_PARAMETER, _END_PARAMETER = "<｜DSML｜parameter", "</｜DSML｜parameter>"
_AFTER_BODY = (_END_INVOKE, _CLOSE, _INVOKE)  # what ends a call
_ENDS = (_END_PARAMETER, _PARAMETER, *_AFTER_BODY)  # what ends a value
_INVOKE_HEAD = re.compile(r'\s+name="([^"\n]+)"\s*>')
_PARAMETER_HEAD = re.compile(r'\s+name="([^"\n]+)"(?:\s+string="(true|false)")?\s*>')
_HEAD_END = re.compile(r"[>\n]|<")
# Names under which models put all arguments as one object.
_WRAPPERS = ("arguments", "input")


class _State(Enum):
    CONTENT = "content"
    CALLS = "calls"  # behind the outer tag or a call, where one may follow
    BODY = "body"  # of a call, between parameters
    VALUE = "value"


class DsmlParser:
    """A machine over what is open."""

    tags = (OPEN, _CLOSE, _INVOKE, _END_INVOKE, _PARAMETER, _END_PARAMETER)

    def __init__(self, tools: Tools) -> None:
        self.tools = tools
        self.complete = 0
        self._text = ""
        self._state = _State.CONTENT
        self._margin = Margin()
        self._tag = ""  # the outer tag behind which no call has come yet: content, if none does
        self._function = self._parameter = ""
        self._string: bool | None = None
        self._count = 0  # parameters of the open call that were told
        self._begun = False  # whether a part of the open value was told
        self._kept = ""  # an object that may be all arguments at once

    def feed(self, text: str) -> Said:
        self._text += text
        steps = {
            _State.CONTENT: self._content,
            _State.CALLS: self._calls,
            _State.BODY: self._body,
            _State.VALUE: self._value,
        }
        said: list[Said] = []
        while (piece := steps[self._state]()) is not None:
            said.append(piece)
        return together([*said, self._partial()])

    def finish(self, cut: bool = False) -> Said:
        """Content that was held back; an open value and its call are ended, unless the text was cut."""
        text, self._text = self._text, ""
        if self._state in (_State.BODY, _State.VALUE):
            if cut:  # what was held back may be a half tag
                return Said()
            if self._state == _State.VALUE:
                return together([self._arguments(self._value_end(text)), self._end()])
            return together([self._beside(text), self._end(), self._margin.end()])
        return together([self._margin.say(self._tag + text), self._margin.end()])

    # --- what each state does with a whole tag; None: it needs more text ----------------------------------------------
    def _content(self) -> Said | None:
        at, tag = self._first(OPEN, _INVOKE)
        if at < 0:
            return None
        said = self._margin.say(self._text[:at])
        self._tag = OPEN if tag == OPEN else ""
        self._text = self._text[at + len(self._tag) :]
        self._state = _State.CALLS
        return said

    def _calls(self) -> Said | None:
        text = self._text.lstrip()
        if text.startswith(_INVOKE):
            return self._call(text)
        if text.startswith(_CLOSE) and not self._tag:
            self._text, self._state = text.removeprefix(_CLOSE), _State.CONTENT
            return Said()
        if any(tag.startswith(text) for tag in (_INVOKE, _CLOSE)):
            return None
        tag, self._tag, self._state = self._tag, "", _State.CONTENT
        return self._margin.say(tag)

    def _call(self, text: str) -> Said | None:
        end = _HEAD_END.search(text, len(_INVOKE))
        if end is None:
            return None
        tag, self._tag = self._tag, ""
        head = _INVOKE_HEAD.match(text, len(_INVOKE), end.end())
        if head is None:  # a tag without a name is content; what stands behind it may be a call
            blanks, self._text = self._text[: len(self._text) - len(text)], text[len(_INVOKE) :]
            self._state = _State.CONTENT
            return self._margin.say(tag + blanks + _INVOKE)
        self._text, self._state = text[head.end() :], _State.BODY
        self._function, self._count, self._kept = head.group(1), 0, ""
        self._margin.called()
        return Said(calls=(CallPiece(self.complete, self._function, "{"),))

    def _body(self) -> Said | None:
        at, tag = self._first(_PARAMETER, *_AFTER_BODY)
        if at < 0:
            return None
        beside = self._beside(self._text[:at])
        if tag == _PARAMETER:
            end = _HEAD_END.search(self._text, at + len(tag))
            if end is None:
                self._text = self._text[at:]
                return beside or None
            head = _PARAMETER_HEAD.match(self._text, at + len(tag), end.end())
            if head is None:
                self._text = self._text[at + len(tag) :]
                return together([beside, self._beside(tag)])
            told = self._arguments(self._flushed())
            self._parameter, self._string = head.group(1), None if head.group(2) is None else head.group(2) == "true"
            self._text = self._text[head.end() :]
            self._state, self._begun = _State.VALUE, False
            return together([beside, told])
        self._text = self._text[at + (len(tag) if tag == _END_INVOKE else 0) :]
        self._state = _State.CALLS
        return together([beside, self._end()])

    def _value(self) -> Said | None:
        at, tag = self._first(*_ENDS)
        if at < 0:
            return None
        value = self._text[:at]
        if tag == _END_PARAMETER:
            self._text = self._text[at + len(tag) :]
        else:  # the line break before what comes next is not the value's
            value, self._text = value.removesuffix("\n"), self._text[at:]
        self._state = _State.BODY
        return self._arguments(self._value_end(value))

    def _partial(self) -> Said:
        """What may be told of a state that is still open."""
        if self._state == _State.CONTENT:
            return self._margin.say(self._released((OPEN, _INVOKE)))
        if self._state == _State.VALUE and self._raw and not self._may_wrap:
            text = self._released((*_ENDS, *(f"\n{tag}" for tag in _ENDS)))
            return self._arguments(self._value_part(text)) if text else Said()
        return Said()

    def _released(self, tags: tuple[str, ...]) -> str:
        keep = len(self._text) - held(self._text, tags)
        text, self._text = self._text[:keep], self._text[keep:]
        return text

    def _first(self, *tags: str) -> tuple[int, str]:
        """(where the first of these tags is, which it is); -1 if there is none."""
        return min(((self._text.find(tag), tag) for tag in tags if tag in self._text), default=(-1, ""))

    def _beside(self, text: str) -> Said:
        """What stands beside parameters: content, unless it is blank."""
        return self._margin.say(text) if text.strip() else Said()

    # --- arguments as JSON --------------------------------------------------------------------------------------------
    @property
    def _raw(self) -> bool:
        """Whether the open value is text as it is. What the schema says is no string is not, whatever the call says."""
        kinds = self.tools.kinds(self._function, self._parameter)
        return self._string is not False and (not kinds or "string" in kinds) and (self._string or kinds <= {"string"})

    @property
    def _may_wrap(self) -> bool:
        """Whether the open value may be an object of all arguments, under a name that the tool does not know."""
        names = self.tools.names(self._function)
        return not self._count and bool(names) and self._parameter in _WRAPPERS and self._parameter not in names

    def _value_part(self, text: str) -> str:
        opening = ""
        if not self._begun:
            opening, self._begun = self._key() + '"', True
        return opening + quoted(text)

    def _value_end(self, text: str) -> str:
        if self._begun:
            return quoted(text) + '"'
        if self._may_wrap and not self._kept:
            try:
                value = loads(text)
            except ValueError:
                value = None
            if isinstance(value, dict) and value.keys() <= self.tools.names(self._function):
                self._kept = text
                return ""
        return self._key() + dumps(self._read(text))

    def _read(self, text: str) -> object:
        if self._raw:
            return text
        if self._string:
            return self.tools.value(self._function, self._parameter, text)
        try:
            value = loads(text)
        except ValueError:
            return self.tools.value(self._function, self._parameter, text)
        only_text = self.tools.kinds(self._function, self._parameter) == {"string"}
        return text if only_text and not isinstance(value, str) else value

    def _flushed(self) -> str:
        """An object that was kept as the value that it is, since another parameter follows."""
        text, self._kept = self._kept, ""
        return self._key() + dumps(self._read(text)) if text else ""

    def _key(self) -> str:
        comma = ", " if self._count else ""
        self._count += 1
        return f"{comma}{dumps(self._parameter)}: "

    def _arguments(self, text: str) -> Said:
        return Said(calls=(CallPiece(self.complete, arguments=text),)) if text else Said()

    def _end(self) -> Said:
        inside = dumps(loads(self._kept))[1:-1] if self._kept else ""
        self._kept = ""
        said = self._arguments(inside + "}")
        self.complete += 1
        self._margin.called()
        return said
