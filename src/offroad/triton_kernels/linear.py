"""Triton linears as entries of the registry: what they need, and how they are bound. Triton is imported by `bind`."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

import torch

from offroad.device.profile import DeviceProfile
from offroad.ops.linear import linear, linear_a8
from offroad.ops.spec import Bound, Problem, Registry
from offroad.quant.packed import FP8_BLOCKS, PER_BYTE, Packed, group_of
from offroad.quant.scheme import layout_of
from offroad.triton_kernels.kernel import TritonKernel
from offroad.triton_kernels.linear_pack import BLOCK_K, BLOCK_N, W4, W8, dequantised_rows
from offroad.triton_kernels.memory import DENSE_BYTES, dense_bytes, dense_outputs, split_bytes

CANONICAL = {W4: ("affine4", "fp4"), W8: ("affine8", "fp8"), "dense": ("dense",)}
# Bytes of shared memory of the largest tile, as the compiler reports them (tests/cpu/triton_kernels).
SHARED_OF = {W4: 69632, W8: 81920, "dense": 98304}
FP8_SHARED = 98_312  # of products of e4m3 by a Triton kernel: on 10.0, elsewhere less
REASON = {
    W4: "4-bit weights widened in registers, products in the activations' type",
    W8: "8-bit weights widened in registers, products in the activations' type",
    "dense": "Triton kernel, each expert's weights once for all of its tokens",
}
PAIRS_AT_ONCE = 4096  # of tokens and experts, that one launch puts in blocks, those that are not there included
SORTED = f"blocks of tokens by expert by one launch, of more than {PAIRS_AT_ONCE:,} pairs of the two by torch's sort"
W8A8 = "triton.linear_w8a8"
ASKED = f"rounds activations to e4m3, which the other kernels do not: --kernel linear@fp8={W8A8} asks for it"
OLDEST = {"torch": (2, 10), "cuda": (12, 9)}  # that multiply blocks of e4m3 by cuBLASLt
SMALLEST_GROUP = 16
DENSE_OUTPUTS = 65_536  # of a dense weight that few tokens read by the kernel
DENSE_FROM = 512  # rows from which dequantising into memory and torch's GEMM cost less than dequantising in registers
GGUF_GROUP = 16  # some of its kinds have 32


def limits_of(layout: str) -> Callable[[DeviceProfile, Problem], str | None]:
    def limits(device: DeviceProfile, problem: Problem) -> str | None:
        found = layout_of(problem.stored)
        if found not in CANONICAL[layout]:
            return f"reads {' and '.join(CANONICAL[layout])}; the weight is {found}"
        k, experts = problem.size("k"), dict(problem.sizes).get("experts", 0)
        if experts and problem.size("n") // experts % BLOCK_N:
            return f"needs experts with a multiple of {BLOCK_N} outputs, not {problem.size('n') // experts}"
        for kind in problem.stored if found != "dense" else ():
            group = GGUF_GROUP if kind.startswith("gguf.") else group_of(kind, k)
            small = SMALLEST_GROUP <= group < BLOCK_K and BLOCK_K % group == 0
            if not (small or group % BLOCK_K == 0 or group >= k):
                return f"needs groups of 16, 32, 64, a multiple of {BLOCK_K} or all of k, not {group} ({kind})"
        return None

    return limits


def _only_invariant(device: DeviceProfile, problem: Problem) -> str | None:
    if not problem.invariant:
        return "is for --batch-invariant: kernels whose tiles change with the rows are faster"
    return limits_of("dense")(device, problem)


def by_library(device: DeviceProfile) -> bool:
    """Whether products of e4m3 with a scale for each block are cuBLASLt's, as on compute capability 9.0; elsewhere a
    Triton kernel does them."""
    return device.compute_capability is not None and device.compute_capability[0] == 9


def too_old(device: DeviceProfile) -> str | None:
    """Of libraries that lack cuBLASLt's products where they are taken: the Triton kernel's would gain nothing there,
    8,192 tokens by gate_up of Qwen3.5-27B on an H200 are 596 TFLOP/s so, 671 with weights widened to bf16, 1,069 by
    cuBLASLt (benchmarks/kernels_linear.py --w8a8 --rows 8192)."""
    if not by_library(device) or device.source == "file":  # a file's device is not here: its libraries are not known
        return None
    for tool, oldest in OLDEST.items():
        there = device.tool(tool)
        if there is None or _version(there) < oldest:
            found = f"not {there}" if there else "and there is none"
            return (
                f"needs {tool} {oldest[0]}.{oldest[1]} or later, {found}, for cuBLASLt's products of e4m3; a Triton "
                "kernel's are slower here than bf16's"
            )
    return None


def _w8a8_limits(device: DeviceProfile, problem: Problem) -> str | None:
    n, k, part = problem.size("n"), problem.size("k"), dict(problem.sizes).get("part", 0)
    if not (device.has("mma_fp8") or device.has("wgmma_fp8")):
        return f"needs matrix units for e4m3, which GPUs have from compute capability 8.9 on; device: {device.name}"
    if reason := too_old(device):
        return reason
    if set(problem.stored) != {FP8_BLOCKS}:
        return f"reads {FP8_BLOCKS}; stored: {', '.join(sorted(set(problem.stored))) or 'nothing'}"
    if n % 128 or k % 128 or part:
        of = f", in parts of multiples of {part}" if part else ""
        return f"needs whole blocks of 128 by 128, not {n:,} by {k:,}{of}"
    if n > DENSE_OUTPUTS:
        return f"is for up to {DENSE_OUTPUTS:,} outputs; asked: {n:,}"
    return None


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text)[:2])


def fp8_parts(rows: int, n: int, k: int) -> tuple[int, int, int, int]:
    """Bytes of what a product of e4m3 operands reads: codes and scales of `rows` tokens, codes and scales of a weight.

    Tokens are padded to a multiple of 16 (cuBLASLt asks for 4), scales of a block's k to a multiple of 4."""
    padded, units = rows + -rows % 16, k // BLOCK_K
    scales, blocks = 4 * padded * units, 4 * (n // 128) * (units + -units % 4)
    return padded * k, scales + -scales % 256, n * k, blocks + -blocks % 256


def _w8a8_workspace(device: DeviceProfile, problem: Problem) -> int:
    """What widening weights takes, or both operands, where a step has as many tokens that they are made."""
    tokens, widened = problem.load.tokens, workspace(device, problem)
    if tokens < DENSE_FROM or problem.phase != "prefill":
        return widened
    return max(split_bytes(device.units), sum(fp8_parts(tokens, problem.size("n"), problem.size("k"))))


def _w8a8(x: torch.Tensor, weight: Packed) -> torch.Tensor:
    """What it computes, by the rows of a step with prompts; checks try less of steps that decode."""
    return (linear if x.shape[0] < DENSE_FROM else linear_a8)(x, weight)


def widening(device: DeviceProfile, problem: Problem) -> tuple[str, str]:
    """(the kernel of 8-bit weights for what is no product of FP8 units, why it is not Hopper's own: "" if it is)."""
    from offroad.ops.registry import default_registry

    own = "hopper.linear_w8"
    verdict = default_registry().kernels[own].check(device, problem)
    return (own, "") if verdict.ok else ("triton.linear_w8", f"{own} {verdict.reason}")


def _w8a8_reason(device: DeviceProfile, problem: Problem) -> str:
    few, why = widening(device, problem)
    whose = "cuBLASLt" if by_library(device) else "a Triton kernel"
    return (
        f"prompts, from {DENSE_FROM} tokens of a step or its graph on: activations rounded to e4m3, products on FP8 "
        f"units by {whose}; else as {few}{f' ({why})' if why else ''}"
    )


def _w8a8_shared(device: DeviceProfile, problem: Problem) -> int:
    return SHARED_OF[W8] if by_library(device) else max(SHARED_OF[W8], FP8_SHARED)


def _bind_w8a8(device: DeviceProfile, problem: Problem) -> Bound:
    from offroad.triton_kernels.linear_fp8 import bind

    return bind(device, problem)


def _bind_linear(device: DeviceProfile, problem: Problem) -> Bound:
    from offroad.triton_kernels.linear_run import card_of, run

    return partial(run, on=card_of(device), invariant=problem.invariant)


def _bind_dense(device: DeviceProfile, problem: Problem) -> Bound:
    from offroad.triton_kernels.linear_run import card_of, dense

    return partial(dense, on=card_of(device))


def _dense_limits(device: DeviceProfile, problem: Problem) -> str | None:
    if problem.size("n") > DENSE_OUTPUTS:
        return f"is for up to {DENSE_OUTPUTS:,} outputs, more are torch's GEMM's; asked: {problem.size('n'):,}"
    packed = [kind for kind in problem.stored if kind.partition(".")[0] in ("gguf", *PER_BYTE)]
    return f"reads dense weights; stored: {packed[0]}" if packed else None


def _bind_grouped(device: DeviceProfile, problem: Problem) -> Bound:
    from offroad.triton_kernels.linear_grouped import grouped
    from offroad.triton_kernels.linear_run import card_of

    return partial(grouped, on=card_of(device), invariant=problem.invariant)


def embed(ids: torch.Tensor, weight: Packed, scale: float, dtype: torch.dtype) -> torch.Tensor:
    """Rows `ids` of an embedding in records times `scale`, [tokens, hidden] in `dtype`."""
    rows = dequantised_rows(weight, ids).to(dtype)
    return rows if scale == 1.0 else rows * torch.tensor(scale, dtype=dtype)


def _bind_embed(device: DeviceProfile, problem: Problem) -> Bound:
    return embed


def workspace(device: DeviceProfile, problem: Problem) -> int:
    """Parts of sums; dequantised weights where a step has as many tokens that this is done (or the like of them)."""
    if problem.invariant:
        return DENSE_BYTES
    if problem.load.tokens < DENSE_FROM:
        return split_bytes(device.units)
    n, k, itemsize = problem.size("n"), problem.size("k"), 4 if problem.dtype == "float32" else 2
    piece = dense_outputs(n, k, itemsize, dense_bytes(device.memory)) * k * itemsize
    return max(split_bytes(device.units), piece)


def _embed_temporary(device: DeviceProfile, problem: Problem) -> int:
    """Codes, numbers and scales of the step's rows on their way to activations: at most 16 bytes a number."""
    return 16 * problem.load.tokens * problem.size("k")


def _grouped_workspace(device: DeviceProfile, problem: Problem) -> int:
    return 0 if problem.invariant else split_bytes(device.units)


def _shared(layout: str) -> Callable[[DeviceProfile, Problem], int]:
    return lambda device, problem: SHARED_OF[layout]


def _experts(layout: str, name: str) -> TritonKernel:
    return TritonKernel(
        f"triton.grouped_{name}",
        "grouped_linear",
        _bind_grouped,
        limits_of(layout),
        _shared(layout),
        layout=layout,
        reason=f"{REASON[layout]}; {SORTED}",
        workspace=_grouped_workspace,
    )


def _packed(layout: str, bits: int) -> tuple[TritonKernel, TritonKernel]:
    """(linear, embedding)."""
    linear = TritonKernel(
        f"triton.linear_w{bits}",
        "linear",
        _bind_linear,
        limits_of(layout),
        _shared(layout),
        features=frozenset({"bias"}),
        layout=layout,
        reason=REASON[layout],
        workspace=workspace,
    )
    name = f"triton.embed_w{bits}"
    return linear, TritonKernel(
        name, "embed", _bind_embed, limits_of(layout), layout=layout, temporary=_embed_temporary
    )


INVARIANT = TritonKernel(
    "triton.linear_invariant",
    "linear",
    _bind_linear,
    _only_invariant,
    _shared("dense"),
    features=frozenset({"bias"}),
    layout="dense",
    reason="Triton kernel of one tile: --batch-invariant",
    workspace=workspace,
)
EIGHT_BY_EIGHT = TritonKernel(
    W8A8,
    "linear",
    _bind_w8a8,
    _w8a8_limits,
    _w8a8_shared,
    features=frozenset({"bias"}),
    dtypes=frozenset({"bfloat16", "float16"}),
    layout=W8,
    reason=_w8a8_reason,
    invariant=False,
    workspace=_w8a8_workspace,
    asked=ASKED,
    computes=_w8a8,
)
DENSE = TritonKernel(
    "triton.linear_dense",
    "linear",
    _bind_dense,
    _dense_limits,
    _shared("dense"),
    features=frozenset({"bias"}),
    dtypes=frozenset({"bfloat16", "float16"}),
    layout="dense",
    reason="up to 16 tokens by a Triton kernel, more by torch's GEMM",
    invariant=False,
    workspace=lambda device, problem: split_bytes(device.units),
)


def register(registry: Registry) -> None:
    """Adds the linears and embeddings over weights of 4 and of 8 bits, the dense ones and those of experts."""
    packed = (kernel for layout, bits in ((W4, 4), (W8, 8)) for kernel in _packed(layout, bits))
    experts = (_experts(layout, name) for layout, name in ((W4, "w4"), (W8, "w8"), ("dense", "dense")))
    for kernel in (*experts, INVARIANT, *packed, EIGHT_BY_EIGHT, DENSE):
        registry.add(kernel)
