"""Messages to prompt text by the model's Jinja template, with the places in it that are worth a prefix checkpoint."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
import jinja2.meta

from offroad.errors import RequestError, SettingsError
from offroad.text.messages import extended, joined, prepared
from offroad.text.template_env import MAX_CHARS, TooSlow, template_environment, time_limit
from offroad.text.tokenizer import Tokenizer
from offroad.weights.source import TokenizerFiles

MAX_SECONDS = 10.0
# Only the latest turns are marked: earlier ones were the latest when they came, and each costs one rendering. Results
# count apart: an agent's many must not displace the last user turn, where prompts part when thoughts are removed.
MARKED_TURNS, MARKED_RESULTS = 8, 2
_MARKED_CHARS = 4_000_000
_PROBE = "\u2063offroad\u2063"


@dataclass(frozen=True)
class Rendered:
    """A prompt's text and, as ascending character offsets, the ends of its system part (with tools), of its user turns
    and of its runs of tool results."""

    text: str
    marks: tuple[int, ...]


class ChatTemplate:
    """The chat template of a model, or `override`: a path to a template, or its text. Compiled once.

    SettingsError: the override is neither a file nor a template. A template of the checkpoint that does not compile
    fails the requests that need it (RequestError), since the model can still serve completions.
    """

    def __init__(self, files: TokenizerFiles, override: str | os.PathLike | None = None) -> None:
        self.source = files.chat_template if override is None else _read_override(override)
        self._tokens = {"bos_token": files.bos_token or "", "eos_token": files.eos_token or ""}
        self._template: jinja2.Template | None = None
        self._broken: str | None = None
        self._knows_parts: dict[str, bool] = {}
        if self.source is None:
            return
        try:
            self._template = template_environment().from_string(self.source)
        except jinja2.TemplateError as e:
            if override is not None:
                raise SettingsError("--chat-template does not compile", found=e, accepted="a Jinja template") from e
            self._broken = str(e)

    @cached_property
    def reads(self) -> frozenset[str]:
        """The variables that the template reads, `tools` and `enable_thinking` perhaps among them."""
        if self._template is None or self.source is None:
            return frozenset()
        return frozenset(jinja2.meta.find_undeclared_variables(template_environment().parse(self.source)))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> Rendered:
        """The prompt of `messages`; `kwargs` are further template variables. RequestError (param `messages`) when the
        template refuses them, when a content is not text, or when the model has no usable template."""
        if self._template is None:
            raise self._unusable()
        self._check(messages, add_generation_prompt, continue_final_message, kwargs)
        variables = {**self._tokens, **kwargs, "tools": [dict(t) for t in tools] if tools else None, "documents": None}
        deadline = time.monotonic() + MAX_SECONDS
        ready = [self._suited(prepared(m, i)) for i, m in enumerate(messages)]
        if continue_final_message:
            text = self._open_end(ready, variables, deadline)
        else:
            text = self._run(ready, variables, add_generation_prompt, deadline)
        return Rendered(text, self._marks(ready, text, variables, deadline))

    def _unusable(self) -> RequestError:
        what = "the model has no chat template"
        if self._broken is not None:
            what = "the model's chat template does not compile"
        return RequestError(
            what,
            param="messages",
            code="no_chat_template",
            found=self._broken,
            next="use /v1/completions, or start the server with --chat-template FILE",
        )

    def _check(self, messages, add_generation_prompt: bool, continue_final: bool, kwargs: dict[str, Any]) -> None:
        if not messages:
            raise RequestError("messages", param="messages", found="an empty list", accepted="one message or more")
        taken = sorted({"messages", "documents", *self._tokens} & kwargs.keys())
        if taken:
            raise RequestError(
                "chat_template_kwargs",
                param="chat_template_kwargs",
                found=taken[0],
                accepted="variables that are not set already",
            )
        if not continue_final:
            return
        if add_generation_prompt:
            raise RequestError(
                "continue_final_message and add_generation_prompt exclude each other",
                param="continue_final_message",
                next="set add_generation_prompt to false",
            )
        if messages[-1].get("role") != "assistant" or not messages[-1].get("content"):
            raise RequestError(
                "continue_final_message",
                param="continue_final_message",
                found=f"a final message of role {messages[-1].get('role')!r}",
                accepted="a final assistant message with content",
            )

    def _suited(self, message: dict[str, Any]) -> dict[str, Any]:
        """The message with its text parts as they are if the template knows parts in this role, else as one string."""
        role = message["role"]
        if isinstance(message["content"], str):
            return message
        if role not in self._knows_parts:
            self._knows_parts[role] = self._shows_parts(role)
        return message if self._knows_parts[role] else joined(message)

    def _shows_parts(self, role: str) -> bool:
        user, call = {"role": "user", "content": "x"}, {"id": "1", "function": {"name": "f", "arguments": {}}}
        probe = {"role": role, "content": [{"type": "text", "text": _PROBE}]}
        around = {"user": [probe], "assistant": [user, probe]}
        around["tool"] = [
            user,
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {**probe, "tool_call_id": "1"},
        ]
        variables = {**self._tokens, "tools": None, "documents": None}
        try:
            text = self._run(around.get(role, [probe, user]), variables, False, time.monotonic() + MAX_SECONDS)
        except RequestError:
            return False
        return _PROBE in text and f'"{_PROBE}"' not in text  # in quotes it is a list that was dumped

    def _open_end(self, messages: list[dict], variables: dict, deadline: float) -> str:
        """The prompt up to where the last message's content ends."""
        # The space tells whether the template strips contents; if so the prompt ends without white space too.
        open_end = [*messages[:-1], extended(messages[-1], _PROBE + " ")]
        text, found, rest = self._run(open_end, variables, False, deadline).rpartition(_PROBE)
        if not found:
            raise RequestError(
                "the chat template does not show the final message, so it cannot be continued",
                param="continue_final_message",
            )
        return text if rest.startswith(" ") else text.rstrip()

    def _run(self, messages: list[dict], variables: dict, generation_prompt: bool, deadline: float) -> str:
        try:
            pieces, size = [], 0
            with time_limit(deadline):
                for piece in self._template.generate(
                    messages=messages, add_generation_prompt=generation_prompt, **variables
                ):
                    pieces.append(piece)
                    size += len(piece)
                    if size > MAX_CHARS:
                        accepted = f"{MAX_CHARS} characters"
                        raise RequestError("the prompt is too long", param="messages", accepted=accepted)
                    if time.monotonic() > deadline:
                        raise TooSlow
            return "".join(pieces)
        except RequestError:
            raise
        except TooSlow as e:
            accepted = f"{MAX_SECONDS:g} s"
            raise RequestError("the template takes too long", param="messages", accepted=accepted) from e
        except Exception as e:  # a template is a program: its errors may be of any type, and all are the request's
            raise RequestError(
                "the chat template refuses these messages",
                param="messages",
                found=f"{type(e).__name__}: {e}" if not isinstance(e, jinja2.TemplateError) else str(e),
                next="check the roles and their order against the model's template",
            ) from e

    def _marks(self, messages: list[dict], text: str, variables: dict, deadline: float) -> tuple[int, ...]:
        """Ends of prefixes of `messages` whose rendering begins `text`. A prefix that the template refuses or renders
        in another way (tools moved, reasoning removed) has no mark: marks are advice only."""
        found = {self._system_end(messages, text, variables, deadline)}
        for end in _turn_ends(messages):
            found.add(self._prefix_end(messages[:end], text, variables, deadline))
        return tuple(sorted(found - {0, len(text)}))

    def _system_end(self, messages: list[dict], text: str, variables: dict, deadline: float) -> int:
        """Where the system part with the tools ends, 0 if there is none."""
        lead = next((i for i, m in enumerate(messages) if m["role"] not in ("system", "developer")), len(messages))
        if lead and (end := self._prefix_end(messages[:lead], text, variables, deadline)):
            return end
        # No system message, or a template that wants a user turn, maybe since the system part is inside it: find where
        # the text of such a turn is, and by a second turn what comes between two texts: an end of turn and a header.
        probe = {"role": "user", "content": _PROBE}
        try:
            before, _, end_of_turn = self._run([*messages[:lead], probe], variables, False, deadline).partition(_PROBE)
        except RequestError:
            return 0
        if not text.startswith(before):
            return 0
        try:
            twice = self._run([*messages[:lead], probe, probe], variables, False, deadline)
        except RequestError:
            twice = ""
        between = twice.removeprefix(before + _PROBE).partition(_PROBE)[0]
        system = before.removesuffix(between.removeprefix(end_of_turn))
        return 0 if system == self._tokens["bos_token"] else len(system)

    def _prefix_end(self, messages: list[dict], text: str, variables: dict, deadline: float) -> int:
        """Length of what `messages` render to, or 0 when `text` does not begin with it."""
        try:
            prefix = self._run(messages, variables, False, deadline)
        except RequestError:
            return 0
        return len(prefix) if text.startswith(prefix) else 0


