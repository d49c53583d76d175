"""The whole server in its own process: start, failure to start, drain, second signal, death of the engine."""

from __future__ import annotations

import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from serve_stack import Stack, Wire

from offroad.errors import SettingsError
from offroad.serve.server import bind, check_certificate, url_of
from offroad.settings import Settings

PROGRAM = Path(__file__).parent / "serve_fake.py"


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


@contextmanager
def running(drain: float = 10, factory: str = "FakeEngine", **more):
    settings = {"model": "fake", "port": 0, "drain_seconds": drain} | more
    command = [sys.executable, str(PROGRAM), factory, json.dumps(settings)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def ready(process) -> tuple[str, int]:
    word, url, worker, length = process.stdout.readline().split()
    assert (word, length) == ("ready", "512")
    return url, int(worker)


def gone(pid: int) -> bool:
    for _ in range(200):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.02)
    return False


class Running:
    """A request in a thread: its text so far, and its end."""

    def __init__(self, url: str, body: dict) -> None:
        self.text, self.error, self.first = "", None, threading.Event()
        self.thread = threading.Thread(target=self._run, args=(url, body))
        self.thread.start()
        assert self.first.wait(10)

    def _run(self, url: str, body: dict) -> None:
        try:
            with httpx.stream("POST", f"{url}/v1/completions", json=body | {"stream": True}, timeout=20) as answer:
                for piece in answer.iter_text():
                    self.text += piece
                    self.first.set()
        except httpx.HTTPError as error:
            self.error = error
        self.first.set()

    def events(self) -> list[str]:
        self.thread.join(20)
        return [e.removeprefix("data: ") for e in self.text.split("\n\n") if e]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_drain_finishes_what_runs(number):
    with running() as process:
        url, worker = ready(process)
        request = Running(url, {"prompt": "abc", "max_tokens": 450})
        process.send_signal(number)
        time.sleep(0.1)
        assert httpx.get(f"{url}/health").json()["status"] == "draining"
        assert httpx.post(f"{url}/v1/completions", json={"prompt": "abc"}).status_code == 503
        events = request.events()
        assert request.error is None
        assert events[-1] == "[DONE]"
        assert json.loads(events[-2])["choices"][0]["finish_reason"] == "length"
        assert process.wait(10) == 0
        assert gone(worker)
        lines = process.stderr.read().splitlines()
        assert [line.split()[1] for line in lines] == ["warning", "info", "info"]  # what happens now, and two requests


def test_drain_that_takes_too_long_ends_with_an_error_event():
    with running(drain=0.2) as process:
        url, _ = ready(process)
        request = Running(url, {"prompt": "abc!", "max_tokens": 500})
        process.send_signal(signal.SIGTERM)
        events = request.events()
        assert events[-1] == "[DONE]"
        assert json.loads(events[-2])["error"]["code"] == "engine_unavailable"
        assert process.wait(10) == 0


def test_second_signal_ends_at_once():
    with running(drain=60) as process:
        url, worker = ready(process)
        request = Running(url, {"prompt": "abc", "max_tokens": 500})
        process.send_signal(signal.SIGTERM)
        time.sleep(0.1)
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 128 + signal.SIGTERM
        assert time.monotonic() - began < 3
        assert gone(worker)
        request.events()


def test_port_is_open_while_loading_and_a_signal_ends_the_load():
    port = free_port()
    with running(factory="VerySlowLoad", port=port) as process:
        for _ in range(200):
            try:
                answer = httpx.get(f"http://127.0.0.1:{port}/health")
                break
            except httpx.ConnectError:
                time.sleep(0.02)
        assert (answer.status_code, answer.json()["status"]) == (503, "loading")
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
        assert process.stdout.read() == ""


@pytest.mark.parametrize("again", [False, True])
def test_death_of_the_engine_leaves_a_server_that_says_so_and_can_be_ended(again):
    with running(restart_engine=again, host="0.0.0.0" if again else "127.0.0.1") as process:
        url, worker = ready(process)
        request = Running(url, {"prompt": "abc", "max_tokens": 500})
        os.kill(worker, signal.SIGKILL)
        assert "SIGKILL" in json.loads(request.events()[-2])["error"]["message"]
        health = httpx.get(f"{url}/health")
        assert (health.status_code, health.json()["status"]) == (503, "dead")
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
        # Others may reach the second server, which has no key.
        assert ("--api-key" in process.stderr.read()) == again


