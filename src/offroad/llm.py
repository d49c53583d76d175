"""The Python API: `LLM(model).generate(prompts, sampling_params)`, with the engine in the caller's process."""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from offroad.engine import Engine, Progress
from offroad.errors import RequestError
from offroad.sample.guide import Guide
from offroad.sample.params import SamplingParams
from offroad.schedule.request import Request, TokenEvent, TokenLogprobs
from offroad.serve.text import ModelText
from offroad.settings import Settings
from offroad.text.answer import Reading
from offroad.text.chat_template import encode_with_marks
from offroad.text.detokenize import OutputStream
from offroad.text.tokenizer import Tokenizer

Prompt = str | dict[str, Any]


@dataclass
class CompletionOutput:
    """One sequence. `finish_reason`: "stop", "length", "abort", "error"; `stop_reason`: which string or id."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None


@dataclass
class Usage:
    """Tokens of a request; `cached_tokens` are the prompt's that were resumed from the prefix cache. `drafts` were
    looked at, and `accepted_drafts` of them were what the model said."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0
    drafts: int = 0
    accepted_drafts: int = 0
    time_to_first_token: float | None = None
    seconds: float = 0.0


@dataclass
class RequestOutput:
    """The result of one prompt. `prompt_logprobs`: of each of its tokens, but None for the first."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    usage: Usage
    finished: bool = False
    prompt_logprobs: list[TokenLogprobs | None] | None = None


@dataclass(frozen=True)
class StreamChunk:
    """New text of sequence `index`; `output` is the request's result so far."""

    index: int
    text: str
    output: RequestOutput


