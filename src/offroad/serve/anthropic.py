"""The routes of Anthropic's API: /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from offroad.errors import OffroadError
from offroad.serve import chat
from offroad.serve.errors import anthropic_body, body_of, error_body, json_response
from offroad.serve.generation import Choice, Generation, Piece
from offroad.serve.openai import CLIENT_GONE, check_model, streamed
from offroad.serve.protocol.anthropic import CountRequest, MessagesRequest
from offroad.serve.protocol.openapi import takes
from offroad.serve.protocol.parse import parse
from offroad.serve.protocol.shared import renamed
from offroad.serve.service import Service
from offroad.serve.stream import PING_SECONDS, Ahead, Disconnected, read_body, while_connected

log = logging.getLogger("offroad.serve")
_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def routes(service: Service) -> APIRouter:
    """The router of one server."""
    router = APIRouter()

    @router.post("/v1/messages", openapi_extra=takes(MessagesRequest))
    async def messages(request: Request) -> Response:
        body = parse(await read_body(request), MessagesRequest)
        service.client.require_ready()
        check_model(service, body.model)
        shape = Shape(service.name, body.thoughts)
        try:
            generation = await while_connected(request.receive, _begin(service, body, shape.id))
            if body.stream:
                return await streamed(request, generation, lambda pieces: shape.frames(pieces, generation))
            try:
                await while_connected(request.receive, generation.collect())
            finally:
                generation.close()
        except Disconnected:
            return Response(status_code=CLIENT_GONE)
        return json_response(shape.answer(generation))

    @router.post("/v1/messages/count_tokens", openapi_extra=takes(CountRequest))
    async def count_tokens(request: Request) -> Response:
        body = parse(await read_body(request), CountRequest)
        service.client.require_ready()
        check_model(service, body.model)
        prompt, _ = await asyncio.to_thread(chat.render, service.text, body.chat(), service.template_defaults)
        return json_response({"input_tokens": len(prompt.ids)})

    return router


async def _begin(service: Service, body: MessagesRequest, name: str) -> Generation:
    info, asked = service.client.info, body.chat()
    with renamed({"stop": "stop_sequences"}):  # the one field of the sampler that a chat has under another name
        made = await asyncio.to_thread(
            chat.read, service.text, asked, info.vocab, info.max_model_len, service.template_defaults
        )
    more = {"salt": "", "continues": False, "reading": made.reading, "guide": made.guide}
    return service.generation([made.prompt], [made.params], name=name, **more)


class Shape:
    """An answer as a `message`, whole or as events: blocks of thinking, text and calls, one open at a time."""

    def __init__(self, model: str, thoughts: bool) -> None:
        """`thoughts`: whether those of the model are shown."""
        self.id, self._model = f"msg_{secrets.token_hex(12)}", model
        self._thoughts, self._index, self._open = thoughts, -1, ""

    def answer(self, generation: Generation) -> dict[str, Any]:
        """The object of an answer that is not streamed. A call that was cut off has no input, and is left out."""
        [choice] = generation.choices
        content: list[dict[str, Any]] = []
        if choice.reasoning and self._thoughts:
            content.append({"type": "thinking", "thinking": choice.reasoning, "signature": ""})
        if choice.content or not (choice.calls or content):
            content.append({"type": "text", "text": choice.content})
        for call in choice.calls:
            try:
                block = {"type": "tool_use", "id": call.id, "name": call.name, "input": json.loads(call.arguments)}
            except (ValueError, RecursionError):
                continue
            content.append(block)
        return self._message(content, generation) | _end(choice)

    async def frames(self, pieces: Ahead[Piece], generation: Generation) -> AsyncIterator[bytes]:
        """The events of a stream; one that fails ends with an error event."""
        try:
            while not await pieces.ready(PING_SECONDS):
                yield _frame({"type": "ping"})
            yield _frame({"type": "message_start", "message": self._message([], generation)})
            while True:
                if not await pieces.ready(PING_SECONDS):
                    yield _frame({"type": "ping"})
                    continue
                try:
                    piece = await anext(pieces)
                except StopAsyncIteration:
                    break
                for body in self._events(piece):
                    yield _frame(body)
            for body in self._closing(generation):
                yield _frame(body)
        except OffroadError as error:
            yield _frame(anthropic_body(body_of(error)))
        except Exception as error:
            log.error("a defect while streaming", exc_info=error)
            body = error_body(500, f"internal error: {type(error).__name__}", code="internal_error")
            yield _frame(anthropic_body(body))

    def _message(self, content: list[dict[str, Any]], generation: Generation) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(generation),
        }

    def _events(self, piece: Piece) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = []
        if piece.reasoning and self._thoughts:
            events += self._block("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            events.append(self._delta({"type": "thinking_delta", "thinking": piece.reasoning}))
        if piece.content:
            events += self._block("text", {"type": "text", "text": ""})
            events.append(self._delta({"type": "text_delta", "text": piece.content}))
        for call in piece.calls:
            if call.name is not None:
                block = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
                events += self._block(f"call {call.index}", block)
            if call.arguments:
                events.append(self._delta({"type": "input_json_delta", "partial_json": call.arguments}))
        return events

    def _block(self, name: str, block: dict[str, Any]) -> list[dict[str, Any]]:
        """What opens a block, unless it is open."""
        if self._open == name:
            return []
        events = self._stop()
        self._index, self._open = self._index + 1, name
        return [*events, {"type": "content_block_start", "index": self._index, "content_block": block}]

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    def _stop(self) -> list[dict[str, Any]]:
        return [{"type": "content_block_stop", "index": self._index}] if self._open else []

    def _closing(self, generation: Generation) -> list[dict[str, Any]]:
        [choice] = generation.choices
        opened = [] if self._open else self._block("text", {"type": "text", "text": ""})
        end = {"type": "message_delta", "delta": _end(choice), "usage": _usage(generation)}
        return [*opened, *self._stop(), end, {"type": "message_stop"}]


def _end(choice: Choice) -> dict[str, Any]:
    """Why an answer ended; a stop string is named."""
    if choice.finish_reason == "stop" and isinstance(choice.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": choice.stop_reason}
    return {"stop_reason": _REASONS.get(choice.finish_reason or "", "end_turn"), "stop_sequence": None}


def _usage(generation: Generation) -> dict[str, Any]:
    """Tokens that were read from the cache count apart from those of the input."""
    usage = generation.usage()
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage["completion_tokens"],
    }


def _frame(body: dict[str, Any]) -> bytes:
    return b"event: " + body["type"].encode() + b"\ndata: " + msgspec.json.encode(body) + b"\n\n"
