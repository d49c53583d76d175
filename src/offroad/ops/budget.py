"""Bytes: what a block, a slot and the weights take, and how memory is divided before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass

from offroad.device.profile import DeviceProfile
from offroad.errors import PlanError
from offroad.models.spec import Item, ModelSpec, Paged, Ring
from offroad.ops.cells import MODEL, Cell, Choice
from offroad.settings import Settings
from offroad.weights.source import Headers

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3": 1, "float8_e5m2": 1}
CPU_KV_CAP = 4 * 1024**3  # a default must not take a workstation's whole memory


@dataclass(frozen=True)
class Memory:
    """The byte budget. Blocks include block 0, the bin, which nothing is read from."""

    total: int
    budget: int
    weights: int
    workspace: int
    history_block_bytes: int
    history_blocks: int
    window_block_bytes: int
    window_blocks: int
    slot_bytes: int
    slots: int

    @property
    def kv(self) -> int:
        return self.history_block_bytes * self.history_blocks + self.window_block_bytes * self.window_blocks

    @property
    def used(self) -> int:
        return self.weights + self.workspace + self.kv + self.slot_bytes * self.slots

    @property
    def headroom(self) -> int:
        return self.budget - self.used


def row_bytes(item: Item, kv_dtype: str) -> int:
    """Bytes of one row of an item: all planes."""
    return sum(plane.numel * ITEMSIZE[plane.dtype or kv_dtype] for plane in getattr(item, "planes", ()))


def _items(spec: ModelSpec) -> list[Item]:
    return [item for layer in spec.layers for _, item in layer.items]


def kv_bytes_per_token(spec: ModelSpec, kv_dtype: str) -> int:
    """Bytes that grow with each token: history rows."""
    return sum(row_bytes(i, kv_dtype) // i.rate for i in _items(spec) if isinstance(i, Paged) and not i.window)


def block_bytes(spec: ModelSpec, kv_dtype: str, block: int) -> tuple[int, int]:
    """(history, window) bytes of one block: one page in each item of that residency."""
    history = sum(
        row_bytes(i, kv_dtype) * block // i.rate for i in _items(spec) if isinstance(i, Paged) and not i.window
    )
    window = sum(row_bytes(i, kv_dtype) * block for i in _items(spec) if isinstance(i, Paged) and i.window)
    return history, window


def state_bytes(spec: ModelSpec, kv_dtype: str, k: int) -> int:
    """Bytes of one slot's rings."""
    return sum(row_bytes(i, kv_dtype) * i.capacity(k) for i in _items(spec) if isinstance(i, Ring))


def window_keep(spec: ModelSpec) -> int:
    """The most old tokens that a reader of window pages needs; 0 without such pages."""
    return max((i.keep for i in _items(spec) if isinstance(i, Paged) and i.window), default=0)


def weight_bytes(spec: ModelSpec, headers: Headers, cells: dict[Cell, Choice], dtype: str) -> int:
    """Bytes of the packed weights: dense ones in `dtype`, others about as large as they are stored."""
    total = 4 * spec.hidden * 4 * len(spec.layers)
    linears = [
        (i, linear.name, linear.n * linear.k, linear.parts)
        for i, layer in enumerate(spec.layers)
        for linear in layer.linears
    ]
    if spec.head is not None:
        linears.append((MODEL, "head", spec.vocab * spec.hidden, spec.head.parts))
    for layer, name, numel, parts in linears:
        total += _packed_bytes(
            cells[Cell(layer, f"linear:{name}", "decode")], numel, [p for p, _ in parts], headers, dtype
        )
    return total + _packed_bytes(
        cells[Cell(MODEL, "embed", "decode")], spec.vocab * spec.hidden, [spec.embed], headers, dtype
    )


def _packed_bytes(choice: Choice, numel: int, modules: list[str], headers: Headers, dtype: str) -> int:
    if choice.layout == "dense":
        return numel * ITEMSIZE[dtype]
    stored = [headers[f"{module}.weight"] for module in modules if f"{module}.weight" in headers]
    # Blocks' scales may grow from fp16 to fp32: at most a quarter more than on disk. fp16 is widened by CPU kernels.
    return sum(
        h.nbytes * 5 // 4 if h.kind.startswith("gguf") else h.nbytes * (2 if h.kind == "f16" else 1) for h in stored
    )


@dataclass(frozen=True)
class Budget:
    """What `divide` decides."""

    memory: Memory
    max_len: int
    notes: tuple[str, ...]


def divide(
    spec: ModelSpec, device: DeviceProfile, settings: Settings, weights: int, kv_dtype: str, block: int, k: int
) -> Budget:
    """Divides the memory among weights, slots, window blocks and history blocks. Raises PlanError with both numbers."""
    budget = int(device.memory * settings.memory_utilization)
    chunk = settings.max_num_batched_tokens
    widest = max(linear.n for layer in spec.layers for linear in layer.linears)
    workspace = 4 * (chunk * (4 * spec.hidden + 2 * widest) + settings.max_num_seqs * spec.vocab * 3)
    history, window = block_bytes(spec, kv_dtype, block)
    slots = settings.max_num_seqs + 1  # slot 0 is the bin
    slot = state_bytes(spec, kv_dtype, k)
    keep = window_keep(spec)
    # ceil((W - 1 + 2 (k + 1)) / B) + 1 for each sequence, twice: in prefill the old window stays until commit, and
    # what is not in use keeps the windows of marks for later prefix hits.
    window_blocks = 2 * settings.max_num_seqs * (-(-(keep + 2 * (k + 1)) // block) + 1) + 1 if keep else 0
    fixed = weights + workspace + slots * slot + window_blocks * window
    room = budget - fixed
    notes: list[str] = []
    limit = settings.kv_cache_memory_bytes or (CPU_KV_CAP if device.kind == "cpu" else room)
    if settings.kv_cache_memory_bytes:
        limit -= window_blocks * window
    room = min(room, limit)
    wanted = settings.max_model_len or spec.max_len
    if settings.max_model_len > spec.max_len:
        raise PlanError("--max-model-len", found=settings.max_model_len, accepted=f"at most the model's {spec.max_len}")
    blocks = room // history if history else settings.max_num_seqs * -(-wanted // block) + 1
    fits = max(0, blocks - 2) * block
    if fits < (settings.max_model_len or min(wanted, 256)):
        need = -(-wanted // block) + 2
        raise PlanError(
            f"memory for a context of {wanted} tokens",
            found=f"{max(room, 0):,} bytes for {fits} tokens after {fixed:,} bytes of weights, windows and workspace",
            accepted=f"{need * history:,} bytes",
            next="lower --max-model-len or --max-num-seqs, or raise --kv-cache-memory-bytes or --memory-utilization",
        )
    max_len = min(wanted, fits)
    if max_len < wanted:
        notes.append(f"context {max_len} of the model's {wanted}: what fits in memory")
    enough = settings.max_num_seqs * (-(-(max_len + k) // block) + 1) + 1
    memory = Memory(
        device.memory, budget, weights, workspace, history, min(blocks, enough), window, window_blocks, slot, slots
    )
    return Budget(memory, max_len, tuple(notes))
