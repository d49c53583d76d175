"""`serve`: the HTTP port, the engine behind it, and an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import logging
import signal
import socket
import ssl
from collections.abc import Callable, Iterator

import uvicorn
from fastapi import FastAPI

from offroad.errors import SettingsError
from offroad.execute.client import EngineClient
from offroad.execute.messages import EngineInfo
from offroad.serve.app import app_of
from offroad.serve.limits import PatientHttp
from offroad.serve.logs import configure
from offroad.serve.service import MakeText, Service
from offroad.serve.text import model_text
from offroad.settings import Settings

log = logging.getLogger("offroad.serve")
_BACKLOG = 2048
# Answers that were complete at the end of the drain are still being written for so long.
_FLUSH_SECONDS = 5
Progress = Callable[[str, float, str], None]


def serve(
    settings: Settings,
    on_ready: Callable[[str, EngineInfo], None] | None = None,
    progress: Progress | None = None,
    *,
    client: EngineClient | None = None,
    make_text: MakeText = model_text,
) -> None:
    """Serves until SIGTERM or SIGINT, then lets running requests finish for up to `drain_seconds`; a second signal ends
    it at once (SystemExit, 128 + signal). The port is open while the model loads. Call from the main thread.

    Raises SettingsError for what cannot be had (port, address, certificate, keys, record), and the OffroadError of a
    load that fails.
    """
    configure(settings)
    check_certificate(settings)
    service = Service(settings, client or EngineClient(settings), make_text)
    sock = bind(settings)
    if not service.keys and not ipaddress.ip_address(sock.getsockname()[0]).is_loopback:
        log.warning("anybody who reaches %s may use the server: see --api-key", url_of(sock))
    code = asyncio.run(_Run(service, sock, on_ready, progress).run())
    if code:
        raise SystemExit(code)


def bind(settings: Settings) -> socket.socket:
    """A listening socket at host and port. Raises SettingsError."""
    try:
        [(family, kind, protocol, _, address), *_] = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except OSError as error:
        raise SettingsError(
            "--host", found=settings.host, accepted="an address of this machine", next=str(error)
        ) from error
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise SettingsError(
                "--port",
                found=f"{settings.port}, which another program uses",
                accepted="a free port",
                next=f"end that program, or try --port {min(settings.port + 1, 65535)}",
            ) from error
        raise SettingsError(
            "--host and --port",
            found=f"{settings.host}:{settings.port} ({error.strerror})",
            accepted="an address and port that this user may listen on",
        ) from error
    return sock


def check_certificate(settings: Settings) -> None:
    """Raises SettingsError if HTTPS is asked for and the certificate or its key cannot be used."""
    if settings.ssl_certfile is None:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(
            settings.ssl_certfile, settings.ssl_keyfile, password=lambda: ""
        )
    except (OSError, ssl.SSLError) as error:
        raise SettingsError(
            "--ssl-certfile and --ssl-keyfile",
            found=f"{settings.ssl_certfile}, {settings.ssl_keyfile or 'no key file'} ({error})",
            accepted="a certificate and its private key as PEM files, the key without a password",
        ) from error


def url_of(sock: socket.socket, scheme: str = "http") -> str:
    """The address to paste into a client."""
    host, port = sock.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def http_server(app: FastAPI, settings: Settings) -> uvicorn.Server:
    """The HTTP side of `app`, to be run on a socket; it takes no signals."""
    return _Http(
        uvicorn.Config(
            app,
            http=PatientHttp,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,  # `logs.Exchanges` writes more
            server_header=False,
            ssl_certfile=settings.ssl_certfile,
            ssl_keyfile=settings.ssl_keyfile,
            timeout_graceful_shutdown=_FLUSH_SECONDS,
            timeout_keep_alive=30,
        )
    )


class _Http(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        # Signals are ours: uvicorn would stop listening before the running requests have finished.
        yield


class _Run:
    """One run of the server, from the open port to the end."""

    def __init__(
        self,
        service: Service,
        sock: socket.socket,
        on_ready: Callable[[str, EngineInfo], None] | None,
        progress: Progress | None,
    ) -> None:
        self.settings, self.service, self.sock = service.settings, service, sock
        self.on_ready, self.progress = on_ready, progress
        self.http = http_server(app_of(service), service.settings)
        self.stop, self.at_once = asyncio.Event(), asyncio.Event()
        self.code = 0

    async def run(self) -> int:
        """Serves until told to stop; the exit code."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signal, number)
        url = url_of(self.sock, "http" if self.settings.ssl_certfile is None else "https")
        http = asyncio.create_task(self.http.serve(sockets=[self.sock]))
        stop = asyncio.create_task(self.stop.wait())
        load = asyncio.create_task(self.service.start(self.progress))
        watch: asyncio.Task[None] | None = None
        try:
            await asyncio.wait((http, stop, load), return_when=asyncio.FIRST_COMPLETED)
            if load.done() and not stop.done():
                load.result()
                if self.on_ready is not None:
                    self.on_ready(url, self.service.client.info)
                watch = asyncio.create_task(self.service.watch())
                await asyncio.wait((http, stop), return_when=asyncio.FIRST_COMPLETED)
                watch.cancel()
            if not http.done():
                await self._drain()
        finally:
            await self._end(http, load, *([watch] if watch else []))
            stop.cancel()
        return self.code

    def _signal(self, number: int) -> None:
        if not self.stop.is_set():
            log.warning("%s: finishing running requests; once more to end at once", signal.Signals(number).name)
            self.stop.set()
            return
        self.code = 128 + number
        self.service.client.kill()
        self.http.force_exit = self.http.should_exit = True
        self.at_once.set()

    async def _drain(self) -> None:
        drain = asyncio.create_task(self.service.client.drain(self.settings.drain_seconds))
        at_once = asyncio.create_task(self.at_once.wait())
        await asyncio.wait((drain, at_once), return_when=asyncio.FIRST_COMPLETED)
        if drain.done() and not drain.result():
            log.warning("requests that still ran after %g s were ended", self.settings.drain_seconds)
        drain.cancel()
        at_once.cancel()

    async def _end(self, http: asyncio.Task[None], *loads: asyncio.Task[None]) -> None:
        """Closes the port and the engine; loads that were under way end with it."""
        self.http.should_exit = True
        await http
        await self.service.close()
        # Their errors are known already, or are that they were told to end.
        await asyncio.gather(*loads, return_exceptions=True)
