"""The ASGI app of one server. It answers from the moment it is made: with 503 until the model can."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from offroad import __version__
from offroad.errors import OffroadError
from offroad.execute.client import EngineClient
from offroad.serve import admin, anthropic, openai, page, render, responses, status, tokens
from offroad.serve.errors import (
    RETRY_SECONDS,
    json_response,
    on_defect,
    on_disconnect,
    on_http_error,
    on_offroad_error,
)
from offroad.serve.limits import BodyLimits
from offroad.serve.logs import Exchanges, configure
from offroad.serve.metrics import CONTENT_TYPE
from offroad.serve.security import KeyGuard, SameSite
from offroad.serve.service import Service
from offroad.settings import Settings


def create_app(settings: Settings) -> FastAPI:
    """An app with an engine of its own, for launchers: its lifespan loads the model, and drains and ends it.

    Raises SettingsError; the lifespan raises the OffroadError of a load that fails. Without a lifespan all answers are
    503. Limits on headers and on clients that do not read are of `offroad serve` alone: here they are the launcher's.
    """
    service = Service(settings, EngineClient(settings))

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        configure(settings)
        async with running(service):
            yield

    return app_of(service, lifespan)


@asynccontextmanager
async def running(service: Service) -> AsyncIterator[None]:
    """A service that is loaded, and loaded again as its settings say; drained and closed at the end."""
    watch: asyncio.Task[None] | None = None
    try:
        await service.start()
        watch = asyncio.create_task(service.watch())
        yield
        watch.cancel()
        await service.client.drain(service.settings.drain_seconds)
    finally:
        if watch is not None:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)
        await service.close()


def app_of(service: Service, lifespan: Any = None) -> FastAPI:
    """An app on `service`, which someone else starts and ends, or `lifespan` does."""
    app = FastAPI(
        title="offroad",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        openapi_url="/openapi.json",
        lifespan=lifespan,
        swagger_ui_oauth2_redirect_url=None,
    )
    _add_layers(app, service)
    for part in (openai, responses, anthropic, render, tokens, admin, status):
        app.include_router(part.routes(service))
    app.include_router(page.routes())
    app.add_exception_handler(OffroadError, on_offroad_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(ClientDisconnect, on_disconnect)
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


def _add_layers(app: FastAPI, service: Service) -> None:
    """What every route is behind, from the inside to the outside. A preflight brings no key, so CORS is before that."""
    settings, record = service.settings, service.record
    app.add_middleware(BodyLimits, max_bytes=settings.max_body_mib * 2**20)
    app.add_middleware(KeyGuard, keys=service.keys)
    app.add_middleware(SameSite, origins=settings.allowed_origins)
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.allowed_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    app.add_middleware(Exchanges, done=record.add if record else None)
