"""What the bodies of all APIs share: how fields are checked, and what a request may ask of the sampler."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

from offroad.errors import RequestError
from offroad.sample.guide import Grammar
from offroad.sample.params import SamplingParams
from offroad.serve.protocol.fields import Body, Strict
from offroad.serve.protocol.structured import ResponseFormat, StructuredOutputs, grammar_of


class StreamOptions(Strict):
    include_usage: bool | None = None
    continuous_usage_stats: Literal[False] | None = None
    include_obfuscation: Literal[False] | None = None


class Generation(Body):
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
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    prompt_logprobs: int | None = None

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
        if self.stream and self.prompt_logprobs is not None:
            raise RequestError(
                "prompt_logprobs",
                param="prompt_logprobs",
                found="stream: true",
                accepted="prompt_logprobs only in an answer that is not streamed",
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
            values["logit_bias"] = {token("logit_bias", id, vocab): bias for id, bias in self.logit_bias.items()}
        for id in self.stop_token_ids or ():
            token("stop_token_ids", id, vocab)
        return SamplingParams(**values)

    def grammar(self) -> Grammar | None:
        """What the answer must look like, if the request says so. Raises RequestError."""
        return grammar_of(self.response_format, self.structured_outputs)

    def max_new_tokens(self) -> int | None:
        raise NotImplementedError

    def wanted_logprobs(self) -> int | None:
        raise NotImplementedError

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


def token(param: str, id: int | str, vocab: int) -> int:
    """A token id inside the vocabulary. Raises RequestError."""
    try:
        number = int(id)
    except ValueError:
        number = -1
    if not 0 <= number < vocab:
        raise RequestError(param, param=param, found=id, accepted=f"token ids 0 to {vocab - 1}")
    return number


@contextmanager
def renamed(names: dict[str, str]) -> Iterator[None]:
    """Errors that a chat's fields raise, with the `names` that those have in another API's request."""
    try:
        yield
    except RequestError as error:
        field, dot, rest = (error.param or "").partition(".")
        if field not in names:
            raise
        whole = field in ("response_format", "messages", "prompt")
        param = names[field] + ("" if whole else dot + rest.replace("function.", ""))
        what = param if error.what == error.param else error.what
        more = {"found": error.found, "accepted": error.accepted, "next": error.next.replace(field, names[field])}
        raise type(error)(what, param=param, code=error.code, **more) from error
