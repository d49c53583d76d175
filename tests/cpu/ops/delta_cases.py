"""Gated DeltaNet written plainly in float64, and small devices that run the op over rings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from offroad.models.spec import GatedDeltaSpec
from offroad.ops.gated_delta import DeltaWeights, gated_delta
from offroad.run.rows import ReplayView, RingView, Rows

EPS = 1e-6
STORE = "rows"
SPEC = GatedDeltaSpec(key_heads=2, value_heads=6, key_dim=8, value_dim=4, kernel=4)


def weights_of(spec: GatedDeltaSpec, seed: int = 0, a_log: float = 1.0, dt_bias: float = 0.0) -> DeltaWeights:
    """Random weights; `a_log` and `dt_bias` are the largest values of theirs."""
    random = torch.Generator().manual_seed(seed)

    def uniform(low: float, high: float, *shape: int) -> torch.Tensor:
        return torch.empty(shape).uniform_(low, high, generator=random)

    return DeltaWeights(
        torch.randn(spec.channels, spec.kernel, generator=random) * 0.5,
        uniform(a_log - 4, a_log, spec.value_heads),
        uniform(dt_bias - 5, dt_bias, spec.value_heads),
        uniform(0.5, 1.5, spec.value_dim),
    )


def inputs_of(spec: GatedDeltaSpec, tokens: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """(qkvz, ba)."""
    random = torch.Generator().manual_seed(seed)
    qkvz = torch.randn(tokens, spec.channels + spec.value_width, generator=random)
    return qkvz, torch.randn(tokens, 2 * spec.value_heads, generator=random)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def plain(
    spec: GatedDeltaSpec, weights: DeltaWeights, qkvz: torch.Tensor, ba: torch.Tensor
) -> tuple[np.ndarray, np.ndarray]:
    """(out [tokens, value_width], states [tokens, heads, key_dim, value_dim]) of one sequence: token by token, head by
    head, in float64 and without anything of offroad's."""
    heads, dk, dv = spec.value_heads, spec.key_dim, spec.value_dim
    taps, a_log, dt_bias, w = (t.double().numpy() for t in (weights.conv, weights.a_log, weights.dt_bias, weights.norm))
    x, gates = qkvz.double().numpy(), ba.double().numpy()
    out, states = np.zeros((len(x), heads * dv)), np.zeros((len(x), heads, dk, dv))
    state = np.zeros((heads, dk, dv))
    for t in range(len(x)):
        u = np.zeros(spec.channels)
        for j in range(spec.kernel):
            before = t - spec.kernel + 1 + j
            if before >= 0:
                u += taps[:, j] * x[before, : spec.channels]
        u = u * _sigmoid(u)
        keys_at, values_at = spec.key_heads * dk, 2 * spec.key_heads * dk
        for h in range(heads):
            from_key = h // (heads // spec.key_heads) * dk
            q = u[from_key : from_key + dk]
            k = u[keys_at + from_key : keys_at + from_key + dk]
            v = u[values_at + h * dv : values_at + (h + 1) * dv]
            q = q / np.sqrt(q @ q + 1e-6) / np.sqrt(dk)
            k = k / np.sqrt(k @ k + 1e-6)
            beta = _sigmoid(gates[t, h])
            state[h] *= np.exp(-np.exp(a_log[h]) * np.log1p(np.exp(gates[t, heads + h] + dt_bias[h])))
            state[h] += np.outer(k, beta * (v - state[h].T @ k))
            o = state[h].T @ q
            z = x[t, spec.channels + h * dv : spec.channels + (h + 1) * dv]
            gate = _sigmoid(z) * (z if spec.gate == "silu" else 1)
            out[t, h * dv : (h + 1) * dv] = o / np.sqrt(np.mean(o * o) + EPS) * w * gate
        states[t] = state
    return out, states


@dataclass
class Part:
    """One row of a step: inputs of tokens at [start, start + len(qkvz)) of a slot."""

    slot: int
    start: int
    qkvz: torch.Tensor
    ba: torch.Tensor


