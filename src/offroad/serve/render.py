"""The route /render, which shows what a request would be to the model; and routes that answer that nothing does yet."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from offroad.errors import RequestError
from offroad.serve import chat
from offroad.serve.errors import json_response
from offroad.serve.openai import check_model
from offroad.serve.protocol.chat import ChatRequest
from offroad.serve.protocol.openapi import takes
from offroad.serve.protocol.parse import parse
from offroad.serve.service import Service
from offroad.serve.stream import read_body

# What only models that give vectors or scores can answer.
_POOLING = ("embeddings", "rerank", "score", "classify")


def routes(service: Service) -> APIRouter:
    """The router of one server."""
    router = APIRouter()

    @router.post("/render", openapi_extra=takes(ChatRequest))
    @router.post("/v1/chat/completions/render", openapi_extra=takes(ChatRequest))
    async def render(request: Request) -> Response:
        """The prompt of a chat, as text and as tokens, and where in it other requests may resume; nothing is run."""
        body = parse(await read_body(request), ChatRequest)
        service.client.require_ready()
        check_model(service, body.model)
        prompt, _ = await asyncio.to_thread(chat.render, service.text, body, service.template_defaults)
        return json_response(
            {
                "prompt": prompt.text,
                "prompt_token_ids": prompt.ids,
                "count": len(prompt.ids),
                "max_model_len": service.client.info.max_model_len,
                "marks": list(prompt.marks),
            }
        )

    async def refuse(request: Request) -> Response:
        what = request.url.path.rpartition("/")[2]
        raise RequestError(
            f"{what} is not supported yet",
            code="unsupported_route",
            found=f"a model that generates text ({service.name})",
            accepted="/v1/chat/completions, /v1/completions, /v1/responses, /v1/messages",
        )

    for name in _POOLING:
        for path in (f"/v1/{name}", f"/{name}"):
            router.add_api_route(path, refuse, methods=["POST"], include_in_schema=False)
    return router
