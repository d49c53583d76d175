"""How fast a device could run a model at best: bytes over its bandwidth, operations over its rate.

A bound, not a promise: no launch, no sum over ranks and no cache miss is in it.
"""

from __future__ import annotations

from dataclasses import dataclass

from offroad.device.profile import DeviceProfile
from offroad.models.spec import AttentionSpec, LinearSpec, ModelSpec
from offroad.ops.budget import Dtypes, kv_bytes_per_token, moved_bytes, window_bytes
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


@dataclass(frozen=True)
class Costs:
    """Bytes and operations of a rank's steps, and the device's rates.

    `head`: operations of one token's logits, which `per_token` has too; `history` and `windows`: bytes of keys and
    values by token of context, and of whole windows, the widest of which has `widest` tokens; `attention`: operations
    of a query and a key, in full layers and in those with a window; `state`: bytes that a token moves of its row's
    recurrent states.
    """

    reads: Reads
    per_token: float
    head: float
    history: int
    windows: int
    widest: int
    attention: tuple[float, float]
    state: int
    bandwidth: float
    rate: float

    def decode(self, rows: int, context: int) -> float:
        """Seconds of a step of `rows` tokens, each of its own sequence with `context` tokens."""
        seen = self.windows * min(1.0, context / self.widest) if self.widest else 0.0
        each = self.history * context + seen + self.state
        return max((self.reads.of(rows) + rows * each) / self.bandwidth, rows * self.per_token / self.rate)

    def prefill(self, tokens: int) -> float:
        """Seconds of one prompt of `tokens`, with logits of its last token: operations, causal attention among them."""
        full, windowed = self.attention
        span = min(tokens, self.widest)
        pairs = full * tokens * tokens / 2 + windowed * (tokens * span - span * span / 2)
        return ((self.per_token - self.head) * tokens + self.head + pairs) / self.rate

    def chunk(self, tokens: int) -> float:
        """Seconds of a step of one short prompt, whose weights take longer to be read than used."""
        return max(self.reads.of(tokens) / self.bandwidth, self.prefill(tokens))


def costs(spec: ModelSpec, packed: dict[Cell, int], device: DeviceProfile, dtypes: Dtypes) -> Costs | None:
    """The costs for a rank's spec, whose weights take `packed` bytes by decode cell; None: the profile has no rates."""
    rate = dict(device.flops).get(dtypes.activation)
    if not rate or not device.bandwidth:
        return None
    mixers = [layer.mixer for layer in spec.layers if isinstance(layer.mixer, AttentionSpec)]
    pairs = [(4.0 * mixer.heads * mixer.head_dim, mixer.window) for mixer in mixers]
    return Costs(
        reads=_reads(spec, packed),
        per_token=2.0 * _active(spec),
        head=2.0 * spec.vocab * spec.hidden,
        history=kv_bytes_per_token(spec, dtypes),
        windows=window_bytes(spec, dtypes),
        widest=max((mixer.window or 0 for mixer in mixers), default=0),
        attention=(sum(n for n, window in pairs if not window), sum(n for n, window in pairs if window)),
        state=moved_bytes(spec, dtypes),
        bandwidth=device.bandwidth,
        rate=rate,
    )


def roofline(
    spec: ModelSpec,
    packed: dict[Cell, int],
    device: DeviceProfile,
    dtypes: Dtypes,
    sequences: int,
) -> Roofline | None:
    """The bound for a rank's spec, whose weights take `packed` bytes by decode cell; None: the profile has no rates."""
    found = costs(spec, packed, device, dtypes)
    if found is None:
        return None
    alone, together = found.decode(1, CONTEXT), found.decode(sequences, CONTEXT)
    return Roofline(1 / alone, sequences / together, found.rate / found.per_token)


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
