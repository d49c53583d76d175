"""Whole runs with random requests: same tokens as the plain run whatever happens around; seeded bugs are caught."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from simengine import SEEN, STATS, VOCAB, random_run

from offroad.schedule.scheduler import Scheduler


@pytest.mark.parametrize("depth", [1, 2])
def test_tokens_do_not_depend_on_mates_chunks_preemption_hits_or_drafts(depth):
    SEEN.clear()
    for seed in range(25):
        random_run(seed, depth)
    for what in (*STATS, "stop", "length", "abort", "turns", "large turns", "shared steps"):
        assert SEEN[what], f"the runs do not exercise: {what}"


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 10**9), st.integers(1, 2))
def test_tokens_do_not_depend_on_what_happens_around(seed, depth):
    random_run(seed, depth)


def test_the_oldest_runs_where_those_whose_turn_it_is_find_no_memory():
    """Three siblings, two tokens a step: the oldest sits out, the second needs a block, and the third has none that it
    does not share."""
    random_run(1616, 1)


# --- seeded bugs ----------------------------------------------------------------------------------------------------


class EndsAtTheWrongToken(Scheduler):
    def submit(self, request):
        super().submit(request)
        for job in self.requests[request.id]:
            job.limit += 1


class SiblingsShareASeed(Scheduler):
    def submit(self, request):
        super().submit(request)
        for job in self.requests[request.id]:
            job.seed = request.seed


class OverTheBudget(Scheduler):
    def _chunk(self, job, room):
        return super()._chunk(job, room + 1)


class NeverPreempts(Scheduler):
    def _make_room(self, job):
        return False


class ResumesWithTheWrongPrompt(Scheduler):
    def _requeue(self):
        for job in self.leaving:
            if not job.slot and len(job.tokens) > job.prompt_len:
                job.tokens[-1] = (job.tokens[-1] + 1) % VOCAB
        super()._requeue()


class AbortForgetsTheCache(Scheduler):
    def _end(self, job, event, events=None, *, forget=False):
        if event.finish_reason == "abort" and job.slot and job in self.running:
            self.running.remove(job)
            self.requests[job.request.id].remove(job)
            if not self.requests[job.request.id]:
                del self.requests[job.request.id]
            self.events.append(event)
        else:
            super()._end(job, event, events, forget=forget)


class DecodesPastTheLimit(Scheduler):
    def _tell(self, job, row, known, sampled, result, events):
        event = job.event(list(sampled), None, None)
        told, finish, _ = job.accept(known, sampled)
        events.append(event)
        if finish:
            self._end(job, job.event([], finish), events)


BUGS = [
    EndsAtTheWrongToken,
    SiblingsShareASeed,
    OverTheBudget,
    NeverPreempts,
    ResumesWithTheWrongPrompt,
    AbortForgetsTheCache,
    DecodesPastTheLimit,
]


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_a_seeded_bug_is_caught(bug):
    for seed in range(200):
        try:
            random_run(seed, 1 + seed % 2, bug)
        except (AssertionError, pytest.fail.Exception):
            return
    pytest.fail("no check has seen it")
