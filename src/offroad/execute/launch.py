"""Two ways to run a worker behind a socket: in its own process, or in a thread of this one (tests, embedding)."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any, Protocol

from offroad.execute import worker


class Running(Protocol):
    """A worker that has been started. `pid` is None for a thread."""

    pid: int | None

    def wait(self, timeout: float) -> int | None:
        """The exit code, or None when it still runs after `timeout` seconds; negative: ended by that signal."""

    def kill(self) -> None:
        """Ends it at once, where that can be done."""


Launch = Callable[[socket.socket], Running]


class _Process:
    def __init__(self, sock: socket.socket) -> None:
        # The child finds modules where we do, whatever put them on the path.
        env = os.environ | {"PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path)}
        # A session of its own: Ctrl-C in the terminal reaches the server alone, which then steers the worker.
        self._popen = subprocess.Popen(
            [sys.executable, "-m", "offroad.execute.worker", str(sock.fileno())],
            stdin=subprocess.DEVNULL,
            pass_fds=[sock.fileno()],
            env=env,
            start_new_session=True,
        )
        self.pid = self._popen.pid
        sock.close()

    def wait(self, timeout: float) -> int | None:
        try:
            return self._popen.wait(timeout)
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        self._popen.kill()


class _Thread:
    pid = None

    def __init__(self, sock: socket.socket, factory: Callable[..., Any]) -> None:
        self._code: int | None = None

        def run() -> None:
            self._code = worker.work(sock, lambda: None, factory)

        self._thread = threading.Thread(target=run, name="offroad-engine", daemon=True)
        self._thread.start()

    def wait(self, timeout: float) -> int | None:
        self._thread.join(timeout)
        return self._code

    def kill(self) -> None:
        """A thread cannot be ended from outside; it ends after its step, when it has read `Close`."""


def in_process(sock: socket.socket) -> Running:
    """The worker in a process of its own; it takes over `sock`."""
    return _Process(sock)


def in_thread(factory: Callable[..., Any]) -> Launch:
    """A launcher for a worker in a thread, with the engine that `factory(settings, progress)` makes."""
    return lambda sock: _Thread(sock, factory)
