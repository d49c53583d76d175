"""The demo against stand-in servers: it reports an answer, and every way in which the server may fail it."""

import json
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from offroad.cli import demo
from offroad.errors import OffroadError

SERVER = """
import json, signal, sys, threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
pieces, code = json.loads(sys.argv[2]), int(sys.argv[3])
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200); self.send_header("content-type", "text/event-stream"); self.end_headers()
        head = {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "m"}
        for piece in pieces:
            choice = {"index": 0, "delta": {"content": piece}, "finish_reason": None}
            self.wfile.write(f"data: {json.dumps(head | {'choices': [choice]})}\\n\\n".encode())
        usage = {"prompt_tokens": 3, "completion_tokens": len(pieces), "total_tokens": 9}
        self.wfile.write(f"data: {json.dumps(head | {'choices': [], 'usage': usage})}\\n\\ndata: [DONE]\\n\\n".encode())
    def log_message(self, *arguments):
        pass
server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
signal.signal(signal.SIGTERM, lambda *a: threading.Thread(target=server.shutdown).start())
server.serve_forever()
sys.exit(code)
"""


@pytest.fixture
def server(monkeypatch):
    """Puts a stand-in in the place of `offroad serve`; the value starts one that answers so and ends with that code."""
    made = []
    real = subprocess.Popen

    def configure(pieces, code=0, program=SERVER):
        def popen(command):
            port = command[command.index("--port") + 1]
            made.append(real([sys.executable, "-c", program, port, json.dumps(pieces), str(code)]))
            return made[-1]

        monkeypatch.setattr(subprocess, "Popen", popen)

    monkeypatch.setitem(
        sys.modules, "offroad.weights.store", SimpleNamespace(pull=lambda name, progress: progress(1.0, name))
    )
    import offroad.weights

    monkeypatch.setattr(offroad.weights, "store", sys.modules["offroad.weights.store"], raising=False)
    yield configure
    for process in made:
        assert process.poll() is not None, "the demo left its server running"


def test_an_answer_is_streamed_and_the_server_ends(server, capsys):
    server(["Par", "is", "."])
    assert demo.main(["tiny", "Where?"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "\n>>> Where?\nParis.\n"
    assert "[3 tokens, " in captured.err
    assert "tok/s" in captured.err


def test_an_empty_answer_fails(server, capsys):
    server([" "])
    assert demo.main(["tiny"]) == 2
    assert "no text" in capsys.readouterr().err


def test_a_bad_end_of_the_server_fails(server, capsys):
    server(["x", "y"], code=5)
    assert demo.main(["tiny"]) == 2
    assert "exit code" in capsys.readouterr().err


def test_a_server_that_does_not_start_fails_at_once(server, capsys):
    server([], program="import sys; sys.exit(3)")
    began = time.monotonic()
    assert demo.main(["tiny"]) == 2
    assert time.monotonic() - began < 20
    assert "exit code 3" in capsys.readouterr().err


def test_a_server_that_never_gets_ready(monkeypatch):
    monkeypatch.setattr(demo, "START_SECONDS", 0.3)
    with pytest.raises(OffroadError, match="did not become ready"):
        demo.wait_until_ready(SimpleNamespace(poll=lambda: None), f"http://127.0.0.1:{demo.free_port()}/health")
