"""How deep and how large decoded JSON may be. What has passed here can be validated, rendered and compiled by recursive
code, and in a time in which others can wait: validation holds up the whole server."""

from __future__ import annotations

from typing import Any

from offroad.errors import RequestError

# An object of a JSON schema takes two levels for each level of its values.
MAX_DEPTH = 100
# Entries of objects and lists: a conversation of 10,000 messages, or 100 tools of 300 entries each, have fewer.
MAX_PARTS = 50_000
# Token ids are quick to look at, and are many.
MAX_IDS = 2**20
_IDS = ("prompt", "tokens", "input")


def check_extent(data: dict[str, Any], param: str | None = None) -> None:
    """Raises RequestError (`param`) if decoded JSON has too many levels or parts. Is not recursive itself.

    Lists of token ids in fields of a request that take some count apart.
    """
    lists = [] if param is not None else [found for name in _IDS for found in _id_lists(data.get(name))]
    ids, apart = sum(map(len, lists)), {id(found) for found in lists}
    if ids > MAX_IDS:
        raise _too_much("token ids", ids, MAX_IDS, param)
    level, parts = [data], 0
    for _ in range(MAX_DEPTH):
        parts += sum(map(len, level))
        if parts > MAX_PARTS:
            raise _too_much("parts", f"more than {MAX_PARTS}", MAX_PARTS, param)
        level = [
            child
            for container in level
            for child in (container.values() if isinstance(container, dict) else container)
            if isinstance(child, (dict, list)) and id(child) not in apart
        ]
        if not level:
            return
    raise _too_much("levels", f"more than {MAX_DEPTH}", MAX_DEPTH, param)


def _id_lists(value: Any) -> list[list[int]]:
    """`value`, or the lists in it, where they are integers only."""
    if not isinstance(value, list):
        return []
    kinds = set(map(type, value))
    if kinds == {int}:
        return [value]
    return [part for part in value if set(map(type, part)) == {int}] if kinds == {list} else []


def _too_much(what: str, found: object, most: int, param: str | None) -> RequestError:
    return RequestError(
        f"{param or 'the body'} has too many {what}",
        param=param,
        code="body_too_complex",
        found=found,
        accepted=f"up to {most}",
    )
