"""What `--speculative-config` says: which drafter, and how many tokens it may propose for a step."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from offroad.errors import SettingsError

METHODS = ("ngram",)
_FLAG = "--speculative-config"
_EXAMPLE = '{"method": "ngram", "num_speculative_tokens": 4}'
_KEYS = {"method": str, "num_speculative_tokens": int, "prompt_lookup_min": int, "prompt_lookup_max": int}


@dataclass(frozen=True)
class Speculation:
    """`tokens`: most drafts in a step; `shortest`, `longest`: of the n-grams that are looked up, in tokens."""

    method: str
    tokens: int
    shortest: int = 2
    longest: int = 5


def speculation(text: str) -> Speculation | None:
    """The config in a JSON text; None for an empty one. Raises SettingsError naming the key."""
    if not text.strip():
        return None
    try:
        values = json.loads(text)
    except ValueError as error:
        raise SettingsError(_FLAG, found=str(error), accepted=f"a JSON object, e.g. {_EXAMPLE}") from error
    if not isinstance(values, dict):
        raise SettingsError(_FLAG, found=type(values).__name__, accepted=f"a JSON object, e.g. {_EXAMPLE}")
    for name, value in values.items():
        if name not in _KEYS:
            raise SettingsError(f"{_FLAG}: key", found=name, accepted=", ".join(_KEYS))
        if not isinstance(value, _KEYS[name]) or isinstance(value, bool):
            raise SettingsError(f"{_FLAG}: {name}", found=repr(value), accepted=_KEYS[name].__name__)
    made = Speculation(
        values.get("method", ""),
        values.get("num_speculative_tokens", 4),
        values.get("prompt_lookup_min", 2),
        values.get("prompt_lookup_max", max(5, values.get("prompt_lookup_min", 2))),
    )
    return _checked(made)


def _checked(made: Speculation) -> Speculation:
    checks: list[tuple[str, Any, bool, str]] = [
        ("method", made.method or "none", made.method in METHODS, ", ".join(METHODS)),
        ("num_speculative_tokens", made.tokens, 1 <= made.tokens <= 16, "1 to 16"),
        ("prompt_lookup_min", made.shortest, made.shortest >= 1, "1 or more"),
        ("prompt_lookup_max", made.longest, made.longest >= made.shortest, f"{made.shortest} or more"),
    ]
    for name, found, ok, accepted in checks:
        if not ok:
            raise SettingsError(f"{_FLAG}: {name}", found=found, accepted=accepted)
    return made
