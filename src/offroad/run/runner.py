"""One device: weights, caches and bound kernels; runs a `Step` and answers with a `StepResult`."""

from __future__ import annotations

import time
from collections import deque
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
from offroad.run.graphs import CudaRecorder, Forward, Graphs, Recorder
from offroad.run.rows import Rows
from offroad.run.transfer import Download
from offroad.sample.logprobs import logprobs
from offroad.sample.sampler import Sampler
from offroad.schedule.step import Logprobs, Step, StepResult, Want
from offroad.speculate.make import make_drafting
from offroad.speculate.proposer import Device, Turn
from offroad.triton_kernels.draw import fused_draw
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
    ) -> None:
        """`recorder` makes the plan's graphs (None: CUDA's); they are captured here."""
        self.plan, self.model, self.device = plan, model, device
        self.arrays = Arrays(plan, spec, device, weights.kv_scales)
        self.sampler = Sampler(plan.memory.slots, spec.vocab, device, fused_draw(plan.device))
        bound = Bounds(plan, spec, weights, bounds, self.arrays.views, device)
        self.ops = bound.model()
        self.drafting = make_drafting(plan, bound, Device(self.arrays, self.sampler))
        self.results: deque[StepResult] = deque()
        self.download = Download(device)
        self.graphs: Graphs | None = None
        if plan.graphs.rows:
            self.graphs = Graphs(plan.graphs, model, self.ops["decode"], self.arrays, recorder or CudaRecorder())

    @torch.inference_mode()
    def launch(self, step: Step) -> None:
        """Runs the step: table edits, restores, forward, sampling, lengths, captures."""
        began = time.perf_counter()
        self.arrays.apply(step)
        self.arrays.restore(step.restores)
        for start in step.starts:
            self.sampler.start(start)
            if self.drafting is not None:
                self.drafting.start(start)
        ran = self.graphs.run(step) if self.graphs is not None else None
        if ran is None:
            rows = self.arrays.rows(step)
            ops = self.ops["decode" if rows.verify == len(rows.slot) else "prefill"]
            states = self.model.forward(rows, ops)
            ran = Forward(rows, ops, states, states if rows.scored is None else states[rows.scored])
        before = self.arrays.length.copy() if len(step.captures) else self.arrays.length
        result = self._finish(step, ran)
        self.results.append(result)
        turn = Turn(step, ran.rows, result.accepted, ran.states)
        if self.drafting is not None:
            self.drafting.follow(turn)
        self.arrays.capture(step.captures, before)
        if self.drafting is not None:
            self.drafting.propose(turn, began)

    def result(self) -> StepResult:
        """The oldest step that was launched and not yet asked for."""
        return self.results.popleft()

    def _finish(self, step: Step, ran: Forward) -> StepResult:
        """Samples, verifies drafts and moves lengths."""
        count, rows, ops = len(step.slot), ran.rows, ran.ops
        arrays, wanting = self.arrays, step.wants.nonzero()[0]
        tokens, bad = np.empty((count, self.plan.k + 1), np.int64), np.empty(count, np.int16)
        tokens.fill(-1)
        bad.fill(-1)
        moved, chosen_logprobs = rows.width, None
        if len(wanting):
            logits = ops.logits(ran.hidden) if ran.logits is None else ran.logits
            slots, positions = step.slot[wanting], (rows.start + rows.width)[wanting].astype(np.int64)
            of_row, place = wanting, 0
            if drafts := len(logits) > len(wanting):
                of_row, place, positions = _places(rows)
                slots = step.slot[of_row]
            drawn, ids, finite = self._drawn(ran, logits, slots, positions)
            if drafts:
                moved = _moved(rows, ids)
                told = np.flatnonzero(place < moved[of_row])
                of_row, place, slots, positions = (x[told] for x in (of_row, place, slots, positions))
                drawn, ids, finite = None, ids[told], finite[told]
                logits = logits[torch.from_numpy(told).to(logits.device)]
            if not (ran.stored and drawn is None):
                arrays.put(slots, positions, ids if drawn is None else drawn)
            tokens[of_row, place] = ids
            if not finite.all():
                broken = np.unique(of_row[~finite])
                bad[broken] = self._bad_layers(step, broken, ops)
            if (step.wants & _LOGPROBS).any():
                chosen_logprobs = _logprobs(step, of_row, place, logits, tokens)
        arrays.length[step.slot] = rows.start + moved
        drafted = (rows.width - 1) * (np.arange(count) < rows.verify) if self.plan.k else None
        return StepResult(step.number, moved.astype(np.int32), tokens, bad, chosen_logprobs, drafted)

    def _drawn(
        self, ran: Forward, logits: torch.Tensor, slots: np.ndarray, positions: np.ndarray
    ) -> tuple[torch.Tensor | None, np.ndarray, np.ndarray]:
        """(drawn tokens on the device, the same on the host, which rows are finite); None: a graph has drawn them.

        A NaN or infinity anywhere reaches the sum of the hidden states, or the logit that was drawn. The host waits for
        the device here, and in no other place of a step without drafts.
        """
        drawn = None
        if ran.answers is not None and self.sampler.plain(slots, positions):
            answers = self.download(ran.answers)[ran.live]
        else:
            drawn = self.sampler.draw(logits, slots, positions, self.arrays.tokens)
            hidden = ran.hidden.float()
            if hidden.device.type == "cpu":  # the same over arrays, whose operations cost less
                ids = drawn.numpy()
                return drawn, ids, np.isfinite(hidden.numpy().sum(-1) + logits.numpy()[np.arange(len(ids)), ids])
            mark = hidden.sum(-1) + logits.gather(-1, drawn[:, None])[:, 0]
            answers = self.download(torch.where(torch.isfinite(mark), drawn, ~drawn))
        finite = answers >= 0
        return drawn, np.where(finite, answers, ~answers), finite

    def _bad_layers(self, step: Step, broken: np.ndarray, ops: Ops) -> np.ndarray:
        """The first layer with a non-finite value of each row of `broken` (the number of layers: the logits).

        Runs those rows again with an observer. Their caches may be spoilt by it, since a recurrent state has moved on:
        the rows end with an error, and nothing of them is kept. Lengths have not moved.
        """
        columns = {name: getattr(step, name)[broken] for name in ("slot", "kind", "width", "wants")}
        rows = self.arrays.rows(replace(step, **columns))
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
