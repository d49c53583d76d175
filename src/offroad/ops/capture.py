"""Which steps become CUDA graphs, what that takes, and why there are none otherwise: decided with the plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from offroad.device.profile import DeviceProfile
from offroad.errors import PlanError
from offroad.models.spec import ModelSpec
from offroad.ops.budget import ITEMSIZE, Budget
from offroad.ops.cells import Cell, Choice
from offroad.ops.roofline import CONTEXT, Costs
from offroad.ops.spec import Registry
from offroad.ops.workspace import live
from offroad.settings import Settings

ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64)  # and every 32 from there on
# Tokens of a chunk: tiles of linears are 16, 32 or 64 of them, and from 512 on weights are dequantised for a GEMM.
CHUNKS = (16, 32, 64, 128, 256, 384, 512)
ENOUGH = 0.9  # of the context that fits without graphs of chunks: with less they are left out
# What the driver keeps for the nodes of one graph of a few hundred launches; an estimate, which the engine compares
# with what capturing took.
GRAPH_BYTES = 16 * 2**20
# What an eager step takes the host for each layer: 15 to 18 ms for 16 layers (docs/perf/notes.md).
HOST_SECONDS = 1e-3
SHARE = 0.5  # of the roofline, that steps of few tokens have
LONG = 32  # steps of decoding rows that chunks must be as long as, to do better without such rows
PIECE = 256  # tokens: their number is told to within so many


@dataclass(frozen=True)
class GraphPlan:
    """Steps that are captured: of verify rows alone, up to each number of `rows`, each of `widths` tokens a row, and of
    one chunk alone, up to each number of `chunks` tokens.

    Empty `rows`: none are, for `reason`; empty `chunks`: steps of a chunk are eager, for `eager`. `nbytes` is an
    estimate of their memory, `chunk_bytes` those of chunks alone. Chunks of up to `turn_tokens` take turns with rows
    that decode, a step of both being eager, and so do chunks of `turn_from` tokens or more in one step; 0: none."""

    rows: tuple[int, ...] = ()
    widths: tuple[int, ...] = ()
    reason: str = "not a CUDA device"
    nbytes: int = 0
    chunks: tuple[int, ...] = ()
    eager: str = ""
    chunk_bytes: int = 0
    turn_tokens: int = 0
    turn_from: int = 0

    def describe(self) -> str:
        """A line for a person."""
        if not self.rows:
            return f"none: {self.reason}"
        rows, widths, chunks = (", ".join(map(str, values)) for values in (self.rows, self.widths, self.chunks))
        turns = f"up to {self.turn_tokens}" if self.turn_tokens else "none"
        alone = f"a chunk of up to {chunks} tokens ({turns} in turn with rows that decode)"
        alone = alone if self.chunks else f"of a chunk none: {self.eager}"
        alone += f"; chunks of {self.turn_from:,} tokens and more in turn with rows too" if self.turn_from else ""
        return f"steps of up to {rows} rows of {widths} tokens, {alone}; about {self.nbytes / 1024**2:.0f} MiB"

    def without_chunks(self, eager: str) -> GraphPlan:
        """The same with steps of a chunk eager, for a reason."""
        return replace(self, nbytes=self.nbytes - self.chunk_bytes, chunks=(), eager=eager, chunk_bytes=0)


def plan_graphs(
    spec: ModelSpec,
    cells: dict[Cell, Choice],
    registry: Registry,
    device: DeviceProfile,
    settings: Settings,
    k: int,
    dtype: str,
) -> GraphPlan:
    """The graphs of a plan whose activations are `dtype`. Of verify rows all sizes, or none if one decode kernel
    reads lengths on the host; of chunks likewise by those of prefill."""
    if device.kind != "cuda":
        return GraphPlan()
    if settings.enforce_eager:
        return GraphPlan(reason="--enforce-eager")
    if host := _host(cells, registry, "decode"):
        return GraphPlan(reason=host)
    rows, widths = row_sizes(settings.max_num_seqs), (1, k + 1) if k else (1,)
    tokens = rows[-1] * widths[-1]
    wide = max(linear.n for layer in spec.layers for linear in layer.linears if not linear.experts)
    each = 4 * (3 * spec.vocab + 2 * wide + 6 * spec.hidden)
    nbytes = len(rows) * len(widths) * GRAPH_BYTES + tokens * each
    if eager := _host(cells, registry, "prefill"):
        return GraphPlan(rows, widths, "", nbytes, eager=eager)
    chunks = chunk_sizes(min(settings.max_num_batched_tokens, settings.max_model_len or spec.max_len))
    more = _chunk_bytes(spec, cells, device, settings, ITEMSIZE[dtype], chunks)
    return GraphPlan(rows, widths, "", nbytes + more, chunks, chunk_bytes=more)


def fitted(graphs: GraphPlan, divide: Callable[[int], Budget]) -> tuple[GraphPlan, Budget]:
    """The graphs that memory has room for, and what `divide` makes of it beside their bytes: those of chunks are left
    out where a context would be much shorter for them. Raises PlanError where even then nothing fits."""
    if not graphs.chunks:
        return graphs, divide(graphs.nbytes)
    bare = graphs.without_chunks("their memory goes to the context")
    without = divide(bare.nbytes)
    try:
        found = divide(graphs.nbytes)
    except PlanError:
        return bare, without
    return (graphs, found) if found.max_len >= ENOUGH * without.max_len else (bare, without)


def in_turns(graphs: GraphPlan, found: Costs | None, layers: int, sequences: int, budget: int) -> GraphPlan:
    """With the largest chunk that had better take turns with rows that decode: the device reads all weights for either,
    which must take less than the host does for an eager step of both. And with the fewest tokens of large steps, of up
    to `budget`, that do better without such rows: a step of those takes LONG times less. None where the device's rates
    are unknown, or rows are no graphs."""
    if found is None or not graphs.rows:
        return graphs
    decode, host = found.decode(sequences, CONTEXT), layers * HOST_SECONDS
    fit = [size for size in graphs.chunks if (found.chunk(size) + decode) / SHARE <= host]
    large = (size for size in range(PIECE, budget + 1, PIECE) if found.chunk(size) >= LONG * decode)
    return replace(graphs, turn_tokens=max(fit, default=0), turn_from=next(large, 0))


def _host(cells: dict[Cell, Choice], registry: Registry, phase: str) -> str:
    """Why a phase's steps cannot be captured; empty: they can."""
    chosen = {(cell.op, choice.kernel) for cell, choice in cells.items() if cell.phase == phase}
    host = sorted(f"{kernel} ({op})" for op, kernel in chosen if not registry.capturable(kernel))
    more = f" and {len(host) - 3} more" if len(host) > 3 else ""
    return f"{', '.join(host[:3])}{more} cannot be captured" if host else ""


