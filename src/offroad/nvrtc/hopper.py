"""Kernels for Hopper in CUDA C++ as entries of the registry. Each has Triton's beside it for what it is not for, so a
cell's kernel is both; Triton and NVRTC are imported by `bind`.
"""

from __future__ import annotations

from functools import partial

from offroad.device.profile import DeviceProfile
from offroad.nvrtc import attention_few as few
from offroad.nvrtc.linear_args import SHARED
from offroad.ops.spec import Bound, Problem, Registry
from offroad.quant.packed import group_of
from offroad.triton_kernels import attention as paged
from offroad.triton_kernels import delta
from offroad.triton_kernels.kernel import Limits, TritonKernel
from offroad.triton_kernels.linear import W8A8, limits_of, workspace
from offroad.triton_kernels.linear_pack import BLOCK_K, BLOCK_N, W4, W8
from offroad.triton_kernels.memory import split_bytes

LINEAR_W4, LINEAR_W8 = "hopper.linear_w4", "hopper.linear_w8"
GATED, DELTA, ATTENTION = "hopper.gated_linear", "hopper.gated_delta", "hopper.paged_decode"
HOPPER = (9, 0)
DIM, TAPS = 128, 4  # of heads, of the convolution
STORED = {W4: "affine4.", W8: "fp8."}
READS = {W4: "4-bit integers with scales and zero points", W8: "numbers in e4m3 with scales"}
LEAST_GROUP = {W4: 32, W8: BLOCK_K}
LEAST_BLOCKS = 0.6  # of the SMs, for linears of up to 16 tokens: with fewer outputs blocks would have to share k
_OURS = "up to 64 tokens by CUDA C++ kernels for Hopper whose warps have tasks apart"
_SMALL = f"up to 16 with outputs for less than {100 * LEAST_BLOCKS:.0f} % of the SMs"
FOR_LINEARS = {
    W4: f"{_OURS}; others, {_SMALL}, and 9 to 16 with zero points of small groups, by Triton's",
    W8: f"{_OURS}; others, and {_SMALL}, by Triton's",
}
FOR_GATED = "as Hopper's kernels of linear:gate_up, the activation behind their sums; other tokens by Triton's"
FOR_ATTENTION = (
    "by a CUDA C++ kernel for Hopper, whose warps have partitions of all rows alike; less than "
    f"{few.LEAST_STREAMS} rows times KV heads by Triton's, with a window or tables for less than {few.LONG:,} positions"
)
FOR_DELTA = "rows of one token by a CUDA C++ kernel, a warp of which starts copies ahead, others and chunks by Triton's"


def _elsewhere(device: DeviceProfile) -> str | None:
    if device.compute_capability != HOPPER:
        return f"is for compute capability 9.0; device: {device.name}"
    if device.source == "probe" and device.tool("nvrtc") is None:
        return "needs NVRTC and cuda-bindings, which torch for CUDA 13 brings: pip install 'offroad[sm70]' for CUDA 12"
    return None


def _linear_limits(layout: str) -> Limits:
    least = LEAST_GROUP[layout]

    def limits(device: DeviceProfile, problem: Problem) -> str | None:
        if reason := _elsewhere(device):
            return reason
        if other := sorted(kind for kind in problem.stored if not kind.startswith(STORED[layout])):
            return f"reads {READS[layout]}; stored: {', '.join(other)}"
        k = problem.size("k")
        if k % 8:
            return f"needs rows of x of whole 16 bytes: a multiple of 8 columns, not {k:,}"
        if small := sorted(kind for kind in problem.stored if group_of(kind, k) < min(least, k)):
            return f"needs groups of {least} and more; stored: {', '.join(small)}"
        return limits_of(layout)(device, problem)

    return limits


def _gated_limits(device: DeviceProfile, problem: Problem) -> str | None:
    if reason := _elsewhere(device):
        return reason
    needed = {"linear:gate_up": (LINEAR_W4, LINEAR_W8, W8A8), "gated_activation": ("triton.gated_activation",)}
    for part, kernels in needed.items():
        if (found := dict(problem.parts).get(part)) not in kernels:
            names = " and ".join(" or ".join(names) for names in needed.values())
            return f"does what {names} do; the plan has {found or 'no kernel'} for {part}"
    size = problem.size("n") // 2
    return f"needs a multiple of {BLOCK_N} outputs of gate and up each, not {size:,}" if size % BLOCK_N else None


