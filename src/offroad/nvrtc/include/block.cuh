// Sums over the threads of a block.
#pragma once
#include "half.cuh"

// The sum of `x` over the block, for every thread, in an order that depends on the block's size alone. `room` has a
// float for each warp; it may be used again after the next barrier.
__device__ __forceinline__ float block_sum(float x, float* room) {
    x = warp_sum(x);
    if (threadIdx.x % 32 == 0) room[threadIdx.x / 32] = x;
    __syncthreads();
    float total = 0.f;
    for (int warp = 0; warp < (blockDim.x + 31) / 32; warp++) total += room[warp];
    return total;
}

__device__ __forceinline__ float sigmoid(float x) { return 1.f / (1.f + __expf(-x)); }

// Eight halves as floats, and back.
__device__ __forceinline__ void widen(uint4 halves, float (&x)[8]) {
    const u32 words[4] = {halves.x, halves.y, halves.z, halves.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        x[2 * i] = __low2float(as_half2(words[i]));
        x[2 * i + 1] = __high2float(as_half2(words[i]));
    }
}

__device__ __forceinline__ uint4 narrow(const float (&x)[8]) {
    return make_uint4(as_bits(__floats2half2_rn(x[0], x[1])), as_bits(__floats2half2_rn(x[2], x[3])),
                      as_bits(__floats2half2_rn(x[4], x[5])), as_bits(__floats2half2_rn(x[6], x[7])));
}

__device__ __forceinline__ float rounded(float x) { return __half2float(__float2half_rn(x)); }
