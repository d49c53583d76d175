"""The Gated DeltaNet kernel beside the reference: both run the same steps over rings of their own, full of NaN."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from offroad.device.profile import load_profile
from offroad.models.spec import GatedDeltaSpec
from offroad.ops.gated_delta import TOLERANCE, DeltaWeights, gated_delta
from offroad.ops.registry import default_registry
from offroad.ops.spec import Problem
from offroad.run.rows import RingView, Rows

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
    ) -> None:
        self.spec, self.name, self.dtype, self.device, self.k = spec, dtype, DTYPES[dtype], device, k
        self.random = torch.Generator(device).manual_seed(seed)
        self.weights = DeltaWeights(
            self.normal(spec.channels, spec.kernel) * 0.5,
            self.normal(spec.value_heads) - 1,
            self.normal(spec.value_heads) - 2,
            self.normal(spec.value_dim) * 0.3 + 1,
        )
        conv = (slots, spec.kernel - 1 + k, spec.channels)
        state = (slots, 1 + k, spec.value_heads, spec.key_dim, spec.value_dim)
        self.reference, self.rings = (
            [self._ring(conv, self.dtype), self._ring(state, torch.float32)] for _ in range(2)
        )
        registry = default_registry()
        self.kernel = registry.kernels["triton.gated_delta"].prepare(H100, Problem("gated_delta", "decode", dtype))

    def _ring(self, shape: tuple[int, ...], dtype: torch.dtype) -> RingView:
        return RingView(torch.full(shape, float("nan"), dtype=dtype, device=self.device))

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
        expected = gated_delta(qkvz, ba, *self.reference, *common)
        found = self.kernel(qkvz, ba, *self.rings, *common)
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        self._close(found, expected)
        self._close(self.rings[1].data, self.reference[1].data)
        assert torch.equal(self.rings[0].data.nan_to_num(-77), self.reference[0].data.nan_to_num(-77))
        return found

    def _close(self, found: torch.Tensor, expected: torch.Tensor) -> None:
        limit = TOLERANCE[self.name]
        torch.testing.assert_close(found, expected, atol=limit.absolute, rtol=limit.relative, equal_nan=True)

    def alone(self, spans: Sequence[Span]) -> None:
        """Each verify row gives the same bits alone as among the others, in outputs and rings."""
        rows = rows_of(spans, len(spans), self.device)
        qkvz, ba = self.inputs(rows.tokens)
        before = [ring.data.clone() for ring in self.rings]
        together = self.kernel(qkvz, ba, *self.rings, rows, self.spec, self.weights, EPS)
        for (slot, start, width), offset in zip(spans, rows.offset.tolist(), strict=True):
            rings = [RingView(data.clone()) for data in before]
            own, span = rows_of([(slot, start, width)], 1, self.device), slice(offset, offset + width)
            out = self.kernel(qkvz[span], ba[span], *rings, own, self.spec, self.weights, EPS)
            assert torch.equal(out, together[span])
            for ring, after in zip(rings, self.rings, strict=True):
                assert torch.equal(ring.data[slot].nan_to_num(-77), after.data[slot].nan_to_num(-77))

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


def spec_of(key_heads: int, group: int, key_dim: int, value_dim: int, **changes) -> GatedDeltaSpec:
    return replace(GatedDeltaSpec(key_heads, key_heads * group, key_dim, value_dim, 4), **changes)