def _delta_limits(device: DeviceProfile, problem: Problem) -> str | None:
    if reason := _elsewhere(device):
        return reason
    if "replay" not in problem.features:
        return "is for states that are replayed from records; these are written at every token"
    dims = tuple(problem.size(name) for name in ("key_dim", "value_dim", "kernel"))
    return None if dims == (DIM, DIM, TAPS) else f"needs heads of 128 by 128 and a convolution of 4, not {dims}"


def _attention_limits(device: DeviceProfile, problem: Problem) -> str | None:
    if reason := _elsewhere(device):
        return reason
    dim, block = problem.size("head_dim"), problem.size("block")
    eight = problem.kv_dtype in paged.KINDS
    if not eight and problem.kv_dtype != "bfloat16":
        return f"reads rows in bfloat16, {' and '.join(paged.KINDS)}; asked: {problem.kv_dtype}"
    if dim not in few.DIMS[eight:]:
        return f"takes heads of {', '.join(map(str, few.DIMS[eight:]))} with rows in {problem.kv_dtype}; asked: {dim}"
    if block < few.LEAST_BLOCK or block & (block - 1):
        return f"needs blocks of a power of 2 of {few.LEAST_BLOCK} tokens and more; planned: {block}"
    return paged.limits(paged.DECODE)(device, problem)


def _bind_attention(device: DeviceProfile, problem: Problem) -> Bound:
    from offroad.triton_kernels import dependent

    dependent.allow(few.EARLY)
    return partial(few.attention, other=paged.bind_decode(device, problem), most=paged.room(device.memory))


def _bind_linear(device: DeviceProfile, problem: Problem) -> Bound:
    from offroad.nvrtc import linear_by_rows
    from offroad.triton_kernels import dependent
    from offroad.triton_kernels.linear_run import card_of

    dependent.allow(linear_by_rows.MOST)
    return partial(getattr(linear_by_rows, problem.op), on=card_of(device))


def _bind_delta(device: DeviceProfile, problem: Problem) -> Bound:
    from offroad.nvrtc import delta_token
    from offroad.triton_kernels.delta_jit import gated_delta
    from offroad.triton_kernels.delta_replay_jit import Single

    single = Single(delta_token.takes, partial(delta_token.single, sms=device.units))
    return partial(gated_delta, tiles=delta.tiles(device, problem.dtype), single=single)


def _attention_sums(device: DeviceProfile, problem: Problem) -> int:
    return max(few.partials(device, problem), paged.partials(device, problem))


def _whole_block(device: DeviceProfile, problem: Problem) -> int:
    return SHARED


def _delta_shared(device: DeviceProfile, problem: Problem) -> int:
    return delta.tiles(device, problem.dtype).shared


def _sums(device: DeviceProfile, problem: Problem) -> int:
    return split_bytes(device.units)


BFLOAT16 = frozenset({"bfloat16"})


def register(registry: Registry) -> None:
    """Adds the linears, attention and Gated DeltaNet; their ops must be there."""
    linears = [
        TritonKernel(
            name,
            "linear",
            _bind_linear,
            _linear_limits(layout),
            _whole_block,
            features=frozenset({"bias"}),
            dtypes=BFLOAT16,
            layout=layout,
            reason=FOR_LINEARS[layout],
            cost=0.9,
            invariant=False,
            workspace=workspace,
        )
        for name, layout in ((LINEAR_W4, W4), (LINEAR_W8, W8))
    ]
    rule = TritonKernel(
        DELTA,
        "gated_delta",
        _bind_delta,
        _delta_limits,
        _delta_shared,
        features=frozenset({"silu", "sigmoid", "replay"}),
        dtypes=BFLOAT16,
        reason=FOR_DELTA,
        cost=0.9,
        temporary=delta.chunk_bytes,
    )
    attention = TritonKernel(
        ATTENTION,
        "attention",
        _bind_attention,
        _attention_limits,
        _whole_block,
        features=paged.FEATURES,
        dtypes=BFLOAT16,
        reason=FOR_ATTENTION,
        cost=0.9,
        invariant=False,
        workspace=_attention_sums,
    )
    for kernel in (*linears, rule, attention):
        registry.add(kernel)


def register_gated(registry: Registry) -> None:
    """Adds the linear with a gated activation behind it; the op must be there."""
    registry.add(
        TritonKernel(
            GATED,
            "gated_linear",
            _bind_linear,
            _gated_limits,
            _whole_block,
            features=frozenset({"bias", "silu", "gelu_tanh"}),
            dtypes=BFLOAT16,
            reason=FOR_GATED,
            cost=0.9,
            invariant=False,
            workspace=_sums,
        )
    )
