"""The bodies of requests: each field is honoured, or refused with an error that names it.

Fields of the OpenAI and vLLM APIs that do not change an answer are accepted with the values for which that is true.
"""

from __future__ import annotations

from typing import Any, Literal, TypeVar

import msgspec
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from offroad.errors import RequestError
from offroad.sample.params import SamplingParams

# Accepted with any value: they name, group or route requests and leave the answer as it is.
HARMLESS = frozenset({"user", "metadata", "safety_identifier", "prompt_cache_key", "parallel_tool_calls"})
# Accepted with these values only (and null), since with others they would have to change the answer.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "store": (False,),
    "service_tier": ("auto", "default"),
    "tools": ([],),
    "tool_choice": ("none",),
    "functions": ([],),
    "function_call": ("none",),
    "response_format": ({"type": "text"},),
    "audio": (),
    "modalities": (["text"],),
    "prediction": (),
    "web_search_options": (),
    "reasoning_effort": (),
    "verbosity": (),
    "include_reasoning": (True,),
    "suffix": (),
    "best_of": (1,),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "early_stopping": (False,),
    "prompt_logprobs": (),
    "truncate_prompt_tokens": (),
    "spaces_between_special_tokens": (True,),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "logits_processors": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structural_tag": (),
    "structured_outputs": (),
    "guided_decoding_backend": (),
    "guided_whitespace_pattern": (),
    "chat_template": (),
    "documents": (),
    "mm_processor_kwargs": (),
    "priority": (0,),
    "request_id": (),
    "return_tokens_as_token_ids": (False,),
    "kv_transfer_params": (),
    "vllm_xargs": (),
    "prompt_embeds": (),
    "prompt_cache_retention": (),
    "thinking_token_budget": (),
    "reasoning": (),
}
_MESSAGE_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "refusal": (),
    "audio": (),
    "function_call": (),
    "tool_calls": ([],),
    "annotations": ([],),
}
_REASONING = ("reasoning_content", "reasoning")


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class StreamOptions(_Strict):
    include_usage: bool | None = None
    continuous_usage_stats: Literal[False] | None = None
    include_obfuscation: Literal[False] | None = None


class TextPart(_Strict):
    type: Literal["text"]
    text: str


class Message(_Strict):
    """One message. `developer` is what newer clients call the system. The thoughts of an answer come back under either
    name; templates keep or remove them."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None

    def plain(self) -> dict[str, Any]:
        """The message as chat templates know it, without fields that are null."""
        message = self.model_dump(exclude_none=True)
        return message | {"role": "system"} if self.role == "developer" else message


class _Generation(_Strict):
    """What both APIs share."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    cache_salt: str | None = None

    def sampling(self, defaults: dict[str, Any], vocab: int) -> SamplingParams:
        """The sampling parameters, `max_tokens` as far as it is known. Raises RequestError.

        `defaults` are the checkpoint's generation defaults, for what the request leaves open.
        """
        if self.stream_options is not None and not self.stream:
            raise RequestError(
                "stream_options",
                param="stream_options",
                found="stream is not true",
                accepted="stream_options only together with stream",
            )
        values: dict[str, Any] = {}
        for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty"):
            if defaults.get(name) is not None:
                values[name] = defaults[name]
        for name in SamplingParams.__struct_fields__:
            value = getattr(self, name, None)
            if value is not None and name not in ("logprobs", "logit_bias"):
                values[name] = value
        values |= {"max_tokens": self.max_new_tokens(), "logprobs": self.wanted_logprobs()}
        if self.logit_bias:
            values["logit_bias"] = {_token("logit_bias", id, vocab): bias for id, bias in self.logit_bias.items()}
        for id in self.stop_token_ids or ():
            _token("stop_token_ids", id, vocab)
        return SamplingParams(**values)

    def max_new_tokens(self) -> int | None:
        raise NotImplementedError

    def wanted_logprobs(self) -> int | None:
        raise NotImplementedError

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


class ChatRequest(_Generation):
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
        return given.pop() if given else None

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


class CompletionRequest(_Generation):
    """Body of /v1/completions."""

    prompt: str | list[str] | list[int] | list[list[int]]
    echo: bool | None = None
    add_special_tokens: bool | None = None
    logprobs: int | None = None

    def max_new_tokens(self) -> int | None:
        return 16 if self.max_tokens is None else self.max_tokens

    def wanted_logprobs(self) -> int | None:
        if self.echo and self.logprobs is not None:
            raise RequestError(
                "logprobs",
                param="logprobs",
                found="echo with logprobs",
                accepted="one of the two: log-probabilities of the prompt are not supported yet",
            )
        return self.logprobs

    def prompts(self, vocab: int) -> list[str | list[int]]:
        """The prompts, each a text or token ids. Raises RequestError for none, an empty one or an unknown id."""
        given = self.prompt
        prompts = [given] if isinstance(given, str) or (given and isinstance(given[0], int)) else list(given)
        if not prompts or any(isinstance(prompt, list) and not prompt for prompt in prompts):
            raise RequestError("prompt", param="prompt", found="an empty list", accepted="at least one token")
        for prompt in prompts:
            for id in prompt if isinstance(prompt, list) else ():
                _token("prompt", id, vocab)
        return prompts


