"""The page at `/` and the files that it is made of. They are the same for everybody: secrets come by the API alone."""

from __future__ import annotations

from importlib.resources import files

from fastapi import APIRouter
from starlette.exceptions import HTTPException
from starlette.responses import Response

PATH = "/web/"
_MEDIA = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
# Nothing is loaded from elsewhere, no script or style stands in the page, and nobody may frame it.
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def routes() -> APIRouter:
    """The router; files are read once."""
    router = APIRouter()
    read = {entry.name: entry.read_bytes() for entry in files("offroad.serve").joinpath("web").iterdir()}

    def answer(name: str) -> Response:
        return Response(read[name], media_type=_MEDIA[name.rpartition(".")[2]], headers=_HEADERS)

    @router.get("/")
    async def index() -> Response:
        """The chat page and the status of the server."""
        return answer("index.html")

    @router.get(PATH + "{name}")
    async def part(name: str) -> Response:
        """A script, a style or an icon of the page."""
        if name not in read:
            raise HTTPException(404)
        return answer(name)

    return router
