"""Steps of verify rows as CUDA graphs: a forward pass, its logits and the best tokens, replayed on fixed buffers.

A graph is made for a number of rows and a width. A step takes the smallest that holds it; rows that are left over have
slot 0 (the bin) and width 0, so that they write nothing that is read. Row r has the tokens `[r * width, (r + 1) *
width)`, of which the first `width[r]` are real; what the others compute is never read, and may be anything.
What a captured kernel reads of a step lies in device memory: of `Rows`' host arrays, lengths, offsets and widths (the
most that a row has) are those of every step, and slots and starts have no meaning while a graph is made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from offroad.errors import OffroadError
from offroad.models.registry import Model
from offroad.ops.bound import Ops
from offroad.ops.capture import GraphPlan
from offroad.run.arrays import Arrays
from offroad.run.rows import Rows
from offroad.run.transfer import Mirror, packed_offsets
from offroad.schedule.step import Kind, Step

Body = Callable[[], None]
Recorder = Callable[[Body], Body]  # makes of a function over fixed buffers one that does the same again
_VERIFY = int(Kind.VERIFY)


@dataclass(frozen=True)
class Forward:
    """A step's forward pass: `states` that left the model, [tokens, hidden] for a drafter that eats all and else
    `hidden`, [scored, hidden] of tokens whose logits are needed; from a graph fp32 logits [scored, vocab] too.

    `answers` int64 [tokens] from a graph: the best token of each, `~token` where a value is not finite; `live`: which
    of them the step has. `stored`: the best tokens stand in `Arrays.tokens` already."""

    rows: Rows
    ops: Ops
    states: torch.Tensor
    hidden: torch.Tensor
    logits: torch.Tensor | None = None
    answers: torch.Tensor | None = None
    live: slice | np.ndarray | None = None
    stored: bool = False


class CudaRecorder:
    """Captures CUDA graphs into one memory pool."""

    def __init__(self) -> None:
        self.pool, self.stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()

    def __call__(self, body: Body) -> Body:
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            body()  # compiles and loads what is lazy, which capturing does not allow
        torch.cuda.current_stream().wait_stream(self.stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"):
            body()
        return graph.replay


class Graphs:
    """The graphs of a plan. `nbytes`: memory that making them took, as far as the device tells."""

    @torch.inference_mode()
    def __init__(self, plan: GraphPlan, model: Model, ops: Ops, arrays: Arrays, recorder: Recorder) -> None:
        """Captures every size, the largest first: later ones fit into its memory. Raises OffroadError where a kernel
        cannot be captured."""
        self.model, self.ops, self.arrays, self.sizes = model, ops, arrays, plan.rows
        device, tokens = arrays.device, plan.rows[-1] * plan.widths[-1]
        self.numbers = Mirror(packed_offsets(_layout(plan.rows[-1], plan.widths[-1]))[1], device)
        self.ids = torch.zeros(tokens, dtype=torch.int64, device=device)
        self.answers = torch.zeros(tokens, dtype=torch.int64, device=device)
        self.hidden: torch.Tensor | None = None
        self.logits: torch.Tensor | None = None
        free = free_bytes(device)
        self.graphs = {
            (rows, width): _Graph(self, rows, width, tokens, recorder)
            for width in sorted(plan.widths, reverse=True)
            for rows in sorted(plan.rows, reverse=True)
        }
        self.nbytes = free - free_bytes(device)

    def run(self, step: Step) -> Forward | None:
        """The step's forward pass by a graph; None if there is none for it."""
        count = len(step.slot)
        size = next((size for size in self.sizes if size >= count), None)
        if size is None or not count or (step.kind != _VERIFY).any() or not step.samples.all():
            return None
        width = step.width
        if self.arrays.k:
            width = np.minimum(width, 1 + self.arrays.drafted[step.slot]).astype(np.int32)
        widest = 1 if width.max() == 1 else self.arrays.k + 1
        return self.graphs[size, widest].run(step.slot, self.arrays.length[step.slot], width)


def free_bytes(device: torch.device) -> int:
    """Bytes of the device that nobody has; 0 where that is unknown."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0


def _layout(rows: int, width: int) -> tuple[np.ndarray, ...]:
    """Arrays of the shapes and dtypes that a step's numbers have: positions, places of the tokens that run and of those
    that come next in `Arrays.tokens`, then slot, start, width and offset of each row."""
    tokens = np.empty((rows, width), np.int64)
    return (tokens,) * 3 + (np.empty(rows, np.int32),) * 4


def captured(recorder: Recorder, body: Body, what: str) -> Body:
    """What does `body` again. Raises OffroadError, naming `what`, where a kernel cannot be captured."""
    try:
        return recorder(body)
    except RuntimeError as error:
        raise OffroadError(
            f"the CUDA graph of {what}",
            found=str(error),
            accepted="kernels that do no host work",
            next="--enforce-eager runs without graphs",
        ) from error


def judged(hidden: torch.Tensor, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(the best token of each row, the same or its complement where a value is not finite), int64 [rows]."""
    best = logits.argmax(-1)
    mark = hidden.float().sum(-1) + logits.gather(-1, best[:, None])[:, 0]
    return best, torch.where(torch.isfinite(mark), best, ~best)


