"""Linears of 17 to 64 tokens over 4-bit integers or e4m3 on Hopper: what kernels/linear_hopper.cu is specialised by,
and how it is launched.
"""

from __future__ import annotations

import torch

from offroad.nvrtc import launch
from offroad.nvrtc.compile import Source
from offroad.nvrtc.linear_args import BITS, GATES, SCALES, SHARED, TARGET
from offroad.nvrtc.tensor_map import map_of
from offroad.triton_kernels.dependent import launching
from offroad.triton_kernels.linear_pack import BLOCK_K, BLOCK_N, Records
from offroad.triton_kernels.linear_run import card, stored
from offroad.triton_kernels.memory import COUNTERS, MEMORY

ARGS = "@16Q7Q7i44x"  # `Args` of the kernel, to its alignment
MOST = 64  # tokens
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
    `bits`."""
    warpgroups, scale = WARPGROUPS[tokens], 4 if scales == 2 else 2
    step = 16 * bits * outputs(tokens) + 2 * BLOCK_K * tokens + fold * outputs(tokens) * (scale + 2 * minima)
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
    tiles = -(-records * BLOCK_N // outputs(tokens))
    programs = blocks(tiles, units, card(x.device).sms)  # of the card that is there: they wait for one another
    partial = MEMORY.get(x.device, "partial", programs * 2 * outputs(tokens) * tokens, torch.float32)
    arrived = MEMORY.get(x.device, COUNTERS, tiles * 4 * WARPGROUPS[tokens], torch.int32)
    tensors = (it.q, it.s, it.m, weight.bias, y, partial, arrived)
    sizes = (rows, weight.n, units, records, tiles, it.s_group, it.group_units)
    launch.load(made, "linear", ARGS).launch(
        (programs, 1, 1),
        threads(tokens),
        *map_of(x.data_ptr(), rows, weight.k, tokens),
        *(0 if tensor is None else tensor.data_ptr() for tensor in tensors),
        *sizes,
        early=launching(rows)["PDL"],
    )
    return y
