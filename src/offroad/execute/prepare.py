"""Requests whose grammar is compiled beside the engine's loop, so that the steps of others do not wait for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from offroad.errors import OffroadError, RequestError
from offroad.execute.messages import Failure, Rejected
from offroad.schedule.request import Request

SECONDS = 20.0
_AT_ONCE = 2


@dataclass(frozen=True)
class Prepared:
    """A request that can be submitted now."""

    request: Request


class Preparing:
    """Calls `prepare` for requests in threads of their own, then gives them to `ready`, or their refusal to `reject`.

    A request that takes longer than `SECONDS` is refused; its thread cannot be ended, so no more than two run at once
    and what waits behind them is refused in turn: grammars may stop, the loop does not.
    """

    def __init__(
        self,
        prepare: Callable[[Request], None],
        ready: Callable[[Prepared], None],
        reject: Callable[[Rejected], None],
        seconds: float = SECONDS,
    ) -> None:
        self._prepare, self._ready, self._reject, self._seconds = prepare, ready, reject, seconds
        self._lock, self._room = threading.Lock(), threading.Semaphore(_AT_ONCE)
        self._open: set[str] = set()

    def begin(self, request: Request) -> None:
        """Begins with a request; returns at once."""
        with self._lock:
            self._open.add(request.id)
        threading.Thread(target=self._watch, args=(request,), name="offroad-prepare", daemon=True).start()

    def drop(self, request_id: str) -> bool:
        """Forgets a request; whether it was still known."""
        with self._lock:
            known = request_id in self._open
            self._open.discard(request_id)
            return known

    def _watch(self, request: Request) -> None:
        if not self._room.acquire(timeout=self._seconds):
            self._refuse(request, self._slow(request))
            return
        worker = threading.Thread(target=self._run, args=(request,), name="offroad-grammar", daemon=True)
        worker.start()
        worker.join(self._seconds)
        if worker.is_alive():
            self._refuse(request, self._slow(request))

    def _run(self, request: Request) -> None:
        try:
            self._prepare(request)
        except Exception as error:
            self._refuse(request, error)
        else:
            self._ready(Prepared(request))
        finally:
            self._room.release()

    def _refuse(self, request: Request, error: Exception) -> None:
        if self.drop(request.id):
            self._reject(Rejected(request.id, Failure.of(error, "compiling a grammar")))

    def _slow(self, request: Request) -> OffroadError:
        assert request.guide is not None
        param = request.guide.param
        return RequestError(
            f"{param} takes too long to compile",
            param=param,
            code="invalid_grammar",
            accepted=f"a grammar that is ready within {self._seconds:g} s",
            next="make it smaller, or try again later",
        )
