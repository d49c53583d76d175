"""Programmatic dependent launch: a kernel's programs start while those of the kernel before still run.

A decode step is some hundred kernels of a few microseconds, and each start from an empty GPU costs two or three of
them. On compute capability 9.0 and later a kernel launched with `launching()` may start once all programs of the one
before have come to `take_turn`; they wait there until it is complete and what it wrote can be seen. Before that a
kernel may touch nothing but weights, which no kernel of a step writes.

Every program of such a kernel calls `take_turn`, and does so before it returns: a kernel that is past it knows that all
kernels before it are complete.
"""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

OLDEST = (9, 0)
_PREFETCH = tl.constexpr("""{
    .reg .pred first; .reg .b32 thread;
    mov.u32 thread, %tid.x; setp.eq.u32 first, thread, 0;
    @first cp.async.bulk.prefetch.L2.global [$1], $2;
    mov.b32 $0, 0;
}""")


@triton.jit
def take_turn(PDL: tl.constexpr):
    """Waits for the kernel before, then lets the one after start."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def prefetch(pointer, size, PDL: tl.constexpr):
    """Has `size` bytes, a multiple of 16, come into the L2 cache; for use before `take_turn`."""
    if PDL:
        tl.inline_asm_elementwise(
            _PREFETCH, "=r,l,r", [pointer.to(tl.int64), size], dtype=tl.int32, is_pure=False, pack=1
        )


@cache
def _supported() -> bool:
    interpreted = triton.knobs.runtime.interpret
    return not interpreted and torch.cuda.is_available() and torch.cuda.get_device_capability() >= OLDEST


def launching() -> dict[str, Any]:
    """Keyword arguments of a launch of a kernel that calls `take_turn`."""
    return {"PDL": True, "launch_pdl": True} if _supported() else {"PDL": False}
