"""The registry with every op and kernel that offroad has."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from offroad.native.pack import PACKERS as CPU_PACKERS
from offroad.nvrtc import entries as cuda_kernels
from offroad.nvrtc import hopper
from offroad.nvrtc.pack import PACKERS as CUDA_PACKERS
from offroad.ops import (
    activation,
    attention,
    block_kernels,
    blocks,
    cpu_kernels,
    gated_delta,
    hyper,
    linear,
    moe,
    norm,
    rope,
    sparse_mla,
    torch_kernels,
)
from offroad.ops.spec import Registry
from offroad.quant.packed import Packed
from offroad.triton_kernels import attention as triton_attention
from offroad.triton_kernels import delta as triton_delta
from offroad.triton_kernels import gated as triton_gated
from offroad.triton_kernels import linear as triton_linear
from offroad.triton_kernels import rows as triton_rows
from offroad.triton_kernels.linear_pack import PACKERS as TRITON_PACKERS


@cache
def default_registry() -> Registry:
    """All ops and kernels. Building it imports no toolchain and touches no device."""
    registry = Registry()
    for module in (norm, linear, rope, attention, activation, gated_delta, moe, sparse_mla, hyper):
        for op in module.OPS:
            registry.add_op(op)
    cpu_kernels.register(registry)
    torch_kernels.register(registry)
    triton_attention.register(registry)
    triton_linear.register(registry)
    hopper.register(registry)
    triton_rows.register(registry)
    triton_delta.register(registry)
    cuda_kernels.register(registry)
    for op in blocks.OPS:
        registry.add_op(op)
    block_kernels.register(registry)
    triton_gated.register(registry)
    triton_rows.register_rope_attention(registry)
    hopper.register_gated(registry)
    return registry


def packers() -> dict[str, Callable[[Packed], Packed]]:
    """Functions that make a kernel's own weight layout from a canonical one, by layout."""
    return CPU_PACKERS | TRITON_PACKERS | CUDA_PACKERS
