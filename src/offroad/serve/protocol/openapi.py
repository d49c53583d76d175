"""Bodies in the OpenAPI document: routes read and check them by themselves, so that errors have the API's own shape."""

from __future__ import annotations

from typing import Any

from offroad.serve.protocol.fields import Body

_REFS = "#/$defs/"


def takes(kind: type[Body]) -> dict[str, Any]:
    """`openapi_extra` of a route that takes such a body, which stands there whole: references would lead nowhere."""
    schema = kind.model_json_schema()
    whole = _resolved(schema, schema.pop("$defs", {}), ())
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": whole}}}}


def _resolved(part: Any, parts: dict[str, Any], within: tuple[str, ...]) -> Any:
    """`part` with what it refers to in place of references; a part within itself may be anything."""
    if isinstance(part, list):
        return [_resolved(entry, parts, within) for entry in part]
    if not isinstance(part, dict):
        return part
    name = str(part.get("$ref", "")).removeprefix(_REFS)
    if name in within:
        return {}
    if name:
        return _resolved(parts[name], parts, (*within, name))
    return {key: _resolved(entry, parts, within) for key, entry in part.items() if key != "discriminator"}
