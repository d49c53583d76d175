// The tensor-core instruction that Volta has: each of the four quad-pairs of a warp multiplies 8 x 4 by 4 x 8.
//
// Quad-pair g is lanes 4 g .. 4 g + 3 and 16 + 4 g .. 16 + 4 g + 3. A lane has row (lane & 3) + 4 (lane >> 4) of A and
// the column of that number of B, four halves each; of the sums it has c[i] at row (lane & 1) + (i & 2) + 4 (lane >> 4),
// column (i & 4) + (lane & 2) + (i & 1) (PTX ISA, "matrix fragments for mma.m8n8k4", .f32 accumulators).
#pragma once
#include "half.cuh"

__device__ __forceinline__ int own_row(int lane) { return (lane & 3) + 4 * (lane >> 4); }
__device__ __forceinline__ int quad_pair(int lane) { return lane >> 2 & 3; }
__device__ __forceinline__ int sum_row(int lane, int i) { return (lane & 1) + (i & 2) + 4 * (lane >> 4); }
__device__ __forceinline__ int sum_column(int lane, int i) { return (i & 4) + (lane & 2) + (i & 1); }

#ifdef OFFROAD_EMULATED
#include "mma884_emulated.h"
#else
__device__ __forceinline__ void mma884(float (&c)[8], u32 a0, u32 a1, u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32 {%0,%1,%2,%3,%4,%5,%6,%7}, {%8,%9}, {%10,%11}, "
        "{%0,%1,%2,%3,%4,%5,%6,%7};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7])
        : "r"(a0), "r"(a1), "r"(b0), "r"(b1));
}
#endif
