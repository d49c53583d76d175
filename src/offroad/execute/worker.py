"""The engine's process: commands in, one message of events for each step out.

A thread reads commands and a thread writes reports, so that neither a slow server nor a large prompt stalls a step.
When the server is gone the reading thread sees the end of the stream and ends the process, even amid a load.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import msgspec

from offroad.errors import OffroadError
from offroad.execute.messages import (
    Abort,
    Call,
    Close,
    Command,
    EngineInfo,
    Events,
    Failed,
    Failure,
    Progress,
    Ready,
    Rejected,
    Reply,
    Report,
    Start,
    Submit,
    Vocabulary,
    pack,
    read_command,
)
from offroad.execute.prepare import Prepared, Preparing

# What the loop takes: what the server asks for, and requests that are prepared.
Work = Command | Prepared
CALLS = ("check", "reset_prefix_cache")
# Sequences are described so often, not at each step: with many of them that would take longer than all the rest here.
SEQUENCES_SECONDS = 0.5
Factory = Callable[..., Any]


class Pipe:
    """A socket with a queue at each end: `commands` to take, `send` that never blocks."""

    def __init__(self, sock: socket.socket, parent_gone: Callable[[], None]) -> None:
        self.commands: queue.SimpleQueue[Work] = queue.SimpleQueue()
        self._reports: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._sock, self._parent_gone = sock, parent_gone
        threading.Thread(target=self._read, name="offroad-commands", daemon=True).start()
        self._writer = threading.Thread(target=self._write, name="offroad-reports", daemon=True)
        self._writer.start()

    def send(self, report: Report) -> None:
        self._reports.put(pack(report))

    def close(self) -> None:
        """Writes what was sent, then closes the socket."""
        self._reports.put(None)
        self._writer.join()
        # The reading thread still holds the socket: only a shutdown ends it for both sides.
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    def _read(self) -> None:
        # A reset connection is the same as an ended one: the server is gone.
        try:
            with self._sock.makefile("rb") as stream:
                while (command := read_command(stream)) is not None:
                    self.commands.put(command)
                    if isinstance(command, Close):
                        return
        except (OSError, ValueError):
            pass
        self._parent_gone()
        self.commands.put(Close())

    def _write(self) -> None:
        while (frame := self._reports.get()) is not None:
            try:
                self._sock.sendall(frame)
            except OSError:
                self._parent_gone()
                return


def work(sock: socket.socket, parent_gone: Callable[[], None], factory: Factory | None = None) -> int:
    """Loads the engine that the first command names and serves until `Close`; returns the exit code.

    `factory` is used in place of the one that the command names. `parent_gone` is called from another thread.
    """
    pipe = Pipe(sock, parent_gone)
    try:
        return _load_and_loop(pipe, factory)
    finally:
        pipe.close()


def _load_and_loop(pipe: Pipe, factory: Factory | None) -> int:
    start = pipe.commands.get()
    if isinstance(start, Close):
        return 0
    assert isinstance(start, Start)
    try:
        make = factory or _find(start.factory)
        engine = make(start.settings, lambda phase, fraction, note: pipe.send(Progress(phase, fraction, note)))
        info = msgspec.convert(msgspec.to_builtins(engine.info), EngineInfo)
        pipe.send(Ready(info, engine.source_tokenizer))
    except Exception as error:
        return _fail(pipe, error, "loading")
    try:
        _loop(engine, pipe)
    except Exception as error:
        return _fail(pipe, error, "running a step")
    engine.close()
    return 0


def _fail(pipe: Pipe, error: Exception, doing: str) -> int:
    if not isinstance(error, OffroadError):
        traceback.print_exception(error)
    pipe.send(Failed(Failure.of(error, doing)))
    return error.exit_code if isinstance(error, OffroadError) else 1


def _loop(engine: Any, pipe: Pipe) -> None:
    """Takes every command that has come, then runs a step; sleeps when there is neither."""
    preparing = Preparing(engine.prepare, pipe.commands.put, pipe.send)
    described = -SEQUENCES_SECONDS
    while True:
        commands: list[Work] = [] if engine.has_work() else [pipe.commands.get()]
        while not pipe.commands.empty():
            commands.append(pipe.commands.get())
        for command in commands:
            if isinstance(command, Close):
                return
            _handle(engine, command, pipe, preparing)
        # A step also after commands alone: it brings the events of what they have aborted.
        events, sequences = engine.step(), None
        if (now := time.monotonic()) - described >= SEQUENCES_SECONDS:
            described, sequences = now, engine.sequences()
        pipe.send(Events(events, engine.stats(), sequences))


def _handle(engine: Any, command: Work, pipe: Pipe, preparing: Preparing) -> None:
    match command:
        case Submit(request) if request.guide is not None and request.guide.grammar is not None:
            preparing.begin(request)
        case Submit(request) | Prepared(request):
            if isinstance(command, Prepared) and not preparing.drop(request.id):
                return  # aborted, or refused because it took too long
            try:
                engine.submit(request)
            except OffroadError as error:
                pipe.send(Rejected(request.id, Failure.of(error, "submitting")))
        case Abort(request_id):
            preparing.drop(request_id)
            engine.abort(request_id)
        case Vocabulary(tokens, ends):
            engine.teach(tokens, ends)
        case Call(number, name):
            assert name in CALLS, name
            failure = None
            try:
                getattr(engine, name)()
            except (OffroadError, AssertionError) as error:
                failure = Failure.of(error, name)
            pipe.send(Reply(number, failure))
        case _:
            raise AssertionError(f"a command out of turn: {command}")


def _find(path: str) -> Factory:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def main() -> int:
    """`python -m offroad.execute.worker FD`: the server steers, so signals to the whole group are not ours."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sock = socket.socket(fileno=int(sys.argv[1]))
    return work(sock, lambda: os._exit(1))


if __name__ == "__main__":
    sys.exit(main())
