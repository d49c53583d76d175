"""One device: weights, caches and bound kernels; runs a `Step` and answers with a `StepResult`."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import numpy as np
import torch

from offroad.models.registry import Model
from offroad.models.spec import AttentionSpec, ModelSpec
from offroad.ops.bound import LayerOps, Ops
from offroad.ops.cells import MODEL, PHASES, Cell
from offroad.ops.plan import Plan
from offroad.ops.rope import rope_table
from offroad.ops.spec import Bound, Registry
from offroad.run.arrays import Arrays
from offroad.run.graphs import CudaRecorder, Forward, Graphs, Recorder
from offroad.run.rows import Rows
from offroad.run.transfer import Download
from offroad.sample.logprobs import logprobs
from offroad.sample.sampler import Sampler
from offroad.schedule.step import Logprobs, Step, StepResult, Want
from offroad.speculate.ngram import propose
from offroad.weights.load import Weights

_LOGPROBS = int(Want.LOGPROBS)  # an enum's member makes an array's operation several times dearer


def prepare(plan: Plan, registry: Registry) -> dict[Cell, Bound]:
    """Compiles and binds the kernel of every cell; equal problems share one."""
    made: dict[tuple, Bound] = {}
    bounds = {}
    for cell, choice in plan.cells.items():
        key = (choice.kernel, choice.problem)
        if key not in made:
            made[key] = registry.kernels[choice.kernel].prepare(plan.device, choice.problem)
        bounds[cell] = made[key]
    return bounds


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
        self.sampler = Sampler(plan.memory.slots, spec.vocab, device)
        mixers = [layer.mixer for layer in spec.layers]
        ropes = dict.fromkeys(mixer.rope for mixer in mixers if isinstance(mixer, AttentionSpec))
        self.rope = {rope: rope_table(rope, plan.max_len + plan.k + 1, device) for rope in ropes}
        self.ops = {phase: self._bind(spec, weights, bounds, phase) for phase in PHASES}
        self.results: deque[StepResult] = deque()
        self.download = Download(device)
        self.graphs: Graphs | None = None
        if plan.graphs.rows:
            self.graphs = Graphs(plan.graphs, model, self.ops["decode"], self.arrays, recorder or CudaRecorder())

    def _bind(self, spec: ModelSpec, weights: Weights, bounds: dict[Cell, Bound], phase: str) -> Ops:
        shared = {cell.op: bound for cell, bound in bounds.items() if cell.layer == MODEL and cell.phase == phase}
        firsts = [loaded.tensors["input_norm"] for loaded in weights.layers]
        following = [*firsts[1:], weights.tensors["norm"]]
        layers = []
        for i, (layer, loaded) in enumerate(zip(spec.layers, weights.layers, strict=True)):
            own = {cell.op: bound for cell, bound in bounds.items() if cell.layer == i and cell.phase == phase}
            layers.append(
                LayerOps(
                    shared | own,
                    loaded.linears,
                    loaded.tensors,
                    spec.norm_eps,
                    mixer=layer.mixer,
                    ffn=layer.ffn,
                    moe=layer.moe,
                    rope=self.rope.get(getattr(layer.mixer, "rope", None)),
                    views=self.arrays.views[i],
                    attention_verify=bounds.get(Cell(i, "attention", "decode")),
                    attention_chunk=bounds.get(Cell(i, "attention", "prefill")),
                    following=following[i],
                )
            )
        outside = {"embed": weights.embed, "head": weights.head} | weights.linears
        model = LayerOps(shared, outside, weights.tensors, spec.norm_eps)
        return Ops(layers, model, spec.embed_scale, getattr(torch, self.plan.dtype), spec.logit_softcap)

    @torch.inference_mode()
    def launch(self, step: Step) -> None:
        """Runs the step: table edits, restores, forward, sampling, lengths, captures."""
        self.arrays.apply(step)
        self.arrays.restore(step.restores)
        for start in step.starts:
            self.sampler.start(start)
        ran = self.graphs.run(step) if self.graphs is not None else None
        if ran is None:
            rows = self.arrays.rows(step)
            ops = self.ops["decode" if rows.verify == len(rows.slot) else "prefill"]
            ran = Forward(rows, ops, self.model.forward(rows, ops))
        before = self.arrays.length.copy() if len(step.captures) else self.arrays.length
        self.results.append(self._finish(step, ran))
        self.arrays.capture(step.captures, before)
        if self.plan.drafter is not None:
            self._propose(step)

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
        moved, chosen_logprobs, drafts = rows.width, None, 0
        if len(wanting):
            logits = ops.logits(ran.hidden) if ran.logits is None else ran.logits
            slots, positions = step.slot[wanting], (rows.start + rows.width)[wanting].astype(np.int64)
            of_row, place = wanting, 0
            if (drafts := len(logits) - len(wanting)) > 0:
                of_row, place, positions = _places(rows)
                slots = step.slot[of_row]
            drawn, ids, finite = self._drawn(ran, logits, slots, positions)
            if drafts > 0:
                moved = _moved(rows, ids)
                told = np.flatnonzero(place < moved[of_row])
                of_row, place, slots, positions = (x[told] for x in (of_row, place, slots, positions))
                drawn, ids, finite = None, ids[told], finite[told]
            if not (ran.stored and drawn is None):
                arrays.put(slots, positions, torch.from_numpy(ids) if drawn is None else drawn)
            tokens[of_row, place] = ids
            if not finite.all():
                broken = np.unique(of_row[~finite])
                bad[broken] = self._bad_layers(step, broken, ops)
            if (step.wants & _LOGPROBS).any():
                chosen_logprobs = self._logprobs(step, rows, logits, tokens)
        arrays.length[step.slot] = rows.start + moved
        return StepResult(step.number, moved.astype(np.int32), tokens, bad, chosen_logprobs, drafts)

    def _propose(self, step: Step) -> None:
        """Drafts for the rows whose pending token is known now."""
        drafter = self.plan.drafter
        for slot in step.slot[step.wants > 0].tolist():
            ids = propose(self.arrays.known(slot), drafter.tokens, drafter.shortest, drafter.longest)
            self.arrays.draft(slot, ids)

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

    @staticmethod
    def _logprobs(step: Step, rows: Rows, logits: torch.Tensor, tokens: np.ndarray) -> Logprobs:
        """Log-probabilities of the one token of each row that asked, in the step's row numbering."""
        asked = (step.wants & _LOGPROBS).nonzero()[0]
        last = rows.wanted_width.cumsum()[asked] - 1
        picked = torch.from_numpy(last).to(logits.device)
        found = logprobs(logits[picked], torch.from_numpy(tokens[asked, 0]).to(logits.device))
        count = len(step.slot)
        chosen = np.zeros(count, np.float32)
        top_ids = np.zeros((count, found.top_ids.shape[1]), np.int64)
        top = np.zeros((count, found.top.shape[1]), np.float32)
        chosen[asked], top_ids[asked], top[asked] = found.chosen, found.top_ids, found.top
        return Logprobs(chosen, top_ids, top)

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
