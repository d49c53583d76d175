"""What of JSON Schema an answer can be held to. xgrammar leaves out what it does not know, or all that stands beside
it, and says nothing: a schema with such a part is refused, so that an answer that is given does follow it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_NEVER = ("not", "if", "contains", "dependentRequired", "dependentSchemas", "dependencies")
_NEVER += ("$dynamicRef", "$recursiveRef")
# One of these is all that is read of a schema: what is asked beside it is lost. A `type` there says little more.
_ALONE = ("$ref", "anyOf", "oneOf", "allOf")
_LENGTHS = ("minLength", "maxLength")
# Without a type they ask nothing, and those of _SHAPES say what it is.
_TYPED = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", *_LENGTHS, "pattern", "format", "multipleOf")
_TYPED += ("minItems", "maxItems", "minProperties", "maxProperties", "propertyNames", "patternProperties")
_SHAPES = ("properties", "additionalProperties", "unevaluatedProperties", "items", "prefixItems")
_ASKING = (*_TYPED, *_SHAPES, "required", "enum", "const", "uniqueItems", "unevaluatedItems")
# Where schemas stand in a schema: as values of an object, in a list, as they are.
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_PARTS = ("items", "additionalProperties", "unevaluatedProperties", "unevaluatedItems", "propertyNames")


def not_followed(schema: dict[str, Any]) -> str | None:
    """The first part of a schema to which an answer would not be held, and where it is; None: there is none.

    What is no schema at all is left to the compiler.
    """
    waiting: list[tuple[str, Any]] = [("#", schema)]
    while waiting:
        where, part = waiting.pop()
        if isinstance(part, dict):
            if (lost := _lost(part)) is not None:
                return f"{lost} at {where}"
            waiting += _below(where, part)
    return None


def with_properties(schema: Any) -> Any:
    """The schema of a tool's arguments without what stands beside `properties` and would be read in their place: an
    `anyOf` that says which of them are required would let a call have any arguments at all."""
    if not isinstance(schema, dict):
        return schema
    kept = {word: value for word, value in schema.items() if word not in _ALONE or "properties" not in schema}
    for word, value in kept.items():
        if word in _MAPS and isinstance(value, dict):
            kept[word] = {name: with_properties(part) for name, part in value.items()}
        elif word in _LISTS and isinstance(value, list):
            kept[word] = [with_properties(part) for part in value]
        elif word in _PARTS:
            kept[word] = with_properties(value)
    return kept


def _below(where: str, schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for word, value in schema.items():
        if word in _MAPS and isinstance(value, dict):
            yield from ((f"{where}/{word}/{name}", part) for name, part in value.items())
        elif word in _LISTS and isinstance(value, list):
            yield from ((f"{where}/{word}/{i}", part) for i, part in enumerate(value))
        elif word in _PARTS:
            yield f"{where}/{word}", value


def _lost(schema: dict[str, Any]) -> str | None:
    """What of this schema, those within it apart, would not be followed."""
    for word in _NEVER:
        if word in schema:
            return word
    alone = [word for word in _ALONE if word in schema]
    beside = [word for word in _ASKING if word in schema] if alone else []
    if len(alone) + len(beside) > 1:
        return f"{(beside + alone)[0]} beside {alone[-1]}"
    if isinstance(several := schema.get("allOf"), list) and len(several) > 1:
        return "allOf of several schemas"
    if isinstance(ref := schema.get("$ref"), str) and ref != "#" and not ref.startswith("#/"):
        return "a $ref to another document"
    if schema.get("uniqueItems") is True:
        return "uniqueItems"
    typed = any(word in schema for word in ("type", *_SHAPES, "enum", "const"))
    untyped = [] if typed else [word for word in (*_TYPED, "required") if word in schema]
    if untyped:
        return f"{untyped[0]} without a type"
    return _lost_of_kind(schema)


def _lost_of_kind(schema: dict[str, Any]) -> str | None:
    """The same of what is said of objects, strings and numbers."""
    known, required = schema.get("properties", {}), schema.get("required", [])
    if isinstance(known, dict) and isinstance(required, list) and any(name not in known for name in required):
        return "required without such a property"
    if "pattern" in schema and any(word in schema for word in _LENGTHS):
        return "minLength or maxLength beside pattern"
    kinds = schema.get("type")
    if "multipleOf" in schema and "number" in (kinds if isinstance(kinds, list) else [kinds]):
        return "multipleOf of a number"
    return None
