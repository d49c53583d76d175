"""What Hopper's linears have in common: how x, scales and gates become arguments."""

from __future__ import annotations

from functools import lru_cache

import torch

from offroad.nvrtc import launch

TARGET = "sm_90a"
BITS = {"int4": 4, "e4m3": 8}  # of a code
SCALES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
GATES = {"": 0, "silu": 1, "gelu_tanh": 2}


@lru_cache(maxsize=4096)
def map_of(address: int, rows: int, k: int, tokens: int) -> tuple[int, ...]:
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
