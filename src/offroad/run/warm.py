"""The prepare phase of Triton kernels: every specialisation that a plan's steps can need is compiled before the first.

Which tile a linear gets, how many parts of k, which loop attention takes: each follows from numbers of rows. So the
model's forward passes are run on tensors without memory, over every number of tokens at which something may change, and
what they would launch is compiled (`triton_kernels/warm.py`). Layers that are alike are run once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from offroad.device.probe import usable_cores
from offroad.models.registry import Model
from offroad.ops.bound import LayerOps, Ops
from offroad.ops.plan import Plan
from offroad.ops.registry import default_registry
from offroad.run.arrays import Arrays
from offroad.run.prompt import SCORED
from offroad.run.rows import ReplayView, Rows
from offroad.sample.choose import Filters
from offroad.sample.params import SamplingParams
from offroad.sample.sampler import Plain
from offroad.schedule.step import Kind, Start, Step, Want
from offroad.speculate.proposer import Proposer

if TYPE_CHECKING:
    from offroad.run.runner import Runner
    from offroad.triton_kernels.warm import Launches

_log = logging.getLogger(__name__)
Progress = Callable[[float, str], None]
_ALL = 72  # every number of tokens up to here: blocks of single pairs, and tiles for few tokens
_BLOCK, _BLOCKS = 64, 10  # then before, at and behind this many blocks of the widest tile


class Twins:
    """Copies of what holds tensors, with tensors that have sizes, strides and alignment, and no memory."""

    def __init__(self) -> None:
        self.made: dict[int, tuple[Any, Any]] = {}  # the first one is kept alive, so that its id stays its own

    def __call__(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor | dict | list | tuple) or (
            is_dataclass(value) and not isinstance(value, type)
        ):
            if id(value) not in self.made:
                self.made[id(value)] = value, self._twin(value)
            return self.made[id(value)][1]
        return value

    def _twin(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return _without_memory(value)
        if isinstance(value, dict):
            return {key: self(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            items = [self(item) for item in value]
            same = all(new is old for new, old in zip(items, value, strict=True))
            return value if same else type(value)(items)
        found = {f.name: self(getattr(value, f.name)) for f in fields(value) if f.init}
        same = all(new is getattr(value, name) for name, new in found.items())
        return value if same else replace(value, **found)


def _without_memory(tensor: torch.Tensor) -> torch.Tensor:
    size = tensor.element_size()
    shift = tensor.data_ptr() % 16 // size
    span = shift + 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True) if n)
    whole = torch.empty(span, dtype=tensor.dtype, device="meta")
    return whole.as_strided(tensor.shape, tensor.stride(), shift)


def counts(most: int) -> list[int]:
    """Numbers of tokens up to `most` at which a specialisation may begin or end."""
    ends = [_BLOCK * i for i in range(1, _BLOCKS + 1)]
    while ends[-1] < most:
        ends.append(2 * ends[-1])
    found = {*range(1, _ALL + 1), *(end + more for end in ends for more in (-1, 0, 1)), most}
    return sorted(n for n in found if n <= most)


@dataclass(frozen=True)
class Shape:
    """Widths of a step's verify rows and of its chunks."""

    verify: tuple[int, ...]
    chunks: tuple[int, ...] = ()

    def rows(self, arrays: Arrays) -> Rows:
        """Rows of slot 0, the bin, at position 0; one token of each is wanted, or all of a verify row's."""
        width = np.array(self.verify + self.chunks, np.int32)
        wanted = np.array(self.verify + (1,) * len(self.chunks), np.int32)
        zeros = np.zeros(len(width), np.int32)
        return arrays.rows_of(zeros, zeros, width, len(self.verify), wanted)


def verify_shapes(plan: Plan) -> Iterator[Shape]:
    """Steps of verify rows alone."""
    widest = plan.k + 1
    for n in counts(plan.max_num_seqs * widest):
        full, rest = divmod(n, widest)
        yield Shape((widest,) * full + ((rest,) if rest else ()))
        if plan.k and n <= plan.max_num_seqs:
            yield Shape((1,) * n)


def chunk_shapes(plan: Plan) -> Iterator[Shape]:
    """Steps with chunks: alone, each of a token, and behind one or many verify rows of each width, in steps
    whose kernels start early and in others."""
    from offroad.triton_kernels.dependent import most

    for n in counts(max(plan.chunk, plan.max_num_seqs * (plan.k + 1))):
        full, rest = divmod(n, plan.max_len)
        yield Shape((), (plan.max_len,) * full + ((rest,) if rest else ()))
    for rows in {2, plan.max_num_seqs}:
        yield Shape((), (1,) * rows)
    for width in range(1, plan.k + 2):
        for rows in {1, max(1, plan.max_num_seqs - 1)}:
            yield Shape((width,) * rows, (1,))
            yield Shape((width,) * rows, (min(most(), plan.max_len),))


class _Few(list[LayerOps]):
    """Some of a model's layers, which counts them all: inputs of a step are cut into a part for each."""

    def __init__(self, layers: list[LayerOps], count: int) -> None:
        super().__init__(layers)
        self.count = count

    def __len__(self) -> int:
        return self.count


