"""A real server process (`offroad serve`) over a tiny model, for end-to-end tests."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

CLI = [sys.executable, "-m", "offroad.cli.main"]


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


@contextmanager
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
