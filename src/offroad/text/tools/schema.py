"""Values of arguments by what a tool's JSON schema says they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from offroad.text.tools.json_text import loads

_KINDS: dict[str, type | tuple[type, ...]] = {
    "object": dict,
    "array": list,
    "boolean": bool,
    "integer": int,
    "number": (int, float),
    "null": type(None),
}


class Tools:
    """The tools of a request by name: OpenAI's list of functions."""

    def __init__(self, tools: list[Mapping[str, Any]]) -> None:
        self._properties: dict[str, Mapping[str, Any]] = {}
        for tool in tools:
            function = tool.get("function", tool)
            parameters = function.get("parameters") or {}
            self._properties[function["name"]] = parameters.get("properties") or {}

    def __contains__(self, name: str) -> bool:
        return name in self._properties

    def names(self, function: str) -> frozenset[str]:
        """The parameters that a function has; empty if nothing is said of them."""
        return frozenset(self._properties.get(function, ()))

    def kinds(self, function: str, parameter: str) -> frozenset[str]:
        """The types that a parameter may have; empty if nothing is said of it."""
        schema = self._properties.get(function, {}).get(parameter)
        return _kinds(schema) if isinstance(schema, Mapping) else frozenset()

    def value(self, function: str, parameter: str, text: str) -> Any:
        """The value that `text` stands for. A text that cannot be read as any of the types stays a string."""
        kinds = self.kinds(function, parameter)
        if not kinds - {"string"}:
            return text
        try:
            value = loads(text)
        except ValueError:
            return _python(text.strip(), kinds, text)
        fits = any(isinstance(value, _KINDS[kind]) for kind in kinds if kind in _KINDS)
        if isinstance(value, bool) and "boolean" not in kinds:
            fits = False
        if "integer" in kinds and isinstance(value, float) and value.is_integer():
            return int(value)
        return value if fits else text


def _python(text: str, kinds: frozenset[str], otherwise: str) -> Any:
    """True, False and None as Python writes them, which models do too."""
    words = {"true": ("boolean", True), "false": ("boolean", False), "none": ("null", None)}
    kind, value = words.get(text.lower(), ("", None))
    return value if kind in kinds else otherwise


def _kinds(schema: Mapping[str, Any]) -> frozenset[str]:
    found: set[str] = set()
    kind = schema.get("type")
    found.update([kind] if isinstance(kind, str) else kind or ())
    for word in ("anyOf", "oneOf", "allOf"):
        for part in schema.get(word) or ():
            if isinstance(part, Mapping):
                found |= _kinds(part)
    if not found and schema.get("enum"):
        found.update("string" if isinstance(value, str) else "number" for value in schema["enum"])
    return frozenset(found)
