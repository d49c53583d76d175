"""A server on a fake engine, in process or behind a real port."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable
from contextlib import asynccontextmanager
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "execute"))

from fake_engine import FakeEngine
from fake_text import FakeText

from offroad.execute.client import EngineClient
from offroad.execute.launch import in_thread
from offroad.serve.app import app_of
from offroad.serve.server import bind, http_server, url_of
from offroad.serve.service import Service
from offroad.settings import Settings


class Stack:
    """A service on a fake engine in a thread; `engine` is there once it is loaded."""

    def __init__(self, make: Callable = FakeEngine, generation: dict | None = None, **settings) -> None:
        self.engine: FakeEngine | None = None

        def factory(given, progress):
            self.engine = make(given, progress)
            return self.engine

        self.settings = Settings(model="fake", port=0, **settings)
        self.client = EngineClient(self.settings, launch=in_thread(factory))
        self.service = Service(self.settings, self.client, lambda files, settings: FakeText(generation or {}))
        self.app = app_of(self.service)

    @asynccontextmanager
    async def http(self, start: bool = True):
        """An HTTP client on the app, without a socket."""
        if start:
            await self.service.start()
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://offroad", timeout=20) as client:
            yield client
        await self.client.close()


class Wire:
    """The same behind a port, its event loop in a thread of its own."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        sock = bind(stack.settings)
        self.url = url_of(sock)
        self._server = http_server(stack.app, stack.settings)
        self.loop: asyncio.AbstractEventLoop | None = None
        ready = threading.Event()

        async def run() -> None:
            self.loop = asyncio.get_running_loop()
            await stack.service.start()
            task = asyncio.create_task(self._server.serve(sockets=[sock]))
            while not self._server.started:
                await asyncio.sleep(0.01)
            ready.set()
            await task
            await stack.client.close()

        self._thread = threading.Thread(target=lambda: asyncio.run(run()), daemon=True)
        self._thread.start()
        assert ready.wait(20)

    def do(self, coroutine):
        """Runs a coroutine in the server's loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(20)

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join(20)
        assert not self._thread.is_alive()
