"""Errors as OpenAI's clients expect them: `{"error": {"message", "type", "param", "code"}}` and a status."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from offroad.errors import EngineDead, OffroadError, QueueFull, RequestError
from offroad.execute.client import NotReady

RETRY_SECONDS = 1
_BY_STATUS = {
    400: "invalid_request_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}


class ModelUnknown(RequestError):
    """The request names a model that is not served: answered with 404."""


class BodyTooLarge(RequestError):
    """The body is above the limit: answered with 413."""


class GenerationFailed(OffroadError):
    """A sequence has ended with an error of the engine: answered with 500."""


def status_of(error: OffroadError) -> int:
    """The HTTP status that answers `error`."""
    for kind, status in (
        (ModelUnknown, 404),
        (BodyTooLarge, 413),
        (RequestError, 400),
        (QueueFull, 429),
        (EngineDead, 503),
        (NotReady, 503),
    ):
        if isinstance(error, kind):
            return status
    return 500


def error_body(status: int, message: str, *, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """The body of an error; its type follows from the status."""
    kind = _BY_STATUS.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def body_of(error: OffroadError) -> dict[str, Any]:
    """The body that answers `error`, also used for an error in the middle of a stream."""
    codes = {429: "queue_full", 500: "generation_failed", 503: "engine_unavailable"}
    status = status_of(error)
    code = getattr(error, "code", None) or codes.get(status)
    return error_body(status, str(error), param=getattr(error, "param", None), code=code)


def anthropic_body(body: dict[str, Any]) -> dict[str, Any]:
    """The same error as Anthropic's clients expect it, whose kinds have other names."""
    kinds = {"server_error": "api_error", "service_unavailable_error": "overloaded_error"}
    error = body["error"]
    return {"type": "error", "error": error | {"type": kinds.get(error["type"], error["type"])}}


def _of_api(request: Request, body: dict[str, Any]) -> dict[str, Any]:
    """The body in the shape of the API that was called."""
    return anthropic_body(body) if request.url.path.startswith("/v1/messages") else body


def json_response(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A JSON response; values that JSON cannot carry have been replaced before."""
    return Response(msgspec.json.encode(body), status, headers, media_type="application/json")


async def on_offroad_error(request: Request, error: Exception) -> Response:
    """Exception handler for OffroadError; the response to those that a later try may pass says when to try."""
    assert isinstance(error, OffroadError)
    status = status_of(error)
    headers = {"Retry-After": str(RETRY_SECONDS)} if status in (429, 503) else None
    return json_response(_of_api(request, body_of(error)), status, headers)


async def on_http_error(request: Request, error: Exception) -> Response:
    """Exception handler for unknown routes and methods."""
    assert isinstance(error, HTTPException)
    what = {404: f"no such route: {request.url.path}", 405: f"{request.method} is not allowed on {request.url.path}"}
    code = {404: "route_not_found", 405: "method_not_allowed"}
    message = what.get(error.status_code, str(error.detail))
    body = error_body(error.status_code, message, code=code.get(error.status_code))
    return json_response(body, error.status_code, dict(error.headers or {}))


async def on_defect(request: Request, error: Exception) -> Response:
    """Exception handler for everything else: our defect. The server logs the traceback, the body has only its kind."""
    body = error_body(500, f"internal error: {type(error).__name__}", code="internal_error")
    return json_response(_of_api(request, body), 500)
