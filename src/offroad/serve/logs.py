"""What is written about requests while they run: ids, access lines, and the form of every log line, text or JSON."""

from __future__ import annotations

import json
import logging
import re
import secrets
import sys
import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from offroad.serve.security import path_of

if TYPE_CHECKING:
    from offroad.serve.generation import Generation
    from offroad.settings import Settings

access = logging.getLogger("offroad.access")
# Paths that programs ask every few seconds; their lines are for debugging.
_POLLED = frozenset({"/health", "/metrics", "/status"})
_GIVEN_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


@dataclass
class Exchange:
    """One request and its response as far as it has come. `at` is Unix time, `seconds` what it took in all.

    `body` is kept for a record only.
    """

    id: str
    method: str
    path: str
    at: float
    began: float
    body: bytearray | None = None
    status: int = 0
    seconds: float = 0.0
    generations: list[Generation] = field(default_factory=list)

    def told(self) -> dict[str, Any]:
        """What the engine did for it: tokens, reasons, times. Empty where it did nothing."""
        if not self.generations:
            return {}
        usages = [generation.usage() for generation in self.generations]
        cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
        firsts = [g.first - self.began for g in self.generations if g.first is not None]
        return {
            "prompt_tokens": sum(usage["prompt_tokens"] for usage in usages),
            "cached_tokens": cached,
            "completion_tokens": sum(usage["completion_tokens"] for usage in usages),
            "finish_reasons": [choice.finish_reason for g in self.generations for choice in g.choices],
            "first_token_seconds": round(min(firsts), 4) if firsts else None,
        }


_current: ContextVar[Exchange | None] = ContextVar("exchange", default=None)


def note(generation: Generation) -> None:
    """Counts a generation to the request that is being answered, if there is one."""
    exchange = _current.get()
    if exchange is not None:
        exchange.generations.append(generation)


class Exchanges:
    """The outermost layer: gives each request an id (the client's `X-Request-Id` if it is a plain one), which is in the
    response and in every log line on the way, and writes the access line. `done` is called with what has ended."""

    def __init__(self, app: ASGIApp, done: Callable[[Exchange], None] | None = None) -> None:
        self.app, self.done = app, done

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        exchange = Exchange(
            given if _GIVEN_ID.fullmatch(given) else f"req-{secrets.token_hex(12)}",
            scope["method"],
            path_of(scope),
            time.time(),
            time.perf_counter(),
            bytearray() if self.done is not None and scope["method"] == "POST" else None,
        )

        async def listening() -> Message:
            message = await receive()
            if exchange.body is not None:
                exchange.body += message.get("body", b"")
            return message

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["X-Request-Id"] = exchange.id
                if exchange.path.startswith("/v1/messages"):
                    headers["request-id"] = exchange.id  # where Anthropic's clients look
            await send(message)

        token = _current.set(exchange)
        try:
            await self.app(scope, listening, sending)
        except BaseException:
            exchange.status = exchange.status or 500
            raise
        finally:
            exchange.seconds = time.perf_counter() - exchange.began
            self._write(exchange)
            _current.reset(token)

    def _write(self, exchange: Exchange) -> None:
        fields = {"status": exchange.status, "seconds": round(exchange.seconds, 4)} | exchange.told()
        level = logging.DEBUG if exchange.path in _POLLED else logging.INFO
        # The path is the client's: quoted, it cannot begin a line.
        access.log(level, "%s %s", exchange.method, json.dumps(exchange.path)[1:-1], extra={"fields": fields})
        if self.done is not None:
            self.done(exchange)


class _Lines(logging.Formatter):
    """`12:00:00 info message field=value`; a multi-line exception follows."""

    def format(self, record: logging.LogRecord) -> str:
        exchange = _current.get()
        fields = getattr(record, "fields", {}) | ({"request_id": exchange.id} if exchange else {})
        more = "".join(f" {name}={_plain(value)}" for name, value in fields.items() if value is not None)
        trace = "\n" + self.formatException(record.exc_info) if record.exc_info else ""
        return f"{self.formatTime(record, '%H:%M:%S')} {record.levelname.lower()} {record.getMessage()}{more}{trace}"


class _Objects(logging.Formatter):
    """One JSON object a line: time (UTC), level, logger, message, request_id, fields."""

    def format(self, record: logging.LogRecord) -> str:
        exchange = _current.get()
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if exchange is not None:
            line["request_id"] = exchange.id
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def _plain(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def configure(settings: Settings) -> None:
    """Sends the server's and uvicorn's log lines to standard error, in the form and from the level of the settings.

    Replaces what was configured for them; other loggers of the process stay as they are.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Objects() if settings.log_json else _Lines())
    level = logging.getLevelName(settings.log_level.upper())
    for name in ("offroad", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        # uvicorn's own remarks on starting and stopping say nothing that is not said already.
        logger.setLevel(max(level, logging.WARNING) if name == "uvicorn" and level != logging.DEBUG else level)