class LLM:
    """A loaded model. `LLM("smollm2-135m", max_num_seqs=8)`: keywords are `Settings` fields.

    Raises ModelNotFound, ModelError, PlanError or SettingsError.
    """

    def __init__(
        self, model: str, *, progress: Progress | None = None, engine: Engine | None = None, **settings: Any
    ) -> None:
        self.settings = Settings.of(model=model, **settings)
        self.engine = engine or Engine(self.settings, progress)
        given = self.settings
        files, parsers = self.engine.source_tokenizer, (given.reasoning_parser, given.tool_call_parser)
        self.text = ModelText(files, given.chat_template, *parsers)
        self.tokenizer, self.template = self.text.tokenizer, self.text.template
        self._ids = count()
        self._inboxes: dict[str, deque[TokenEvent]] = {}  # by request: events that its stream has not taken

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        structured_outputs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Completes each prompt: a string, or {"prompt_token_ids": [...]}. Results come in the order of the prompts.
        `structured_outputs` is what they must look like, as in a request to the server: `{"regex": "[0-9]+"}`.

        Raises RequestError, and then nothing has been run.
        """
        listed = [prompts] if isinstance(prompts, (str, dict)) else list(prompts)
        params = self._params(sampling_params, len(listed))
        encoded = [self._encode(prompt) for prompt in listed]
        guides = [self._guide(p, {"structured_outputs": structured_outputs}) for p in params]
        return self._run(
            [self._request(ids, (), p, g) for (_, ids), p, g in zip(encoded, params, guides, strict=True)],
            [text for text, _ in encoded],
            continues=True,
        )

    def chat(
        self,
        messages: list[dict[str, Any]] | list[list[dict[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        chat_template_kwargs: dict[str, Any] | None = None,
        structured_outputs: dict[str, Any] | None = None,
        response_format: dict[str, Any] | None = None,
        thinking_token_budget: int | None = None,
        **template: Any,
    ) -> list[RequestOutput]:
        """Answers one conversation, or several. `template` goes to the chat template (`tools`, `enable_thinking`, ...),
        and so do `chat_template_kwargs`, the name of the same thing in a request to the server. An answer must look
        like `structured_outputs` or `response_format`, once thoughts have ended, and these have at most
        `thinking_token_budget` tokens; all three are as in such a request.
        """
        limits = {"structured_outputs": structured_outputs, "response_format": response_format}
        conversations = messages if messages and isinstance(messages[0], list) else [messages]
        params = self._params(sampling_params, len(conversations))
        requests, texts = [], []
        for conversation, p in zip(conversations, params, strict=True):
            request, text = self._chat(conversation, p, chat_template_kwargs, template, limits, thinking_token_budget)
            requests.append(request)
            texts.append(text)
        return self._run(requests, texts, continues=False)

    def stream_chat(
        self,
        messages: list[dict[str, Any]],
        sampling_params: SamplingParams | None = None,
        *,
        chat_template_kwargs: dict[str, Any] | None = None,
        structured_outputs: dict[str, Any] | None = None,
        response_format: dict[str, Any] | None = None,
        thinking_token_budget: int | None = None,
        **template: Any,
    ) -> Iterator[StreamChunk]:
        """Answers one conversation piece by piece, as `chat`; closing the iterator aborts the request."""
        [params] = self._params(sampling_params, 1)
        limits = {"structured_outputs": structured_outputs, "response_format": response_format}
        request, text = self._chat(messages, params, chat_template_kwargs, template, limits, thinking_token_budget)
        yield from self._stream([request], [text], continues=False)

    def close(self) -> None:
        """Frees the engine's memory."""
        self.engine.close()

    def _params(self, given: SamplingParams | Sequence[SamplingParams] | None, n: int) -> list[SamplingParams]:
        if given is None or isinstance(given, SamplingParams):
            return [given or SamplingParams()] * n
        if len(given) != n:
            raise RequestError(
                "sampling_params",
                param="sampling_params",
                found=f"{len(given)} for {n} prompts",
                accepted="one, or one for each prompt",
            )
        return list(given)

    def _chat(
        self,
        messages: list[dict[str, Any]],
        params: SamplingParams,
        kwargs: dict[str, Any] | None,
        template: dict[str, Any],
        limits: dict[str, Any],
        budget: int | None,
    ) -> tuple[Request, str]:
        """The request of a conversation, and its prompt."""
        rendered = self.template.render(messages, **(kwargs or {}), **template)
        ids, marks = encode_with_marks(self.tokenizer, rendered)
        guide = self._guide(params, limits, budget, rendered.text, {**(kwargs or {}), **template})
        return self._request(ids, marks, params, guide), rendered.text

    def _guide(
        self,
        params: SamplingParams,
        limits: dict[str, Any],
        budget: int | None = None,
        chat: str | None = None,
        options: dict[str, Any] | None = None,
    ) -> Guide | None:
        """What an answer is limited to, as a request to the server says it. `chat`: the prompt of a conversation, and
        `options` the variables of its template; a completion has no thoughts."""
        given = {name: value for name, value in limits.items() if value is not None}
        if not given and budget is None:
            return None
        # The server's reading of requests takes long to import, and most answers have no limits.
        from offroad.serve.chat import begun, check_minimum, guide_of
        from offroad.serve.protocol.parse import validated
        from offroad.serve.protocol.structured import Structured

        options, reading = options or {}, Reading()
        grammar, param = validated(given, Structured).grammar(), next(iter(given), "structured_outputs")
        check_minimum(params.min_tokens, grammar, param)
        if chat is not None:
            reading = Reading(*begun(self.text.notation, chat, bool(options.get("continue_final_message"))))
        thinks = next((options[name] for name in ("enable_thinking", "thinking") if name in options), None)
        return guide_of(self.text, reading, grammar, budget, thinks=thinks, param=param)

    def _encode(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, str):
            return prompt, self.tokenizer.encode(prompt)
        if set(prompt) == {"prompt_token_ids"}:
            return None, list(prompt["prompt_token_ids"])
        raise RequestError(
            "prompt", param="prompt", found=sorted(prompt), accepted='a string or {"prompt_token_ids": [...]}'
        )

    def _request(self, ids: list[int], marks: tuple[int, ...], params: SamplingParams, guide: Guide | None) -> Request:
        seed = params.seed if params.seed is not None else secrets.randbits(63)
        return Request(
            id=f"llm-{next(self._ids)}",
            prompt_ids=ids,
            params=params,
            seed=seed,
            eos_ids=self.tokenizer.eos_ids,
            marks=marks,
            guide=guide,
        )

    def _run(self, requests: list[Request], texts: list[str | None], continues: bool) -> list[RequestOutput]:
        results: dict[str, RequestOutput] = {}
        for chunk in self._stream(requests, texts, continues):
            results[chunk.output.request_id] = chunk.output
        return [results[request.id] for request in requests]

    def _stream(self, requests: list[Request], texts: list[str | None], continues: bool) -> Iterator[StreamChunk]:
        """Submits as many as the queue takes, steps the engine, and yields text as it comes. Other streams may be open:
        whoever is asked steps for all."""
        open_requests = {
            r.id: _Collector(r, text, self.tokenizer, continues) for r, text in zip(requests, texts, strict=True)
        }
        waiting = list(reversed(requests))
        for request in requests:
            self.engine.validate(request)
        inbox: deque[TokenEvent] = deque()
        self._inboxes |= {request.id: inbox for request in requests}
        sound = True  # a step that failed would only fail again
        try:
            while open_requests:
                while waiting and self.engine.stats().waiting < self.settings.max_waiting:
                    self.engine.submit(waiting.pop())
                sound = False
                if not inbox:
                    self._step()
                sound = True
                while inbox:
                    event = inbox.popleft()
                    if (collector := open_requests.get(event.request_id)) is None:
                        continue  # the end of a request that a stop string has ended before
                    yield collector.take(event)
                    if collector.stopped_by_text:
                        self.engine.abort(event.request_id)
                    if collector.output.finished:
                        del open_requests[event.request_id]
        finally:
            for request in requests:
                del self._inboxes[request.id]
            for request_id in open_requests:
                self.engine.abort(request_id)
            while sound and not self._inboxes and self.engine.has_work():
                self.engine.step()

    def _step(self) -> None:
        """Steps the engine; events wait for the streams whose requests they belong to."""
        for event in self.engine.step():
            if (inbox := self._inboxes.get(event.request_id)) is not None:
                inbox.append(event)


