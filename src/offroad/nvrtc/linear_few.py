"""Linears of up to 16 tokens over 4-bit integers and e4m3 on Hopper: what kernels/linear_few.cu is specialised by, and
how it is launched. A block has strips of 16 outputs over all of k, as many as it takes for one block on each SM.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from offroad.nvrtc import launch
from offroad.nvrtc.compile import Source
from offroad.nvrtc.hopper import LEAST_BLOCKS
from offroad.nvrtc.linear_args import BITS, GATES, SCALES, SHARED, TARGET
from offroad.nvrtc.tensor_map import map_of
from offroad.triton_kernels.dependent import launching
from offroad.triton_kernels.linear_pack import BLOCK_K, Records
from offroad.triton_kernels.linear_run import card, stored

ARGS = "@16Q5Q6i"  # `Args` of the kernel
MOST = 16  # tokens
STRIP = 16  # outputs
WARPS = 16  # that multiply; eight more start copies
THREADS = 32 * WARPS + 256
MOST_STRIPS = {4: 32, 8: 24}  # of a block, by the bits of a code: each warp's units have room beside one another
OWN = {8: 5, 16: 4}  # strips of a warp that registers hold, by the tokens of a tile
OWN_WIDE = {8: 4, 16: 3}  # with zero points, scales in fp32, or for 16 tokens with four scales or codes of 8 bits


@dataclass(frozen=True)
class Kind:
    """How a weight is stored: scales to 128 k's, their dtype's number, whether there are zero points, bits of a code;
    and the gate."""

    fold: int = 1
    scales: int = 0
    minima: bool = False
    gate: str = ""
    bits: int = 4


def source(tokens: int, strips: int, kind: Kind) -> Source:
    """For up to `tokens` tokens (8, 16) and blocks of so many strips, with a gate twice those of y."""
    scale = 4 if kind.scales == 2 else 2
    slot = 2 * BLOCK_K * tokens + 256 * kind.bits * strips + kind.fold * strips * STRIP * (scale + 2 * kind.minima)
    slot += -slot % 1024
    wide = kind.minima or kind.scales == 2 or tokens * kind.fold > 32 or (tokens == 16 and kind.bits == 8)
    own = (OWN_WIDE if wide else OWN)[tokens]
    groups = next(size for size in (1, 2, 4, 8, 16) if -(-strips // size) <= own)
    slots = (SHARED - 1024) // (slot + 16)
    slots -= slots % (WARPS // groups)
    sizes = {"TOKENS": tokens, "STRIPS": strips, "GROUPS": groups, "SLOTS": slots, "BITS": kind.bits}
    kinds = {"FOLD": kind.fold, "SCALES": kind.scales, "MINIMA": int(kind.minima), "GATE": GATES[kind.gate]}
    return Source("linear_few.cu", (*sizes.items(), *kinds.items()), 1024 + slots * (slot + 16), TARGET)


def strips(outputs: int, sms: int, gate: str = "", bits: int = 4) -> int:
    """Of y, of a block."""
    return min(MOST_STRIPS[bits] // (2 if gate else 1), -(-outputs // (STRIP * sms)))


def takes(rows: int, weight: Records, outputs: int, sms: int) -> bool:
    """Whether the kernel is for so many rows of x and columns of y. Zero points of small groups need sums of x for each
    of them, which registers do not hold for 16 tokens."""
    small = "m" in weight.tensors and weight.group < min(BLOCK_K, weight.k)
    return rows <= (8 if small else MOST) and outputs >= LEAST_BLOCKS * sms * STRIP


def product(x: torch.Tensor, weight: Records, gate: str = "", sms: int = 0) -> torch.Tensor:
    """[tokens, n] of x [tokens, k] in bf16, which is contiguous and in the order of the weight's columns, or
    [tokens, n / 2] with the gated activation `gate`. One launch, or more where n is larger than what blocks on all
    `sms` may have (0: those of the card that is there)."""
    rows, it = x.shape[0], stored(weight)
    bits = BITS[it.kind]
    assert it.fold <= (4 if bits == 4 else 1), it.fold
    minima, tokens, outputs = it.m is not None, 8 if rows <= 8 else 16, weight.n // 2 if gate else weight.n
    assert not minima or it.m.dtype == torch.int16, it.m.dtype
    y = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    sms = sms or card(x.device).sms
    each = strips(outputs, sms, gate, bits)
    made = source(tokens, each * (2 if gate else 1), Kind(it.fold, SCALES[it.s.dtype], minima, gate, bits))
    if x.device.type == "meta":
        launch.rehearse(made, "linear", ARGS)
        return y
    words = map_of(x.data_ptr(), rows, weight.k, tokens)
    tensors = (it.q, it.s, it.m, weight.bias, y)
    pointers = tuple(0 if tensor is None else tensor.data_ptr() for tensor in tensors)
    kernel, early = launch.load(made, "linear", ARGS), launching(rows)["PDL"]
    for first in range(0, outputs, sms * each * STRIP):
        blocks = min(sms, -(-(outputs - first) // (each * STRIP)))
        sizes = (rows, weight.n, it.q.shape[1], first, it.s_group, it.group_units)
        kernel.launch((blocks, 1, 1), THREADS, *words, *pointers, *sizes, early=early)
    return y
