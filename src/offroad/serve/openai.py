"""The routes of the OpenAI API: /v1/chat/completions, /v1/completions, /v1/models."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Callable

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from offroad.errors import OffroadError, RequestError
from offroad.serve.chat import plain_guide, read
from offroad.serve.errors import CLIENT_GONE, ModelUnknown, body_of, error_body, json_response
from offroad.serve.generation import Generation, Piece, fit
from offroad.serve.protocol.chat import ChatRequest
from offroad.serve.protocol.completion import CompletionRequest
from offroad.serve.protocol.openapi import takes
from offroad.serve.protocol.parse import parse
from offroad.serve.service import Service
from offroad.serve.shapes import ChatShape, CompletionShape, Shape
from offroad.serve.stream import (
    DONE,
    PING,
    PING_SECONDS,
    Ahead,
    Disconnected,
    EventStream,
    event,
    read_body,
    while_connected,
)
from offroad.serve.text import Prompt

log = logging.getLogger("offroad.serve")
Frames = Callable[[Ahead[Piece]], AsyncIterator[bytes]]


def routes(service: Service) -> APIRouter:
    """The router of one server."""
    router = APIRouter()

    @router.post("/v1/chat/completions", openapi_extra=takes(ChatRequest))
    async def chat(request: Request) -> Response:
        body = parse(await read_body(request), ChatRequest)
        return await _answer(service, request, body, _chat)

    @router.post("/v1/completions", openapi_extra=takes(CompletionRequest))
    async def completions(request: Request) -> Response:
        body = parse(await read_body(request), CompletionRequest)
        return await _answer(service, request, body, _completions)

    @router.get("/v1/models")
    async def models() -> Response:
        return json_response({"object": "list", "data": [service.card(name) for name in service.names]})

    @router.get("/v1/models/{model:path}")
    async def model(model: str) -> Response:
        check_model(service, model)
        return json_response(service.card(model))

    return router


def check_model(service: Service, model: str | None) -> None:
    """Raises ModelUnknown if a request names another model."""
    if model is not None and model not in service.names:
        raise ModelUnknown(
            "the model is not served here",
            param="model",
            code="model_not_found",
            found=model,
            accepted=", ".join(service.names),
        )


async def _answer(service: Service, request: Request, body: ChatRequest | CompletionRequest, begin) -> Response:
    service.client.require_ready()
    check_model(service, body.model)
    try:
        generation, shape = await while_connected(request.receive, begin(service, body))
    except Disconnected:
        return Response(status_code=CLIENT_GONE)
    if body.stream:
        return await streamed(
            request, generation, lambda pieces: _frames(pieces, generation, shape, bool(body.include_usage))
        )
    try:
        await while_connected(request.receive, generation.collect())
    except Disconnected:
        return Response(status_code=CLIENT_GONE)
    finally:
        generation.close()
    return json_response(shape.answer(generation))


async def _chat(service: Service, body: ChatRequest) -> tuple[Generation, Shape]:
    text, info = service.text, service.client.info
    chat = await asyncio.to_thread(read, text, body, info.vocab, info.max_model_len, service.template_defaults)
    name = f"chatcmpl-{secrets.token_hex(12)}"
    shape = ChatShape(
        text,
        thoughts=body.include_reasoning is not False,
        id=name,
        model=service.name,
        fingerprint=info.plan_fingerprint,
        top=chat.params.logprobs,
        prompt_top=body.prompt_logprobs,
        ids=bool(body.return_token_ids),
    )
    more = {"salt": body.cache_salt or "", "continues": False, "reading": chat.reading, "guide": chat.guide}
    return service.generation([chat.prompt], [chat.params], name=name, **more), shape


async def _completions(service: Service, body: CompletionRequest) -> tuple[Generation, Shape]:
    text, info = service.text, service.client.info
    sampling = body.sampling(text.generation, info.vocab)
    given = body.prompts(info.vocab)
    if len(given) > service.client.room:
        raise RequestError(
            "prompt", param="prompt", found=f"{len(given)} prompts", accepted=f"up to {service.client.room}"
        )
    service.client.require_ready(len(given))
    special = body.add_special_tokens is not False

    def encode() -> list[Prompt]:
        return [Prompt(p) if isinstance(p, list) else text.prompt(p, special) for p in given]

    prompts = await asyncio.to_thread(encode)
    params = [fit(prompt, sampling, info.max_model_len, None, "prompt") for prompt in prompts]
    name = f"cmpl-{secrets.token_hex(12)}"
    shape = CompletionShape(
        text,
        echo=bool(body.echo),
        id=name,
        model=service.name,
        fingerprint=info.plan_fingerprint,
        top=sampling.logprobs,
        prompt_top=body.prompt_logprobs,
        ids=bool(body.return_token_ids),
    )
    guide = await asyncio.to_thread(plain_guide, text, body)
    more = {"salt": body.cache_salt or "", "continues": True, "guide": guide, "silent": body.prompts_alone}
    return service.generation(prompts, params, name=name, **more), shape


async def streamed(request: Request, generation: Generation, frames: Frames) -> Response:
    """A stream of `frames`, or the error with its status if the request fails before anything was sent."""
    pieces = Ahead(generation.pieces())

    async def close() -> None:
        await pieces.aclose()
        generation.close()

    try:
        await while_connected(request.receive, pieces.ready(PING_SECONDS))
        pieces.raise_if_failed()
    except Disconnected:
        await close()
        return Response(status_code=CLIENT_GONE)
    except BaseException:
        await close()
        raise
    return EventStream(frames(pieces), close)


async def _frames(
    pieces: Ahead[Piece], generation: Generation, shape: Shape, include_usage: bool
) -> AsyncIterator[bytes]:
    """The events of a stream; one that fails ends with an error event. `[DONE]` comes last in any case."""
    try:
        for chunk in shape.opening(generation):
            yield event(chunk)
        while True:
            if not await pieces.ready(PING_SECONDS):
                yield PING
                continue
            try:
                piece = await anext(pieces)
            except StopAsyncIteration:
                break
            if (chunk := shape.chunk(piece)) is not None:
                yield event(chunk)
        if include_usage:
            yield event(shape.usage_chunk(generation))
    except OffroadError as error:
        yield event(body_of(error))
    except Exception as error:
        log.error("a defect while streaming", exc_info=error)
        yield event(error_body(500, f"internal error: {type(error).__name__}", code="internal_error"))
    yield DONE
