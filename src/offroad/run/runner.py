"""One device: weights, caches and bound kernels; runs a `Step` and answers with a `StepResult`."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from offroad.models.registry import Model
from offroad.models.spec import ModelSpec
from offroad.ops.bound import Ops
from offroad.ops.cells import Cell
from offroad.ops.plan import Plan
from offroad.ops.spec import Bound
from offroad.run.arrays import Arrays
from offroad.run.bind import Bounds
from offroad.run.chunk_graphs import ChunkGraphs
from offroad.run.graphs import CudaRecorder, Forward, Graphs, Recorder
from offroad.run.guides import Guides
from offroad.run.prompt import score_prompts
from offroad.run.rows import Rows
from offroad.run.transfer import Download
from offroad.run.warm import Parts, Progress, prepare_triton, uses_triton
from offroad.sample.logprobs import logprobs
from offroad.sample.masks import Masks
from offroad.sample.sampler import Sampler
from offroad.schedule.step import Logprobs, Step, StepResult, Want
from offroad.speculate.make import make_drafting
from offroad.speculate.proposer import Device, Turn
from offroad.triton_kernels.draw import fused_draw
from offroad.triton_kernels.memory import MEMORY
from offroad.weights.load import Weights

_LOGPROBS = int(Want.LOGPROBS)  # an enum's member makes an array's operation several times dearer


class Runner:
    """Runs steps in order on one device. `launch` enqueues, `result` answers for the oldest step."""

    def __init__(
        self,
        plan: Plan,
        spec: ModelSpec,
        model: Model,
        weights: Weights,
        bounds: dict[Cell, Bound],
        device: torch.device,
        recorder: Recorder | None = None,
        progress: Progress = lambda fraction, note: None,
    ) -> None:
        """`recorder` makes the plan's graphs (None: CUDA's); they are captured here, when all that the plan's steps can
        launch has been compiled: `progress` is told how far that is, `compiled` how much it was."""
        self.plan, self.model, self.device = plan, model, device
        self.arrays = Arrays(plan, spec, device, weights.kv_scales)
        plain = None if plan.batch_invariant else fused_draw(plan.device)  # one way of drawing, whoever is beside
        self.sampler = Sampler(plan.memory.slots, spec.vocab, device, plain)
        bound = Bounds(plan, spec, weights, bounds, self.arrays.views, device)
        self.ops = bound.model()
        self.guides: Guides | None = None  # until the engine brings what compiles grammars
        self.drafting = make_drafting(plan, bound, Device(self.arrays, self.sampler))
        self.results: deque[Callable[[], StepResult]] = deque()
        self.download = Download(device, plan.depth + 1)
        self.graphs: Graphs | None = None
        self.chunk_graphs: ChunkGraphs | None = None
        self.compiled = ""
        if uses_triton(plan) and device.type == "cuda":
            proposer = self.drafting.proposer if self.drafting is not None else None
            MEMORY.reserve(device, plan.memory.workspaces.kept)
            parts = Parts(plan, model, self.ops, self.arrays, proposer, plain, spec.vocab)
            self.compiled = prepare_triton(parts, progress)
        if plan.graphs.rows:
            self._capture(recorder or CudaRecorder())

    def _capture(self, recorder: Recorder) -> None:
        """Makes the plan's graphs, which share the recorder's memory."""
        found, model, arrays = self.plan.graphs, self.model, self.arrays
        if found.chunks:
            self.chunk_graphs = ChunkGraphs(found.chunks, model, self.ops["prefill"], arrays, recorder)
        self.graphs = Graphs(found, model, self.ops["decode"], arrays, recorder)

    @torch.inference_mode()
    def launch(self, step: Step) -> None:
        """Runs the step: table edits, restores, forward, sampling, lengths, captures."""
        began = time.perf_counter()
        self.arrays.apply(step)
        self.arrays.restore(step.restores)
        for start in step.starts:
            self.sampler.start(start)
            if self.guides is not None:
                self.guides.start(start)
            if self.drafting is not None:
                self.drafting.start(start)
        ran = self.graphs.run(step) if self.graphs is not None else None
        if ran is None and self.chunk_graphs is not None:
            ran = self.chunk_graphs.run(step)
        if ran is None:
            rows = self.arrays.rows(step)
            ops = self.ops["decode" if rows.verify == len(rows.slot) else "prefill"]
            states = self.model.forward(rows, ops)
            ran = Forward(rows, ops, states, states if rows.scored is None else states[rows.scored])
        if ran.answers is None:  # a graph has done it
            self.arrays.settle(ran.rows)
        before = self.arrays.length.copy() if len(step.captures) else self.arrays.length
        result = self._finish(step, ran)
        if step.scores.any():
            scored = replace(result(), prompt=score_prompts(step, ran, self.arrays))
            result = lambda: scored  # noqa: E731 - as the others, a result to ask for
        self.results.append(result)
        if self.drafting is None:
            self.arrays.capture(step.captures, before)
            return
        turn = Turn(step, ran.rows, result().accepted, ran.states if self.arrays.tapped else ran.hidden)
        self.drafting.follow(turn)
        self.arrays.capture(step.captures, before)
        self.drafting.propose(turn, began)

    @torch.inference_mode()
    def result(self) -> StepResult:
        """The oldest step that was launched and not yet asked for; waits for it."""
        return self.results.popleft()()

    def _finish(self, step: Step, ran: Forward) -> Callable[[], StepResult]:
        """Samples and moves lengths; what is returned waits for the device and gives the result.

        Without drafts lengths move by what is known, so the host can go on with the next step. With drafts, for guided
        sequences, and where log-probabilities are asked, it waits here.
        """
        wanting = step.samples.nonzero()[0]
        if not len(wanting):
            self.arrays.length[step.slot] = ran.rows.start + ran.rows.width
            return lambda: self._result(step, ran, wanting, 0, np.empty(0, np.int64))
        if self.plan.k or self._guided(step.slot[wanting]) or (step.wants & _LOGPROBS).any():
            done = self._finish_now(step, ran, wanting)
            return lambda: done
        logits = ran.ops.logits(ran.hidden) if ran.logits is None else ran.logits
        slots, positions = step.slot[wanting], (ran.rows.start + ran.rows.width)[wanting].astype(np.int64)
        drawn, answers = self._drawn(ran, logits, slots, positions)
        if drawn is not None:
            self.arrays.put(slots, positions, drawn)
        assert drawn is not None or ran.stored, "a graph of single tokens stores them"
        self.arrays.length[step.slot] = ran.rows.start + ran.rows.width
        return lambda: self._result(step, ran, wanting, 0, answers())

    def _finish_now(self, step: Step, ran: Forward, of_row: np.ndarray) -> StepResult:
        """The same with drafts, masks or log-probabilities."""
        rows, arrays, place = ran.rows, self.arrays, 0
        logits = ran.ops.logits(ran.hidden) if ran.logits is None else ran.logits
        positions, moved = (rows.start + rows.width)[of_row].astype(np.int64), rows.width
        if drafts := len(logits) > len(of_row):
            of_row, place, positions = _places(rows)
        slots, masks = step.slot[of_row], None
        if guided := self._guided(slots):
            before = rows.ids.cpu().numpy()[rows.offset[of_row] + place] if drafts else None
            masks = guided.masks(slots, place, before)
        drawn, values = self._drawn(ran, logits, slots, positions, masks)
        answers = values()
        if drafts:
            if self.drafting is not None:
                answers = self.drafting.decide(rows, of_row, positions, answers)
            moved = _moved(rows, _ids(answers))
            told = np.flatnonzero(place < moved[of_row])
            of_row, place, positions, slots = of_row[told], place[told], positions[told], slots[told]
            drawn, answers = None, answers[told]
            logits = logits[torch.from_numpy(told).to(logits.device)]
        if guided:
            guided.told(slots, _ids(answers))
        if not (ran.stored and drawn is None and masks is None):
            arrays.put(slots, positions, _ids(answers) if drawn is None else drawn)
        arrays.length[step.slot] = rows.start + moved
        result = self._result(step, ran, of_row, place, answers, moved)
        if not (step.wants & _LOGPROBS).any():
            return result
        return replace(result, logprobs=_logprobs(step, of_row, place, logits, result.tokens))

    def _result(
        self,
        step: Step,
        ran: Forward,
        of_row: np.ndarray,
        place: np.ndarray | int,
        answers: np.ndarray,
        moved: np.ndarray | None = None,
    ) -> StepResult:
        """The result of tokens `answers` int64 [n], `~token` where a value was not finite, which belong to rows
        `of_row` and stand there at `place`."""
        count, rows = len(step.slot), ran.rows
        tokens, bad = np.empty((count, self.plan.k + 1), np.int64), np.empty(count, np.int16)
        tokens.fill(-1)
        bad.fill(-1)
        tokens[of_row, place] = _ids(answers)
        if (answers < 0).any():
            broken = np.unique(of_row[answers < 0])
            bad[broken] = self._bad_layers(rows, broken, ran.ops)
        drafted = (rows.width - 1) * (np.arange(count) < rows.verify) if self.plan.k else None
        return StepResult(
            step.number, (rows.width if moved is None else moved).astype(np.int32), tokens, bad, None, drafted
        )

    def _guided(self, slots: np.ndarray) -> Guides | None:
        """The guides, if one of these slots has one."""
        return self.guides if self.guides is not None and self.guides.among(slots) else None

    def _drawn(
        self,
        ran: Forward,
        logits: torch.Tensor,
        slots: np.ndarray,
        positions: np.ndarray,
        masks: Masks | None = None,
    ) -> tuple[torch.Tensor | None, Callable[[], np.ndarray]]:
        """(drawn tokens on the device, what waits for them: `~token` where a value is not finite); None: a graph has
        drawn them. A NaN or infinity anywhere reaches the sum of the hidden states, or the logit that was drawn."""
        if ran.answers is not None and masks is None and self.sampler.plain(slots, positions):
            values, live = self.download(ran.answers), ran.live
            return None, lambda: values()[live]
        drawn = self.sampler.draw(logits, slots, positions, self.arrays.tokens, masks)
        hidden = ran.hidden.float()
        if hidden.device.type == "cpu":  # the same over arrays, whose operations cost less
            ids = drawn.numpy()
            finite = np.isfinite(hidden.numpy().sum(-1) + logits.numpy()[np.arange(len(ids)), ids])
            return drawn, lambda: np.where(finite, ids, ~ids)
        mark = hidden.sum(-1) + logits.gather(-1, drawn[:, None])[:, 0]
        return drawn, self.download(torch.where(torch.isfinite(mark), drawn, ~drawn))

    def _bad_layers(self, ran: Rows, broken: np.ndarray, ops: Ops) -> np.ndarray:
        """The first layer with a non-finite value of each row of `broken` (the number of layers: the logits).

        Runs those rows again with an observer. Their caches may be spoilt by it, since a recurrent state has moved on:
        the rows end with an error, and nothing of them is kept.
        """
        columns = (ran.slot[broken], ran.start[broken], ran.width[broken])
        rows = self.arrays.rows_of(*columns, int((broken < ran.verify).sum()), ran.wanted_width[broken])
        row_of = torch.from_numpy(np.repeat(np.arange(len(broken)), rows.width)).to(self.device)
        bad = torch.full((len(broken),), len(ops.layers), dtype=torch.int16, device=self.device)

        def look(layer: int, residual: torch.Tensor) -> None:
            finite = torch.isfinite(residual).all(-1)
            # Any token of the row: the last one may only see the value a layer later, through attention. Layers that
            # store nothing keep the wanted tokens only.
            rows_of = row_of if len(finite) == rows.tokens else row_of[rows.wanted]
            spoilt = rows_of[~finite]
            bad[spoilt] = torch.minimum(bad[spoilt], torch.full_like(bad[spoilt], layer))

        self.model.forward(rows, replace(ops, observe=look))
        return bad.cpu().numpy()


def _ids(answers: np.ndarray) -> np.ndarray:
    """Token ids of answers, whose complement says that a value was not finite."""
    return np.where(answers < 0, ~answers, answers)


def _places(rows: Rows) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For each wanted token: its row, its number among the row's wanted ones, and the position that it draws for."""
    count = rows.wanted_width
    of_row = np.repeat(np.arange(len(count)), count)
    place = np.arange(len(of_row)) - (count.cumsum() - count)[of_row]
    first = rows.start + rows.width - count + 1
    return of_row, place, first[of_row].astype(np.int64) + place


