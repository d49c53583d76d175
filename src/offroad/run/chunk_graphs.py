"""Steps of one chunk as CUDA graphs: what a short prompt, or the tail of one behind a prefix hit, waits for.

Eager, such a step takes the host several times as long as the device. A graph is made for a number of tokens, its size,
and a step takes the smallest that holds its chunk. Grids, tiles and GEMMs are those of an eager step of the size, and
so are a token's numbers: linears that do otherwise from a number of rows on (dequantise weights, round activations) do
so for every chunk of a size that has as many.

The chunk's width lies on the device. Tokens behind it are dead: they have ids and positions that exist, each is
computed from itself alone, no kernel stores their rows, states or columns, and no token attends to them.

The last token's logits are computed whether or not they are asked for. The best token is stored at the new length if
they are, and otherwise in slot 0, the bin: what follows a chunk in the middle of a prompt is known.
"""

from __future__ import annotations

import numpy as np
import torch

from offroad.models.registry import Model
from offroad.ops.bound import Ops
from offroad.run.arrays import Arrays
from offroad.run.graphs import Forward, Recorder, captured, free_bytes, judged
from offroad.run.rows import Rows
from offroad.run.transfer import Mirror, packed_offsets
from offroad.schedule.step import Kind, Step

_CHUNK = int(Kind.CHUNK)


class ChunkGraphs:
    """The graphs of chunks of `sizes` tokens. `nbytes`: memory that making them took, as far as the device tells."""

    @torch.inference_mode()
    def __init__(self, sizes: tuple[int, ...], model: Model, ops: Ops, arrays: Arrays, recorder: Recorder) -> None:
        """Captures every size, the largest first: later ones fit into its memory. `ops` are those of prefill. Raises
        OffroadError where a kernel cannot be captured."""
        self.model, self.ops, self.arrays = model, ops, arrays
        device, largest = arrays.device, max(sizes)
        self.numbers = Mirror(packed_offsets(_layout(largest))[1], device)
        self.ids = torch.zeros(largest, dtype=torch.int64, device=device)
        self.every = torch.arange(largest, device=device)
        self.answers = torch.zeros(1, dtype=torch.int64, device=device)
        self.states: torch.Tensor | None = None  # of all tokens, where a drafter eats them, else as `hidden`
        self.hidden: torch.Tensor | None = None
        self.logits: torch.Tensor | None = None
        free = free_bytes(device)
        self.graphs = {size: _Graph(self, size, recorder) for size in sorted(sizes, reverse=True)}
        self.sizes = sorted(sizes)
        self.nbytes = free - free_bytes(device)

    def run(self, step: Step) -> Forward | None:
        """The step's forward pass by a graph; None if there is none for it."""
        if len(step.slot) != 1 or step.kind[0] != _CHUNK or step.scores[0]:
            return None
        slot, width = int(step.slot[0]), int(step.width[0])
        size = next((size for size in self.sizes if size >= width), None)
        if size is None:
            return None
        return self.graphs[size].run(slot, int(self.arrays.length[slot]), width, bool(step.samples[0]))


def _layout(size: int) -> tuple[np.ndarray, ...]:
    """Arrays of the shapes and dtypes that a step's numbers have: positions and places in `Arrays.tokens` of its
    tokens, the index of the last real one, the place of the best token, then slot, start, width, offset and the last
    real token's position."""
    one, tokens, number = np.empty(1, np.int64), np.empty(size, np.int64), np.empty(1, np.int32)
    return (tokens,) * 2 + (one,) * 2 + (number,) * 5


