"""The routes /tokenize and /detokenize: what a prompt is in tokens, and back. Shapes as in vLLM."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from offroad.errors import RequestError
from offroad.serve import chat
from offroad.serve.errors import json_response
from offroad.serve.openai import check_model
from offroad.serve.protocol.chat import ChatRequest
from offroad.serve.protocol.fields import Body
from offroad.serve.protocol.openapi import takes
from offroad.serve.protocol.parse import parse, validated
from offroad.serve.protocol.shared import token
from offroad.serve.service import Service
from offroad.serve.stream import read_body

_CHAT = ("messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs")


class TokenizeRequest(Body):
    """A text as `prompt`, or a chat by the fields that it has in /v1/chat/completions."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    messages: list[Any] | None = None
    tools: list[Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def chat(self) -> ChatRequest:
        """The chat. Raises RequestError."""
        given = {name: getattr(self, name) for name in _CHAT if getattr(self, name) is not None}
        return validated(ChatRequest.prepared(given), ChatRequest)


class DetokenizeRequest(Body):
    model: str | None = None
    tokens: list[int]


def routes(service: Service) -> APIRouter:
    """The router of one server."""
    router = APIRouter()

    @router.post("/tokenize", openapi_extra=takes(TokenizeRequest))
    async def tokenize(request: Request) -> Response:
        body = parse(await read_body(request), TokenizeRequest)
        service.client.require_ready()
        check_model(service, body.model)
        ids = await asyncio.to_thread(_ids, service, body)
        answer: dict[str, Any] = {"count": len(ids), "max_model_len": service.client.info.max_model_len, "tokens": ids}
        if body.return_token_strs:
            answer["token_strs"] = [service.text.token_text(id) for id in ids]
        return json_response(answer)

    @router.post("/detokenize", openapi_extra=takes(DetokenizeRequest))
    async def detokenize(request: Request) -> Response:
        body = parse(await read_body(request), DetokenizeRequest)
        service.client.require_ready()
        check_model(service, body.model)
        for id in (min(body.tokens), max(body.tokens)) if body.tokens else ():
            token("tokens", id, service.client.info.vocab)
        return json_response({"prompt": await asyncio.to_thread(service.text.decode, body.tokens)})

    return router


def _ids(service: Service, body: TokenizeRequest) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        found = "neither" if body.prompt is None else "both"
        raise RequestError("prompt", param="prompt", found=found, accepted="one of prompt and messages")
    if body.prompt is not None:
        return service.text.prompt(body.prompt, body.add_special_tokens is not False).ids
    return chat.render(service.text, body.chat(), service.template_defaults)[0].ids
