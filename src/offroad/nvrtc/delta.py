"""Gated DeltaNet for SM70: what kernels/delta.cu is specialised by, and how it is launched."""

from __future__ import annotations

import torch

from offroad.device.profile import DeviceProfile
from offroad.models.spec import GatedDeltaSpec
from offroad.nvrtc import launch
from offroad.nvrtc.compile import Source
from offroad.nvrtc.kernel import CudaKernel
from offroad.nvrtc.launch import LaunchError, Shapes
from offroad.ops.gated_delta import DeltaWeights
from offroad.ops.spec import Bound, Problem
from offroad.run.rows import RingView, Rows

ARGS = "@14P5q8i2f"  # `Args` of the kernels
MAX_KEY_DIM = 128  # numbers of the state that a thread keeps in registers
MAX_VALUE_DIM = 1024
PART = 32  # tokens of a chunk that are solved for at once
# Below, rounding the state to halves shows in outputs that are normed over few columns: chunks go token after token.
LEAST_DIM = 16
SEGMENT = 32  # tokens that a thread of the convolution takes
THREADS = 256
_SHAPES = Shapes.of(
    "gated_delta",
    qkvz="tokens projected",
    ba="tokens gates",
    conv="slots conv_rows channels",
    state="slots state_rows value_heads key_dim value_dim",
    conv_weight="channels kernel",
    a_log="value_heads",
    dt_bias="value_heads",
    norm="value_dim",
)


def source(key_dim: int, value_dim: int, taps: int) -> Source:
    warps = -(-value_dim // 32)
    defines = (("KEY_DIM", key_dim), ("VALUE_DIM", value_dim), ("TAPS", taps))
    return Source("delta.cu", defines, 4 * (4 * key_dim + 2 * warps))


def chunk_source(key_dim: int, value_dim: int) -> Source:
    """For chunks: queries (then updates), keys, the state, two matrices of PART, weights, two of values, tokens."""
    keys, columns = -(-key_dim // 16) * 16, slice_of(value_dim)
    updates = 4 * PART * (columns + 8)
    shared = max(2 * PART * (keys + 8), updates) + 2 * PART * (keys + 8) + 2 * keys * (columns + 8)
    shared += 8 * PART**2 + 2 * PART * (PART + 8) + 8 * PART * (columns + 4) + 20 * PART
    return Source("delta_chunk.cu", (("KEY_DIM", key_dim), ("VALUE_DIM", value_dim)), shared)


def takes_parts(key_dim: int, value_dim: int) -> bool:
    return min(key_dim, value_dim) >= LEAST_DIM


def slice_of(value_dim: int) -> int:
    """Columns of a head that a block has."""
    return 64 if value_dim >= 64 else -(-value_dim // 16) * 16


def bind(device: DeviceProfile, problem: Problem) -> Bound:
    """The op `gated_delta`: verify rows token after token, chunks in parts of PART."""
    key_dim, value_dim = problem.size("key_dim"), problem.size("value_dim")
    made = source(key_dim, value_dim, problem.size("kernel"))
    convolve, rule = launch.load(made, "convolve", ARGS, shares=False), launch.load(made, "rule", ARGS)
    in_parts = problem.phase == "prefill" and takes_parts(key_dim, value_dim)
    if in_parts:
        chunked, slices = chunk_source(key_dim, value_dim), -(-value_dim // slice_of(value_dim))
        chunk = launch.load(chunked, "chunk", ARGS)
        gated_norm = launch.load(chunked, "gated_norm", ARGS, shares=False)

    def gated_delta(
        qkvz: torch.Tensor,
        ba: torch.Tensor,
        conv: RingView,
        state: RingView,
        rows: Rows,
        spec: GatedDeltaSpec,
        weights: DeltaWeights,
        eps: float,
    ) -> torch.Tensor:
        _check(qkvz, ba, conv, state, spec, weights)
        tokens, count, widest = qkvz.shape[0], len(rows.slot), int(rows.width.max())
        mixed = torch.empty((tokens, spec.channels), dtype=qkvz.dtype, device=qkvz.device)
        out = torch.empty((tokens, spec.value_width), dtype=qkvz.dtype, device=qkvz.device)
        _, slots, starts, widths, offsets = rows.addresses
        tensors = (qkvz, ba, mixed, out, conv.data, state.data)
        tensors += (weights.conv, weights.a_log, weights.dt_bias, weights.norm)
        arguments = (
            *(tensor.data_ptr() for tensor in tensors),
            *(slots, starts, widths, offsets),
            *(qkvz.stride(0), ba.stride(0), conv.data.stride(0), *state.data.stride()[:2]),
            *(spec.channels, spec.key_heads, spec.value_heads, conv.capacity, state.capacity),
            *(rows.verify, int(spec.gate == "silu"), 0, eps, 0.0),
        )
        convolve.launch((-(-spec.channels // THREADS), count, -(-widest // SEGMENT)), THREADS, *arguments)
        chunks = count - rows.verify if in_parts else 0
        if alone := count - chunks:
            rule.launch((spec.value_heads, alone, 1), -(-spec.value_dim // 32) * 32, *arguments)
        if chunks:
            chunk.launch((spec.value_heads * slices, chunks, 1), THREADS, *arguments)
            gated_norm.launch((spec.value_heads, chunks, -(-widest // 8)), THREADS, *arguments)
        return out

    return gated_delta


def _check(
    qkvz: torch.Tensor,
    ba: torch.Tensor,
    conv: RingView,
    state: RingView,
    spec: GatedDeltaSpec,
    weights: DeltaWeights,
) -> None:
    sizes = {name: getattr(spec, name) for name in ("channels", "value_heads", "key_dim", "value_dim", "kernel")}
    sizes |= {"projected": spec.channels + spec.value_width, "gates": 2 * spec.value_heads}
    named = {"a_log": weights.a_log, "dt_bias": weights.dt_bias, "norm": weights.norm, "conv_weight": weights.conv}
    _SHAPES.check(sizes, qkvz=qkvz, ba=ba, conv=conv.data, state=state.data, **named)
    halves, floats = (qkvz, ba, conv.data), (state.data, *named.values())
    if any(t.dtype != torch.float16 for t in halves) or any(t.dtype != torch.float32 for t in floats):
        raise LaunchError("gated_delta", found=[t.dtype for t in (*halves, *floats)], accepted="fp16, state in fp32")
    if qkvz.stride(1) != 1 or ba.stride(1) != 1 or not state.data[0, 0].is_contiguous() or conv.data.stride(2) != 1:
        raise LaunchError("gated_delta", found="rows of numbers that stand apart", accepted="neighbouring numbers")
    if conv.data.stride(1) != spec.channels:
        raise LaunchError("gated_delta: conv", found=conv.data.stride(), accepted="rows one after the other")


def limits(problem: Problem) -> str | None:
    key_dim, value_dim = problem.size("key_dim"), problem.size("value_dim")
    if key_dim > MAX_KEY_DIM or key_dim % 4:
        return f"needs key heads of a multiple of 4 up to {MAX_KEY_DIM}; asked: {key_dim}"
    return f"takes value heads up to {MAX_VALUE_DIM}; asked: {value_dim}" if value_dim > MAX_VALUE_DIM else None


def shared_of(problem: Problem) -> int:
    dims = problem.size("key_dim"), problem.size("value_dim")
    return chunk_source(*dims).shared if problem.phase == "prefill" and takes_parts(*dims) else 0


KERNELS = (CudaKernel("cuda.sm70_gated_delta", "gated_delta", bind, limits, shared_of, frozenset({"silu", "sigmoid"})),)
