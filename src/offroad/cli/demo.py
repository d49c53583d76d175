"""`make demo`: pull a small model, start the real server, ask it one question with the OpenAI client, shut it down.

`python -m offroad.cli.demo [MODEL] [QUESTION]`. Exit code 0 only if every part worked, the shutdown too.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time

import httpx

from offroad.cli.main import print_error
from offroad.cli.progress import LoadProgress
from offroad.errors import OffroadError

QUESTION = "What is the capital of France? Answer, then name two things to see there."
START_SECONDS, STOP_SECONDS = 300.0, 60.0


def main(arguments: list[str]) -> int:
    """Runs the demo; the exit code."""
    model = arguments[0] if arguments else "smollm2-135m"
    question = arguments[1] if len(arguments) > 1 else QUESTION
    try:
        demo(model, question)
    except OffroadError as error:
        print_error(error, sys.stderr)
        return error.exit_code
    return 0


def demo(model: str, question: str) -> None:
    """Pull, serve, ask, stop. Raises OffroadError where one of them fails."""
    from offroad.weights import store

    with LoadProgress(("pull",)) as progress:
        store.pull(model, lambda fraction, note: progress("pull", fraction, note))
    port = free_port()
    # On the CPU also where there is a GPU: GPUs have no kernels yet, only the slow reference path.
    flags = [model, "--device", "cpu", "--port", str(port)]
    command = [sys.executable, "-m", "offroad.cli.main", "serve", *flags, "--log-level", "warning"]
    print(f"$ offroad serve {' '.join(flags)}", file=sys.stderr)
    server = subprocess.Popen(command)
    try:
        wait_until_ready(server, f"http://127.0.0.1:{port}/health")
        ask(f"http://127.0.0.1:{port}/v1", model, question)
        stop(server)
    finally:
        if server.poll() is None:
            server.kill()
            server.wait()


def free_port() -> int:
    """A TCP port of the loopback address that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_until_ready(server: subprocess.Popen, url: str) -> None:
    """Returns when /health answers 200. Raises OffroadError if the server ends or takes too long."""
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until:
        if (code := server.poll()) is not None:
            raise OffroadError(
                "the server ended while it started", found=f"exit code {code}", next="its message is above"
            )
        try:
            if httpx.get(url, timeout=2.0).status_code == 200:
                return
        except httpx.TransportError:
            pass  # it does not listen yet; the loop has a limit
        time.sleep(0.1)
    raise OffroadError("the server did not become ready", found=f"{START_SECONDS:.0f} seconds of waiting")


def ask(base_url: str, model: str, question: str) -> None:
    """Streams one answer to stdout, and its speed to stderr. Raises OffroadError for an empty or failed one."""
    from openai import OpenAI, OpenAIError

    print(f"\n>>> {question}", flush=True)
    first, usage, text = None, None, ""
    began = time.perf_counter()
    try:
        stream = OpenAI(base_url=base_url, api_key="none").chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": question}],
            max_tokens=96,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        for chunk in stream:
            usage = chunk.usage or usage
            piece = chunk.choices[0].delta.content if chunk.choices else None
            if piece:
                first = first or time.perf_counter()
                text += piece
                print(piece, end="", flush=True)
    except OpenAIError as error:
        raise OffroadError("the request failed", found=str(error)) from error
    end = time.perf_counter()
    print(flush=True)
    if not text.strip() or usage is None:
        raise OffroadError(
            "the answer", found="no text" if not text.strip() else "no usage", accepted="text and a usage event"
        )
    speed = (usage.completion_tokens - 1) / (end - first) if usage.completion_tokens > 1 else 0.0
    print(
        f"\n[{usage.completion_tokens} tokens, {speed:.1f} tok/s, first after {first - began:.2f} s]", file=sys.stderr
    )


def stop(server: subprocess.Popen) -> None:
    """Ends the server by SIGTERM. Raises OffroadError if it does not end, or not with exit code 0."""
    server.send_signal(signal.SIGTERM)
    try:
        code = server.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise OffroadError(
            "the server did not end after SIGTERM", found=f"{STOP_SECONDS:.0f} seconds of waiting"
        ) from error
    if code != 0:
        raise OffroadError("the server's exit code", found=code, accepted="0")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