def test_failure_to_load_is_the_error_of_the_engine():
    with running(model="broken") as process:
        assert process.stdout.readline() == "error weights; found: holes; accepted: none; next: pull again\n"
        assert process.wait(10) == 2


def test_port_in_use_and_unknown_host():
    with bind(Settings(model="m", port=0)) as taken:
        port = taken.getsockname()[1]
        assert url_of(taken) == f"http://127.0.0.1:{port}"
        with pytest.raises(SettingsError, match=f"--port.*{port}"):
            bind(Settings(model="m", port=port))
    with pytest.raises(SettingsError, match="--host"):
        bind(Settings(model="m", host="203.0.113.7", port=0))


def until(url: str, status: int, seconds: float = 15) -> httpx.Response:
    """/health when it first answers `status`."""
    end = time.monotonic() + seconds
    while (answer := httpx.get(f"{url}/health")).status_code != status:
        assert time.monotonic() < end, answer.text
        time.sleep(0.02)
    return answer


def test_kill_9_and_the_engine_is_started_again():
    with running(restart_engine=True) as process:
        url, worker = ready(process)
        stream = Running(url, {"prompt": "abc", "max_tokens": 500})
        os.kill(worker, signal.SIGKILL)
        events = stream.events()
        assert "SIGKILL" in json.loads(events[-2])["error"]["message"]
        assert events[-1] == "[DONE]"
        health = until(url, 503)
        assert "SIGKILL" in health.json()["reason"]
        refused = httpx.post(f"{url}/v1/completions", json={"prompt": "abc"})
        assert refused.status_code == 503
        assert "SIGKILL" in refused.json()["error"]["message"]
        assert until(url, 200).json() == {"status": "ready"}
        assert gone(worker)
        for _ in range(2):
            answer = httpx.post(f"{url}/v1/completions", json={"prompt": "abc", "max_tokens": 5})
            assert answer.json()["choices"][0]["text"] == "abcab"
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
        log = process.stderr.read()
        assert "started again in 1 s (1 of 5)" in log
        assert "ready again" in log


def test_https(tmp_path):
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=127.0.0.1"]
    cert, key = str(tmp_path / "cert.pem"), str(tmp_path / "key.pem")
    make += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", cert]
    try:
        subprocess.run(make, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("no openssl to make a certificate with")
    wire = Wire(Stack(ssl_certfile=cert, ssl_keyfile=key))
    try:
        url = httpx.URL(wire.url)
        with httpx.Client(
            base_url=f"https://127.0.0.1:{url.port}", verify=ssl.create_default_context(cafile=cert)
        ) as http:
            answer = http.post("/v1/completions", json={"prompt": "abc", "max_tokens": 3})
        assert answer.json()["choices"][0]["text"] == "abc"
        with socket.create_connection((url.host, url.port), timeout=5) as sock:
            sock.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b"ready" not in sock.recv(1000)
    finally:
        wire.close()
    check_certificate(Settings(model="m", ssl_certfile=cert, ssl_keyfile=key))
    for certfile, keyfile in ((cert, None), (key, key), (str(tmp_path / "none"), key)):
        with pytest.raises(SettingsError, match="--ssl-certfile"):
            check_certificate(Settings(model="m", ssl_certfile=certfile, ssl_keyfile=keyfile))


def test_json_logs_of_a_whole_run():
    secret = "sk-the-secret-of-this-server"
    with running(log_json=True, api_key=[secret], log_level="debug") as process:
        url, worker = ready(process)
        headers = {"Authorization": f"Bearer {secret}"}
        httpx.post(f"{url}/v1/completions", json={"prompt": "abc", "max_tokens": 3}, headers=headers)
        assert httpx.post(f"{url}/v1/completions?api_key={secret}", json={"prompt": "abc"}).status_code == 401
        httpx.post(f"{url}/v1/completions", json={"prompt": "!raise", "max_tokens": 9}, headers=headers)
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
        log = process.stderr.read()
    assert secret not in log
    lines = [line for line in log.splitlines() if line.startswith("{")]
    rest = [line for line in log.splitlines() if not line.startswith("{")]
    assert all(json.loads(line)["level"] for line in lines)
    assert rest[0] == "Traceback (most recent call last):"  # of the engine's own process
    assert [json.loads(line)["status"] for line in lines if '"POST ' in line] == [200, 401, 503]
