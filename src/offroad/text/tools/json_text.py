"""JSON as clients can read it: what Python's reader takes beyond JSON (NaN, infinities) is refused, and what it cannot
write in UTF-8 (a lone surrogate) is escaped."""

from __future__ import annotations

import json
import math
from typing import Any


def _refuse(word: str) -> Any:
    raise ValueError(word)


def _finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _refuse(text)


_DECODER = json.JSONDecoder(parse_constant=_refuse, parse_float=_finite)


def loads(text: str) -> Any:
    """The value of a JSON text. Raises ValueError for anything else, too deeply nested ones too."""
    try:
        return _DECODER.decode(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def first_value(text: str) -> tuple[Any, int]:
    """(the value that begins a text, where it ends). Raises ValueError."""
    try:
        return _DECODER.raw_decode(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def dumps(value: Any) -> str:
    """A value as JSON. Raises ValueError or TypeError for what JSON has not."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    return text if text.isascii() or not _surrogates(text) else json.dumps(value)


def quoted(text: str) -> str:
    """A string as JSON, without its quotes."""
    return dumps(text)[1:-1]


def _surrogates(text: str) -> bool:
    return any("\ud800" <= character <= "\udfff" for character in text)
