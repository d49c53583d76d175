"""The body of /v1/responses, OpenAI's newer API, and the chat that it asks for. Nothing is kept between requests."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from offroad.errors import RequestError
from offroad.serve.protocol.chat import ChatRequest, Effort
from offroad.serve.protocol.fields import Body, Strict
from offroad.serve.protocol.parse import validated
from offroad.serve.protocol.shared import StreamOptions

# Fields that a chat has under another name, for errors that name them.
NAMES = {
    "messages": "input",
    "prompt": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
    "tools": "tools",
}
_PARTS = ("input_text", "output_text")
_ITEMS = ("message", "function_call", "function_call_output", "reasoning")
# Fields that a chat has too, with the same meaning.
_SHARED = (
    *("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed"),
    *("stop", "stop_token_ids", "ignore_eos", "min_tokens", "logit_bias", "cache_salt", "parallel_tool_calls"),
    *("chat_template_kwargs", "enable_thinking", "thinking_token_budget", "structured_outputs"),
)


class Text(Strict):
    """`annotations` and `logprobs` come back from an answer, and are accepted with any value."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class _Item(Strict):
    """`id` and `status` come back from an answer: nothing is looked up by them."""

    id: str | None = None
    status: str | None = None


class MessageItem(_Item):
    type: Literal["message"]
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[Text]
    phase: Literal["commentary", "final_answer"] | None = None


class CallItem(_Item):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class ResultItem(_Item):
    type: Literal["function_call_output"]
    call_id: str
    output: str | list[Text]


class Thought(Strict):
    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(_Item):
    type: Literal["reasoning"]
    summary: list[Thought] = []
    content: list[Thought] | None = None
    encrypted_content: None = None


Item = Annotated[MessageItem | CallItem | ResultItem | ReasoningItem, Field(discriminator="type")]


class FunctionTool(Strict):
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def chat(self) -> dict[str, Any]:
        """As a tool of a chat."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": {k: v for k, v in function.items() if v is not None}}


class NamedFunction(Strict):
    type: Literal["function"]
    name: str


class Reasoning(Strict):
    """`summary` "auto": as there is, and there is none: thoughts are shown as they are."""

    effort: Effort | None = None
    summary: Literal["auto"] | None = None
    generate_summary: Literal["auto"] | None = None


class Format(Strict):
    """`strict` and `description` are accepted with any value, as in a chat: `structured.JsonSchema`."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    description: str | None = None
    strict: bool | None = None


class TextConfig(Strict):
    format: Format | None = None
    verbosity: Literal["medium"] | None = None


