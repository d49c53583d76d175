"""Linears of 17 to 64 tokens over 4-bit integers, e4m3 or bf16 on Hopper: what kernels/linear_hopper.cu is specialised
by, and how it is launched.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from offroad.nvrtc import launch
from offroad.nvrtc.compile import Source
from offroad.nvrtc.linear_args import BITS, GATES, LEAST_DENSE, SCALES, SHARED, TARGET
from offroad.nvrtc.tensor_map import map_of
from offroad.quant.packed import Packed
from offroad.triton_kernels.dependent import launching
from offroad.triton_kernels.linear_pack import BLOCK_K, BLOCK_N, Records
from offroad.triton_kernels.linear_run import card, stored
from offroad.triton_kernels.memory import COUNTERS, MEMORY

ARGS = "@16Q7Q7i44x"  # `Args` of the kernel, to its alignment
DENSE_ARGS = ARGS + "16Q"
DENSE_K = 64  # of a step of bf16
LEAST, MOST = 16, 64  # tokens: more than the first
# Warpgroups that multiply (one more starts copies) and steps on their way at most, by the tokens of a tile. Blocks take
# more than half of an SM's shared memory: two of a launch on one SM would leave another idle.
WARPGROUPS = {32: 2, 64: 2}
STAGES = {32: 8, 64: 6}


def outputs(tokens: int) -> int:
    """Of a block's tile."""
    return 2 * BLOCK_N * WARPGROUPS[tokens]


def threads(tokens: int) -> int:
    """Of a block."""
    return 128 * (WARPGROUPS[tokens] + 1)


def source(tokens: int, fold: int = 1, scales: int = 0, minima: bool = False, gate: str = "", bits: int = 4) -> Source:
    """For up to `tokens` tokens (32, 64) and `fold` scales to 128 k's, of the dtype with the number `scales`; codes of
    `bits`, or weights in bf16 (16)."""
    warpgroups, wide = WARPGROUPS[tokens], DENSE_K if bits == 16 else BLOCK_K
    scale = 0 if bits == 16 else (4 if scales == 2 else 2) + 2 * minima  # bytes, a zero point's too
    step = bits * wide // 8 * outputs(tokens) + 2 * wide * tokens + fold * outputs(tokens) * scale
    stage, rest = step + -step % 1024 + 16, 1024 + 4 * warpgroups * tokens * 32
    stages = min(STAGES[tokens], (SHARED - rest) // stage)
    shared = rest + stages * stage
    sizes = {"BITS": bits, "TOKENS": tokens, "WARPGROUPS": warpgroups, "STAGES": stages, "FOLD": fold}
    kinds = {"SCALES": scales, "MINIMA": int(minima), "GATE": GATES[gate]}
    return Source("linear_hopper.cu", (*sizes.items(), *kinds.items()), shared, TARGET)


def blocks(tiles: int, units: int, sms: int) -> int:
    """As many as there are SMs, or twice as many as tiles where that is nearly so: each of them has half a tile's steps
    then, and adds sums once."""
    return min(2 * tiles if 0.8 * sms <= 2 * tiles <= sms else sms, tiles * units)


class Read(NamedTuple):
    """What a launch reads of a weight of n outputs: (codes, scales, zero points, bias), and as in `Args`. `words`: its
    map, of bf16."""

    tensors: tuple[torch.Tensor | None, ...]
    n: int
    records: int
    units: int
    padded: int
    group_units: int
    words: tuple[int, ...] = ()


def _launch(x: torch.Tensor, made: Source, tokens: int, it: Read, y: torch.Tensor) -> None:
    tiles = -(-it.records * BLOCK_N // outputs(tokens))
    programs = blocks(tiles, it.units, card(x.device).sms)  # of the card that is there: they wait for one another
    partial = MEMORY.get(x.device, "partial", programs * 2 * outputs(tokens) * tokens, torch.float32)
    arrived = MEMORY.get(x.device, COUNTERS, tiles * 4 * WARPGROUPS[tokens], torch.int32)
    launch.load(made, "linear", DENSE_ARGS if it.words else ARGS).launch(
        (programs, 1, 1),
        threads(tokens),
        *map_of(x.data_ptr(), *x.shape, tokens),
        *(0 if tensor is None else tensor.data_ptr() for tensor in (*it.tensors, y, partial, arrived)),
        *(x.shape[0], it.n, it.units, it.records, tiles, it.padded, it.group_units),
        *it.words,
        early=launching(x.shape[0])["PDL"],
    )


def product(x: torch.Tensor, weight: Records, gate: str = "") -> torch.Tensor:
    """One launch: [tokens, n] of x [tokens, k] in bf16, contiguous and in the order of the weight's columns, or
    [tokens, n / 2] with the gated activation `gate`."""
    rows, it = x.shape[0], stored(weight)
    tokens = next(size for size in STAGES if rows <= size)
    y = torch.empty(rows, weight.n // 2 if gate else weight.n, dtype=x.dtype, device=x.device)
    minima = it.m is not None
    assert not minima or it.m.dtype == torch.int16, it.m.dtype
    made = source(tokens, it.fold, SCALES[it.s.dtype], minima, gate, BITS[it.kind])
    if x.device.type == "meta":
        launch.rehearse(made, "linear", ARGS)
        return y
    records, units = it.q.shape[:2]
    read = Read((it.q, it.s, it.m, weight.bias), weight.n, records, units, it.s_group, it.group_units)
    _launch(x, made, tokens, read, y)
    return y


def takes_dense(rows: int, weight: Packed) -> bool:
    """Whether `dense` has so many rows of x in bf16."""
    w = weight.tensors["w"]
    whole = w.is_contiguous() and weight.k % 8 == 0 and (w.is_meta or w.data_ptr() % 16 == 0)
    return LEAST < rows <= MOST and weight.n >= LEAST_DENSE and w.dtype == torch.bfloat16 and whole


def dense(x: torch.Tensor, weight: Packed, gate: str = "") -> torch.Tensor:
    """As `product`, of a weight in bf16 that `takes_dense`; with a gate, a multiple of 128 outputs."""
    rows, w, (n, k) = x.shape[0], weight.tensors["w"], (weight.n, weight.k)
    tokens = next(size for size in STAGES if rows <= size)
    assert not gate or n % (2 * BLOCK_N) == 0, n
    y = torch.empty(rows, n // 2 if gate else n, dtype=x.dtype, device=x.device)
    made = source(tokens, gate=gate, bits=16)
    if x.device.type == "meta":
        launch.rehearse(made, "linear", DENSE_ARGS)
        return y
    words, units = map_of(w.data_ptr(), n, k, BLOCK_N), -(-k // DENSE_K)
    _launch(x, made, tokens, Read((None, None, None, weight.bias), n, -(-n // BLOCK_N), units, 0, units, words), y)
    return y
