"""The registry with every op and kernel that offroad has."""

from __future__ import annotations

from functools import cache

from offroad.ops import activation, attention, linear, norm, rope, torch_kernels
from offroad.ops.spec import Registry


@cache
def default_registry() -> Registry:
    """All ops and kernels. Building it imports no toolchain and touches no device."""
    registry = Registry()
    for module in (norm, linear, rope, attention, activation):
        for op in module.OPS:
            registry.add_op(op)
    torch_kernels.register(registry)
    return registry


def packers() -> dict[str, object]:
    """Functions that make a kernel's own weight layout from a canonical one, by layout."""
    return {}