def distinct(ops: Ops) -> Ops:
    """The ops with one of each kind of layers, and the last kind twice: what a model does behind its last layer's
    mixer it does to some tokens only."""
    kinds: dict[Any, LayerOps] = {}
    for layer in ops.layers:
        kinds.setdefault(_kind(layer), layer)
    layers = [*kinds.values(), ops.layers[-1]]
    return replace(ops, layers=_Few(layers, len(ops.layers)) if "per_layer" in ops.model.linears else layers)


def _kind(value: Any) -> Any:
    """What decides which kernels are launched with which sizes, to be compared."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype, value.storage_offset() % 16
    if isinstance(value, dict):
        return tuple((key, _kind(value[key])) for key in sorted(value))
    if isinstance(value, list | tuple):
        return tuple(map(_kind, value))
    if is_dataclass(value) and not isinstance(value, type):
        return type(value), *(_kind(getattr(value, f.name)) for f in fields(value))
    return value if isinstance(value, int | float | str | bool | None) else id(value)


@dataclass(frozen=True)
class Parts:
    """What of a runner launches kernels."""

    plan: Plan
    model: Model
    ops: dict[str, Ops]
    arrays: Arrays
    proposer: Proposer | None
    plain: Plain | None
    vocab: int


def gather(parts: Parts) -> Launches:
    """What the steps of the plan can launch; runs nothing on the device but copies of a few numbers."""
    warm = import_module("offroad.triton_kernels.warm")
    launches, twins = warm.Launches(), Twins()
    ops = {phase: distinct(twins(found)) for phase, found in parts.ops.items()}
    with torch.inference_mode(), warm.collect(launches):
        for phase, shapes in (("decode", verify_shapes), ("prefill", chunk_shapes)):
            for shape in shapes(parts.plan):
                rows = Twins()(shape.rows(parts.arrays))
                hidden = parts.model.forward(rows, ops[phase])
                ops[phase].logits(hidden)
                if parts.proposer is not None:
                    parts.proposer.rehearse(phase, rows, twins)
        for count in counts(SCORED):
            ops["prefill"].logits(hidden.new_empty(count, hidden.shape[1]))
        for ring, _ in twins(parts.arrays.checkpoints):
            if isinstance(ring, ReplayView):  # what checkpoints are made from
                ring.before(0, 0, 1)
        if parts.plain is not None:
            _draw(parts.plain, parts.vocab)
    return launches


def _draw(plain: Plain, vocab: int) -> None:
    from offroad.triton_kernels.dependent import most

    def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    wide, whole = torch.float64, torch.int64
    for rows in (1, 2, most() + 1):
        numbers = [empty(rows, dtype=dtype) for dtype in (wide, wide, wide, whole, whole, whole)]
        plain(empty(rows, vocab, dtype=torch.float32), Filters(*numbers))


def uses_triton(plan: Plan) -> bool:
    """Whether a plan has something to be compiled here."""
    return plan.device.kind == "cuda" and any(name.startswith("triton.") for name in plan.kernels())


def prepare_triton(parts: Parts, progress: Progress) -> str:
    """Compiles what the plan needs and loads it; a line that says how much that was. From here on every compilation is
    counted, and warned of."""
    warm = import_module("offroad.triton_kernels.warm")
    warm.LATE.rest()
    registry = default_registry()
    if host := [name for name in parts.plan.kernels() if not registry.capturable(name)]:
        text = f"Triton kernels are compiled when they are first called: {', '.join(host)} cannot run without memory"
        _log.warning("%s", text)
        return text
    progress(0.0, "looking at what steps launch")
    launches = gather(parts)

    def report(done: int, of: int) -> None:
        progress(done / of, f"{done} of {of} Triton kernels")

    made = warm.compile_all(launches, usable_cores(), report)
    text = f"{len(launches.found)} Triton kernels, {made.compiled} compiled, {made.cached} from {warm.folder()}"
    _log.info("%s", text)
    return text


def begin(runner: Runner) -> None:
    """The last thing before requests: first steps on the device, whose libraries load much when they are first used,
    then every compilation is counted. Nothing to do without Triton kernels on a GPU."""
    if runner.compiled:
        first_steps(runner)
        import_module("offroad.triton_kernels.warm").LATE.watch()


def first_steps(runner: Runner) -> None:
    """Chunks of slot 0, the bin, with each way of drawing a token; what they leave behind is never read."""
    arrays, prompt = runner.arrays, np.zeros(min(20, runner.plan.max_len - 1), np.int64)
    drafting, runner.drafting = runner.drafting, None
    filtered = SamplingParams(temperature=0.7, top_k=20, top_p=0.9, presence_penalty=0.1)
    for params in (filtered, SamplingParams(temperature=0.7), SamplingParams(temperature=0.0)):
        row, chunk = np.zeros(1, np.int32), np.full(1, Kind.CHUNK, np.uint8)
        wants = np.full(1, Want.SAMPLE, np.uint8)
        start = Start(0, prompt, 0, len(prompt), params, 0)
        runner.launch(Step(-1, row, chunk, np.full(1, len(prompt), np.int32), wants, starts=(start,)))
        runner.result()
    runner.drafting = drafting
    arrays.length[0] = arrays.drafted[0] = 0
    arrays.base[0] = 0


def late(plan: Plan) -> int:
    """How many kernels were compiled after all was ready."""
    return import_module("offroad.triton_kernels.warm").LATE.count if uses_triton(plan) else 0
