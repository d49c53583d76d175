"""How fast a device could run a model at best: bytes over its bandwidth, operations over its rate.

A bound, not a promise: no launch, no sum over ranks and no cache miss is in it.
"""

from __future__ import annotations

from dataclasses import dataclass

from offroad.device.profile import DeviceProfile
from offroad.models.spec import LinearSpec, ModelSpec
from offroad.ops.budget import Dtypes, kv_bytes_per_token, state_bytes, window_bytes
from offroad.ops.cells import Cell

CONTEXT = 1024  # tokens of context that decode is estimated at


@dataclass(frozen=True)
class Roofline:
    """Tokens a second: of one sequence, of all sequences together, and of prompts."""

    decode: float
    decode_all: float
    prefill: float


@dataclass(frozen=True)
class Reads:
    """What a step reads: `shared` bytes once, and of `experts` bytes the part that its tokens choose."""

    shared: int
    experts: int
    chosen: float  # the part of the experts that one token chooses

    def of(self, tokens: int) -> float:
        return self.shared + self.experts * (1 - (1 - self.chosen) ** tokens)


def roofline(
    spec: ModelSpec,
    packed: dict[Cell, int],
    device: DeviceProfile,
    dtypes: Dtypes,
    sequences: int,
) -> Roofline | None:
    """The bound for a rank's spec, whose weights take `packed` bytes by decode cell; None: the profile has no rates."""
    rate = dict(device.flops).get(dtypes.activation)
    if not rate or not device.bandwidth:
        return None
    reads = _reads(spec, packed)
    per_token = 2.0 * _active(spec)
    kv, window = kv_bytes_per_token(spec, dtypes), window_bytes(spec, dtypes)
    widest = max((layer.mixer.window or 0 for layer in spec.layers if hasattr(layer.mixer, "window")), default=0)
    seen = window * min(1.0, CONTEXT / widest) if widest else 0.0
    each = kv * CONTEXT + seen + 2 * state_bytes(spec, dtypes, 0)

    def step(tokens: int) -> float:
        return max((reads.of(tokens) + tokens * each) / device.bandwidth, tokens * per_token / rate)

    return Roofline(1 / step(1), sequences / step(sequences), rate / per_token)


def _reads(spec: ModelSpec, packed: dict[Cell, int]) -> Reads:
    """The input embedding is not read, but for a row a token, unless it is the head too."""
    shared = experts = 0
    for cell, size in packed.items():
        if cell.op.startswith("grouped_linear"):
            experts += size
        elif not (cell.op.startswith("embed") and (cell.op != "embed" or spec.head is not None)):
            shared += size
    chosen = max((layer.moe.top_k / layer.moe.experts for layer in spec.layers if layer.moe), default=0.0)
    return Reads(shared, experts, chosen)


def _active(spec: ModelSpec) -> float:
    """Weights that a token is multiplied with."""

    def weights(linear: LinearSpec, top_k: int) -> float:
        return linear.n * linear.k * (top_k / linear.experts if linear.experts else 1.0)

    total = float(spec.vocab * spec.hidden)
    total += sum(weights(linear, 1) for linear in spec.linears if linear.op == "linear")
    return total + sum(
        weights(linear, layer.moe.top_k if layer.moe else 1) for layer in spec.layers for linear in layer.linears
    )