Body = TypeVar("Body", ChatRequest, CompletionRequest)


def parse(raw: bytes, kind: type[Body]) -> Body:
    """The request in a body. Raises RequestError: not JSON, a field that is unknown, wrong or not supported yet."""
    try:
        data = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(
            "the body is not valid JSON", code="invalid_json", found=str(error), accepted="a JSON object"
        ) from error
    if not isinstance(data, dict):
        raise RequestError("the body", code="invalid_json", found=type(data).__name__, accepted="a JSON object")
    own = kind.model_fields.keys()
    data = {name: value for name, value in data.items() if name in own or not _neutral(name, value, NEUTRAL, name)}
    for i, message in enumerate(data.get("messages") or () if isinstance(data.get("messages"), list) else ()):
        if isinstance(message, dict):
            data["messages"][i] = _checked_message(message, f"messages.{i}")
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise _refusal(error) from error


def _neutral(name: str, value: Any, table: dict[str, tuple[Any, ...]], param: str) -> bool:
    """True: leave the field out. False: it is none of ours, the model decides. Raises RequestError: not supported."""
    if name in HARMLESS and table is NEUTRAL:
        return True
    if name not in table:
        return False
    if value is None or any(type(value) is type(ok) and value == ok for ok in table[name]):
        return True
    accepted = ", ".join(msgspec.json.encode(ok).decode() for ok in table[name]) or "null"
    raise RequestError(
        f"{param} is not supported yet",
        param=param,
        code="unsupported_field",
        found=_short(value),
        accepted=accepted,
        next="leave the field out",
    )


def _checked_message(message: dict[str, Any], param: str) -> dict[str, Any]:
    """A message without the fields that clients send back unchanged from an answer; kinds of content not supported
    yet are named here, since a list of what a union did not match would not be read."""
    kept = {k: v for k, v in message.items() if not _neutral(k, v, _MESSAGE_NEUTRAL, f"{param}.{k}")}
    if kept.get("role") in ("tool", "function"):
        raise RequestError(
            f"messages of role {kept['role']} are not supported yet",
            param=f"{param}.role",
            code="unsupported_field",
            found=kept["role"],
            accepted="system, developer, user, assistant",
        )
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
    if message.get("role") in ("system", "developer", "user"):
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


def _refusal(error: ValidationError) -> RequestError:
    """One error in our own shape: an unknown field before others (a typo explains them), else the first and deepest."""
    found = [(_path(e["loc"]), e) for e in error.errors(include_url=False)]
    unknown = [(path, e) for path, e in found if e["type"] == "extra_forbidden"]
    field = [(path, e) for path, e in found if path[:2] == found[0][0][:2] or path[:1] == found[0][0]]
    path, first = unknown[0] if unknown else max(field, key=lambda entry: len(entry[0]))
    param = ".".join(path)
    if first["type"] == "extra_forbidden":
        return RequestError(
            f"{param} is not a field of this request",
            param=param,
            code="unknown_field",
            next="check the spelling, or leave it out",
        )
    if first["type"] == "missing":
        return RequestError(f"{param} is missing", param=param, code="missing_field")
    accepted = sorted({e["msg"].removeprefix("Input should be ") for other, e in found if other == path})
    return RequestError(
        param, param=param, code="invalid_value", found=_short(first["input"]), accepted=" or ".join(accepted)
    )


def _path(location: tuple[int | str, ...]) -> tuple[str, ...]:
    """The user's names and indices; names that pydantic gives to members of a union are left out."""
    if location[0] == "prompt":
        return ("prompt",)
    head, *rest = location
    return (
        str(head),
        *(str(part) for part in rest if isinstance(part, int) or (part.isidentifier() and part != "str")),
    )


def _short(value: Any) -> str:
    text = msgspec.json.encode(value).decode(errors="replace")
    return text if len(text) <= 200 else text[:200] + "..."


def _token(param: str, id: int | str, vocab: int) -> int:
    """A token id inside the vocabulary. Raises RequestError."""
    try:
        number = int(id)
    except ValueError:
        number = -1
    if not 0 <= number < vocab:
        raise RequestError(param, param=param, found=id, accepted=f"token ids 0 to {vocab - 1}")
    return number