def _moved(rows: Rows, drawn_ids: np.ndarray) -> np.ndarray:
    """By how much each row's length moves: a chunk by its width, a verify row by 1 and the drafts before the first one
    that is not what was drawn for its position."""
    moved = rows.width.copy()
    ids = rows.ids.cpu().numpy()
    first = rows.wanted_width.cumsum() - rows.wanted_width
    for row in range(rows.verify):
        drafts = rows.width[row] - 1
        offset = rows.offset[row]
        wrong = np.flatnonzero(ids[offset + 1 : offset + 1 + drafts] != drawn_ids[first[row] : first[row] + drafts])
        moved[row] = 1 + (wrong[0] if len(wrong) else drafts)
    return moved


def _logprobs(
    step: Step, of_row: np.ndarray, place: np.ndarray | int, logits: torch.Tensor, tokens: np.ndarray
) -> Logprobs:
    """Log-probabilities of the tokens of rows that asked; `of_row` and `place` say where each row of logits belongs in
    `tokens` [rows, k + 1]."""
    asked = np.flatnonzero(step.wants[of_row] & _LOGPROBS)
    at = of_row[asked], np.broadcast_to(place, of_row.shape)[asked]
    chosen = torch.from_numpy(tokens[at]).to(logits.device)
    found = logprobs(logits[torch.from_numpy(asked).to(logits.device)], chosen)
    best = found.top_ids.shape[1]
    values = np.zeros(tokens.shape, np.float32)
    top_ids, top = np.zeros((*tokens.shape, best), np.int64), np.zeros((*tokens.shape, best), np.float32)
    values[at], top_ids[at], top[at] = found.chosen, found.top_ids, found.top
    return Logprobs(values, top_ids, top)
