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
CLIENT_GONE = 499
_CODES = {
    401: "invalid_api_key",
    403: "forbidden",
    408: "body_too_slow",
    413: "body_too_large",
    429: "queue_full",
    500: "generation_failed",
    503: "engine_unavailable",
    504: "request_timeout",
}
_BY_STATUS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


class ModelUnknown(RequestError):
    """The request names a model that is not served: answered with 404."""


class BodyTooLarge(RequestError):
    """The body is above the limit: answered with 413."""


class BodyTooSlow(RequestError):
    """The client does not send the rest of its body: answered with 408."""


class KeyNeeded(RequestError):
    """The request brings none of the server's keys: answered with 401."""


class Forbidden(RequestError):
    """The request is none that the server takes from there: answered with 403."""


class RequestTimeout(OffroadError):
    """The request ran longer than `--request-timeout`: answered with 504."""


class GenerationFailed(OffroadError):
    """A sequence has ended with an error of the engine: answered with 500."""


def status_of(error: OffroadError) -> int:
    """The HTTP status that answers `error`."""
    for kind, status in (
        (ModelUnknown, 404),
        (BodyTooLarge, 413),
        (BodyTooSlow, 408),
        (KeyNeeded, 401),
        (Forbidden, 403),
        (RequestError, 400),
        (QueueFull, 429),
        (EngineDead, 503),
        (NotReady, 503),
        (RequestTimeout, 504),
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
    status = status_of(error)
    code = getattr(error, "code", None)
    if code in (None, "", "invalid_request"):
        code = _CODES.get(status, code)
    return error_body(status, str(error), param=getattr(error, "param", None), code=code)


def anthropic_body(body: dict[str, Any]) -> dict[str, Any]:
    """The same error as Anthropic's clients expect it, whose kinds have other names."""
    kinds = {"server_error": "api_error", "service_unavailable_error": "overloaded_error"}
    error = body["error"]
    kind = "request_too_large" if error["code"] == "body_too_large" else kinds.get(error["type"], error["type"])
    return {"type": "error", "error": error | {"type": kind}}


def _of_api(path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The body in the shape of the API that was called."""
    return anthropic_body(body) if path.startswith("/v1/messages") else body


def response_of(path: str, error: OffroadError, headers: dict[str, str] | None = None) -> Response:
    """The response to `error` in the shape of the API at `path`; it says when to try again where that may help."""
    status = status_of(error)
    retry = {"Retry-After": str(RETRY_SECONDS)} if status in (429, 503) else {}
    return json_response(_of_api(path, body_of(error)), status, retry | (headers or {}))


def json_response(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A JSON response; values that JSON cannot carry have been replaced before."""
    return Response(msgspec.json.encode(body), status, headers, media_type="application/json")


async def on_offroad_error(request: Request, error: Exception) -> Response:
    """Exception handler for OffroadError."""
    assert isinstance(error, OffroadError)
    return response_of(request.url.path, error)


async def on_http_error(request: Request, error: Exception) -> Response:
    """Exception handler for unknown routes and methods."""
    assert isinstance(error, HTTPException)
    what = {404: f"no such route: {request.url.path}", 405: f"{request.method} is not allowed on {request.url.path}"}
    code = {404: "route_not_found", 405: "method_not_allowed"}
    message = what.get(error.status_code, str(error.detail))
    body = error_body(error.status_code, message, code=code.get(error.status_code))
    return json_response(_of_api(request.url.path, body), error.status_code, dict(error.headers or {}))


async def on_disconnect(request: Request, error: Exception) -> Response:
    """Exception handler for a client that goes before it has sent its body: nobody reads this."""
    return Response(status_code=CLIENT_GONE)


async def on_defect(request: Request, error: Exception) -> Response:
    """Exception handler for everything else: our defect. The server logs the traceback, the body has only its kind."""
    body = error_body(500, f"internal error: {type(error).__name__}", code="internal_error")
    return json_response(_of_api(request.url.path, body), 500)
