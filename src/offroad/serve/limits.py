"""What one client may take of the server: the size and pace of what it sends, and how long it may not read."""

from __future__ import annotations

import asyncio
import socket
import time
from typing import Any

import h11
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from offroad.serve.errors import BodyTooLarge, BodyTooSlow, response_of
from offroad.serve.security import path_of

HEADER_SECONDS = 20.0
BODY_SECONDS, PAUSE_SECONDS = 300.0, 30.0
UNREAD_SECONDS = 120


class BodyLimits:
    """Ends a request whose body is too large (413) or does not come (408). Counts what arrives, whatever is announced.

    After its end, a body's `receive` waits as long as the response takes: it tells then that the client has gone.
    """

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self.app, self.max_bytes = app, max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        announced = Headers(scope=scope).get("content-length", "")
        if announced.isdigit() and (len(announced) > 18 or int(announced) > self.max_bytes):
            await response_of(path_of(scope), self._too_large())(scope, receive, send)
            return
        end, total, more = time.monotonic() + BODY_SECONDS, 0, True

        async def limited() -> Message:
            nonlocal total, more
            if not more:
                return await receive()
            try:
                message = await asyncio.wait_for(receive(), min(PAUSE_SECONDS, max(end - time.monotonic(), 0)))
            except TimeoutError as error:
                raise BodyTooSlow(
                    "the body did not come",
                    found=f"{total} bytes, then nothing for {PAUSE_SECONDS:g} s or not all in {BODY_SECONDS:g} s",
                    accepted="a body that is sent without a pause",
                ) from error
            total += len(message.get("body", b""))
            more = message["type"] == "http.request" and message.get("more_body", False)
            if total > self.max_bytes:
                raise self._too_large()
            return message

        await self.app(scope, limited, send)

    def _too_large(self) -> BodyTooLarge:
        return BodyTooLarge(
            "the body is too large", found="more than that", accepted=f"{self.max_bytes} bytes (--max-body-mib)"
        )


class PatientHttp(H11Protocol):
    """uvicorn's HTTP/1.1 for one connection, which is closed if no whole header comes within `HEADER_SECONDS`, or when
    its client does not read what was sent for `UNREAD_SECONDS`: neither may hold a connection for ever."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._head: asyncio.TimerHandle | None = self.loop.call_later(HEADER_SECONDS, self._no_header)
        sock = transport.get_extra_info("socket")
        if hasattr(socket, "TCP_USER_TIMEOUT") and sock is not None and sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNREAD_SECONDS * 1000)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        waits = self.conn.their_state is h11.IDLE
        if waits and self._head is None:
            self._head = self.loop.call_later(HEADER_SECONDS, self._no_header)
        elif not waits:
            self._forget_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_timer()
        super().connection_lost(exc)

    def _forget_timer(self) -> None:
        if self._head is not None:
            self._head.cancel()
            self._head = None

    def _no_header(self) -> None:
        self._head = None
        self.transport.abort()
