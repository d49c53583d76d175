"""Bytes: what a block, a slot and the weights take, and how memory is divided before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm, prod

from offroad.device.profile import DeviceProfile
from offroad.errors import PlanError
from offroad.models.spec import (
    AttentionSpec,
    Item,
    LinearSpec,
    ModelSpec,
    Paged,
    Plane,
    Ring,
    ScalePlane,
    SparseMlaSpec,
    SparsePaged,
)
from offroad.ops.cells import DRAFTER, MODEL, Cell, Choice
from offroad.ops.workspace import Workspace, workspace_of
from offroad.quant.packed import group_of
from offroad.quant.scheme import layout_of
from offroad.settings import Settings
from offroad.weights.source import Headers

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "uint8": 1}
ITEMSIZE_OF_KIND = {"f32": 4.0, "bf16": 2.0, "f16": 2.0}
_KEPT_WINDOWS = 16  # windows that only prefix hits need take at most this part of the memory
CPU_KV_CAP = 4 * 1024**3  # a default must not take a workstation's whole memory


@dataclass(frozen=True)
class Dtypes:
    """What "activation" and "kv" stand for in a plane."""

    activation: str
    kv: str

    def of(self, plane: Plane) -> str:
        return {"activation": self.activation, "kv": self.kv}.get(plane.dtype, plane.dtype)


@dataclass(frozen=True)
class Memory:
    """The byte budget. Blocks include block 0, the bin, which nothing is read from; `tables` are tokens, block tables
    and angles, `workspace` is the sum of `workspaces`."""

    total: int
    budget: int
    weights: int
    workspace: int
    tables: int
    history_block_bytes: int
    history_blocks: int
    window_block_bytes: int
    window_blocks: int
    slot_bytes: int
    slots: int
    checkpoint_bytes: int
    checkpoints: int
    graphs: int = 0
    workspaces: Workspace = Workspace()

    @property
    def kv(self) -> int:
        return self.history_block_bytes * self.history_blocks + self.window_block_bytes * self.window_blocks

    @property
    def states(self) -> int:
        return self.slot_bytes * self.slots + self.checkpoint_bytes * self.checkpoints

    @property
    def used(self) -> int:
        return self.weights + self.workspace + self.tables + self.kv + self.states + self.graphs

    @property
    def headroom(self) -> int:
        return self.budget - self.used


def plane_bytes(planes: tuple[Plane, ...], dtypes: Dtypes) -> int:
    """Bytes of one row of all these planes."""
    return sum(plane.numel * ITEMSIZE[dtypes.of(plane)] for plane in planes)


def row_bytes(item: Item, dtypes: Dtypes) -> int:
    """Bytes of one row of an item: all planes."""
    planes = [p for p in getattr(item, "planes", ()) if not isinstance(p, ScalePlane) or ITEMSIZE[dtypes.kv] == 1]
    return plane_bytes(tuple(planes), dtypes)


def block_of(spec: ModelSpec) -> int:
    """Tokens in a block: the smallest multiple of 64 at which every item has whole rows, and pages as long as their
    kernels want them."""
    pages = [item for layer in spec.layers for _, item in layer.items if isinstance(item, Paged)]
    return lcm(64, *(item.rate * (item.page if isinstance(item, SparsePaged) else 1) for item in pages))


def _paged(spec: ModelSpec, window: bool) -> list[Paged]:
    return [
        item
        for layer in spec.layers
        for _, item in layer.items
        if isinstance(item, Paged) and (item.window is not None) == window
    ]


def rings(spec: ModelSpec) -> list[Ring]:
    """Those of all layers."""
    return [item for layer in spec.layers for _, item in layer.items if isinstance(item, Ring)]


def kv_bytes_per_token(spec: ModelSpec, dtypes: Dtypes) -> int:
    """Bytes that grow with each token, rounded down: history rows."""
    return int(sum(row_bytes(i, dtypes) / i.rate for i in _paged(spec, window=False)))


def window_bytes(spec: ModelSpec, dtypes: Dtypes) -> int:
    """Bytes of one sequence's full windows, without the slack of blocks."""
    return sum(row_bytes(i, dtypes) * i.window for i in _paged(spec, window=True))


