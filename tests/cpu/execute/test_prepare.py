"""Grammars are compiled beside the loop: refusals, aborts, and what takes too long."""

from __future__ import annotations

import threading
import time

from offroad.errors import RequestError
from offroad.execute.prepare import Prepared, Preparing
from offroad.sample.guide import Grammar, Guide
from offroad.sample.params import SamplingParams
from offroad.schedule.request import Request


def asked(name: str) -> Request:
    guide = Guide(Grammar("regex", name), param="response_format")
    return Request(id=name, prompt_ids=[1], params=SamplingParams(), guide=guide)


class Bench:
    """Collects what comes out of a `Preparing` whose work is held up until `go`."""

    def __init__(self, seconds: float = 5.0) -> None:
        self.go, self.out, self.came = threading.Event(), [], threading.Semaphore(0)
        self.preparing = Preparing(self._prepare, self._put, self._put, seconds)

    def _prepare(self, request: Request) -> None:
        if request.id.startswith("held"):
            assert self.go.wait(10)
        if request.id == "wrong":
            raise RequestError("regex", param="response_format", found="x", accepted="y")
        if request.id == "defect":
            raise ZeroDivisionError

    def _put(self, report) -> None:
        self.out.append(report)
        self.came.release()

    def next(self):
        assert self.came.acquire(timeout=10)
        return self.out[-1]


def test_ready_and_refused():
    bench = Bench()
    bench.preparing.begin(asked("right"))
    assert bench.next() == Prepared(asked("right"))
    assert bench.preparing.drop("right")
    bench.preparing.begin(asked("wrong"))
    rejected = bench.next()
    assert (rejected.request_id, rejected.failure.kind, rejected.failure.param) == (
        "wrong",
        "RequestError",
        "response_format",
    )
    assert not bench.preparing.drop("wrong")
    bench.preparing.begin(asked("defect"))
    assert "ZeroDivisionError" in bench.next().failure.found


def test_what_was_aborted_is_not_known_when_it_is_ready():
    bench = Bench()
    bench.preparing.begin(asked("held"))
    assert bench.preparing.drop("held")
    bench.go.set()
    assert bench.next() == Prepared(asked("held"))
    assert not bench.preparing.drop("held")


def test_what_takes_too_long_is_refused_and_others_behind_it_in_turn():
    bench = Bench(seconds=0.2)
    for name in ("held 1", "held 2", "late"):
        bench.preparing.begin(asked(name))
        time.sleep(0.02)
    names = {bench.next().request_id for _ in range(3)}
    assert names == {"held 1", "held 2", "late"}
    assert all(report.failure.code == "invalid_grammar" for report in bench.out)
    bench.go.set()
