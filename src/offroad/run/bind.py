"""Binds a model's layers, and a drafter's, to kernels, weights and caches."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from offroad.models.spec import AttentionSpec, ModelSpec, RopeSpec
from offroad.ops import cells
from offroad.ops.bound import LayerOps, Ops
from offroad.ops.cells import DRAFTER, MODEL, PHASES, Cell
from offroad.ops.plan import Plan
from offroad.ops.rope import rope_table
from offroad.ops.spec import Bound, Registry
from offroad.run.rows import View
from offroad.weights.load import Weights


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


@dataclass(frozen=True)
class Bounds:
    """What ops are made of. `views` are the items of every layer, the drafter's behind the model's own."""

    plan: Plan
    spec: ModelSpec
    weights: Weights
    kernels: dict[Cell, Bound]
    views: list[dict[str, View]]
    device: torch.device
    ropes: dict[RopeSpec, torch.Tensor] = field(default_factory=dict)

    def model(self) -> dict[str, Ops]:
        """The model's ops by phase."""
        return {phase: self._ops(phase, MODEL, range(self.spec.own), self.weights.tensors["norm"]) for phase in PHASES}

    def drafter(self) -> dict[str, Ops]:
        """The drafter's ops by phase, with the model's embedding and head unless it has its own."""
        assert self.weights.draft is not None, "a drafter is loaded"
        layers, norm = range(self.spec.own, len(self.spec.layers)), self.weights.draft.tensors["norm"]
        return {phase: self._ops(phase, DRAFTER, layers, norm) for phase in PHASES}

    def _ops(self, phase: str, outside: int, layers: range, last_norm: torch.Tensor) -> Ops:
        spec, weights = self.spec, self.weights
        shared = self._kernels(outside, phase)
        following = [*(weights.layers[i].tensors["input_norm"] for i in layers[1:]), last_norm]
        bound = [self._layer(i, phase, shared, after) for i, after in zip(layers, following, strict=True)]
        dtype, drafter = getattr(torch, self.plan.dtype), None
        if outside == DRAFTER:
            draft, loaded = spec.draft, weights.draft
            assert draft is not None, "there is a drafter"
            assert loaded is not None, "a drafter is loaded"
            linears = {"head": loaded.linears["embed"]} if draft.tied else {}
            drafter = LayerOps(shared, linears | loaded.linears, loaded.tensors, self._eps(outside))
            if draft.whole:
                return Ops(bound, drafter, draft.embed_scale, dtype, draft.logit_softcap)
        linears = {"embed": weights.embed, "head": weights.head} | weights.linears
        model = LayerOps(self._kernels(MODEL, phase), linears, weights.tensors, spec.norm_eps)
        return Ops(bound, model, spec.embed_scale, dtype, spec.logit_softcap, drafter=drafter)

    def _eps(self, outside: int) -> float:
        draft = self.spec.draft
        own = draft.norm_eps if outside == DRAFTER and draft is not None else None
        return self.spec.norm_eps if own is None else own

    def _kernels(self, layer: int, phase: str) -> dict[str, Bound]:
        return {cell.op: kernel for cell, kernel in self.kernels.items() if (cell.layer, cell.phase) == (layer, phase)}

    def _layer(self, i: int, phase: str, shared: dict[str, Bound], following: torch.Tensor) -> LayerOps:
        layer, loaded = self.spec.layers[i], self.weights.layers[i]
        return LayerOps(
            shared | self._kernels(i, phase),
            loaded.linears,
            loaded.tensors,
            self._eps(cells.outside(self.spec, i)),
            mixer=layer.mixer,
            ffn=layer.ffn,
            moe=layer.moe,
            rope=self._rope(layer.mixer) if isinstance(layer.mixer, AttentionSpec) else None,
            views=self.views[i],
            attention_verify=self.kernels.get(Cell(i, "attention", "decode")),
            attention_chunk=self.kernels.get(Cell(i, "attention", "prefill")),
            following=following,
        )

    def _rope(self, mixer: AttentionSpec) -> torch.Tensor:
        """Angles of every position, made once for layers that turn alike."""
        if mixer.rope not in self.ropes:
            self.ropes[mixer.rope] = rope_table(mixer.rope, self.plan.max_len + self.plan.k + 1, self.device)
        return self.ropes[mixer.rope]
