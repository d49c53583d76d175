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
from offroad.sample.logprobs import logprobs
from offroad.sample.sampler import Sampler
from offroad.schedule.step import Logprobs, Step, StepResult, Want
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
    ) -> None:
        self.plan, self.model, self.device = plan, model, device
        self.arrays = Arrays(plan, spec, device)
        self.sampler = Sampler(plan.memory.slots, spec.vocab, device)
        mixers = [layer.mixer for layer in spec.layers]
        ropes = dict.fromkeys(mixer.rope for mixer in mixers if isinstance(mixer, AttentionSpec))
        self.rope = {rope: rope_table(rope, plan.max_len + plan.k + 1, device) for rope in ropes}
        self.ops = {phase: self._bind(spec, weights, bounds, phase) for phase in PHASES}
        self.results: deque[StepResult] = deque()

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
        rows = self.arrays.rows(step)
        ops = self.ops["decode" if rows.verify == len(rows.slot) else "prefill"]
        hidden = self.model.forward(rows, ops)
        before = self.arrays.length.copy() if len(step.captures) else self.arrays.length
        self.results.append(self._finish(step, ops, hidden))
        self.arrays.capture(step.captures, before)

    def result(self) -> StepResult:
        """The oldest step that was launched and not yet asked for."""
        return self.results.popleft()

    def _finish(self, step: Step, ops: Ops, hidden: torch.Tensor) -> StepResult:
        count = len(step.slot)
        arrays, wanting = self.arrays, step.wants.nonzero()[0]
        tokens, bad = np.empty((count, self.plan.k + 1), np.int64), np.empty(count, np.int16)
        tokens.fill(-1)
        bad.fill(-1)
        after = arrays.length[step.slot] + step.width
        chosen_logprobs = None
        if len(wanting):
            logits = ops.logits(hidden)
            slots, positions = step.slot[wanting], after[wanting]
            drawn = self.sampler.draw(logits, slots, positions, arrays.tokens)
            finite = self._finite(hidden, logits, drawn)
            arrays.put(slots, positions, drawn)
            tokens[wanting, 0] = drawn.cpu().numpy()
            if not finite.all():
                bad[wanting[~finite]] = self._bad_layers(step, wanting[~finite], ops)
            if (step.wants & _LOGPROBS).any():
                chosen_logprobs = self._logprobs(step, wanting, logits, drawn)
        arrays.length[step.slot] = after
        return StepResult(step.number, step.width.astype(np.int32), tokens, bad, chosen_logprobs)

    @staticmethod
    def _finite(hidden: torch.Tensor, logits: torch.Tensor, drawn: torch.Tensor) -> np.ndarray:
        """Which rows are finite: a NaN or infinity anywhere reaches the sum of the hidden states, or the logit that was
        drawn."""
        hidden = hidden.float()
        if hidden.device.type == "cpu":  # the same over arrays, whose operations cost less
            return np.isfinite(hidden.numpy().sum(-1) + logits.numpy()[np.arange(len(drawn)), drawn.numpy()])
        mark = hidden.sum(-1) + logits.gather(-1, drawn[:, None])[:, 0]
        return np.isfinite(mark.cpu().numpy())

    @staticmethod
    def _logprobs(step: Step, wanting: np.ndarray, logits: torch.Tensor, drawn: torch.Tensor) -> Logprobs:
        """Log-probabilities for the rows that asked, in the step's row numbering."""
        asked = np.flatnonzero(step.wants[wanting] & _LOGPROBS)
        picked = torch.from_numpy(asked).to(logits.device)
        found = logprobs(logits[picked], drawn[picked])
        rows, count = wanting[asked], len(step.slot)
        chosen = np.zeros(count, np.float32)
        top_ids = np.zeros((count, found.top_ids.shape[1]), np.int64)
        top = np.zeros((count, found.top.shape[1]), np.float32)
        chosen[rows], top_ids[rows], top[rows] = found.chosen, found.top_ids, found.top
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
