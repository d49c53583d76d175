"""Continuous batching: which sequences run in the next step, with how many tokens, and what their results mean.

Host only, no tensor and no device call. Rows are planned in order of age, so that an older sequence is never held up by
a younger one; the step lists verify rows first, then chunks.
"""

from __future__ import annotations

from collections import deque
from operator import sub

import numpy as np

from offroad.cache.hybrid import HybridCache
from offroad.cache.sequence import Row
from offroad.cache.spec import CacheConfig
from offroad.errors import QueueFull, RequestError
from offroad.schedule.drafts import DraftCounts
from offroad.schedule.fits import check_fits
from offroad.schedule.job import Job
from offroad.schedule.request import Request, Stats, TokenEvent
from offroad.schedule.step import Kind, Step, StepResult
from offroad.schedule.turns import Turns

_COUNTS = (
    *("prompt_tokens", "prefill_tokens", "generated_tokens", "preemptions"),
    *("prefix_query_tokens", "prefix_matched_tokens", "prefix_resumed_tokens"),
)
_VERIFY, _CHUNK = int(Kind.VERIFY), int(Kind.CHUNK)


class Scheduler:
    """Requests in by `submit`, steps out by `build`, events out by `commit` and `drain_events`.

    `max_num_batched_tokens` bounds the tokens of a step, `depth` the steps in flight. `turns`: which chunks take turns
    with the rows that decode. `max_chunk` may be lowered to bound each chunk. The engine counts `seconds`.
    """

    def __init__(
        self,
        config: CacheConfig,
        *,
        max_num_batched_tokens: int,
        max_waiting: int,
        depth: int = 1,
        drafter: str = "",
        turns: Turns = Turns(),  # noqa: B008 - it is frozen
    ) -> None:
        self.config, self.cache = config, HybridCache(config)
        self.budget, self.max_waiting, self.depth = max_num_batched_tokens, max_waiting, depth
        self.waiting: deque[Job] = deque()
        self.running: list[Job] = []
        self.leaving: list[Job] = []  # preempted with a step in flight; they wait again after it
        self.requests: dict[str, list[Job]] = {}  # sequences that have not ended
        self.in_flight: deque[tuple[int, list[Row]]] = deque()
        self.events: list[TokenEvent] = []
        self._refused: tuple[Job | None, tuple[int, int]] = (None, (0, 0))
        self.number = self.age = 0
        self.max_chunk = max_num_batched_tokens
        self.turns = turns
        self.decodes_next = False  # the last step had no row that decodes
        self.seconds = 0.0
        self.drafts = DraftCounts(config.k, drafter)
        self._counts = dict.fromkeys(_COUNTS, 0)

    # --- requests -----------------------------------------------------------------------------------------------------
    def submit(self, request: Request) -> None:
        """Queues the sequences of a request. Raises RequestError if it can never run, QueueFull if too many wait."""
        self.validate(request)
        # Whoever finds a free slot at the next step does not wait, though it is in the queue until then.
        room = self.max_waiting + self.config.slots - 1
        if len(self.requests) >= room:
            found, accepted = len(self.requests), f"fewer than {room} (max_num_seqs + max_waiting)"
            raise QueueFull("unfinished requests", found=found, accepted=accepted, next="try again later")
        root = self.cache.root(request.salt)
        jobs = [Job.of(request, i, self.age + i, root, self.config.max_len) for i in range(request.params.n)]
        self.age += len(jobs)
        if len(jobs) > 1 and self.config.prefix_caching:
            jobs[0].shared = self._prompt_boundary(jobs[0]) == 0
            for job in jobs[1:]:
                job.leader = jobs[0]
        self.requests[request.id] = jobs
        self.waiting.extend(jobs)

    def validate(self, request: Request) -> None:
        """Raises RequestError, with both numbers, if the request can never run; queues nothing."""
        if request.id in self.requests:
            raise RequestError("request id", param="id", found=request.id, accepted="an id that is not in use")
        check_fits(len(request.prompt_ids), self.config)

    def _prompt_boundary(self, job: Job) -> int:
        """The last boundary at which a sibling with the same prompt can resume."""
        return (job.prompt_len - 1) // self.config.block * self.config.block

    def abort(self, request_id: str) -> None:
        """Ends all sequences of a request, with an event each; unknown and finished ids are ignored."""
        for job in list(self.requests.get(request_id, ())):
            self._end(job, job.event([], "abort"))

    def refuse(self, slot: int, error: str) -> None:
        """Ends the sequence that has begun in a slot, if one has, as one that the request should not have asked for."""
        for job in [job for job in self.running if job.slot == slot and job.begun]:
            self._end(job, job.event([], "refused", None, error))

    def has_work(self) -> bool:
        return bool(self.requests or self.in_flight or self.events)

    def drain_events(self) -> list[TokenEvent]:
        """Events that no commit returns: aborts, and ends for want of memory."""
        events, self.events = self.events, []
        return events

    def reset_prefix_cache(self) -> None:
        """Forgets every cached prefix that no running sequence holds."""
        self.cache.reset_prefixes()

    # --- building a step ----------------------------------------------------------------------------------------------
    def build(self) -> Step | None:
        """The next step, or None: nothing can run before a step in flight is committed, or nothing is left to do."""
        if len(self.in_flight) >= self.depth:
            return None
        if self.waiting:
            self._admit()
        if not self.running:
            return None
        verify, chunks = self._plan()
        rows = verify + chunks
        if not rows:
            assert self.in_flight or not self.running, "progress: the oldest sequence can run alone"
            return None
        self.decodes_next = not verify
        return self._step(rows)

    def _admit(self) -> None:
        """Admits waiting sequences in order while there is room; siblings whose prompt still runs are passed over."""
        while self.cache.slots.free and not any(job.starved >= 0 for job in self.running):
            job = next((job for job in self.waiting if job.leader is None or job.leader.shared), None)
            if job is None:
                return
            promised = self._promised(job)
            room = (self.cache.history.free - promised[0], self.cache.window.free - promised[1])
            if self.cache.live and job is self._refused[0] and max(map(sub, room, self._refused[1])) <= 0:
                return  # no more room than when it was refused: a long prompt is not looked up again at each step
            if not self.cache.admit(job, *promised):
                self._refused = (job, room)
                if self.cache.live:
                    return
                self._end(job, self._out_of_memory(job))
                continue
            self.waiting.remove(job)
            self.running.append(job)
            if len(self.running) > 1 and self.running[-2].age > job.age:
                self.running.sort(key=lambda job: job.age)
            if not job.counted:
                self._count(job)

    def _promised(self, job: Job) -> tuple[int, int]:
        """(history, window) blocks that are left to running sequences: for the rest of their prompts, and one each.
        Kept apart, for all that they and `job` may become: who is released and read again has other bits."""
        config, history = self.config, len(self.running)
        history += config.blocks(job.limit) - config.blocks(len(job.tokens)) if config.invariant else 0
        for other in self.running:
            end = other.limit if config.invariant else other.goal
            history += max(0, config.blocks(end + config.k) - len(other.history))
        return history, len(self.running) if config.keep else 0

    def _count(self, job: Job) -> None:
        """Counts a sequence at its first admission; a request's prompt counts once."""
        job.counted, counts, resume = True, self._counts, job.resume
        job.first_resume = (resume.matched, resume.resumed)
        counts["prompt_tokens"] += job.prompt_len if job.index == 0 else 0
        counts["prefix_query_tokens"] += len(job.tokens)
        counts["prefix_matched_tokens"] += resume.matched
        counts["prefix_resumed_tokens"] += resume.resumed

    def _plan(self) -> tuple[list[Row], list[Row]]:
        """Verify rows and chunks. A turn of either that comes to nothing, for want of memory, is the other's."""
        if any(job.starved >= 0 for job in self.running):  # the oldest is first for memory
            return self._rows(self.running)
        chunks = self.turns.chunks([job for job in self.running if job.high < job.goal], self._chunk, self.budget)
        if not chunks:
            return self._rows(self.running)
        decoding = [job for job in self.running if job.high >= job.goal]
        one, other = (decoding, chunks) if self.decodes_next else (chunks, decoding)
        rows = self._rows(one)
        return rows if any(rows) else self._rows(other)

    def _rows(self, jobs: list[Job]) -> tuple[list[Row], list[Row]]:
        """Rows of sequences in order of age. Each that decodes has a token; drafts and chunks share the rest."""
        decoding = [job for job in jobs if job.high >= job.goal]
        spare, skipped = self.budget - len(decoding), frozenset()
        if spare < 0:  # more sequences than tokens: those that have waited longest go
            decoding.sort(key=lambda job: job.last)
            spare, skipped = 0, frozenset(decoding[self.budget :])
        verify: list[Row] = []
        chunks: list[Row] = []
        for job in tuple(jobs):
            if not job.slot or job.dead or job in skipped:
                continue
            if job.high >= job.goal:
                width = min(1 + self.config.k, job.limit - 1 - job.high, 1 + spare)
                if width >= 1 and (row := self._reserve(job, Kind.VERIFY, width)) is not None:
                    verify.append(row)
                    spare -= width - 1
            elif (width := self._chunk(job, spare)) and (row := self._reserve(job, Kind.CHUNK, width)) is not None:
                chunks.append(row)
                spare -= row.width
        if skipped and not (verify or chunks):  # the oldest, who can run alone, may be among them
            return self._rows([job for job in jobs if job in skipped])
        return verify, chunks

    def _chunk(self, job: Job, room: int) -> int:
        """Tokens of the next chunk; 0: it waits for room. It ends on a mark, whose state or window could not be kept
        otherwise; the window of the prompt's last boundary can, since it is all but the window at the end."""
        high = job.high
        end = min(job.goal, high + min(room, self.max_chunk))
        if self.config.invariant and end < job.goal:  # within a block it would change sums of recurrent layers
            end = max(high, end - end % self.config.block)
        if not self.config.marked or end == high:
            return end - high
        mark = job.next_mark(high, self.config.interval)
        last = (job.goal - 1) // self.config.block * self.config.block
        if mark is None or (mark >= last and not self.config.rings):
            return end - high
        return min(end, mark) - high

    def _reserve(self, job: Job, kind: Kind, width: int) -> Row | None:
        """A row for the sequence; None: it sits out."""
        while (row := self.cache.reserve(job, kind, width)) is None:
            if not self._make_room(job):
                return None
        job.starved = -1
        return row

    def _make_room(self, job: Job) -> bool:
        """Whether memory was freed for a sequence that could not be reserved.

        What is in flight may give memory back, so that is committed first; then the youngest sequence is released.
        """
        if job.starved < 0 and self.in_flight:
            job.starved = self.in_flight[-1][0]
            return False
        if self.in_flight and self.in_flight[0][0] <= job.starved:
            return False
        if any(other.dead for other in self.cache.live.values()):
            return False  # released, and its blocks come with the last step that names them
        youngest = self.running[-1]
        if youngest is not job:
            return self._preempt(youngest)
        if len(self.running) == 1 and not self.in_flight:
            self._end(job, self._out_of_memory(job))
        return False

    def _preempt(self, job: Job) -> bool:
        """Releases a running sequence, which will wait again; whether its memory is free already."""
        self.running.remove(job)
        self._counts["preemptions"] += 1
        job.starved = -1
        freed = self.cache.release(job)
        self.leaving.append(job)
        if freed:
            self._requeue()
        return freed

    def _requeue(self) -> None:
        """Preempted sequences whose memory is free wait again, in order of age."""
        ready = [job for job in self.leaving if not job.slot]
        if ready:
            self.leaving = [job for job in self.leaving if job.slot]
            self.waiting = deque(sorted((*self.waiting, *ready), key=lambda job: job.age))

    def _step(self, rows: list[Row]) -> Step:
        self.number += 1
        for row in rows:
            row.seq.last = self.number
        tables, restores, captures, begin = self.cache.collect(rows)
        self.in_flight.append((self.number, rows))
        self._counts["prefill_tokens"] += sum(row.width for row in rows if row.kind == _CHUNK)
        wants = [row.seq.wanted(row.final or row.kind == _VERIFY, row.kind == _CHUNK) for row in rows]
        return Step(
            number=self.number,
            slot=np.array([row.seq.slot for row in rows], np.int32),
            kind=np.array([row.kind for row in rows], np.uint8),
            width=np.array([row.width for row in rows], np.int32),
            wants=np.array(wants, np.uint8),
            tables=tables,
            restores=restores,
            captures=captures,
            starts=tuple(job.start() for job in begin),
        )

    # --- results ------------------------------------------------------------------------------------------------------
    def commit(self, step: Step, result: StepResult) -> list[TokenEvent]:
        """Takes the result of the oldest step in flight; returns the events of its tokens."""
        number, rows = self.in_flight.popleft()
        assert number == step.number == result.number, "steps are committed in order"
        accepted, tokens, bad = result.accepted.tolist(), result.tokens.tolist(), result.bad_layer.tolist()
        events: list[TokenEvent] = []
        drafted = None if result.drafted is None else result.drafted.tolist()
        if result.drafted is not None:
            verify = sum(row.kind == _VERIFY for row in rows)
            self.drafts.take(result.drafted[:verify], result.accepted[:verify] - 1)
        for i, row in enumerate(rows):
            job = row.seq
            if drafted and drafted[i]:
                job.drafts += drafted[i]
                job.accepted_drafts += accepted[i] - 1
            if job.dead:
                self.cache.commit(row, accepted[i])
                continue
            if bad[i] >= 0:
                self._fail(row, accepted[i], bad[i], events)
                continue
            sampled = tokens[i][: accepted[i] if row.kind == _VERIFY else 1] if row.final or row.kind == _VERIFY else ()
            known = len(job.tokens)
            if i in result.prompt:
                job.score(job.committed, result.prompt[i])
            self.cache.commit(row, accepted[i], sampled)
            if not job.shared and job.committed >= self._prompt_boundary(job):
                job.shared = True
            if sampled:
                self._tell(job, i, known, sampled, result, events)
        if self.leaving:
            self._requeue()
        return events

    def _tell(
        self, job: Job, row: int, known: int, sampled: list[int], result: StepResult, events: list[TokenEvent]
    ) -> None:
        told, finish, stop = job.accept(known, sampled)
        self._counts["generated_tokens"] += len(told)
        event = job.event(told, finish, stop, None, job.logprobs(result.logprobs, row, len(told)))
        if finish is None:
            events.append(event)
        else:
            self._end(job, event, events)

    def _fail(self, row: Row, accepted: int, layer: int, events: list[TokenEvent]) -> None:
        """Ends a sequence that met a value that is not finite. Its prefix is forgotten: it may come from there."""
        job = row.seq
        error = f"layer {layer} gave a value that is not finite, in a step from position {job.committed} on"
        self._end(job, job.event([], "error", None, error), events, forget=True)
        self.cache.commit(row, accepted)

    def _out_of_memory(self, job: Job) -> TokenEvent:
        have = (self.config.history_blocks - 1) * self.config.block
        error = f"the cache holds {have} tokens, which the {len(job.tokens)} known ones and the next exceed"
        return job.event([], "length", None, error)

    def _end(
        self, job: Job, event: TokenEvent, events: list[TokenEvent] | None = None, *, forget: bool = False
    ) -> None:
        """The last event of a sequence; its memory goes back once no step names it."""
        (self.events if events is None else events).append(event)
        job.shared = True
        jobs = self.requests[job.request.id]
        jobs.remove(job)
        if not jobs:
            del self.requests[job.request.id]
        if job in self.leaving:
            self.leaving.remove(job)
        elif job.slot:
            self.running.remove(job)
            self.cache.release(job, forget=forget)
        else:
            self.waiting.remove(job)

    # --- looking ------------------------------------------------------------------------------------------------------
    def stats(self) -> Stats:
        """Gauges and counters. Blocks are history blocks, cached ones that nobody holds not among the used."""
        history = self.cache.history
        return Stats(
            running=len(self.running),
            waiting=len(self.waiting) + len(self.leaving),
            kv_blocks_used=history.held,
            kv_blocks_cached=history.cached,
            kv_blocks_total=history.count - 1,
            steps=self.number,
            step_seconds=self.seconds,
            **self.drafts.stats(),
            **self._counts,
        )

    def check(self) -> None:
        """Raises AssertionError if the books do not balance; when nothing runs, everything is free (I1)."""
        self.cache.check()
        live = set(self.cache.live.values())
        assert set(self.running) == {job for job in live if not job.dead}, "running sequences and slots"
        assert [job.age for job in self.running] == sorted(job.age for job in self.running), "order of age"
        assert all(not job.slot for job in self.waiting), "waiting sequences hold nothing"
        queued = {*self.waiting, *self.running, *self.leaving}
        assert queued == {job for jobs in self.requests.values() for job in jobs}, "every sequence is somewhere"
        if not self.in_flight:
            assert not self.leaving, "I1: preempted and still held"
            assert not any(job.dead for job in live), "I1: released and still held"
        if not self.requests and not self.in_flight:
            assert not live, "I1: slots when idle"
            assert not self.cache.history.held, "I1: history blocks when idle"
            assert not self.cache.window.held, "I1: window blocks when idle"
