"""The body of /v1/messages, Anthropic's API, and the chat that it asks for."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec
from pydantic import Field

from offroad.errors import RequestError
from offroad.serve.protocol.chat import ChatRequest, Effort
from offroad.serve.protocol.fields import Body, Strict
from offroad.serve.protocol.parse import validated

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class _Block(Strict):
    """`cache_control` is accepted with any value: prefixes are kept without being asked."""

    cache_control: dict[str, Any] | None = None


class TextBlock(_Block):
    type: Literal["text"]
    text: str
    citations: None = None


class ThinkingBlock(_Block):
    """`signature` is accepted with any value: thoughts are not encrypted here."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class ToolUseBlock(_Block):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(_Block):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[TextBlock] | None = None
    is_error: bool | None = None


Block = Annotated[TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")]


class Turn(Strict):
    role: Literal["user", "assistant"]
    content: str | list[Block]


class CustomTool(_Block):
    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None

    def plain(self) -> dict[str, Any]:
        function = {"name": self.name, "description": self.description, "parameters": self.input_schema}
        return {"type": "function", "function": {k: v for k, v in function.items() if v is not None}}


class Choice(Strict):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Strict):
    """`adaptive` leaves it to the model."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(default=None, ge=0)
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(Strict):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Strict):
    effort: Effort | None = None
    format: OutputFormat | None = None


class CountRequest(Body):
    """Body of /v1/messages/count_tokens."""

    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {
        "service_tier": ("auto", "standard_only"),
        "container": (),
        "mcp_servers": ([],),
        "context_management": ({}, {"edits": []}),
        "cache_control": (),
        "inference_geo": (),
        "speed": ("standard",),
    }

    model: str | None = None
    messages: list[Turn] = Field(min_length=1)
    system: str | list[TextBlock] | None = None
    tools: list[CustomTool] | None = None
    tool_choice: Choice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None

    @classmethod
    def prepared(cls, data: dict[str, Any]) -> dict[str, Any]:
        """The body, once no content is of a kind that is not supported yet. Raises RequestError that names it."""
        kinds = ("text", "thinking", "tool_use", "tool_result")
        for i, message in enumerate(data["messages"] if isinstance(data.get("messages"), list) else ()):
            content = message.get("content") if isinstance(message, dict) else None
            for j, block in enumerate(content if isinstance(content, list) else ()):
                kind = block.get("type") if isinstance(block, dict) else None
                if isinstance(kind, str) and kind not in kinds:
                    raise RequestError(
                        f"content of type {kind} is not supported yet",
                        param=f"messages.{i}.content.{j}.type",
                        code="unsupported_content",
                        found=kind,
                        accepted=", ".join(kinds),
                    )
        return data

    @property
    def thoughts(self) -> bool:
        """Whether thoughts are to be shown."""
        return self.thinking is None or self.thinking.display != "omitted"

    def chat(self) -> ChatRequest:
        """The same as a chat. A last turn of the assistant is gone on with. Raises RequestError."""
        messages: list[dict[str, Any]] = []
        if self.system is not None:
            messages.append({"role": "system", "content": _joined(self.system)})
        for i, turn in enumerate(self.messages):
            messages += _turn(turn, i)
        goes_on = self.messages[-1].role == "assistant"
        more: dict[str, Any] = {"messages": messages, "continue_final_message": goes_on, **self.sampling_fields()}
        if self.tools:
            more["tools"] = [tool.plain() for tool in self.tools]
        if self.tool_choice is not None:
            more |= _choice(self.tool_choice)
        if self.thinking is not None and self.thinking.type != "adaptive":
            budget = self.thinking.budget_tokens if self.thinking.type == "enabled" else None
            more["thinking"] = {"type": self.thinking.type, "budget_tokens": budget}
        if self.output_config is not None and self.output_config.format is not None:
            schema = {"name": "output", "schema": self.output_config.format.schema_}
            more["response_format"] = {"type": "json_schema", "json_schema": schema}
        if self.output_config is not None and self.output_config.effort is not None:
            # Here an effort turns no thoughts on or off; a template that knows efforts reads it.
            more["chat_template_kwargs"] = {"reasoning_effort": self.output_config.effort}
        return validated(more, ChatRequest)

    def sampling_fields(self) -> dict[str, Any]:
        """How to sample, by the names of a chat."""
        return {}


class MessagesRequest(CountRequest):
    """Body of /v1/messages."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None

    def sampling_fields(self) -> dict[str, Any]:
        names = ("max_tokens", "temperature", "top_p", "top_k")
        return {name: getattr(self, name) for name in names} | {"stop": self.stop_sequences}


def _choice(choice: Choice) -> dict[str, Any]:
    if (choice.type == "tool") != (choice.name is not None):
        accepted = 'a name with type "tool", and only there'
        raise RequestError("tool_choice.name", param="tool_choice.name", found=choice.name, accepted=accepted)
    named = {"type": "function", "function": {"name": choice.name}}
    more: dict[str, Any] = {"tool_choice": named if choice.type == "tool" else _CHOICES[choice.type]}
    return more | ({"parallel_tool_calls": False} if choice.disable_parallel_tool_use else {})


def _turn(turn: Turn, index: int) -> list[dict[str, Any]]:
    """The messages of a turn: results of tools are messages of their own, in their place among the texts."""
    if isinstance(turn.content, str):
        return [{"role": turn.role, "content": turn.content}]
    allowed = (TextBlock, ToolResultBlock) if turn.role == "user" else (TextBlock, ThinkingBlock, ToolUseBlock)
    for j, block in enumerate(turn.content):
        if not isinstance(block, allowed):
            param = f"messages.{index}.content.{j}.type"
            raise RequestError(param, param=param, found=f"{block.type} of the {turn.role}", accepted="another role")
    if turn.role == "assistant":
        return [_answer(turn.content)]
    made: list[dict[str, Any]] = []
    for block in turn.content:
        if isinstance(block, ToolResultBlock):
            error = "Error: " if block.is_error else ""
            made.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": error + _joined(block.content)})
        elif isinstance(block, TextBlock):
            if not made or made[-1]["role"] != "user":
                made.append({"role": "user", "content": []})
            made[-1]["content"].append({"type": "text", "text": block.text})
    return made


def _answer(blocks: list[Any]) -> dict[str, Any]:
    thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]
    calls = [
        {
            "id": block.id,
            "type": "function",
            "function": {"name": block.name, "arguments": msgspec.json.encode(block.input).decode()},
        }
        for block in blocks
        if isinstance(block, ToolUseBlock)
    ]
    text = _joined([block for block in blocks if isinstance(block, TextBlock)])
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    return message | ({"tool_calls": calls} if calls else {})


def _joined(content: str | list[TextBlock] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(block.text for block in content)
