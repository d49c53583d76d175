"""Linears of up to 64 tokens over 4-bit integers on Hopper: what kernels/linear_hopper.cu is specialised by, and how it
is launched. More tokens, and fewer than a plan asks for, go to Triton's kernels, which read the same records.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from offroad.nvrtc import launch
from offroad.nvrtc.compile import Source
from offroad.nvrtc.hopper import SHARED
from offroad.triton_kernels import linear_gated, linear_run
from offroad.triton_kernels.dependent import launching
from offroad.triton_kernels.linear_pack import BLOCK_K, BLOCK_N, Records
from offroad.triton_kernels.linear_run import Card, card, stored
from offroad.triton_kernels.memory import COUNTERS, MEMORY

if TYPE_CHECKING:
    from offroad.ops.bound import LayerOps
    from offroad.quant.packed import Packed

ARGS = "@16Q7Q7i44x"  # `Args` of the kernel, to its alignment
TARGET = "sm_90a"
LEAST, MOST = 17, 64  # tokens
# Warpgroups that multiply (one more starts copies) and steps on their way at most, by the tokens of a tile. Blocks take
# more than half of an SM's shared memory: two of a launch on one SM would leave another idle.
WARPGROUPS = {8: 4, 16: 4, 32: 2, 64: 2}
STAGES = {8: 6, 16: 5, 32: 8, 64: 6}
SCALES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
GATES = {"": 0, "silu": 1, "gelu_tanh": 2}


def outputs(tokens: int) -> int:
    """Of a block's tile."""
    return 2 * BLOCK_N * WARPGROUPS[tokens]


def threads(tokens: int) -> int:
    """Of a block."""
    return 128 * (WARPGROUPS[tokens] + 1)


def source(tokens: int, fold: int = 1, scales: int = 0, minima: bool = False, gate: str = "") -> Source:
    """For up to `tokens` tokens (8, 16, 32, 64) and `fold` scales to 128 k's, of the dtype with the number `scales`."""
    warpgroups, scale = WARPGROUPS[tokens], 4 if scales == 2 else 2
    step = 64 * outputs(tokens) + 2 * BLOCK_K * tokens + fold * outputs(tokens) * (scale + 2 * minima)
    stage, rest = step + -step % 1024 + 16, 1024 + 4 * warpgroups * tokens * 32
    stages = min(STAGES[tokens], (SHARED - rest) // stage)
    shared = rest + stages * stage
    sizes = {"TOKENS": tokens, "WARPGROUPS": warpgroups, "STAGES": stages, "FOLD": fold}
    kinds = {"SCALES": scales, "MINIMA": int(minima), "GATE": GATES[gate]}
    return Source("linear_hopper.cu", (*sizes.items(), *kinds.items()), shared, TARGET)


def takes(rows: int, weight: Packed, least: int) -> bool:
    """Whether the kernel is for so many rows of x, in bf16; from `least` on."""
    return least <= rows <= MOST and isinstance(weight, Records) and weight.kind == "int4"


def linear(x: torch.Tensor, weight: Packed, *, on: Card, least: int = LEAST) -> torch.Tensor:
    """`x w^T + bias`; x [tokens, k] -> [tokens, n]."""
    if not takes(x.shape[0], weight, least):
        return linear_run.run(x, weight, on=on)
    return product(x, weight)


def gated_linear(x: torch.Tensor, layer: LayerOps, *, on: Card, least: int = LEAST) -> torch.Tensor:
    """The contract of `ops.blocks.gated_linear`."""
    weight, kind = layer.linears["gate_up"], layer.ffn.activation
    if takes(x.shape[0], weight, least):
        return product(x, weight, gate=kind)
    return linear_gated.gated_linear(x, layer, on=on)


def product(x: torch.Tensor, weight: Records, gate: str = "") -> torch.Tensor:
    """One launch: [tokens, n] of x [tokens, k] in bf16, or [tokens, n / 2] with the gated activation `gate`."""
    x = (x if weight.perm is None else x.index_select(1, weight.perm)).contiguous()
    rows, it = x.shape[0], stored(weight)
    tokens = next(size for size in STAGES if rows <= size)
    y = torch.empty(rows, weight.n // 2 if gate else weight.n, dtype=x.dtype, device=x.device)
    minima = it.m is not None
    assert not minima or it.m.dtype == torch.int16, it.m.dtype
    made = source(tokens, it.fold, SCALES[it.s.dtype], minima, gate)
    if x.device.type == "meta":
        launch.rehearse(made, "linear", ARGS)
        return y
    records, units = it.q.shape[:2]
    tiles = -(-records * BLOCK_N // outputs(tokens))
    programs = min(card(x.device).sms, tiles * units)  # of the card that is there: they wait for one another
    partial = MEMORY.get(x.device, "partial", programs * 2 * outputs(tokens) * tokens, torch.float32)
    arrived = MEMORY.get(x.device, COUNTERS, tiles * 4 * WARPGROUPS[tokens], torch.int32)
    tensors = (it.q, it.s, it.m, weight.bias, y, partial, arrived)
    sizes = (rows, weight.n, units, records, tiles, it.s_group, it.group_units)
    launch.load(made, "linear", ARGS).launch(
        (programs, 1, 1),
        threads(tokens),
        *_map_of(x.data_ptr(), rows, weight.k, tokens),
        *(0 if tensor is None else tensor.data_ptr() for tensor in tensors),
        *sizes,
        early=launching(rows)["PDL"],
    )
    return y


@lru_cache(maxsize=4096)
def _map_of(address: int, rows: int, k: int, tokens: int) -> tuple[int, ...]:
    """The words of a tensor map: bf16 [rows, k] at an address, in swizzled boxes of `tokens` rows and 64 columns, zeros
    where there are none."""
    from cuda.bindings import driver

    status, made = driver.cuTensorMapEncodeTiled(
        driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        2,
        address,
        [driver.cuuint64_t(k), driver.cuuint64_t(rows)],
        [driver.cuuint64_t(2 * k)],
        [driver.cuuint32_t(64), driver.cuuint32_t(tokens)],
        [driver.cuuint32_t(1)] * 2,
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if status.value:
        raise launch.LaunchError("a tensor map of x", found=f"{status.name} for [{rows}, {k}]")
    return tuple(int(word) for word in made.opaque)
