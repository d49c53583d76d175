"""From the bytes of a body to a request, or to an error that names the field."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
from pydantic import ValidationError

from offroad.errors import RequestError
from offroad.serve.protocol.extent import check_extent
from offroad.serve.protocol.fields import NEUTRAL, Body, left_out, short

Wanted = TypeVar("Wanted", bound=Body)

_KINDS = {"str", "bool", "int", "dict"}
_ITEM_KINDS = {"message", "function_call", "function_call_output", "reasoning"}


def parse(raw: bytes, kind: type[Wanted]) -> Wanted:
    """The request in a body. Raises RequestError: not JSON, a field that is unknown, wrong or not supported yet."""
    try:
        data = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(
            "the body is not valid JSON", code="invalid_json", found=str(error), accepted="a JSON object"
        ) from error
    if not isinstance(data, dict):
        raise RequestError("the body", code="invalid_json", found=type(data).__name__, accepted="a JSON object")
    check_extent(data)
    own, table = kind.model_fields.keys(), NEUTRAL | kind.neutral
    data = {name: value for name, value in data.items() if name in own or not left_out(name, value, table)}
    return validated(kind.prepared(data), kind)


def validated(data: dict[str, Any], kind: type[Wanted]) -> Wanted:
    """The request in a decoded body. Raises RequestError."""
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise _refusal(error) from error


def _refusal(error: ValidationError) -> RequestError:
    """One error in our own shape: an unknown field before others (a typo explains them), else the first and deepest."""
    found = [(_path(e["loc"]), e) for e in error.errors(include_url=False)]
    unknown = [(path, e) for path, e in found if e["type"] == "extra_forbidden"]
    field = [(path, e) for path, e in found if path[:2] == found[0][0][:2] or path[:1] == found[0][0]]
    path, first = unknown[0] if unknown else max(field, key=lambda entry: len(entry[0]))
    param = ".".join(path)
    if first["type"] == "extra_forbidden":
        return RequestError(
            f"{param} is not a field of this request",
            param=param,
            code="unknown_field",
            next="check the spelling, or leave it out",
        )
    if first["type"] == "missing":
        return RequestError(f"{param} is missing", param=param, code="missing_field")
    accepted = sorted({e["msg"].removeprefix("Input should be ") for other, e in found if other == path})
    return RequestError(
        param, param=param, code="invalid_value", found=short(first["input"]), accepted=" or ".join(accepted)
    )


def _path(location: tuple[int | str, ...]) -> tuple[str, ...]:
    """The user's names and indices; names that pydantic gives to members of a union are left out."""
    if location[0] == "prompt":
        return ("prompt",)
    head, *rest = location
    if head == "input" and len(rest) > 2 and rest[2] in _ITEM_KINDS:
        del rest[2]
    return (
        str(head),
        *(
            str(part)
            for part in rest
            if isinstance(part, int) or (part.isidentifier() and part not in _KINDS and part[0].islower())
        ),
    )
