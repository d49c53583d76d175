"""Tools in requests: what may be called, whether it must be, and calls in earlier messages."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from offroad.errors import RequestError
from offroad.serve.protocol.fields import Strict


class Function(Strict):
    """`strict` is accepted with any value: it does not change how a call is read."""

    name: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    type: Literal["function"]
    function: Function

    def plain(self) -> dict[str, Any]:
        """As templates know it, without fields that are null."""
        return self.model_dump(exclude_none=True)


class Named(Strict):
    name: str


class NamedChoice(Strict):
    type: Literal["function"]
    function: Named


class CalledFunction(Strict):
    """`arguments`: a JSON object, as text."""

    name: str
    arguments: str | None = None


class ToolCall(Strict):
    """A call in an earlier answer; `index` comes from clients that put a stream together."""

    id: str | None = None
    type: Literal["function"] | None = None
    function: CalledFunction
    index: int | None = None

    def plain(self) -> dict[str, Any]:
        return {"type": "function", **self.model_dump(exclude_none=True, exclude={"index"})}


ToolChoice = Literal["none", "auto", "required"] | NamedChoice


def check_choice(tools: list[Tool], choice: ToolChoice | None) -> None:
    """Raises RequestError: a choice without tools, or of one that is not there; two tools of one name."""
    names = [tool.function.name for tool in tools]
    if twice := {name for name in names if names.count(name) > 1}:
        raise RequestError("tools", param="tools", found=f"{sorted(twice)[0]} twice", accepted="names that differ")
    if choice == "required" and not tools:
        raise RequestError("tool_choice", param="tool_choice", found="required without tools", accepted="tools to call")
    if isinstance(choice, NamedChoice) and choice.function.name not in names:
        found, accepted = choice.function.name, ", ".join(names) or "a choice only together with tools"
        raise RequestError("tool_choice", param="tool_choice", found=found, accepted=accepted)
