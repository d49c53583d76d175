"""What the engine was last seen to do: for pages that people look at, so it must cost next to nothing.

All of it is known on the server's side from messages that come anyway; nothing here asks the engine.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from offroad.execute.messages import Progress
from offroad.schedule.request import Request, SequenceState, Stats

WINDOW_SECONDS = 10.0
_APART_SECONDS = 0.25


@dataclass(frozen=True)
class Submitted:
    """A request that has not ended: when it was sent (the watch's clock) and how many prompt tokens it has."""

    began: float
    prompt: int


class Watch:
    """The requests that have not ended, how far they are, and the counters of the last seconds.

    `progress` is the last message of a load. `clock` gives seconds that only grow.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.progress: Progress | None = None
        self.requests: dict[str, Submitted] = {}
        self.sequences: list[SequenceState] = []
        self.last_step: float | None = None
        self._samples: deque[tuple[float, Stats]] = deque()

    def started(self) -> None:
        """A new engine is started, whose counters begin at 0."""
        self.progress, self.sequences, self.last_step = None, [], None
        self._samples = deque([(self.clock(), Stats())])

    def submitted(self, request: Request) -> None:
        self.requests[request.id] = Submitted(self.clock(), len(request.prompt_ids))

    def ended(self, request_id: str) -> None:
        self.requests.pop(request_id, None)

    def stepped(self, stats: Stats, sequences: list[SequenceState] | None) -> None:
        """Takes the gauges and counters of a step, and how far sequences are if that was told."""
        now = self.last_step = self.clock()
        if sequences is not None:
            self.sequences = sequences
        samples = self._samples
        # The newest is always kept; older ones are kept at a distance.
        if len(samples) > 1 and now - samples[-2][0] < _APART_SECONDS:
            samples.pop()
        samples.append((now, stats))
        while len(samples) > 1 and samples[1][0] <= now - WINDOW_SECONDS:
            samples.popleft()

    def window(self) -> tuple[float, Stats, Stats]:
        """(seconds, counters then, counters now): over the last `WINDOW_SECONDS`, or since the engine's start if that
        is less. Without steps counters stand still, so those of the last step before hold at the window's beginning."""
        now = self.clock()
        if not self._samples:
            return 0.0, Stats(), Stats()
        began, first = next(
            (sample for sample in reversed(self._samples) if sample[0] <= now - WINDOW_SECONDS), self._samples[0]
        )
        return min(WINDOW_SECONDS, now - began), first, self._samples[-1][1]
