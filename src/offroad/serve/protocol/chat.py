"""The body of /v1/chat/completions."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from offroad.errors import RequestError
from offroad.serve.protocol.fields import Strict
from offroad.serve.protocol.messages import Message, checked_message
from offroad.serve.protocol.shared import Generation
from offroad.serve.protocol.tools import Tool, ToolChoice, check_choice

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class Thinking(Strict):
    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = Field(default=None, ge=0)


class ChatRequest(Generation):
    """Body of /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    echo: Literal[False] | None = None
    add_special_tokens: Literal[False] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    enable_thinking: bool | None = None
    thinking: bool | Thinking | None = None
    reasoning_effort: Effort | None = None
    include_reasoning: bool | None = None
    thinking_token_budget: int | None = Field(default=None, ge=0)

    @classmethod
    def prepared(cls, data: dict[str, Any]) -> dict[str, Any]:
        """Messages without what clients send back unchanged."""
        messages = data.get("messages")
        if not isinstance(messages, list):
            return data
        checked = [checked_message(m, f"messages.{i}") if isinstance(m, dict) else m for i, m in enumerate(messages)]
        return data | {"messages": checked}

    def thinks(self) -> bool | None:
        """Whether the model shall think; None: its template decides. RequestError if the fields disagree."""
        asked: dict[str, bool] = {}
        if self.enable_thinking is not None:
            asked["enable_thinking"] = self.enable_thinking
        if self.thinking is not None:
            asked["thinking"] = self.thinking if isinstance(self.thinking, bool) else self.thinking.type != "disabled"
        if self.reasoning_effort is not None:
            asked["reasoning_effort"] = self.reasoning_effort != "none"
        if len({*asked.values()}) > 1:
            *_, last = asked
            accepted = f"what {next(iter(asked))} says, or one of them alone"
            raise RequestError(last, param=last, found="the opposite of another field", accepted=accepted)
        return next(iter(asked.values()), None)

    def budget(self) -> int | None:
        """The most tokens of thoughts; None: any number. RequestError if two fields disagree."""
        other = self.thinking.budget_tokens if isinstance(self.thinking, Thinking) else None
        given = {v for v in (self.thinking_token_budget, other) if v is not None}
        if len(given) > 1:
            name = "thinking_token_budget"
            raise RequestError(
                name,
                param=name,
                found=self.thinking_token_budget,
                accepted=f"the same as thinking.budget_tokens ({other})",
            )
        return given.pop() if given else None

    def called(self) -> tuple[list[Tool], ToolChoice]:
        """The tools that may be called, and the choice. RequestError: a choice that cannot be made."""
        tools, choice = self.tools or [], self.tool_choice
        check_choice(tools, choice)
        if not tools or choice == "none":
            return [], "none"
        return tools, choice or "auto"

    def max_new_tokens(self) -> int | None:
        """As asked; None: the rest of the context. Raises RequestError if the two names disagree."""
        given = {v for v in (self.max_tokens, self.max_completion_tokens) if v is not None}
        if len(given) > 1:
            raise RequestError(
                "max_completion_tokens",
                param="max_completion_tokens",
                found=self.max_completion_tokens,
                accepted=f"the same as max_tokens ({self.max_tokens}), or one of the two alone",
            )
        if self.max_completion_tokens is not None and self.max_completion_tokens < 1:
            name = "max_completion_tokens"
            raise RequestError(name, param=name, found=self.max_completion_tokens, accepted="1 or more")
        return given.pop() if given else None

    @property
    def limit(self) -> str:
        """The field that says how many tokens the answer may have, for errors that name it."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    def wanted_logprobs(self) -> int | None:
        if self.top_logprobs and not self.logprobs:
            raise RequestError(
                "top_logprobs",
                param="top_logprobs",
                found=self.top_logprobs,
                accepted="top_logprobs only together with logprobs: true",
            )
        if self.top_logprobs is not None and not 0 <= self.top_logprobs <= 20:
            raise RequestError("top_logprobs", param="top_logprobs", found=self.top_logprobs, accepted="0 to 20")
        return (self.top_logprobs or 0) if self.logprobs else None