class _Graph:
    """One size: views of the shared buffers, and what replays."""

    def __init__(self, graphs: ChunkGraphs, size: int, recorder: Recorder) -> None:
        self.all, self.size = graphs, size
        self.host, there, self.nbytes = graphs.numbers.views(_layout(size))
        positions, self.places, self.last, self.following, slot_t, start_t, width_t, offset_t, last_t = there
        device, (slot, start, width, offset, last) = graphs.arrays.device, self.host[4:]
        one = np.ones(1, np.int32)
        alone = Rows(
            ids=graphs.ids[:1],
            positions=positions[:1],
            slot=slot,
            start=last,
            width=one,
            offset=offset,
            slot_t=slot_t,
            start_t=last_t,
            width_t=torch.ones(1, dtype=torch.int32, device=device),
            offset_t=offset_t,
            verify=1,
            wanted=torch.zeros(1, dtype=torch.int64, device=device),
            wanted_width=one,
        )
        self.rows = Rows(
            ids=graphs.ids[:size],
            positions=positions,
            slot=slot,
            start=start,
            # What kernels size their grids by while they are captured: the most. On a CPU nothing is captured, and
            # reference kernels read the step's own.
            width=width if device.type == "cpu" else np.full(1, size, np.int32),
            offset=offset,
            slot_t=slot_t,
            start_t=start_t,
            width_t=width_t,
            offset_t=offset_t,
            verify=0,
            wanted=graphs.every[:size] if graphs.arrays.tapped else self.last,
            wanted_width=one,
            scored=self.last if graphs.arrays.tapped else None,
            streams=positions.expand(3, -1) if graphs.arrays.streams else None,
            narrowed=None if graphs.arrays.tapped else alone,
        )
        self._fill(0, 0, 1, False)  # a token of the bin
        self.replay = captured(recorder, self._body, f"a chunk of {size} tokens")

    def _fill(self, slot: int, start: int, width: int, samples: bool) -> None:
        """Writes the step's numbers and sends them. Dead tokens have the last places there are, or others' ids."""
        graphs, columns = self.all, self.all.arrays.tokens.shape[1]
        graphs.numbers.reserve()
        positions, places, wanted, following, *row = self.host
        np.minimum(start + np.arange(self.size), columns - 1, out=positions)
        np.add(slot * columns, positions, out=places)
        wanted[0] = width - 1
        following[0] = slot * columns + min(start + width, columns - 1) if samples else 0
        for array, value in zip(row, (slot, start, width, 0, start + width - 1), strict=True):
            array[0] = value
        graphs.numbers.upload(self.nbytes)

    def _body(self) -> None:
        """What is captured."""
        graphs = self.all
        known = graphs.arrays.tokens.view(-1)
        torch.take(known, self.places, out=self.rows.ids)
        states = graphs.model.forward(self.rows, graphs.ops)
        graphs.arrays.settle(self.rows)
        hidden = states if self.rows.scored is None else states[self.rows.scored]
        logits = graphs.ops.logits(hidden)
        if graphs.states is None or graphs.hidden is None or graphs.logits is None:
            # In the first run, before anything is captured.
            most = len(graphs.ids) if graphs.arrays.tapped else 1
            graphs.states = states.new_empty((most, states.shape[1]))
            graphs.hidden, graphs.logits = torch.empty_like(hidden), torch.empty_like(logits)
        graphs.states[: len(states)].copy_(states)
        graphs.hidden.copy_(hidden)
        graphs.logits.copy_(logits)
        best, answers = judged(hidden, logits)
        graphs.answers.copy_(answers)
        known.put_(self.following, best)

    def run(self, slot: int, start: int, width: int, samples: bool) -> Forward:
        self._fill(slot, start, width, samples)
        self.replay()
        graphs, full, live = self.all, self.rows, slice(int(samples))
        assert graphs.states is not None
        assert graphs.hidden is not None
        assert graphs.logits is not None
        # As the runner and drafters read them: copies, since the graph's own are overwritten.
        slots, starts, widths, offsets = (array.copy() for array in self.host[4:8])
        rows = Rows(
            ids=full.ids[:width],
            positions=full.positions[:width],
            slot=slots,
            start=starts,
            width=widths,
            offset=offsets,
            slot_t=full.slot_t,
            start_t=full.start_t,
            width_t=full.width_t,
            offset_t=full.offset_t,
            verify=0,
            wanted=full.wanted[:width] if graphs.arrays.tapped else full.wanted[live],
            wanted_width=np.full(1, samples, np.int32),
            scored=None if full.scored is None else full.scored[live],
            streams=None if full.streams is None else full.streams[:, :width],
        )
        hidden = graphs.hidden[live]
        states = graphs.states[:width] if graphs.arrays.tapped else hidden
        return Forward(rows, graphs.ops, states, hidden, graphs.logits[live], graphs.answers, live, True)