def block_bytes(spec: ModelSpec, dtypes: Dtypes, block: int) -> tuple[int, int]:
    """(history, window) bytes of one block: one page in each item of that residency."""
    history = sum(row_bytes(i, dtypes) * block // i.rate for i in _paged(spec, window=False))
    return history, sum(row_bytes(i, dtypes) * block for i in _paged(spec, window=True))


def state_bytes(spec: ModelSpec, dtypes: Dtypes, k: int) -> int:
    """Bytes of one slot's rings, with the records of those that are replayed."""
    return sum(
        row_bytes(i, dtypes) * i.capacity(k) + plane_bytes(i.records, dtypes) * i.replayed(k) for i in rings(spec)
    )


def moved_bytes(spec: ModelSpec, dtypes: Dtypes) -> int:
    """Bytes that a token moves of rings: it reads the rows before it and writes its own; where records are replayed, it
    reads the state and half as many records as may be behind it, writes one, and the state at every `lag`-th token."""

    def moved(ring: Ring) -> float:
        row = row_bytes(ring, dtypes)
        if ring.store == "rows":
            return (ring.back + 1) * row
        return row * (1 + 1 / ring.lag) + plane_bytes(ring.records, dtypes) * (ring.lag / 2 + 1)

    return int(sum(moved(ring) for ring in rings(spec)))


def checkpoint_bytes(spec: ModelSpec, dtypes: Dtypes) -> int:
    """Bytes of one checkpoint: the rows of every ring that a resume needs."""
    return sum(row_bytes(i, dtypes) * i.resume for i in rings(spec))


def window_keep(spec: ModelSpec) -> int:
    """The most old tokens that a reader of window pages needs; 0 without such pages."""
    return max((i.keep for i in _paged(spec, window=True)), default=0)


def packed_bytes(spec: ModelSpec, headers: Headers, cells: dict[Cell, Choice], dtype: str) -> dict[Cell, int]:
    """Bytes of each packed weight by its decode cell: dense ones in `dtype`, others about as large as they are stored.

    A rank's spec has its part of each weight, `headers` have the whole.
    """
    outside = [spec.embedding, *spec.linears, *([spec.head] if spec.head else [])]
    linears = [(MODEL, linear) for linear in outside]
    if spec.drafted and spec.draft is not None:
        linears += [(DRAFTER, linear) for linear in spec.draft.linears]
    linears += [(i, linear) for i, layer in enumerate(spec.layers) for linear in layer.linears]
    keys = {Cell(i, linear.use, "decode"): linear for i, linear in linears}
    return {cell: _packed_bytes(cells[cell], linear, headers, dtype) for cell, linear in keys.items()}


def tensor_bytes(spec: ModelSpec) -> int:
    """Bytes of the tensors outside linears: fp32, indices int64."""
    tensors = [*spec.tensors, *(tensor for layer in spec.layers for tensor in layer.tensors)]
    tensors += spec.draft.tensors if spec.drafted and spec.draft is not None else ()
    return sum((8 if tensor.transform == "index" else 4) * prod(tensor.shape) for tensor in tensors)


def _packed_bytes(choice: Choice, linear: LinearSpec, headers: Headers, dtype: str) -> int:
    if choice.layout == "dense":
        return linear.n * linear.k * ITEMSIZE[dtype]
    stored = [headers[name] for name in linear.tensors(headers) if name in headers]
    fused = layout_of(tuple(header.kind for header in stored)) if stored else ""
    whole = sum(prod(h.shape) for h in stored)
    share = linear.n * linear.k / max(1, whole)
    return int(sum(prod(h.shape) * _width(h.kind, choice.layout, h.shape[-1], fused) for h in stored) * share)


def _width(kind: str, layout: str, k: int, fused: str = "") -> float:
    """Bytes that a weight stored as `kind` takes in memory: its code, and its share of fp32 scales (and minima). CPU
    kernels widen what they cannot read. `fused`: the canonical layout of all parts, if there are others."""
    family, own = kind.partition(".")[0], layout.startswith("cpu.")
    if family in ITEMSIZE_OF_KIND:
        return 4.0 if own and kind == "f16" else ITEMSIZE_OF_KIND[family]
    group = 32 if family == "gguf" else group_of(kind, k)
    if layout.startswith("triton."):  # scales in 16 bits, and as many minima; of fp8 and of GGUF's kinds in 32
        scales = 1 if "nvfp4" in kind else {"fp8": 4, "fp4": 2, "gguf": 8}.get(family, 4)
        return (0.5 if layout == "triton.w4" else 1.0) + scales / group
    if layout.startswith("cuda."):  # scales in 16 bits, of integers as many zeros
        four_bits = (fused or layout_of((kind,))) in ("affine4", "fp4")
        return (0.5 if four_bits else 1.0) + (2 if family in ("fp8", "fp4") else 4) / group
    if family == "fp8":
        return 4.0 if own else 1 + 4 / group
    if family == "fp4":
        return (1.0 if own else 0.5) + 4 / group
    return (0.5 if layout_of((kind,)) == "affine4" and layout != "affine8" else 1.0) + 8 / group


@dataclass(frozen=True)
class Budget:
    """What `divide` decides."""

    memory: Memory
    max_len: int
    notes: tuple[str, ...]


def _table_bytes(spec: ModelSpec, length: int, slots: int, block: int) -> int:
    """Known tokens (int64) and two block tables (int32) a slot, and angles of each rope (fp32)."""
    ropes = {layer.mixer.rope for layer in spec.layers if isinstance(layer.mixer, AttentionSpec | SparseMlaSpec)}
    return slots * length * 8 + 2 * slots * 4 * (length // block + 2) + sum(4 * rope.dim * length for rope in ropes)


def _checkpoints(spec: ModelSpec, settings: Settings, each: int, room: int) -> int:
    """Places for checkpoints: by the bytes asked for, else an eighth of what is left, at most 4 for each sequence."""
    if not each or not settings.enable_prefix_caching:
        return 0
    if settings.checkpoint_memory_bytes:
        return settings.checkpoint_memory_bytes // each
    return max(0, min(4 * settings.max_num_seqs, room // 8 // each))


def _window_blocks(settings: Settings, keep: int, k: int, block: int, spare: int) -> int:
    """ceil((W - 1 + 2 (k + 1)) / B) + 1 blocks for each sequence, and up to as many again, if `spare` are there, for
    windows of marks: later prefix hits need them. At least as many more as the chunks of one step take, whose old
    windows stay until commit."""
    each = -(-(keep + 2 * (k + 1)) // block) + 1
    twice = settings.max_num_seqs * each
    chunks = -(-settings.max_num_batched_tokens // block) + settings.max_num_seqs
    return twice + min(twice, max(chunks, spare)) + 1


def _too_heavy(weights: int, budget: int) -> PlanError:
    """The weights alone are more than there may be: no context is short enough."""
    return PlanError(
        "memory for the weights",
        found=f"{weights:,} bytes",
        accepted=f"less than {budget:,} bytes, the part of the device's memory that may be used",
        next="take a checkpoint of fewer bits or a device with more memory, or raise --memory-utilization",
    )


def _too_little(
    wanted: int, room: int, fits: int, taken: int, budget: int, need: int, workspace: Workspace
) -> PlanError:
    """`room` bytes hold `fits` tokens, where a context of `wanted` tokens needs `need` bytes."""
    return PlanError(
        f"memory for a context of {wanted} tokens",
        found=f"{room:,} bytes for {fits} tokens: of {budget:,} bytes, {taken:,} are for weights, windows, states, "
        f"tables and workspace ({workspace.describe()})",
        accepted=f"{need:,} bytes",
        next="lower --max-model-len or --max-num-seqs, or raise --memory-utilization",
    )


def _too_few_asked(wanted: int, asked: int, fits: int, need: int) -> PlanError:
    """The same where --kv-cache-memory-bytes are what is short; `need` are all that they would have to be."""
    return PlanError(
        f"--kv-cache-memory-bytes for a context of {wanted} tokens",
        found=f"{asked:,} bytes, which hold {fits} tokens beside windows and checkpoints",
        accepted=f"{need:,} bytes",
        next="raise it, or lower --max-model-len or --max-num-seqs",
    )


def _room(settings: Settings, device: DeviceProfile, left: int, windows: int) -> int:
    """Bytes for checkpoints and history, of those `left`; what is set for caches holds the windows too."""
    if settings.kv_cache_memory_bytes:
        return min(left, settings.kv_cache_memory_bytes - windows)
    return min(left, CPU_KV_CAP) if device.kind == "cpu" else left


def divide(
    spec: ModelSpec,
    device: DeviceProfile,
    settings: Settings,
    weights: int,
    dtypes: Dtypes,
    block: int,
    k: int,
    graphs: int = 0,
    cells: dict[Cell, Choice] | None = None,
) -> Budget:
    """Divides the memory among weights, slots, windows, checkpoints and history; `graphs` bytes are taken already.
    `cells`: whose kernels need memory of their own.

    Raises PlanError with both numbers."""
    if settings.max_model_len > spec.max_len:
        raise PlanError("--max-model-len", found=settings.max_model_len, accepted=f"at most the model's {spec.max_len}")
    budget = int(device.memory * settings.memory_utilization)
    if weights >= budget:
        raise _too_heavy(weights, budget)
    workspace = workspace_of(spec, device, settings, ITEMSIZE[dtypes.activation], cells)
    history, window = block_bytes(spec, dtypes, block)
    slots = settings.max_num_seqs + 1  # slot 0 is the bin
    slot, each = state_bytes(spec, dtypes, k), checkpoint_bytes(spec, dtypes)
    keep = window_keep(spec)
    wanted = settings.max_model_len or spec.max_len
    window_blocks = _window_blocks(settings, keep, k, block, budget // (_KEPT_WINDOWS * max(window, 1))) if keep else 0
    tables = _table_bytes(spec, wanted + k + 1, slots, block)
    fixed = weights + graphs + workspace.total + tables + slots * slot + window_blocks * window
    room = _room(settings, device, budget - fixed, window_blocks * window)
    places = _checkpoints(spec, settings, each, room)
    room -= places * each
    blocks = room // history if history else settings.max_num_seqs * -(-wanted // block) + 1
    fits = max(0, blocks - 2) * block
    least = settings.max_model_len or min(wanted, 256)
    if fits < least:
        need = (-(-least // block) + 2) * history
        if settings.kv_cache_memory_bytes and room + places * each < budget - fixed:
            # Windows and checkpoints are of those bytes too, and an eighth of more is again for checkpoints.
            beside = window_blocks * window + _checkpoints(spec, settings, each, need * 8 // 7) * each
            raise _too_few_asked(least, settings.kv_cache_memory_bytes, fits, need + beside)
        raise _too_little(least, max(room, 0), fits, fixed + places * each, budget, need, workspace)
    max_len = min(wanted, fits)
    notes = () if max_len == wanted else (f"context {max_len} of the model's {wanted}: what fits in memory",)
    tables = _table_bytes(spec, max_len + k + 1, slots, block)
    enough = settings.max_num_seqs * (-(-(max_len + k) // block) + 1) + 1
    blocks = min(blocks, enough)
    paged = (history, blocks, window, window_blocks)
    memory = Memory(
        device.memory, budget, weights, workspace.total, tables, *paged, slot, slots, each, places, graphs, workspace
    )
    return Budget(memory, max_len, notes)
