"""A real server process (`offroad serve`) over a tiny model, for end-to-end tests."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

CLI = [sys.executable, "-m", "offroad.cli.main"]


def free_port() -> int:
    """A port that nobody takes before the server does: one of this worker's own, below those that systems give out."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    while True:
        port = 20000 + 1000 * worker + random.randrange(1000)
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.bind(("127.0.0.1", port))
            return port


@contextlib.contextmanager
def served(folder: Path, *flags: str) -> Iterator[str]:
    """The address of a server that answers; it must end with exit code 0 on SIGTERM."""
    port = free_port()
    command = [
        *CLI,
        "serve",
        str(folder),
        "--served-model-name",
        "tiny",
        "--device",
        "cpu",
        "--port",
        str(port),
        *flags,
    ]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            try:
                if httpx.get(f"{address}/health").status_code == 200:
                    break
            except httpx.TransportError:
                pass
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.1)
        yield address
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.communicate()
