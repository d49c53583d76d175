"""The route /v1/responses: answers as items of reasoning, text and calls, whole or as a stream of events."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from offroad.errors import OffroadError
from offroad.serve import chat
from offroad.serve.errors import body_of, error_body, json_response
from offroad.serve.generation import CallDelta, Generation, Piece
from offroad.serve.openai import CLIENT_GONE, check_model, streamed
from offroad.serve.protocol.openapi import takes
from offroad.serve.protocol.parse import parse
from offroad.serve.protocol.responses import NAMES, ResponsesRequest
from offroad.serve.protocol.shared import renamed
from offroad.serve.service import Service
from offroad.serve.stream import PING, PING_SECONDS, Ahead, Disconnected, read_body, while_connected

log = logging.getLogger("offroad.serve")
Event = dict[str, Any]


def routes(service: Service) -> APIRouter:
    """The router of one server."""
    router = APIRouter()

    @router.post("/v1/responses", openapi_extra=takes(ResponsesRequest))
    async def responses(request: Request) -> Response:
        body = parse(await read_body(request), ResponsesRequest)
        service.client.require_ready()
        check_model(service, body.model)
        answer = Answer(service.name, body)
        try:
            with renamed(NAMES):
                generation = await while_connected(request.receive, _begin(service, body, answer.id))
                if body.stream:
                    return await streamed(request, generation, lambda pieces: answer.frames(pieces, generation))
                try:
                    await while_connected(request.receive, answer.collect(generation))
                finally:
                    generation.close()
        except Disconnected:
            return Response(status_code=CLIENT_GONE)
        return json_response(answer.whole(generation))

    return router


async def _begin(service: Service, body: ResponsesRequest, name: str) -> Generation:
    info, asked = service.client.info, body.chat()
    made = await asyncio.to_thread(
        chat.read, service.text, asked, info.vocab, info.max_model_len, service.template_defaults
    )
    more = {"salt": asked.cache_salt or "", "continues": False, "reading": made.reading, "guide": made.guide}
    return service.generation([made.prompt], [made.params], name=name, **more)


class Items:
    """The output of an answer, as far as it was said: one item is open at a time, the last. A piece of text opens the
    item that it belongs to, which ends the one before."""

    def __init__(self) -> None:
        self.output: list[dict[str, Any]] = []
        self._open = ""

    def take(self, piece: Piece) -> list[Event]:
        """Adds a piece; the events that tell of it, not numbered yet."""
        events: list[Event] = []
        if piece.reasoning:
            events += self._text("reasoning", piece.reasoning)
        if piece.content:
            events += self._text("message", piece.content)
        for call in piece.calls:
            events += self._call(call)
        return events

    def end(self, status: str) -> list[Event]:
        """Ends the answer; an answer of nothing is an empty message."""
        opened = [] if self.output else self._begin("message", "message")
        return [*opened, *self._close(status)]

    def _text(self, kind: str, text: str) -> list[Event]:
        events = [] if self._open == kind else self._begin(kind, kind)
        self.output[-1]["content"][0]["text"] += text
        delta: Event = {"type": f"response.{_part(kind)}.delta", **self._at(content_index=0), "delta": text}
        return [*events, delta | ({"logprobs": []} if kind == "message" else {})]

    def _call(self, call: CallDelta) -> list[Event]:
        name = f"function_call {call.index}"
        events = [] if self._open == name else self._begin("function_call", name, call)
        if call.arguments:
            self.output[-1]["arguments"] += call.arguments
            event = {"type": "response.function_call_arguments.delta", **self._at(), "delta": call.arguments}
            events.append(event)
        return events

    def _begin(self, kind: str, name: str, call: CallDelta | None = None) -> list[Event]:
        """Opens an item. Events have copies of it, since it grows."""
        events = self._close("completed")
        self._open, item = name, _item(kind, call)
        self.output.append(item)
        events.append({"type": "response.output_item.added", "output_index": self._index, "item": _copy(item)})
        if kind != "function_call":
            item["content"].append(_content(kind))
            part = {"type": "response.content_part.added", **self._at(content_index=0), "part": _content(kind)}
            events.append(part)
        return events

    def _close(self, status: str) -> list[Event]:
        """Ends the open item, if there is one."""
        if not self._open:
            return []
        self._open, item = "", self.output[-1]
        item["status"] = status
        if item["type"] == "function_call":
            said = {"name": item["name"], "arguments": item["arguments"]}
            events = [{"type": "response.function_call_arguments.done", **self._at(), **said}]
        else:
            where, [content] = self._at(content_index=0), item["content"]
            more = {"logprobs": []} if item["type"] == "message" else {}
            events = [
                {"type": f"response.{_part(item['type'])}.done", **where, "text": content["text"], **more},
                {"type": "response.content_part.done", **where, "part": dict(content)},
            ]
        return [*events, {"type": "response.output_item.done", "output_index": self._index, "item": _copy(item)}]

    @property
    def _index(self) -> int:
        return len(self.output) - 1

    def _at(self, **more: int) -> dict[str, Any]:
        return {"item_id": self.output[-1]["id"], "output_index": self._index, **more}


def _part(kind: str) -> str:
    return "reasoning_text" if kind == "reasoning" else "output_text"


def _content(kind: str) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": ""}
    return {"type": "output_text", "text": "", "annotations": [], "logprobs": []}


def _item(kind: str, call: CallDelta | None) -> dict[str, Any]:
    """An item of which nothing is said yet."""
    short = {"reasoning": "rs", "message": "msg", "function_call": "fc"}[kind]
    item: dict[str, Any] = {"id": f"{short}_{secrets.token_hex(12)}", "type": kind, "status": "in_progress"}
    if call is not None:
        return item | {"call_id": call.id, "name": call.name, "arguments": ""}
    more = {"summary": [], "encrypted_content": None} if kind == "reasoning" else {"role": "assistant"}
    return item | more | {"content": []}


def _copy(item: dict[str, Any]) -> dict[str, Any]:
    return item | {"content": [dict(part) for part in item["content"]]} if "content" in item else dict(item)


class Answer:
    """An answer as a `response`. Streamed or not, its items come from the same pieces."""

    def __init__(self, model: str, body: ResponsesRequest) -> None:
        self.id, self._model, self._body = f"resp_{secrets.token_hex(12)}", model, body
        self._items, self._created = Items(), int(time.time())
        self._number = -1

    async def collect(self, generation: Generation) -> None:
        """Takes all pieces; raises as `Generation.pieces`."""
        async for piece in generation.pieces():
            self._items.take(piece)
        self._items.end(self._status(generation))

    def whole(self, generation: Generation) -> dict[str, Any]:
        """The object of an answer that has ended."""
        return self._response(self._status(generation), generation) | {"timings": generation.timings()}

    async def frames(self, pieces: Ahead[Piece], generation: Generation) -> AsyncIterator[bytes]:
        """The events of a stream, numbered; one that fails ends with `error` and `response.failed`."""
        try:
            for kind in ("response.created", "response.in_progress"):
                yield self._frame({"type": kind, "response": self._response("in_progress", generation)})
            while True:
                if not await pieces.ready(PING_SECONDS):
                    yield PING
                    continue
                try:
                    piece = await anext(pieces)
                except StopAsyncIteration:
                    break
                for event in self._items.take(piece):
                    yield self._frame(event)
            status = self._status(generation)
            for event in self._items.end(status):
                yield self._frame(event)
            yield self._frame({"type": f"response.{status}", "response": self.whole(generation)})
        except OffroadError as error:
            for frame in self._failed(body_of(error), generation):
                yield frame
        except Exception as error:
            log.error("a defect while streaming", exc_info=error)
            body = error_body(500, f"internal error: {type(error).__name__}", code="internal_error")
            for frame in self._failed(body, generation):
                yield frame

    def _failed(self, body: dict[str, Any], generation: Generation) -> list[bytes]:
        error = body["error"]
        told = {name: error[name] for name in ("code", "message", "param")}
        self._items.end("incomplete")
        response = self._response("failed", generation)
        response["error"] = {"code": "server_error", "message": error["message"]}
        return [
            self._frame({"type": "error", **told}),
            self._frame({"type": "response.failed", "response": response}),
        ]

    def _frame(self, event: Event) -> bytes:
        self._number += 1
        body = msgspec.json.encode(event | {"sequence_number": self._number})
        return b"event: " + event["type"].encode() + b"\ndata: " + body + b"\n\n"

    @staticmethod
    def _status(generation: Generation) -> str:
        [choice] = generation.choices
        return "incomplete" if choice.finish_reason == "length" else "completed"

    def _response(self, status: str, generation: Generation) -> dict[str, Any]:
        body, params, ended = self._body, generation.params, status not in ("in_progress", "failed")
        plain = {"exclude_none": True, "by_alias": True}
        text = {} if body.text is None or body.text.format is None else body.text.format.model_dump(**plain)
        choice = body.tool_choice or "auto"
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": None,
            "metadata": body.metadata or {},
            "model": self._model,
            "output": [] if status == "in_progress" else [_copy(item) for item in self._items.output],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": None if body.reasoning is None else body.reasoning.effort, "summary": None},
            "service_tier": "default",
            "store": False,
            "temperature": params.temperature,
            "text": {"format": text or {"type": "text"}, "verbosity": "medium"},
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
            "tools": [tool.model_dump() for tool in body.tools or ()],
            "top_logprobs": 0,
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": _usage(generation) if ended else None,
            "user": None,
        }


def _usage(generation: Generation) -> dict[str, Any]:
    """Usage by the names of this API."""
    usage = generation.usage()
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {
            "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
            "cache_write_tokens": 0,
        },
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": usage["completion_tokens_details"]["reasoning_tokens"]},
        "total_tokens": usage["total_tokens"],
    }
