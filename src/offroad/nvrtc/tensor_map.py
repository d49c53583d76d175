"""Tensor maps: how Hopper's copies find boxes of a matrix in memory."""

from __future__ import annotations

from functools import lru_cache

from offroad.nvrtc import launch


@lru_cache(maxsize=4096)
def map_of(address: int, rows: int, columns: int, high: int, itemsize: int = 2, chunks: int = 0) -> tuple[int, ...]:
    """The words of a tensor map: a matrix of bf16, or of bytes (`itemsize` 1), at an address, in swizzled boxes of
    `high` rows and 128 bytes, zeros where there are none; or, with `chunks`, as [chunks of 128 bytes of a row, rows],
    in boxes of so many chunks. Raises LaunchError."""
    from cuda.bindings import driver

    kinds, wide, pitch = driver.CUtensorMapDataType, 128 // itemsize, itemsize * columns
    sizes, strides, box = [columns, rows], [pitch], [wide, high]
    if chunks:
        sizes, strides, box = [wide, rows, columns // wide], [pitch, 128], [wide, high, chunks]
    status, made = driver.cuTensorMapEncodeTiled(
        kinds.CU_TENSOR_MAP_DATA_TYPE_UINT8 if itemsize == 1 else kinds.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        len(sizes),
        address,
        [driver.cuuint64_t(size) for size in sizes],
        [driver.cuuint64_t(stride) for stride in strides],
        [driver.cuuint32_t(size) for size in box],
        [driver.cuuint32_t(1)] * len(sizes),
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if status.value:
        raise launch.LaunchError("a tensor map", found=f"{status.name} for [{rows}, {columns}]")
    return tuple(int(word) for word in made.opaque)
