"""How far the sequences of a scheduler are, for people who look at a server."""

from __future__ import annotations

from offroad.schedule.job import Job
from offroad.schedule.request import SequenceState
from offroad.schedule.scheduler import Scheduler

# A long queue is not described to its end: nobody looks there, and the engine's loop waits meanwhile.
DESCRIBED_AT_MOST = 512


def standings(scheduler: Scheduler) -> list[SequenceState]:
    """How far sequences are that have not ended: those that run by age, then those that wait in order."""
    jobs = (*scheduler.running, *scheduler.leaving, *scheduler.waiting)
    return [_standing(job) for job in jobs[:DESCRIBED_AT_MOST]]


def _standing(job: Job) -> SequenceState:
    prompt, known, cached = job.prompt_len, len(job.tokens), job.first_resume[1]
    if job.slot and not job.dead:
        state = "prefill" if job.committed < job.goal else "decode"
        return SequenceState(job.request.id, job.index, state, prompt, cached, job.committed, known - prompt)
    state = "preempted" if job.counted else "waiting"  # it is counted at its first admission
    return SequenceState(job.request.id, job.index, state, prompt, cached, 0, known - prompt)
