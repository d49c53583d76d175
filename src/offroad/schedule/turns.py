"""Which chunks take turns with the rows that decode, instead of sharing their step.

A step of one short chunk can be a CUDA graph, and a step of decoding rows is one; a step of both is eager, and its
host takes longer than both replays take the device. So a short chunk has a step of its own and the next step is that of
the rows that decode. A step takes any number of chunks at once: where some wait, that is what costs least.

Chunks that fill a large step do without rows that decode too, all of them in one: a step of those rows is short beside
it, and costs less than they do in the large one (docs/perf/notes.md, version 11).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from offroad.schedule.job import Job

# Short chunks in turn of which the last one waits no longer than for a shared step: an eager step takes about as long
# as three replays of a short chunk, each with one of decoding rows behind it.
MOST = 2


@dataclass(frozen=True)
class Turns:
    """Tokens of chunks that have steps of their own: one chunk at a time while those that wait have up to `short`, all
    at once if they have `long` or more in a step. 0: none."""

    short: int = 0
    long: int = 0

    def chunks(self, reading: Sequence[Job], width: Callable[[Job, int], int], budget: int) -> list[Job]:
        """Of the sequences that read their prompts, by age, those whose chunks have the next step that is not of rows
        that decode; none: they share one. `width`: tokens of a sequence's chunk, given a room for tokens."""
        able, room = [], budget
        for job in reading if self.short or self.long else ():
            if not room:
                break
            if tokens := width(job, room):
                able.append(job)
                room -= tokens
        if able and self.long and budget - room >= self.long:
            return able
        if len(able) > MOST or budget - room > self.short or any(job.fresh for job in reading):
            return []  # fresh: it scores its prompt, which no graph does
        return able[:1]
