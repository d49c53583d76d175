"""From prompts to pieces of text: what both APIs do between a checked body and the shape of an answer."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from offroad.errors import RequestError
from offroad.execute.client import EngineClient, NotReady, Subscription
from offroad.sample.guide import Guide
from offroad.sample.params import SamplingParams
from offroad.schedule.request import Request, TokenEvent, TokenLogprobs
from offroad.serve.errors import GenerationFailed, RequestTimeout
from offroad.serve.metrics import Metrics
from offroad.serve.text import Prompt, TextLayer
from offroad.text.answer import AnswerParser, Reading
from offroad.text.said import CallPiece, Said, runs, together


@dataclass
class Call:
    """A call of a tool as far as it was told; `arguments` is JSON."""

    id: str
    name: str
    arguments: str = ""


@dataclass(frozen=True)
class CallDelta:
    """What is added to call `index`: `name` and `id` on its first one."""

    index: int
    arguments: str
    name: str | None = None
    id: str | None = None


@dataclass(frozen=True)
class Piece:
    """What one event adds to choice `index`, or a part of it: `text` as the model said it, and taken apart into what
    was said in this order. `finish_reason` "stop", "length" or "tool_calls" on its last piece."""

    index: int
    text: str
    reasoning: str
    content: str
    calls: list[CallDelta]
    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass
class Choice:
    """One sequence as far as it has come; `before_answer` are tokens that came while it could still think."""

    stream: Any
    prompt: int
    parser: AnswerParser | None = None
    text: str = ""
    reasoning: str = ""
    content: str = ""
    calls: list[Call] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    cached: int = 0
    drafts: int = 0
    accepted_drafts: int = 0
    before_answer: int = 0
    last_token: float | None = None

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of thoughts, those that mark their beginning and end among them."""
        thought = self.parser is not None and self.parser.thought
        return min(self.before_answer, len(self.token_ids)) if thought else 0


def _add(calls: list[Call], piece: CallPiece) -> CallDelta:
    """Adds a piece to the calls of a choice; a new one gets an id."""
    if piece.index < len(calls):
        calls[piece.index].arguments += piece.arguments
        return CallDelta(piece.index, piece.arguments)
    assert piece.name is not None, "a call begins with its name"
    calls.append(Call(f"call_{secrets.token_hex(12)}", piece.name, piece.arguments))
    return CallDelta(piece.index, piece.arguments, piece.name, calls[-1].id)


def fit(
    prompt: Prompt,
    params: SamplingParams,
    max_model_len: int,
    default: int | None,
    param: str,
    limit: str = "max_tokens",
) -> SamplingParams:
    """The parameters with `max_tokens` set: as asked, else `default`, at most the rest of the context.

    Raises RequestError with code context_length_exceeded and both numbers; `param` is the prompt's field, `limit` the
    one that asks for tokens.
    """
    used = len(prompt.ids)
    if used == 0:
        raise RequestError("the prompt", param=param, found="no tokens", accepted="at least one token")
    rest = max_model_len - used
    asked = params.max_tokens
    if rest < 1 or (asked is not None and asked > rest):
        more = "" if asked is None else f" and {asked} tokens of completion were asked for ({used + asked} in all)"
        raise RequestError(
            f"this model's maximum context length is {max_model_len} tokens, but the prompt has {used}{more}",
            param=limit if rest >= 1 else param,
            code="context_length_exceeded",
            next=f"shorten the prompt or lower {limit}" if rest >= 1 else "shorten the prompt",
        )
    if asked is None:
        asked = min(rest, default or rest)
    return msgspec.structs.replace(params, max_tokens=asked)


