"""The ASGI app of one server. It answers from the moment it is made: with 503 until the model can."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.responses import Response

from offroad import __version__
from offroad.errors import OffroadError
from offroad.serve import anthropic, openai, page, status, tokens
from offroad.serve.errors import RETRY_SECONDS, json_response, on_defect, on_http_error, on_offroad_error
from offroad.serve.metrics import CONTENT_TYPE
from offroad.serve.service import Service


def create_app(service: Service) -> FastAPI:
    """An app on `service`, which someone else starts and ends."""
    app = FastAPI(title="offroad", version=__version__, docs_url=None, redoc_url=None, openapi_url=None)
    for part in (openai, anthropic, tokens, status):
        app.include_router(part.routes(service))
    app.include_router(page.routes())
    app.add_exception_handler(OffroadError, on_offroad_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(Exception, on_defect)

    @app.get("/health")
    async def health() -> Response:
        """200 if a request would be taken now."""
        state = service.status
        if state == "ready":
            return json_response({"status": state})
        reason = None if service.client.death is None else str(service.client.death)
        return json_response({"status": state, "reason": reason}, 503, {"Retry-After": str(RETRY_SECONDS)})

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.text(), headers={"Content-Type": CONTENT_TYPE})

    @app.get("/version")
    async def version() -> Response:
        return json_response({"version": __version__})

    return app
