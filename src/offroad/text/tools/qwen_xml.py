"""Calls as Qwen3-Coder and Qwen3.5 write them; arguments are told as they come.

    <tool_call>
    <function=NAME>
    <parameter=ARG>
    VALUE
    </parameter>
    </function>
    </tool_call>

Taken with what models leave out: the outer tags, and the end of a parameter before the next one. A value loses one line
break at each end, and what the schema says is no string is read as JSON once it is whole.
"""

from __future__ import annotations

import re
from enum import Enum

from offroad.text.said import CallPiece, Margin, Said, held, together
from offroad.text.tools.json_text import dumps, quoted
from offroad.text.tools.schema import Tools

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_FUNCTION, _PARAMETER = "<function=", "<parameter="
_END_FUNCTION, _END_PARAMETER = "</function>", "</parameter>"
_ENDS = (_END_PARAMETER, _PARAMETER, _END_FUNCTION)  # of a value
_NAME = re.compile(r"[^<>\n]*")


class _State(Enum):
    CONTENT = "content"
    CALL = "call"  # behind the outer tag
    BODY = "body"  # of a function, between parameters
    VALUE = "value"
    AFTER = "after"  # behind a function, where the outer tag's end may follow


class QwenXmlParser:
    """A machine over what is open."""

    tags = (_OPEN, _CLOSE, _FUNCTION, _END_FUNCTION, _PARAMETER, _END_PARAMETER)

    def __init__(self, tools: Tools) -> None:
        self.tools = tools
        self.complete = 0
        self._text = ""
        self._state = _State.CONTENT
        self._margin = Margin()
        self._tag = ""  # of the open call, as said: content, if no function follows
        self._function = self._parameter = ""
        self._count = 0  # parameters of the open function
        self._begun = False  # whether a part of the open value was told

    def feed(self, text: str) -> Said:
        self._text += text
        steps = {
            _State.CONTENT: self._content,
            _State.CALL: self._call,
            _State.BODY: self._body,
            _State.VALUE: self._value,
            _State.AFTER: self._after,
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
            value = self._value_end(text.removesuffix("\n")) if self._state == _State.VALUE else ""
            return self._end(value + "}")
        tag = self._tag if self._state == _State.CALL else ""
        return together([self._margin.say(tag + text), self._margin.end()])

    # --- what each state does with a whole tag; None: it needs more text ----------------------------------------------
    def _content(self) -> Said | None:
        at, tag = self._first(_OPEN, _FUNCTION)
        if at < 0:
            return None
        said = self._margin.say(self._text[:at])
        self._tag = _OPEN if tag == _OPEN else ""
        self._text = self._text[at + len(self._tag) :]
        self._state = _State.CALL
        return said

    def _call(self) -> Said | None:
        text = self._text.lstrip()
        if not text.startswith(_FUNCTION):
            if _FUNCTION.startswith(text):
                return None
            self._state = _State.CONTENT
            return self._margin.say(self._tag)
        name = self._name(text, len(_FUNCTION))
        if name is None:
            return None
        function, end = name
        if function and text[end] == ">":
            self._text = text[end + 1 :]
            self._function, self._count, self._state = function, 0, _State.BODY
            self._margin.called()
            return Said(calls=(CallPiece(self.complete, function, "{"),))
        self._state = _State.CONTENT  # a tag without a name is content; what stands behind it may be a call
        blanks, self._text = self._text[: len(self._text) - len(text)], text[len(_FUNCTION) :]
        return self._margin.say(self._tag + blanks + _FUNCTION)

    def _body(self) -> Said | None:
        at, tag = self._first(_PARAMETER, _END_FUNCTION, _CLOSE)
        if at < 0:
            return None
        if tag == _PARAMETER:
            name = self._name(self._text, at + len(tag))
            if name is None:
                return None
            self._parameter, end = name
            self._text = self._text[end + (self._text[end] == ">") :]
            self._state, self._begun = _State.VALUE, False
            return Said()
        self._text = self._text[at + len(tag) :]
        self._state = _State.AFTER if tag == _END_FUNCTION else _State.CONTENT
        return self._end("}")

    def _value(self) -> Said | None:
        at, tag = self._first(*_ENDS)
        if at < 0:
            return None
        value = self._text[:at].removesuffix("\n")
        self._text = self._text[at + (len(tag) if tag == _END_PARAMETER else 0) :]
        self._state = _State.BODY
        return self._arguments(self._value_end(value))

    def _after(self) -> Said | None:
        text = self._text.lstrip()
        if _CLOSE.startswith(text):
            if text == _CLOSE:
                self._text, self._state = "", _State.CONTENT
                return Said()
            return None
        self._text, self._state = text.removeprefix(_CLOSE), _State.CONTENT
        return Said()

    def _partial(self) -> Said:
        """What may be told of a state that is still open."""
        if self._state == _State.CONTENT:
            return self._margin.say(self._released((_OPEN, _FUNCTION)))
        if self._state == _State.VALUE and not self.tools.kinds(self._function, self._parameter) - {"string"}:
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

    @staticmethod
    def _name(text: str, at: int) -> tuple[str, int] | None:
        """(the name that begins at `at`, where it ends); None: it may go on."""
        found = _NAME.match(text, at)
        assert found is not None, "the pattern takes an empty text"
        return None if found.end() == len(text) else (found.group().strip(), found.end())

    # --- arguments as JSON --------------------------------------------------------------------------------------------
    def _value_part(self, text: str) -> str:
        opening = ""
        if not self._begun:
            opening, text, self._begun = self._key() + '"', text.removeprefix("\n"), True
        return opening + quoted(text)

    def _value_end(self, text: str) -> str:
        if self._begun:
            return quoted(text) + '"'
        value = self.tools.value(self._function, self._parameter, text.removeprefix("\n"))
        return self._key() + dumps(value)

    def _key(self) -> str:
        comma = ", " if self._count else ""
        self._count += 1
        return f"{comma}{dumps(self._parameter)}: "

    def _arguments(self, text: str) -> Said:
        return Said(calls=(CallPiece(self.complete, arguments=text),))

    def _end(self, text: str) -> Said:
        said = self._arguments(text)
        self.complete += 1
        self._margin.called()
        return said