class Generation:
    """The choices of one HTTP request: `params.n` for each prompt, numbered prompt by prompt.

    Made by submitting: raises NotReady, EngineDead or QueueFull, and then nothing has been sent. `close` aborts.
    """

    def __init__(
        self,
        client: EngineClient,
        text: TextLayer,
        metrics: Metrics,
        prompts: list[Prompt],
        params: list[SamplingParams],
        *,
        name: str,
        salt: str,
        continues: bool,
        reading: Reading | None = None,
        guide: Guide | None = None,
        timeout: float = 0.0,
        silent: bool = False,
    ) -> None:
        """`reading` says how answers are taken apart (None: they are content as they are), `guide` what they may be.
        `silent`: answers have no tokens, whatever the engine draws.

        After `timeout` seconds (0: never) what still runs is aborted, and `pieces` raises RequestTimeout.
        """
        self.prompts, self.params, self._metrics, self._silent = prompts, params[0], metrics, silent
        n = self.params.n
        self.choices = [
            Choice(
                text.stream(params[i], continues, reading),
                i,
                None if reading is None else text.parser(params[i], reading),
            )
            for i in range(len(prompts))
            for _ in range(n)
        ]
        seed = self.params.seed if self.params.seed is not None else secrets.randbits(63)
        requests = [
            Request(
                id=f"{name}-{i}",
                prompt_ids=prompt.ids,
                params=params[i],
                seed=seed,
                eos_ids=text.eos_ids,
                marks=prompt.marks,
                salt=salt,
                guide=guide,
            )
            for i, prompt in enumerate(prompts)
        ]
        self._base = {request.id: i * n for i, request in enumerate(requests)}
        self.prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
        self.began = time.perf_counter()
        self.first: float | None = None
        self.last = self.began
        self._subscription: Subscription = client.submit(requests)
        self._timeout = timeout
        self._timer = asyncio.get_running_loop().call_later(timeout, self._expire) if timeout else None

    async def pieces(self) -> AsyncIterator[Piece]:
        """Pieces of all choices as they come; ends when every choice has finished.

        Raises GenerationFailed when a sequence has failed, and what ends the requests from outside (EngineDead, ...).
        """
        try:
            async for event in self._subscription:
                index = self._base[event.request_id] + event.index
                choice = self.choices[index]
                if choice.finish_reason is not None:
                    continue  # it was ended by a stop string while a sibling still runs
                for piece in self._take(index, choice, event):
                    yield piece
                self._abort_if_stopped(event.request_id)
        finally:
            self.close()

    async def collect(self) -> None:
        """Waits until every choice has finished; raises as `pieces`."""
        async for _ in self.pieces():
            pass

    def close(self) -> None:
        """Aborts what has not finished; counts it."""
        if self._timer is not None:
            self._timer.cancel()
        self._subscription.close()
        for choice in self.choices:
            if choice.finish_reason is None:
                choice.finish_reason = "abort"
                self._metrics.finished("abort", time.perf_counter() - self.began)

    def _expire(self) -> None:
        error = RequestTimeout(
            "the request has taken too long",
            found=f"it still ran after {self._timeout:g} s",
            accepted="requests that end within --request-timeout",
            next="ask for fewer tokens, or try again when the server is less busy",
        )
        self._subscription.end(error)

    def _take(self, index: int, choice: Choice, event: TokenEvent) -> list[Piece]:
        self._clock(choice, len(event.token_ids))
        choice.cached = max(choice.cached, event.cached)
        choice.drafts, choice.accepted_drafts = event.drafts, event.accepted_drafts
        if event.prompt_logprobs is not None:
            self.prompt_logprobs[choice.prompt] = event.prompt_logprobs
        if event.finish_reason not in (None, "stop", "length"):
            choice.finish_reason = event.finish_reason
            self._metrics.finished(event.finish_reason, time.perf_counter() - self.began)
            if event.finish_reason == "abort":
                raise NotReady("the engine has aborted the request", found=event.error)
            if event.finish_reason == "refused":
                raise RequestError("the request was ended", code="request_refused", found=event.error)
            raise GenerationFailed("the engine has failed on this request", found=event.error)
        if self._silent:
            none = {"token_ids": [], "logprobs": None, "stop_reason": None}
            event = msgspec.structs.replace(event, finish_reason="length", **none)
        used = choice.stream.tokens_used
        texts, stopped, reason = self._heard(choice, event)
        # Tokens after the one that completed a stop string are no part of the answer.
        took = choice.stream.tokens_used - used if stopped else len(event.token_ids)
        if stopped:
            choice.finish_reason, choice.stop_reason = "stop", reason
        elif event.finish_reason is not None:
            choice.finish_reason, choice.stop_reason = event.finish_reason, event.stop_reason
        told = self._told(choice, texts)
        if len(told) < len(texts):  # nor are those after the one that completed the only call
            texts, took = texts[: len(told)], len(told)
            choice.finish_reason, choice.stop_reason = "stop", None
        self._end(choice, told)
        ids, logprobs = event.token_ids[:took], (event.logprobs or [])[:took]
        choice.text += "".join(texts)
        choice.token_ids += ids
        choice.logprobs += logprobs
        if choice.finish_reason is not None:
            self._metrics.finished(choice.finish_reason, time.perf_counter() - self.began)
        elif not ids and not any(texts):
            return []
        return self._pieces(index, choice, texts, told, ids, logprobs)

    @staticmethod
    def _heard(choice: Choice, event: TokenEvent) -> tuple[list[str], bool, str | None]:
        """(the text of an event, token by token where it is taken apart, so that it is no matter how many come at once;
        whether a stop string has ended it, and which)."""
        stream, ids, ended = choice.stream, event.token_ids, event.finish_reason is not None
        texts, rest = [], [ids] if choice.parser is None or not ids else [[id] for id in ids]
        while True:
            group, *rest = rest
            delta = stream.push(group, ends_with_stop_token=event.finish_reason == "stop" and not rest)
            texts.append(delta.text)
            if delta.stopped or not rest:
                break
        if ended and not delta.stopped:
            delta = stream.finish()
            texts[-1] += delta.text
        return texts, delta.stopped, delta.stop_reason

    @staticmethod
    def _told(choice: Choice, texts: list[str]) -> list[Said]:
        """What each of `texts` says; none behind the one that completes the only call."""
        parser = choice.parser
        if parser is None:
            return [Said(content=text) for text in texts]
        told: list[Said] = []
        for text in texts:
            choice.before_answer += parser.thinking
            told.append(parser.feed(text))
            if parser.done:
                break
        return told

    @staticmethod
    def _end(choice: Choice, told: list[Said]) -> None:
        """Adds to `told` what is left when an answer has ended; whether it was to call is known then.

        An answer that was cut within a call keeps its reason: only a call that was said to its end is one to follow.
        """
        if (parser := choice.parser) is None:
            return
        if choice.finish_reason is None and parser.done:
            choice.finish_reason = "stop"
        if choice.finish_reason is not None:
            cut = choice.finish_reason == "length" or isinstance(choice.stop_reason, str)
            told.append(parser.finish(cut))
            if parser.complete and parser.complete == parser.begun:
                choice.finish_reason = "tool_calls"

    @staticmethod
    def _pieces(
        index: int, choice: Choice, texts: list[str], told: list[Said], ids: list[int], logprobs: list[TokenLogprobs]
    ) -> list[Piece]:
        """The pieces of `told`, which are added to the choice: one for each of `texts`, and what is left at the end."""
        pieces, begin, parts = [], 0, runs(told)
        for number, run in enumerate(parts, 1):
            last, said = number == len(parts), together(run)
            part = slice(begin, None if last else begin + len(run))
            begin += len(run)
            calls = [_add(choice.calls, piece) for piece in said.calls]
            choice.reasoning += said.reasoning
            choice.content += said.content
            end = (choice.finish_reason, choice.stop_reason) if last else (None, None)
            text = "".join(texts[part])
            pieces.append(Piece(index, text, said.reasoning, said.content, calls, ids[part], logprobs[part], *end))
        return pieces

    def _abort_if_stopped(self, request_id: str) -> None:
        # The engine knows nothing of stop strings; it is told when no sibling runs any more.
        base = self._base[request_id]
        if all(choice.finish_reason for choice in self.choices[base : base + self.params.n]):
            self._subscription.abort(request_id)

    def _clock(self, choice: Choice, tokens: int) -> None:
        if not tokens:
            return
        now = self.last = time.perf_counter()
        if choice.last_token is not None:
            self._metrics.inter_token.observe((now - choice.last_token) / tokens)
        elif self.first is None:
            self.first = now
            self._metrics.first_token.observe(now - self.began)
        choice.last_token = now

    def _cached(self) -> int:
        # Siblings resume from the first one's prompt; what was there before this request is the least of them.
        by_prompt: dict[int, int] = {}
        for choice in self.choices:
            by_prompt[choice.prompt] = min(choice.cached, by_prompt.get(choice.prompt, choice.cached))
        return sum(by_prompt.values())

    def usage(self) -> dict[str, Any]:
        """The `usage` object. A prompt counts once, however many choices it has; finishing eos tokens count. Drafts
        have the names of OpenAI's predicted outputs; accepted ones behind the end of an answer count too."""
        prompt = sum(len(p.ids) for p in self.prompts)
        completion = sum(len(choice.token_ids) for choice in self.choices)
        drafts, accepted = (sum(getattr(c, name) for c in self.choices) for name in ("drafts", "accepted_drafts"))
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": self._cached()},
            "completion_tokens_details": {
                "reasoning_tokens": sum(choice.reasoning_tokens for choice in self.choices),
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": drafts - accepted,
            },
        }

    def timings(self) -> dict[str, Any]:
        """The `timings` extension. `prompt_n`: prompt tokens that were run (not resumed); `prompt_ms`: until the first
        token, waiting included; `predicted_per_second`: over the tokens after the first ones, null without any."""
        usage, first = self.usage(), self.first or self.last
        predicted, seconds = usage["completion_tokens"], self.last - first
        later = predicted - sum(bool(choice.token_ids) for choice in self.choices)
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "prompt_n": usage["prompt_tokens"] - cached,
            "prompt_ms": round((first - self.began) * 1e3, 3),
            "predicted_n": predicted,
            "predicted_ms": round(seconds * 1e3, 3),
            "predicted_per_second": round(later / seconds, 3) if later > 0 and seconds > 0 else None,
            "cached_n": cached,
            "draft_n": sum(choice.drafts for choice in self.choices),
            "draft_n_accepted": sum(choice.accepted_drafts for choice in self.choices),
        }
