"""Messages of a chat."""

from __future__ import annotations

from typing import Any, Literal

from offroad.errors import RequestError
from offroad.serve.protocol.fields import Strict, neutral
from offroad.serve.protocol.tools import ToolCall

_MESSAGE_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "refusal": (),
    "audio": (),
    "function_call": (),
    "annotations": ([],),
}
# Clients' copies of fields that they did not know in an answer, and also send as what they are (LiteLLM).
_COPIES = frozenset({"provider_specific_fields"})
_ROLES = {"system", "developer", "user", "assistant", "tool"}
_REASONING = ("reasoning_content", "reasoning")


class TextPart(Strict):
    type: Literal["text"]
    text: str


class Message(Strict):
    """One message. `developer` is what newer clients call the system. The thoughts of an answer come back under either
    name; templates keep or remove them."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart]
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None

    def plain(self) -> dict[str, Any]:
        """The message as chat templates know it, without fields that are null."""
        message = self.model_dump(exclude_none=True, exclude={"tool_calls"})
        if self.tool_calls:
            message["tool_calls"] = [call.plain() for call in self.tool_calls]
        return message | {"role": "system"} if self.role == "developer" else message


def checked_message(message: dict[str, Any], param: str) -> dict[str, Any]:
    """A message without the fields that clients send back unchanged from an answer; kinds of content not supported
    yet are named here, since a list of what a union did not match would not be read."""
    kept = {
        k: v for k, v in message.items() if k not in _COPIES and not neutral(k, v, _MESSAGE_NEUTRAL, f"{param}.{k}")
    }
    for name, role in (("tool_calls", "assistant"), ("tool_call_id", "tool")):
        if kept.get(name) not in (None, []) and kept.get("role") in _ROLES - {role}:
            raise RequestError(
                f"{param}.{name}",
                param=f"{param}.{name}",
                found=f"a message of role {kept['role']}",
                accepted=f"{name} in messages of role {role} only",
            )
    if kept.get("content") is None and kept.get("role") == "assistant" and kept.get("tool_calls"):
        kept["content"] = ""  # an answer that was nothing but calls
    _check_reasoning(kept, param)
    content = kept.get("content")
    for i, part in enumerate(content if isinstance(content, list) else ()):
        if isinstance(part, dict) and isinstance(part.get("type"), str) and part["type"] != "text":
            raise RequestError(
                f"content of type {part['type']} is not supported yet",
                param=f"{param}.content.{i}.type",
                code="unsupported_content",
                found=part["type"],
                accepted="text",
            )
    return kept


def _check_reasoning(message: dict[str, Any], param: str) -> None:
    """Thoughts belong to answers. One that was all thoughts (cut off by max_tokens) has no content, made "" here."""
    given = {name: message[name] for name in _REASONING if message.get(name) is not None}
    if not given:
        return
    *_, name = given
    if message.get("role") in ("system", "developer", "user", "tool"):
        raise RequestError(
            f"{param}.{name}",
            param=f"{param}.{name}",
            found=f"a message of role {message['role']}",
            accepted="reasoning in messages of the assistant only",
        )
    if len(given) == 2 and given["reasoning"] != given["reasoning_content"]:
        raise RequestError(
            f"{param}.{name}",
            param=f"{param}.{name}",
            found="another text than in the other field",
            accepted="one of reasoning_content and reasoning, or the same text in both",
        )
    if message.get("content") is None:
        message["content"] = ""