class ResponsesRequest(Body):
    """Body of /v1/responses."""

    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {
        "previous_response_id": (),
        "conversation": (),
        "background": (False,),
        "background_options": (),
        "truncation": ("disabled",),
        "max_tool_calls": (),
        "prompt": (),
        "moderation": (),
        "context_management": ([],),
        "prompt_cache_options": ({"mode": "implicit"},),
        "prompt_cache_retention": ("in_memory",),
        "top_logprobs": (0,),
        "prompt_logprobs": (),
    }

    model: str | None = None
    input: str | list[Item] = Field(min_length=1)
    instructions: str | None = None
    max_output_tokens: int | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: TextConfig | None = None
    include: list[Literal["reasoning.encrypted_content"]] | None = None
    metadata: dict[str, str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    logit_bias: dict[str, float] | None = None
    cache_salt: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    thinking_token_budget: int | None = None
    structured_outputs: dict[str, Any] | None = None

    @classmethod
    def prepared(cls, data: dict[str, Any]) -> dict[str, Any]:
        """The body with the type of each item, once none is of a kind that is not supported. RequestError names it."""
        if not isinstance(data.get("input"), list):
            return data
        return data | {"input": [_prepared(item, f"input.{i}") for i, item in enumerate(data["input"])]}

    def chat(self) -> ChatRequest:
        """The same as a chat. Raises RequestError."""
        given = {name: getattr(self, name) for name in _SHARED if getattr(self, name) is not None}
        given["messages"] = self._messages()
        if self.max_output_tokens is not None:
            given["max_completion_tokens"] = self.max_output_tokens
        if self.tools:
            given["tools"] = [tool.chat() for tool in self.tools]
        if isinstance(self.tool_choice, NamedFunction):
            given["tool_choice"] = {"type": "function", "function": {"name": self.tool_choice.name}}
        elif self.tool_choice is not None:
            given["tool_choice"] = self.tool_choice
        if self.reasoning is not None and self.reasoning.effort is not None:
            given["reasoning_effort"] = self.reasoning.effort
        if self.text is not None and self.text.format is not None:
            given["response_format"] = _response_format(self.text.format)
        return validated(given, ChatRequest)

    def _messages(self) -> list[dict[str, Any]]:
        """Messages of the items. What one answer has said is one message, and so is all that comes before the first
        turn: templates want one system message."""
        made: list[dict[str, Any]] = []
        if self.instructions is not None:
            made.append({"role": "system", "content": self.instructions})
        items = self.input
        if isinstance(items, str):
            return [*made, {"role": "user", "content": items}]
        for item in items:
            if isinstance(item, ResultItem):
                made.append({"role": "tool", "tool_call_id": item.call_id, "content": _joined(item.output)})
            elif isinstance(item, MessageItem) and item.role != "assistant":
                content = _joined(item.content)
                lead = item.role in ("system", "developer") and len(made) == 1 and made[0]["role"] == "system"
                if lead:
                    made[0]["content"] += "\n\n" + content
                else:
                    role = "system" if item.role == "developer" else item.role
                    made.append({"role": role, "content": content})
            else:
                _said(made, item)
        return made


def _said(made: list[dict[str, Any]], item: MessageItem | CallItem | ReasoningItem) -> None:
    """Adds what the assistant has said to its last message, or begins one: thoughts come first in each."""
    last = made[-1] if made and made[-1]["role"] == "assistant" else None
    has_said = last is not None and bool(last["content"])
    has_called = last is not None and "tool_calls" in last
    begins = isinstance(item, ReasoningItem) and (has_said or has_called)
    begins = begins or (isinstance(item, MessageItem) and has_said and not has_called)
    if last is None or begins:
        last = {"role": "assistant", "content": ""}
        made.append(last)
    if isinstance(item, ReasoningItem):
        thoughts = "\n".join(part.text for part in item.content or item.summary)
        if thoughts:
            before = last.get("reasoning_content")
            last["reasoning_content"] = thoughts if before is None else f"{before}\n{thoughts}"
    elif isinstance(item, MessageItem):
        last["content"] = "\n".join(text for text in (last["content"], _joined(item.content)) if text)
    else:
        call = {"id": item.call_id, "type": "function", "function": {"name": item.name, "arguments": item.arguments}}
        last.setdefault("tool_calls", []).append(call)


def _prepared(item: Any, param: str) -> Any:
    if not isinstance(item, dict):
        return item
    if "type" not in item and "role" in item:
        item = item | {"type": "message"}
    kind = item.get("type")
    if isinstance(kind, str) and kind not in _ITEMS:
        raise _unsupported(f"{param}.type", kind, _ITEMS)
    for name in ("content", "output"):
        parts = item.get(name) if kind != "reasoning" else None
        for j, part in enumerate(parts if isinstance(parts, list) else ()):
            found = part.get("type") if isinstance(part, dict) else None
            if isinstance(found, str) and found not in _PARTS:
                raise _unsupported(f"{param}.{name}.{j}.type", found, _PARTS)
    if item.get("encrypted_content") is not None:
        name = f"{param}.encrypted_content"
        accepted = "null: thoughts are not encrypted here, they are in content"
        raise RequestError(name, param=name, code="unsupported_content", found="thoughts of others", accepted=accepted)
    return item


def _unsupported(param: str, kind: str, accepted: tuple[str, ...]) -> RequestError:
    return RequestError(
        f"{kind} is not supported yet",
        param=param,
        code="unsupported_content",
        found=kind,
        accepted=", ".join(accepted),
    )


def _response_format(format: Format) -> dict[str, Any]:
    if format.type != "json_schema":
        return {"type": format.type}
    if format.schema_ is None or format.name is None:
        param = "text.format.schema" if format.schema_ is None else "text.format.name"
        raise RequestError(f"{param} is missing", param=param, code="missing_field")
    return {"type": "json_schema", "json_schema": {"name": format.name, "schema": format.schema_}}


def _joined(content: str | list[Text]) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)