def _chunk_bytes(
    spec: ModelSpec,
    cells: dict[Cell, Choice],
    device: DeviceProfile,
    settings: Settings,
    itemsize: int,
    chunks: tuple[int, ...],
) -> int:
    """The largest chunk's activations and its hidden states for drafters, what its neediest kernel takes beside them,
    logits, and the graphs."""
    tokens, each = chunks[-1], live(spec, device, settings, itemsize)
    taken = [
        (cell.op, choice.temporary * tokens // choice.problem.load.tokens)
        for cell, choice in cells.items()
        if choice.problem.load.tokens
    ]
    step = tokens * (each.most + itemsize * spec.hidden) + each.beside(tokens, taken) + 4 * 3 * spec.vocab
    return len(chunks) * GRAPH_BYTES + step


def row_sizes(most: int) -> tuple[int, ...]:
    """Numbers of rows that graphs are made for: the usual ones below `most`, and `most`."""
    usual = (*ROWS, *range(ROWS[-1] + 32, most, 32))
    return (*(size for size in usual if size < most), most)


def chunk_sizes(most: int) -> tuple[int, ...]:
    """Tokens of chunks that graphs are made for, where a step has `most`: the usual ones, none of them longer."""
    usual = tuple(size for size in CHUNKS if size < most)
    return usual if most > CHUNKS[-1] else (*usual, most)
