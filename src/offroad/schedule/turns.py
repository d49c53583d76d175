"""Which chunk takes turns with the rows that decode, instead of sharing their step.

A step of one short chunk can be a CUDA graph, and a step of decoding rows is one; a step of both is eager, and its
host takes longer than both replays take the device. So a short chunk has a step of its own and the next step is that of
the rows that decode. A step takes any number of chunks at once: where many wait, that is what costs least.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from offroad.schedule.job import Job

# Chunks in turn of which the last one waits no longer than for a shared step: an eager step takes about as long as
# three replays of a short chunk, each with one of decoding rows behind it.
MOST = 2


def lone_chunk(reading: Sequence[Job], width: Callable[[Job, int], int], budget: int, most: int) -> Job | None:
    """Of the sequences that read their prompts, by age, the one whose chunk has a step of its own; None: chunks share a
    step. Those that could run now, by `width` of a sequence and a room for tokens, have up to `most` tokens in all."""
    first, count, room = None, 0, budget
    for job in reading:
        if job.fresh:  # it scores its prompt, which no graph does
            return None
        if tokens := width(job, room):
            first, count, room = first or job, count + 1, room - tokens
        if count > MOST or budget - room > most:
            return None
    return first
