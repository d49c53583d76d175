"""Programmatic dependent launch: a kernel's programs start while those of the kernel before still run.

A decode step is some hundred kernels of a few microseconds, and each start from an empty GPU costs two or three of
them. On compute capability 9.0 and later a kernel launched with `launching()` may start once all programs of the one
before have come to `take_turn` or ended. It waits there until all kernels before are complete and what they wrote can
be seen; before that it may touch nothing but weights, which no kernel of a step writes.

Every program of such a kernel calls `take_turn` or `wait_turn` before it returns, so that a complete kernel says the
same of all before it.
"""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

OLDEST = (9, 0)
# Tokens of a step: with more, Triton's linears are longer than what a start costs, and what comes early takes SMs
# unevenly. An H100 decodes Qwen3.5-27B W4A16 of 8 sequences 2 % faster so, and of 64 5 % slower. Linears that begin
# with weights before their turn gain by it (`allow`): an H200 decodes 64 sequences 4 % faster, and 32 5 %. So does
# Hopper's own attention beside cuBLAS's linears, by 2 and 4 % (Qwen3-8B); beside Triton's that was not measured.
MOST = 16
_most = [MOST]


def allow(tokens: int) -> None:
    """Kernels of steps of up to so many tokens start early from now on."""
    _most[0] = max(_most[0], tokens)


def most() -> int:
    """Tokens of the largest step whose kernels start early."""
    return _most[0]


@triton.jit
def take_turn(PDL: tl.constexpr):
    """Lets the kernel after this one start, and waits for the one before: of kernels that are short."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def wait_turn(PDL: tl.constexpr):
    """Waits for the kernel before. The one after starts when programs of this one end: of kernels that fill the GPU for
    long, whose successor's programs would crowd on the SMs that have room first."""
    if PDL:
        gdc_wait()


@cache
def _supported() -> bool:
    interpreted = triton.knobs.runtime.interpret
    return not interpreted and torch.cuda.is_available() and torch.cuda.get_device_capability() >= OLDEST


def launching(tokens: int) -> dict[str, Any]:
    """Keyword arguments of a launch of a kernel that calls `take_turn`, in a step of `tokens`."""
    return {"PDL": True, "launch_pdl": True} if tokens <= most() and _supported() else {"PDL": False}
