"""The server's side of the engine: requests out, token events in, all in one asyncio loop."""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import AsyncIterator, Callable, Sequence
from enum import Enum
from typing import Literal

from offroad.errors import EngineDead, OffroadError, QueueFull
from offroad.execute.launch import Launch, Running, in_process
from offroad.execute.messages import (
    Abort,
    Call,
    Close,
    Command,
    EngineInfo,
    Events,
    Failed,
    Progress,
    Ready,
    Rejected,
    Reply,
    Report,
    Start,
    Submit,
    Vocabulary,
    pack,
    read_report,
    socket_pair,
)
from offroad.execute.watch import Watch
from offroad.schedule.request import Request, Stats, TokenEvent
from offroad.settings import Settings
from offroad.weights.source import TokenizerFiles

log = logging.getLogger("offroad.execute")
ENGINE = "offroad.engine:Engine"
_CLOSE_SECONDS = 5.0


class State(Enum):
    """What the engine is doing, as `/health` tells it."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    DEAD = "dead"


class NotReady(OffroadError):
    """The engine is loading or the server is shutting down: answered with 503."""


class Subscription:
    """The events of some requests, merged in the order in which they come. Ends when all of them have finished.

    Iterating raises the OffroadError that has ended the requests. `close` aborts what still runs.
    """

    def __init__(self, client: EngineClient, requests: Sequence[Request]) -> None:
        self._client = client
        self._queue: asyncio.Queue[TokenEvent | OffroadError] = asyncio.Queue()
        self._open = {request.id: set(range(request.params.n)) for request in requests}

    def __aiter__(self) -> AsyncIterator[TokenEvent]:
        return self

    async def __anext__(self) -> TokenEvent:
        if not self._open and self._queue.empty():
            raise StopAsyncIteration
        item = await self._queue.get()
        if isinstance(item, OffroadError):
            self.close()
            raise item
        return item

    def close(self) -> None:
        """Aborts the requests that have not finished. May be called again."""
        for request_id in list(self._open):
            self.abort(request_id)

    def abort(self, request_id: str) -> None:
        """Ends one of the requests; nothing more comes of it."""
        if self._open.pop(request_id, None) is not None:
            self._client.abort(request_id)

    def end(self, error: OffroadError) -> None:
        """Aborts what still runs; iterating raises `error` after the events that have come."""
        if self._open:
            self.close()
            self._queue.put_nowait(error)

    def put(self, event: TokenEvent) -> bool:
        """Called by the client; True when this event finishes its request."""
        self._queue.put_nowait(event)
        sequences = self._open[event.request_id]
        if event.finish_reason is not None:
            sequences.discard(event.index)
        if sequences:
            return False
        del self._open[event.request_id]
        return True

    def fail(self, request_id: str, error: OffroadError) -> None:
        """Called by the client: the request has ended with `error`."""
        self._open.pop(request_id, None)
        self._queue.put_nowait(error)


class EngineClient:
    """Starts an engine, submits to it and hands out its events. `ended` is set while the engine is dead.

    Every request in flight is counted here, so `QueueFull` is known before anything is sent. `launch` says where the
    worker runs. Call `start`, then `open`. Use from one event loop only.
    """

    def __init__(self, settings: Settings, *, factory: str = ENGINE, launch: Launch = in_process) -> None:
        self.settings, self.stats, self.state = settings, Stats(), State.LOADING
        self.info: EngineInfo | None = None
        self.tokenizer: TokenizerFiles | None = None
        self.death: OffroadError | None = None
        self.restarts = 0
        self._factory, self._launch = factory, launch
        self._open: dict[str, Subscription] = {}
        self._taught = self._loaded = self._closed = False
        self._calls: dict[int, asyncio.Future[None]] = {}
        self.watch = Watch()
        self._worker: Running | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[None] | None = None
        self._idle, self.ended = asyncio.Event(), asyncio.Event()
        self._idle.set()

    @property
    def unfinished(self) -> int:
        """Requests that the engine has and has not finished."""
        return len(self._open)

    @property
    def room(self) -> int:
        """The most requests that may be unfinished at a time."""
        return self.settings.max_waiting + self.settings.max_num_seqs

    @property
    def worker_pid(self) -> int | None:
        """Process id of the engine; None when there is none."""
        return self._worker.pid if self._worker else None

    async def start(self, progress: Callable[[str, float, str], None] | None = None) -> None:
        """Launches the engine and waits until it is loaded. Raises the OffroadError with which the load failed.

        May be called again when the engine is dead: `death` is then the reason until `open`.
        """
        assert self._ready is None or self.state is State.DEAD
        if self._closed:
            raise self._dead()
        if self._worker is not None:
            await self._leave()
            self.restarts += 1
        self.state, self.stats, self._taught, self._loaded = State.LOADING, Stats(), False, False
        self.ended.clear()
        self.watch.started()
        ours, theirs = socket_pair()
        try:
            self._worker = self._launch(theirs)
        except OSError as error:
            ours.close()
            theirs.close()
            self._die(EngineDead("the engine's process cannot be started", found=str(error)))
            raise self._dead() from error
        self._ready = asyncio.get_running_loop().create_future()
        reader, self._writer = await asyncio.open_connection(sock=ours)
        self._reading = asyncio.create_task(self._read(reader, progress or (lambda phase, fraction, note: None)))
        # Keys are none of the engine's business.
        self._send(Start(self.settings.replace(api_key=(), api_key_file=None), self._factory))
        await self._ready

    def open(self) -> None:
        """Lets requests in, once all that they need is loaded; an engine that has ended meanwhile stays ended."""
        assert self.info is not None
        if self.state is State.LOADING:
            self.state, self.death = State.READY, None

    def require_ready(self, new: int = 1) -> None:
        """Raises NotReady, EngineDead or QueueFull if `new` more requests cannot be taken now."""
        if self.state is State.LOADING:
            what = "the model is still loading" if self.death is None else "the engine has ended and is loaded again"
            raise NotReady(what, found=self.death, next="try again soon; /health answers 200 when it is ready")
        if self.state is State.DRAINING:
            raise NotReady("the server is shutting down", next="send the request to another server")
        if self.state is State.DEAD:
            raise self._dead()
        if self.unfinished + new > self.room:
            raise QueueFull(
                f"{self.unfinished} requests are unfinished",
                found=f"{new} more",
                accepted=f"{self.room} in all (max_num_seqs + max_waiting)",
                next="try again later",
            )

    def submit(self, requests: Sequence[Request]) -> Subscription:
        """Sends all of the requests or, raising NotReady, EngineDead or QueueFull, none of them."""
        self.require_ready(len(requests))
        subscription = Subscription(self, requests)
        frames = [pack(Submit(request)) for request in requests]  # one that cannot be sent is not counted
        for request, frame in zip(requests, frames, strict=True):
            assert request.id not in self._open, request.id
            self._open[request.id] = subscription
            self.watch.submitted(request)
            self._write(frame)
        self._idle.clear()
        return subscription

    def teach(self, tokens: Sequence[bytes], ends: tuple[int, ...]) -> None:
        """Tells the engine the bytes of all tokens, once; before a request with a grammar."""
        if not self._taught:
            self._taught = True
            self._send(Vocabulary(list(tokens), ends))

    async def generate(self, request: Request) -> AsyncIterator[TokenEvent]:
        """The events of one request; leaving the loop early aborts it."""
        subscription = self.submit([request])
        try:
            async for event in subscription:
                yield event
        finally:
            subscription.close()

    def abort(self, request_id: str) -> None:
        """Ends a request; unknown or finished ids are ignored. Its last events are dropped."""
        # It no longer counts: the engine reads this before any later submission.
        if self._forget(request_id) is not None:
            self._send(Abort(request_id))

    async def call(self, name: Literal["check", "reset_prefix_cache"]) -> None:
        """Runs a method of the engine between two steps. Raises what it raises, as an OffroadError."""
        if self.state is State.DEAD:
            raise self._dead()
        number = len(self._calls)
        while number in self._calls:
            number += 1
        self._calls[number] = asyncio.get_running_loop().create_future()
        self._send(Call(number, name))
        try:
            await self._calls[number]
        finally:
            del self._calls[number]

    async def drain(self, seconds: float) -> bool:
        """Takes no new request and waits up to `seconds` for the running ones, then ends them with an error.

        True when all of them finished by themselves.
        """
        if self.state in (State.READY, State.LOADING):
            self.state = State.DRAINING
        if not self._open:
            return True
        try:
            await asyncio.wait_for(self._idle.wait(), seconds)
        except TimeoutError:
            for request_id in list(self._open):
                subscription = self._forget(request_id)
                self._send(Abort(request_id))
                error = NotReady(
                    "the server is shutting down",
                    found=f"the request still ran after {seconds:g} s",
                    next="send the request to another server",
                )
                subscription.fail(request_id, error)
            return False
        return True

    async def close(self) -> None:
        """Ends the engine; requests that still run fail with EngineDead. May be called again."""
        self._closed = True
        self._die(EngineDead("the server has ended"))
        if self._worker is None:
            return
        self._send(Close())
        if not self._loaded:
            self._worker.kill()  # a load may take minutes and has nothing to save
        await self._leave()

    async def _leave(self) -> None:
        """Waits until an engine that was told to end, or has failed, is gone; lets go of its socket."""
        began = time.monotonic()
        while await asyncio.to_thread(self._worker.wait, 0.2) is None:
            if time.monotonic() - began > _CLOSE_SECONDS:
                self._worker.kill()
                await asyncio.to_thread(self._worker.wait, _CLOSE_SECONDS)
                break
        if self._writer is not None:
            self._writer.close()
        if self._reading is not None:
            await self._reading

    def kill(self) -> None:
        """Ends the engine's process at once."""
        if self._worker is not None:
            self._worker.kill()

    def _send(self, command: Command) -> None:
        self._write(pack(command))

    def _write(self, frame: bytes) -> None:
        # Never waits: what the socket does not take is kept by the transport.
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(frame)

    async def _read(self, reader: asyncio.StreamReader, progress: Callable[[str, float, str], None]) -> None:
        try:
            while True:
                report = await read_report(reader)
                if isinstance(report, Progress):
                    self.watch.progress = report
                    progress(report.phase, report.fraction, report.note)
                elif isinstance(report, Failed):
                    self._die(report.failure.error())
                else:
                    self._take(report)
        except (asyncio.IncompleteReadError, OSError):
            self._die(await self._how_it_ended())
        except Exception as error:
            # A defect here must not leave requests waiting for ever.
            self._die(EngineDead("the engine's messages cannot be read", found=f"{type(error).__name__}: {error}"))
            log.error("a defect while reading the engine's messages", exc_info=error)
            self.kill()

    def _take(self, report: Report) -> None:
        match report:
            case Events(events, stats, sequences):
                self.stats = stats
                self.watch.stepped(stats, sequences)
                for event in events:
                    subscription = self._open.get(event.request_id)
                    # None: the last events of a request that was aborted here.
                    if subscription is not None and subscription.put(event):
                        self._forget(event.request_id)
            case Rejected(request_id, failure):
                if (subscription := self._forget(request_id)) is not None:
                    subscription.fail(request_id, failure.error())
            case Reply(number, failure):
                future = self._calls.get(number)
                if future is not None and not future.done():
                    if failure is None:
                        future.set_result(None)
                    else:
                        future.set_exception(failure.error())
            case Ready(info, tokenizer):
                self.info, self.tokenizer, self._loaded = info, tokenizer, True
                if not self._ready.done():
                    self._ready.set_result(None)
            case _:
                raise AssertionError(f"a report out of turn: {report}")

    def _forget(self, request_id: str) -> Subscription | None:
        subscription = self._open.pop(request_id, None)
        self.watch.ended(request_id)
        if not self._open:
            self._idle.set()
        return subscription

    def _dead(self) -> OffroadError:
        again = self.settings.restart_engine and not self._closed
        next = "try again soon: it is started again" if again else "see the server's log, then restart it"
        return EngineDead("the engine has ended", found=self.death, next=next)

    def _die(self, error: OffroadError) -> None:
        """The engine has ended: everything that waits for it fails. The first reason stays."""
        if self.state is State.DEAD:
            return
        self.state, self.death = State.DEAD, error
        self.ended.set()
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(error)
        for request_id in list(self._open):
            self._forget(request_id).fail(request_id, self._dead())
        for future in self._calls.values():
            if not future.done():
                future.set_exception(self._dead())

    async def _how_it_ended(self) -> EngineDead:
        code = await asyncio.to_thread(self._worker.wait, _CLOSE_SECONDS)
        found = "it closed its socket" if code is None else f"exit code {code}"
        if code is not None and code < 0:
            found = signal.Signals(-code).name
        hint = "out of memory? see the kernel's log" if found == "SIGKILL" else "its messages are on standard error"
        return EngineDead("the engine's process has ended", found=found, next=hint)
