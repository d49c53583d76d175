"""How deeply a request may be nested: recursive code (validation, templates, grammars) follows what has passed here."""

from __future__ import annotations

from typing import Any

from offroad.errors import RequestError

# An object of a JSON schema takes two levels for each level of its values.
MAX_DEPTH = 100


def check_depth(value: dict[str, Any] | list[Any], param: str | None = None) -> None:
    """Raises RequestError (`param`) if decoded JSON is nested deeper than `MAX_DEPTH`. Is not recursive itself."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for container in level
            for child in (container.values() if isinstance(container, dict) else container)
            if isinstance(child, (dict, list))
        ]
        if not level:
            return
    raise RequestError(
        f"{param or 'the body'} is nested too deeply",
        param=param,
        code="body_too_deep",
        found=f"more than {MAX_DEPTH} levels",
        accepted=f"up to {MAX_DEPTH}",
    )