class _Graph:
    """One size: views of the shared buffers, and what replays."""

    def __init__(self, graphs: Graphs, rows: int, width: int, most: int, recorder: Recorder) -> None:
        self.all, self.width, self.tokens = graphs, width, rows * width
        host, there, self.nbytes = graphs.numbers.views(_layout(rows, width))
        self.positions, self.places, self.following, self.slot, self.start, self.widths, self.offset = host
        self.here = [tensor.flatten() for tensor in there[:3]]
        device, positions = graphs.arrays.device, self.here[0]
        self.rows = Rows(
            ids=graphs.ids[: self.tokens],
            positions=positions,
            slot=self.slot,
            start=self.start,
            # What kernels size their grids by while they are captured: the most. On a CPU nothing is captured, and
            # reference kernels read the step's own.
            width=self.widths if device.type == "cpu" else np.full(rows, width, np.int32),
            offset=self.offset,
            slot_t=there[3],
            start_t=there[4],
            width_t=there[5],
            offset_t=there[6],
            verify=rows,
            wanted=torch.arange(self.tokens, device=device),
            wanted_width=np.full(rows, width, np.int32),
            streams=positions.expand(3, -1) if graphs.arrays.streams else None,
        )
        self._fill(*(np.zeros(0, np.int32) for _ in range(3)))
        self.replay = captured(recorder, lambda: self._body(most), f"{rows} rows of {width} tokens")

    def _fill(self, slot: np.ndarray, start: np.ndarray, width: np.ndarray) -> None:
        """Writes the step's numbers for the rows that it has, and empty rows; sends them."""
        graphs, count = self.all, len(slot)
        graphs.numbers.reserve()
        for array, values in ((self.slot, slot), (self.start, start), (self.widths, width)):
            array[:count], array[count:] = values, 0
        columns, steps = graphs.arrays.tokens.shape[1], np.arange(self.width)
        self.offset[:] = np.arange(len(self.slot)) * self.width
        np.minimum(self.start[:, None].astype(np.int64) + steps, columns - 1, out=self.positions)
        first = self.slot[:, None].astype(np.int64) * columns
        np.add(first, self.positions, out=self.places)
        np.add(first, np.minimum(self.positions + 1, columns - 1), out=self.following)
        graphs.numbers.upload(self.nbytes)

    def _body(self, most: int) -> None:
        """What is captured. Where there are drafts the runner compares them, and stores tokens, afterwards."""
        graphs, count = self.all, self.tokens
        _, places, following = self.here
        known = graphs.arrays.tokens.view(-1)
        torch.take(known, places, out=self.rows.ids)
        hidden = graphs.model.forward(self.rows, graphs.ops)
        graphs.arrays.settle(self.rows)
        logits = graphs.ops.logits(hidden)
        if graphs.hidden is None or graphs.logits is None:  # in the first run, before anything is captured
            graphs.hidden = hidden.new_empty((most, hidden.shape[1]))
            graphs.logits = logits.new_empty((most, logits.shape[1]))
        graphs.hidden[:count].copy_(hidden)
        graphs.logits[:count].copy_(logits)
        best, graphs.answers[:count] = judged(hidden, logits)
        if self.width == 1:
            known.put_(following, best)

    def run(self, slot: np.ndarray, start: np.ndarray, width: np.ndarray) -> Forward:
        self._fill(slot, start, width)
        self.replay()
        graphs, count = self.all, len(slot)
        assert graphs.hidden is not None
        assert graphs.logits is not None
        rows = self._live(count, width)
        live: slice | np.ndarray = slice(count * self.width)
        picked: slice | torch.Tensor = live
        if (width != self.width).any():
            live = np.flatnonzero(np.arange(self.width) < width[:, None])
            picked = torch.from_numpy(live).to(graphs.arrays.device, non_blocking=True)
        hidden = graphs.hidden[picked]
        return Forward(
            rows,
            graphs.ops,
            graphs.hidden[: self.tokens] if graphs.arrays.tapped else hidden,
            hidden,
            graphs.logits[picked],
            graphs.answers[: self.tokens],
            live,
            self.width == 1,
        )

    def _live(self, count: int, width: np.ndarray) -> Rows:
        """The step's rows, as the runner reads them; its arrays are copies, since the graph's own are overwritten."""
        full, width = self.rows, width.astype(np.int32)
        return Rows(
            ids=full.ids,
            positions=full.positions,
            slot=full.slot[:count].copy(),
            start=full.start[:count].copy(),
            width=width,
            offset=full.offset[:count].copy(),
            slot_t=full.slot_t[:count],
            start_t=full.start_t[:count],
            width_t=full.width_t[:count],
            offset_t=full.offset_t[:count],
            verify=count,
            wanted=full.wanted,
            wanted_width=width,
            streams=full.streams,
        )
