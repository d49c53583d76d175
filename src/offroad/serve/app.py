"""The ASGI app of one server. It answers from the moment it is made: with 503 until the model can."""

from __future__ import annotations

from importlib.resources import files

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.responses import Response

from offroad import __version__
from offroad.errors import OffroadError
from offroad.serve import anthropic, openai, render, responses, tokens
from offroad.serve.errors import RETRY_SECONDS, json_response, on_defect, on_http_error, on_offroad_error
from offroad.serve.metrics import CONTENT_TYPE
from offroad.serve.service import Service

_PAGE_POLICY = "default-src 'self' 'unsafe-inline'"


def create_app(service: Service) -> FastAPI:
    """An app on `service`, which someone else starts and ends."""
    app = FastAPI(title="offroad", version=__version__, docs_url=None, redoc_url=None, openapi_url=None)
    for part in (openai, responses, anthropic, render, tokens):
        app.include_router(part.routes(service))
    app.add_exception_handler(OffroadError, on_offroad_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(Exception, on_defect)

    page = files("offroad.serve").joinpath("web/index.html").read_bytes()

    @app.get("/")
    async def chat_page() -> Response:
        """A small chat page; it loads nothing from elsewhere."""
        return Response(page, media_type="text/html", headers={"Content-Security-Policy": _PAGE_POLICY})

    @app.get("/health")
    async def health() -> Response:
        """200 if a request would be taken now."""
        status = service.status
        if status == "ready":
            return json_response({"status": status})
        reason = None if service.client.death is None else str(service.client.death)
        return json_response({"status": status, "reason": reason}, 503, {"Retry-After": str(RETRY_SECONDS)})

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.text(), headers={"Content-Type": CONTENT_TYPE})

    @app.get("/version")
    async def version() -> Response:
        return json_response({"version": __version__})

    @app.get("/plan")
    async def plan() -> Response:
        """Which kernel runs where and why, as JSON."""
        if service.client.info is None:
            service.client.require_ready()
        return Response(service.client.info.plan_json, media_type="application/json")

    return app
