"""The CUDA C++ kernels as entries of the registry."""

from __future__ import annotations

from offroad.nvrtc import attention, delta, linear, rows
from offroad.ops.spec import Registry

KERNELS = (*attention.KERNELS, *linear.KERNELS, *delta.KERNELS, *rows.KERNELS)


def register(registry: Registry) -> None:
    """Adds the kernels; their ops must be there."""
    for kernel in KERNELS:
        registry.add(kernel)
