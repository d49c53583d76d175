"""Bodies in and streams out: reading with a limit, server-sent events, and noticing that the client has gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

PING_SECONDS = 10.0
PING = b": ping\n\n"
DONE = b"data: [DONE]\n\n"
Result = TypeVar("Result")


class Disconnected(Exception):
    """The client has gone; nobody reads an answer."""


async def read_body(request: Request) -> bytes:
    """The whole body; `limits.BodyLimits` sees to its size and pace.

    Raises BodyTooLarge, BodyTooSlow, ClientDisconnect.
    """
    return await request.body()


def event(body: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


async def while_connected(receive: Receive, work: Awaitable[Result]) -> Result:
    """The result of `work`, which is cancelled when the client goes first (raises Disconnected)."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Disconnected
        return task.result()
    finally:
        await _cancel(task, gone)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class Ahead(AsyncIterator[Result]):
    """An iterator whose next item can be waited for with a time limit without losing it."""

    def __init__(self, source: AsyncIterator[Result]) -> None:
        self._source = source
        self._next: asyncio.Future[Result] | None = None

    async def ready(self, seconds: float) -> bool:
        """Whether an item, an end or an error is there within `seconds`."""
        if self._next is None:
            self._next = asyncio.ensure_future(anext(self._source))
        done, _ = await asyncio.wait((self._next,), timeout=seconds)
        return bool(done)

    def raise_if_failed(self) -> None:
        """Raises the error that the next item would raise, if that is known by now."""
        if self._next is not None and self._next.done():
            error = self._next.exception()
            if error is not None and not isinstance(error, StopAsyncIteration):
                raise error

    async def __anext__(self) -> Result:
        task, self._next = self._next, None
        return await (task if task is not None else anext(self._source))

    async def aclose(self) -> None:
        """Stops the source; what it was about to give is lost."""
        if self._next is not None:
            await _cancel(self._next)
        await self._source.aclose()


class EventStream(Response):
    """Sends frames as server-sent events until they end or the client goes; then calls `close`, whatever happened."""

    def __init__(self, frames: AsyncIterator[bytes], close: Callable[[], Awaitable[None]]) -> None:
        super().__init__(None, 200, {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}, "text/event-stream")
        del self.headers["content-length"]
        self._frames, self._close = frames, close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self._send_all(send))
        except (Disconnected, OSError):
            pass  # nobody is left to tell
        finally:
            await self._close()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for frame in self._frames:
            await send({"type": "http.response.body", "body": frame, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