def rows_of(parts: Sequence[Part], verify: int) -> Rows:
    widths = [len(p.qkvz) for p in parts]
    values = ([p.slot for p in parts], [p.start for p in parts], widths, np.cumsum([0, *widths[:-1]]))
    arrays = [np.array(v, np.int32) for v in values]
    positions = torch.cat([torch.arange(p.start, p.start + width) for p, width in zip(parts, widths, strict=True)])
    nothing = torch.zeros(0, dtype=torch.int64)
    tensors = [torch.from_numpy(a) for a in arrays]
    return Rows(torch.zeros_like(positions), positions, *arrays, *tensors, verify, nothing, np.zeros_like(arrays[2]))


@dataclass
class Device:
    """Rings for `slots` sequences and up to `k` drafts, full of NaN, and the op over them. `store`: how states are
    kept; None: as STORE says."""

    spec: GatedDeltaSpec
    weights: DeltaWeights
    slots: int = 4
    k: int = 0
    dtype: torch.dtype = torch.float32
    stored: torch.dtype = torch.float32
    store: str | None = None
    lag: int = 0  # of replayed states; 0: as many as a step has tokens
    conv: RingView = field(init=False)
    state: RingView | ReplayView = field(init=False)

    def __post_init__(self) -> None:
        spec = self.spec
        conv = (self.slots, spec.kernel - 1 + self.k, spec.channels)
        state = (spec.value_heads, spec.key_dim, spec.value_dim)
        self.conv = RingView(torch.full(conv, float("nan"), dtype=self.dtype))
        if (self.store or STORE) == "rows":
            self.state = RingView(torch.full((self.slots, 1 + self.k, *state), float("nan"), dtype=self.stored))
            return
        shapes = ((spec.key_heads, spec.key_dim), (spec.value_heads, spec.value_dim), (spec.value_heads,))
        lag = self.lag or self.k + 1
        each, wide = lag + self.k + 1, torch.promote_types(self.stored, torch.float32)
        records = [torch.full((self.slots, each, *shape), float("nan"), dtype=wide) for shape in shapes]
        data = torch.full((self.slots, *state), float("nan"), dtype=self.stored)
        self.state = ReplayView(data, *records, torch.zeros(self.slots, dtype=torch.int64), lag)

    def step(self, chunks: Sequence[Part] = (), verify: Sequence[Part] = ()) -> list[torch.Tensor]:
        """The output of each row, verify rows first."""
        parts = [*verify, *chunks]
        qkvz, ba = torch.cat([p.qkvz for p in parts]).to(self.dtype), torch.cat([p.ba for p in parts]).to(self.dtype)
        rows = rows_of(parts, len(verify))
        if isinstance(self.state, ReplayView):
            for part in (part for part in parts if part.start == 0):  # a sequence begins
                self.state.base[part.slot] = 0
        out = gated_delta(qkvz, ba, self.conv, self.state, rows, self.spec, self.weights, EPS)
        if isinstance(self.state, ReplayView):
            fold = self.state.folds(rows.slot_t.long(), rows.start_t.long()).tolist()
            for i, part in enumerate(parts):
                if i >= len(verify):
                    self.state.base[part.slot] = part.start + len(part.qkvz)
                elif fold[i]:
                    self.state.base[part.slot] = part.start
        return list(out.split([len(p.qkvz) for p in parts]))

    def state_at(self, slot: int, length: int) -> torch.Tensor:
        """The state that `length` tokens have left."""
        return self.state.before(slot, length, 1)[0]


class Tape:
    """The tokens of one sequence with what the plain formulas make of them."""

    def __init__(self, spec: GatedDeltaSpec, weights: DeltaWeights, tokens: int, seed: int = 1) -> None:
        self.qkvz, self.ba = inputs_of(spec, tokens, seed)
        self.out, self.states = (torch.from_numpy(a) for a in plain(spec, weights, self.qkvz, self.ba))

    def part(self, slot: int, start: int, end: int) -> Part:
        return Part(slot, start, self.qkvz[start:end], self.ba[start:end])
