"""Entry of the Gated DeltaNet kernels: which problems they take, how tiles are cut, and their shared memory."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from importlib import import_module

from offroad.device.profile import DeviceProfile
from offroad.ops.gated_delta import CHUNK
from offroad.ops.spec import Bound, Problem, Registry
from offroad.triton_kernels.kernel import TritonKernel

LARGEST = 128  # key and value dims of a state that is held in registers


@dataclass(frozen=True)
class Tiles:
    """How chunks are cut: value columns, warps and stages of a program of the scan, and warps of one of the solve, and
    the dims of keys that it has at once: operands of products are in registers but on Hopper.

    `shared`: bytes of the largest tile, of the scan for heads of `LARGEST`, as Triton compiles it.
    """

    values: int
    warps: int
    stages: int
    solve_warps: int
    solve_keys: int
    shared: int


HOPPER = Tiles(values=32, warps=4, stages=2, solve_warps=4, solve_keys=128, shared=160_260)  # wgmma
# `shared` is that of 10.0; 74,244 below and above.
OTHERS = Tiles(values=32, warps=8, stages=2, solve_warps=8, solve_keys=16, shared=94_740)
WIDE = Tiles(values=32, warps=8, stages=1, solve_warps=8, solve_keys=128, shared=90_112)  # fp32


def tiles(device: DeviceProfile, dtype: str) -> Tiles:
    """Those for activations of a type on a device."""
    if dtype == "float32":
        return WIDE
    return HOPPER if device.compute_capability == (9, 0) else OTHERS


def _limits(device: DeviceProfile, problem: Problem) -> str | None:
    longest = max(problem.size("key_dim"), problem.size("value_dim"))
    if longest <= LARGEST:
        return None
    return f"holds states up to {LARGEST} x {LARGEST} in registers; asked: {longest}"


def _bind(device: DeviceProfile, problem: Problem) -> Bound:
    function = import_module("offroad.triton_kernels.delta_jit").gated_delta
    return partial(function, tiles=tiles(device, problem.dtype))


def chunk_bytes(device: DeviceProfile, problem: Problem) -> int:
    """Bytes of what the kernels of chunks hand to one another: see `delta_chunk_jit.gated_delta`."""
    sizes, tokens = dict(problem.sizes), problem.load.tokens
    if problem.phase != "prefill" or not tokens:
        return 0
    item, parts = (4, 1) if problem.dtype == "float32" else (2, 2)
    heads = sizes["value_heads"]
    mixed = item * (2 * sizes["key_heads"] * sizes["key_dim"] + heads * sizes["value_dim"])
    return tokens * (mixed + 8 * sizes["key_heads"] + 2 * parts * heads * CHUNK * item + 4 * heads)


def register(registry: Registry) -> None:
    """Adds the kernel, for verify rows and chunks alike."""
    kernel = TritonKernel(
        "triton.gated_delta",
        "gated_delta",
        _bind,
        _limits,
        shared=lambda device, problem: tiles(device, problem.dtype).shared,
        features=frozenset({"silu", "sigmoid", "replay"}),
        temporary=chunk_bytes,
    )
    registry.add(kernel)
