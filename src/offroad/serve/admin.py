"""Routes for whoever runs the server. They need a key, also where nothing else does."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from offroad.serve.errors import Forbidden, json_response
from offroad.serve.service import Service


def routes(service: Service) -> APIRouter:
    """The router of one server."""
    router = APIRouter()

    @router.post("/admin/reset_prefix_cache")
    async def reset_prefix_cache() -> Response:
        """Forgets cached prefixes; running requests keep what they hold, and their answers do not change."""
        # Without keys nobody can be told from anybody, not even on this machine: other users and web pages are there.
        if not service.keys:
            raise Forbidden(
                "this route needs a server with API keys",
                found="a server without",
                accepted="a request with a key",
                next="start the server with --api-key or --api-key-file",
            )
        service.client.require_ready(0)
        await service.client.call("reset_prefix_cache")
        return json_response({"status": "ok"})

    return router
