"""Who answers in a terminal chat: a model loaded in this process, or a server behind a URL."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from offroad.errors import OffroadError, RequestError

if TYPE_CHECKING:
    from offroad.llm import LLM

Message = dict[str, str]

DEFAULT_TEMPERATURE = 0.7  # where the checkpoint recommends none: small models ramble at 1


@dataclass(frozen=True)
class AnswerStats:
    """Of one answer: tokens, seconds, and prompt tokens that came from the prefix cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    first: float | None  # seconds to the first token
    seconds: float
    finish_reason: str | None

    def line(self) -> str:
        """`42 tokens, 31.2 tok/s, first after 0.12 s, 18 of 60 prompt tokens cached`."""
        parts = [f"{self.completion_tokens} tokens"]
        if self.first is not None and self.completion_tokens > 1 and self.seconds > self.first:
            parts.append(f"{(self.completion_tokens - 1) / (self.seconds - self.first):.1f} tok/s")
        if self.first is not None:
            parts.append(f"first after {self.first:.2f} s")
        parts.append(f"{self.cached_tokens} of {self.prompt_tokens} prompt tokens cached")
        if self.finish_reason == "length":
            parts.append("cut at the token limit")
        return ", ".join(parts)


class Backend(Protocol):
    """Answers conversations. `raise_at_once`: Ctrl-C may interrupt it anywhere, and not only between pieces."""

    raise_at_once: bool
    stats: AnswerStats | None

    def answer(self, messages: list[Message], options: dict[str, Any]) -> Iterator[str]:
        """The answer piece by piece, then `stats` is set; closing the iterator ends the request. `options` are names of
        SamplingParams. Raises OffroadError."""
        ...

    def close(self) -> None: ...


class LocalBackend:
    """A model in this process."""

    raise_at_once = False  # an exception in the middle of a step would leave the engine's books wrong

    def __init__(self, llm: LLM) -> None:
        self.llm, self.stats = llm, None
        self.defaults = sampling_defaults(llm.engine.source_tokenizer.generation)

    def answer(self, messages: list[Message], options: dict[str, Any]) -> Iterator[str]:
        from offroad.sample.params import SamplingParams

        params = SamplingParams(**{"max_tokens": None, **self.defaults, **options})
        output = None
        stream = self.llm.stream_chat(messages, params)
        try:
            for chunk in stream:
                output = chunk.output
                if chunk.text:
                    yield chunk.text
        finally:
            stream.close()
            if output is not None:
                usage = output.usage
                self.stats = AnswerStats(
                    usage.prompt_tokens,
                    usage.completion_tokens,
                    usage.cached_tokens,
                    usage.time_to_first_token,
                    usage.seconds,
                    output.outputs[0].finish_reason,
                )
        if output is not None and output.outputs[0].finish_reason == "error":
            raise OffroadError("the answer ended with an error", found=output.outputs[0].error)

    def close(self) -> None:
        self.llm.close()


def sampling_defaults(generation: dict[str, Any]) -> dict[str, Any]:
    """Sampling settings that the checkpoint recommends in its generation_config.json."""
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    found = {name: generation[name] for name in names if generation.get(name) is not None}
    return {"temperature": DEFAULT_TEMPERATURE, **found}


class ServerBackend:
    """An OpenAI-compatible server, offroad's or another."""

    raise_at_once = True

    def __init__(self, url: str, model: str) -> None:
        import httpx

        self.url = url.rstrip("/").removesuffix("/v1") + "/v1/chat/completions"
        self.model, self.stats = model, None
        self.client = httpx.Client(timeout=httpx.Timeout(10.0, read=None))

    def answer(self, messages: list[Message], options: dict[str, Any]) -> Iterator[str]:
        import httpx

        body = {
            "model": self.model,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            **options,
        }
        began, first, usage, reason = time.perf_counter(), None, {}, None
        try:
            with self.client.stream("POST", self.url, json=body) as response:
                if response.status_code != 200:
                    response.read()
                    raise RequestError(
                        f"{self.url} answered {response.status_code}", found=error_message(response.text)
                    )
                for event in sse_events(response.iter_lines()):
                    if "error" in event:
                        raise RequestError("the answer ended with an error", found=error_message(json.dumps(event)))
                    usage = event.get("usage") or usage
                    for choice in event.get("choices", []):
                        reason = choice.get("finish_reason") or reason
                        if text := choice.get("delta", {}).get("content"):
                            first = first or time.perf_counter() - began
                            yield text
        except httpx.HTTPError as error:
            raise OffroadError(
                f"no answer from {self.url}",
                found=str(error) or type(error).__name__,
                next="is the server running? start it with `offroad serve MODEL`",
            ) from error
        finally:
            details = usage.get("prompt_tokens_details") or {}
            self.stats = (
                AnswerStats(
                    usage.get("prompt_tokens", 0),
                    usage.get("completion_tokens", 0),
                    details.get("cached_tokens", 0),
                    first,
                    time.perf_counter() - began,
                    reason,
                )
                if usage
                else None
            )

    def close(self) -> None:
        self.client.close()


def sse_events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """JSON events of a server-sent stream, up to `[DONE]`. Raises RequestError for data that is not JSON."""
    for line in lines:
        if not line.startswith("data:"):
            continue
        data = line[5:].strip()
        if data == "[DONE]":
            return
        try:
            yield json.loads(data)
        except json.JSONDecodeError as error:
            raise RequestError("event of the server", found=data[:200], accepted="JSON") from error


def error_message(text: str) -> str:
    """The message in an OpenAI error body, or the text itself."""
    try:
        error = json.loads(text)["error"]
    except (json.JSONDecodeError, KeyError, TypeError):
        return text[:500]
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)