def _turn_ends(messages: list[dict]) -> list[int]:
    """How many messages there are up to the ends of the latest user turns and of the latest runs of tool results."""
    roles = [message["role"] for message in messages]
    users = [end for end, role in enumerate(roles, 1) if role == "user"]
    results = [end for end, role in enumerate(roles, 1) if role == "tool" and roles[end : end + 1] != ["tool"]]
    return [*users[-MARKED_TURNS:], *results[-MARKED_RESULTS:]]


def encode_with_marks(tokenizer: Tokenizer, rendered: Rendered) -> tuple[list[int], tuple[int, ...]]:
    """Token ids of a rendered prompt (nothing added: templates write bos themselves), and its marks as numbers of
    tokens; a mark inside a token is left out. A text that is too long for most models has none: to make the offsets of
    a million tokens would hold up other threads."""
    if len(rendered.text) > _MARKED_CHARS:
        return tokenizer.encode(rendered.text, add_special=False), ()
    ids, offsets = tokenizer.encode_with_offsets(rendered.text, add_special=False)
    marks, token = [], 0
    for mark in rendered.marks:
        while token < len(ids) and offsets[token][1] <= mark:
            token += 1
        inside = token < len(ids) and offsets[token][0] < mark
        if token and not inside:
            marks.append(token)
    return ids, tuple(dict.fromkeys(marks))


def _read_override(override: str | os.PathLike) -> str:
    text = os.fspath(override)
    if "{{" in text or "{%" in text:
        return text
    try:
        return Path(text).read_text(encoding="utf-8")
    except OSError as e:
        raise SettingsError(
            "--chat-template", found=text, accepted="a readable file with a Jinja template, or the template itself"
        ) from e