class _Collector:
    """Turns a request's events into its `RequestOutput`."""

    def __init__(self, request: Request, text: str | None, tokenizer: Tokenizer, continues: bool) -> None:
        n = request.params.n
        wants = request.params.logprobs is not None
        outputs = [CompletionOutput(i, logprobs=[] if wants else None) for i in range(n)]
        self.output = RequestOutput(request.id, text, request.prompt_ids, outputs, Usage(len(request.prompt_ids)))
        self.streams = [OutputStream(tokenizer, request.params, continues=continues) for _ in range(n)]
        self.drafts = [(0, 0)] * n
        self.began = time.perf_counter()
        self.stopped_by_text = False

    def take(self, event: TokenEvent) -> StreamChunk:
        """Adds an event; events after a stop string are dropped."""
        out, usage = self.output.outputs[event.index], self.output.usage
        self.stopped_by_text = False
        if event.prompt_logprobs is not None:
            self.output.prompt_logprobs = [None, *event.prompt_logprobs]
        if out.finish_reason is not None:
            return StreamChunk(event.index, "", self.output)
        if usage.time_to_first_token is None and event.token_ids:
            usage.time_to_first_token = time.perf_counter() - self.began
        usage.cached_tokens = max(usage.cached_tokens, event.cached)
        self.drafts[event.index] = event.drafts, event.accepted_drafts
        usage.drafts, usage.accepted_drafts = map(sum, zip(*self.drafts, strict=True))
        ended, stream = event.finish_reason == "stop", self.streams[event.index]
        used = stream.tokens_used
        delta = stream.push(event.token_ids, ends_with_stop_token=ended)
        text = delta.text
        # Tokens after the one that completed a stop string are no part of the answer.
        took = stream.tokens_used - used if delta.stopped else len(event.token_ids)
        out.token_ids += event.token_ids[:took]
        usage.completion_tokens += took
        if out.logprobs is not None and event.logprobs:
            out.logprobs += event.logprobs[:took]
        if delta.stopped:
            out.finish_reason, out.stop_reason = "stop", delta.stop_reason
            # The request is aborted once no sibling still runs; a stopped sequence's later tokens are dropped.
            self.stopped_by_text = all(o.finish_reason for o in self.output.outputs)
        elif event.finish_reason:
            text += stream.finish().text
            out.finish_reason, out.stop_reason, out.error = event.finish_reason, event.stop_reason, event.error
        out.text += text
        self.output.finished = all(o.finish_reason for o in self.output.outputs)
        usage.seconds = time.perf_counter() - self.began
        return StreamChunk(event.index, text, self.output)
