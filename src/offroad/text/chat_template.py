"""Messages to prompt text by the model's Jinja template, with the places in it that are worth a prefix checkpoint.

The environment is the one that `transformers` gives templates, so a template that works there works here.
"""

from __future__ import annotations

import datetime
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

from offroad.errors import RequestError, SettingsError
from offroad.text.tokenizer import Tokenizer
from offroad.weights.source import TokenizerFiles

MAX_CHARS = 16 * 2**20
MAX_SECONDS = 10.0
# Only the latest user turns are marked: earlier ones were the latest when they came, and each costs one rendering.
MARKED_TURNS = 8
_PROBE = "\u2063offroad\u2063"


@dataclass(frozen=True)
class Rendered:
    """A prompt's text and, as ascending character offsets, the ends of its system part and of its user turns."""

    text: str
    marks: tuple[int, ...]


class _Generation(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks assistant tokens for training; here its body is rendered."""

    tags = {"generation"}

    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Refuses products that would fill the memory: a template is code from a stranger."""

    intercepted_binops = frozenset(["*", "**"])

    def call_binop(self, context, operator, left, right):
        sized = [x for x in (left, right) if isinstance(x, (str, list, tuple))]
        count = [x for x in (left, right) if isinstance(x, int)]
        if sized and count and len(sized[0]) * count[0] > MAX_CHARS:
            raise jinja2.exceptions.SecurityError("the template repeats a value too often")
        if operator == "**" and isinstance(right, int) and right > 1024:
            raise jinja2.exceptions.SecurityError("the template raises to too high a power")
        return super().call_binop(context, operator, left, right)


def _tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    # Jinja's own filter escapes HTML characters, which would change what the model reads.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message):
    raise jinja2.exceptions.TemplateError(message)


def _strftime_now(format):
    return datetime.datetime.now().strftime(format)


def _environment() -> _Environment:
    env = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"])
    env.filters["tojson"] = _tojson
    env.globals["raise_exception"] = _raise_exception
    env.globals["strftime_now"] = _strftime_now
    return env


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
        if self.source is None:
            return
        try:
            self._template = _environment().from_string(self.source)
        except jinja2.TemplateError as e:
            if override is not None:
                raise SettingsError("--chat-template does not compile", found=e, accepted="a Jinja template") from e
            self._broken = str(e)

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
        ready = [_prepared(m, i) for i, m in enumerate(messages)]
        variables = {**self._tokens, **kwargs, "tools": [dict(t) for t in tools] if tools else None, "documents": None}
        deadline = time.monotonic() + MAX_SECONDS
        if continue_final_message:
            open_end = [*ready[:-1], {**ready[-1], "content": ready[-1]["content"] + _PROBE}]
            text, found, _ = self._run(open_end, variables, False, deadline).rpartition(_PROBE)
            if not found:
                raise RequestError(
                    "the chat template does not show the final message, so it cannot be continued",
                    param="continue_final_message",
                )
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

    def _run(self, messages: list[dict], variables: dict, generation_prompt: bool, deadline: float) -> str:
        try:
            pieces, size = [], 0
            for piece in self._template.generate(
                messages=messages, add_generation_prompt=generation_prompt, **variables
            ):
                pieces.append(piece)
                size += len(piece)
                if size > MAX_CHARS:
                    raise RequestError("the prompt is too long", param="messages", accepted=f"{MAX_CHARS} characters")
                if time.monotonic() > deadline:
                    raise RequestError("the template takes too long", param="messages", accepted=f"{MAX_SECONDS:g} s")
            return "".join(pieces)
        except RequestError:
            raise
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
        lead = next((i for i, m in enumerate(messages) if m["role"] not in ("system", "developer")), len(messages))
        found = {self._prefix_end(messages[:lead], text, variables, deadline) if lead else 0}
        if found == {0}:
            # No system message, or one that the template puts into the first user turn: find where that turn's text is.
            probe = [*messages[:lead], {"role": "user", "content": _PROBE}]
            found = {self._prefix_end(probe, text, variables, deadline, before=_PROBE)}
        turns = [i + 1 for i, m in enumerate(messages) if m["role"] == "user"]
        for end in turns[-MARKED_TURNS:]:
            found.add(self._prefix_end(messages[:end], text, variables, deadline))
        return tuple(sorted(found - {0, len(text)}))

    def _prefix_end(self, messages, text: str, variables: dict, deadline: float, before: str | None = None) -> int:
        """Length of what `messages` render to (up to `before`), or 0 when `text` does not begin with it."""
        try:
            prefix = self._run(messages, variables, False, deadline)
        except RequestError:
            return 0
        if before is not None:
            prefix = prefix.partition(before)[0]
        return len(prefix) if text.startswith(prefix) else 0


def encode_with_marks(tokenizer: Tokenizer, rendered: Rendered) -> tuple[list[int], tuple[int, ...]]:
    """Token ids of a rendered prompt (nothing added: templates write bos themselves), and its marks as numbers of
    tokens; a mark inside a token is left out."""
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


def _prepared(message: Mapping[str, Any], index: int) -> dict[str, Any]:
    """A message as templates expect it: content as one string, arguments of tool calls as an object."""
    where = f"messages[{index}]"
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RequestError(where, param="messages", found=message, accepted="an object with a role")
    out = dict(message)
    out["content"] = _content(message.get("content"), where)
    if message.get("tool_calls"):
        out["tool_calls"] = [_tool_call(call, where) for call in message["tool_calls"]]
    return out


def _content(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    accepted = 'a string, or parts {"type": "text", "text": ...}'
    if not isinstance(content, Sequence):
        raise RequestError(f"{where}.content", param="messages", found=type(content).__name__, accepted=accepted)
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
        if not isinstance(text, str):
            found = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise RequestError(f"{where}.content", param="messages", found=found, accepted=accepted)
        texts.append(text)
    return "\n".join(texts)


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise RequestError(f"{where}.tool_calls", param="messages", found=call, accepted="calls of functions")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except ValueError as e:
            raise RequestError(
                f"{where}.tool_calls arguments", param="messages", found=arguments[:200], accepted="a JSON object"
            ) from e
    return {**call, "function": {**function, "arguments": arguments}}
