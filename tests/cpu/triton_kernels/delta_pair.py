"""The Gated DeltaNet kernel beside the reference: both run the same steps over rings of their own, full of NaN.

Beside fp32 the reference is evaluated in float64, so that the kernel's error alone is held against the tolerance: of
many numbers some are where two computations in fp32 err to opposite sides. Beside halves it is not: where the op rounds
to them is a part of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module

import numpy as np
import torch

from offroad.device.probe import probe_cuda
from offroad.device.profile import load_profile
from offroad.models.spec import GatedDeltaSpec
from offroad.ops.gated_delta import TOLERANCE, DeltaWeights, gated_delta
from offroad.ops.registry import default_registry
from offroad.ops.spec import Problem
from offroad.run.rows import ReplayView, RingView, Rows

EPS = 1e-6
H100 = load_profile("h100-80gb")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
Span = tuple[int, int, int]  # slot, start, width


def rows_of(spans: Sequence[Span], verify: int, device: str) -> Rows:
    """Rows of a step, verify rows first."""
    slot, start, width = (list(column) for column in zip(*spans, strict=True))
    arrays = [np.array(column, np.int32) for column in (slot, start, width, np.cumsum([0, *width[:-1]]))]
    positions = torch.cat([torch.arange(a, a + n) for a, n in zip(start, width, strict=True)]).to(device)
    nothing = torch.zeros(0, dtype=torch.int64, device=device)
    tensors = [torch.from_numpy(array).to(device) for array in arrays]
    return Rows(torch.zeros_like(positions), positions, *arrays, *tensors, verify, nothing, np.zeros_like(arrays[0]))


class Pair:
    """Rings for `slots` sequences and `k` drafts. `repeat`: keys hardly differ between tokens and hardly decay, so
    that tokens of a chunk depend on one another strongly."""

    def __init__(
        self,
        spec: GatedDeltaSpec,
        dtype: str = "float32",
        k: int = 0,
        device: str = "cpu",
        slots: int = 5,
        seed: int = 0,
        lag: int = 0,
        kernel: str = "triton.gated_delta",
    ) -> None:
        self.spec, self.name, self.dtype, self.device, self.k = spec, dtype, DTYPES[dtype], device, k
        self.random = torch.Generator(device).manual_seed(seed)
        self.weights = DeltaWeights(
            self.normal(spec.channels, spec.kernel) * 0.5,
            self.normal(spec.value_heads) - 1,
            self.normal(spec.value_heads) - 2,
            self.normal(spec.value_dim) * 0.3 + 1,
        )
        self.slots, self.lag = slots, lag
        # Of the reference's inputs and states.
        self.wide, stored = (torch.float64, torch.float64) if dtype == "float32" else (self.dtype, torch.float32)
        self.reference, self.rings = self._rings(stored), self._rings(torch.float32)
        registry = default_registry()
        on = probe_cuda() if device == "cuda" else H100
        self.kernel = registry.kernels[kernel].prepare(on, Problem("gated_delta", "decode", dtype))

    def _rings(self, stored: torch.dtype) -> tuple[RingView, RingView | ReplayView]:
        """(raw columns, states or what they are replayed from in `stored`)."""
        spec, k = self.spec, self.k

        def dirty(*shape: int, dtype: torch.dtype = stored) -> torch.Tensor:
            return torch.full((self.slots, *shape), float("nan"), dtype=dtype, device=self.device)

        conv, each = RingView(dirty(spec.kernel + k, spec.channels, dtype=self.dtype)), self.lag + k + 1
        state = (spec.value_heads, spec.key_dim, spec.value_dim)
        if not self.lag:
            return conv, RingView(dirty(1 + k, *state))
        shapes = ((spec.key_heads, spec.key_dim), (spec.value_heads, spec.value_dim), (spec.value_heads,))
        base = torch.zeros(self.slots, dtype=torch.int64, device=self.device)
        return conv, ReplayView(dirty(*state), *(dirty(each, *shape) for shape in shapes), base, self.lag)

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.random, device=self.device)

    def inputs(self, tokens: int, repeat: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """(qkvz, ba)."""
        spec = self.spec
        qkvz, ba = self.normal(tokens, spec.channels + spec.value_width), self.normal(tokens, 2 * spec.value_heads)
        if repeat:
            qkvz[:, : 2 * spec.key_heads * spec.key_dim] *= 0.02
            qkvz[:, : 2 * spec.key_heads * spec.key_dim] += 1.0
            ba = ba * 0.1 + torch.tensor([6.0, -6.0], device=self.device).repeat_interleave(spec.value_heads)
        return qkvz.to(self.dtype), ba.to(self.dtype)

    def step(self, verify: Sequence[Span] = (), chunks: Sequence[Span] = (), repeat: bool = False) -> torch.Tensor:
        """Runs both, and holds every number of outputs and rings against the reference's; gives the outputs."""
        rows = rows_of([*verify, *chunks], len(verify), self.device)
        qkvz, ba = self.inputs(rows.tokens, repeat)
        common = (rows, self.spec, self.weights, EPS)
        expected = gated_delta(qkvz.to(self.wide), ba.to(self.wide), *self.reference, *common)
        found = self.kernel(qkvz, ba, *self.rings, *common)
        assert (found.dtype, found.shape) == (self.dtype, expected.shape)
        # Where nothing decays, fp32 rounds by more: the kernel's, and beside halves the reference's too.
        self._close(found, expected, 4 if repeat else 1)
        for mine, theirs in zip(tensors_of(self.rings[1]), tensors_of(self.reference[1]), strict=True):
            self._close(mine, theirs, 4 if repeat else 1)
        assert torch.equal(self.rings[0].data.nan_to_num(-77), self.reference[0].data.nan_to_num(-77))
        if self.lag:
            self.settle(rows)
            self._checkpoints(rows)
        return found

    def settle(self, rows: Rows) -> None:
        """As `Arrays.settle`."""
        slots, start = rows.slot_t.long(), rows.start_t.long()
        for _, view in (self.reference, self.rings):
            base = torch.where(view.folds(slots, start), start, view.base[slots])
            base[rows.verify :] = (start + rows.width_t)[rows.verify :]
            view.base[slots] = base

    def _checkpoints(self, rows: Rows) -> None:
        """The kernel of checkpoints gives the states that the reference replays."""
        state_at = import_module("offroad.triton_kernels.delta_replay_jit").state_at
        for slot, first, width in zip(rows.slot.tolist(), rows.start.tolist(), rows.width.tolist(), strict=True):
            if width:
                self._close(
                    state_at(self.rings[1], slot, first + width), self.reference[1].before(slot, first + width, 1)
                )

    def _close(self, found: torch.Tensor, expected: torch.Tensor, times: int = 1) -> None:
        limit = TOLERANCE[self.name]
        assert found.dtype == (torch.float32 if expected.dtype == torch.float64 else expected.dtype)
        bounds = dict(atol=times * limit.absolute, rtol=times * limit.relative)
        torch.testing.assert_close(found.to(expected.dtype), expected, **bounds, equal_nan=True)

    def alone(self, spans: Sequence[Span]) -> None:
        """Each verify row gives the same bits alone as among the others, in outputs and rings."""
        rows = rows_of(spans, len(spans), self.device)
        qkvz, ba = self.inputs(rows.tokens)
        before = [copied(ring) for ring in self.rings]
        together = self.kernel(qkvz, ba, *self.rings, rows, self.spec, self.weights, EPS)
        for (slot, start, width), offset in zip(spans, rows.offset.tolist(), strict=True):
            rings = [copied(ring) for ring in before]
            own, span = rows_of([(slot, start, width)], 1, self.device), slice(offset, offset + width)
            out = self.kernel(qkvz[span], ba[span], *rings, own, self.spec, self.weights, EPS)
            assert torch.equal(out, together[span])
            for ring, after in zip(rings, self.rings, strict=True):
                for one, other in zip(tensors_of(ring), tensors_of(after), strict=True):
                    assert torch.equal(one[slot].nan_to_num(-77), other[slot].nan_to_num(-77))

    def rounds(self, widths: Sequence[int], lengths: Sequence[int], count: int) -> None:
        """`count` verify steps of slots whose sequences have `lengths`, each keeping some of its tokens."""
        length = dict(enumerate(lengths))
        dice = np.random.default_rng(len(widths))
        for _ in range(count):
            slots = dice.permutation(len(lengths))
            spans = [(int(s), length[int(s)], int(dice.choice(widths))) for s in slots]
            self.step(verify=spans)
            for slot, _, width in spans:
                length[slot] += int(dice.integers(1, width + 1))


def tensors_of(ring: RingView | ReplayView) -> list[torch.Tensor]:
    return [value for value in vars(ring).values() if isinstance(value, torch.Tensor)]


def copied(ring: RingView | ReplayView) -> RingView | ReplayView:
    return replace(ring, **{n: v.clone() for n, v in vars(ring).items() if isinstance(v, torch.Tensor)})


def spec_of(key_heads: int, group: int, key_dim: int, value_dim: int, **changes) -> GatedDeltaSpec:
    return replace(GatedDeltaSpec(key_heads, key_heads * group, key_dim, value_dim, 4), **changes)
