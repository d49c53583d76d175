// Halves as bits, four to eight at a time, and 8-bit floats out of them and into them.
#pragma once
#include <cuda_fp16.h>

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
typedef long long i64;

__device__ __forceinline__ half2 as_half2(u32 bits) {
    half2 h;
    memcpy(&h, &bits, 4);
    return h;
}

__device__ __forceinline__ u32 as_bits(half2 h) {
    u32 bits;
    memcpy(&bits, &h, 4);
    return bits;
}

__device__ __forceinline__ u16 half_bits(half h) {
    u16 bits;
    memcpy(&bits, &h, 2);
    return bits;
}

__device__ __forceinline__ half bits_half(u16 bits) {
    half h;
    memcpy(&h, &bits, 2);
    return h;
}

// Eight e5m2 bytes as eight halves: a byte is the upper half of the fp16 with the same value.
__device__ __forceinline__ uint4 e5m2_halves(uint2 bytes) {
    return make_uint4(((bytes.x & 0xFFu) << 8) | ((bytes.x & 0xFF00u) << 16),
                      ((bytes.x & 0xFF0000u) >> 8) | (bytes.x & 0xFF000000u),
                      ((bytes.y & 0xFFu) << 8) | ((bytes.y & 0xFF00u) << 16),
                      ((bytes.y & 0xFF0000u) >> 8) | (bytes.y & 0xFF000000u));
}

// x / scale as e5m2, to the nearest (ties to even), limited to the largest number; NaN stays NaN.
__device__ __forceinline__ u8 e5m2_of(float x, float scale) {
    x = __fdiv_rn(x, scale);
    if (x != x) return 0x7F;
    x = fminf(fmaxf(x, -57344.f), 57344.f);
    // Rounding twice is right if the first rounding goes to odd: toward zero, with the lost bits kept in the last one.
    half toward_zero = __float2half_rz(x);
    u32 bits = half_bits(toward_zero);
    if (__half2float(toward_zero) != x) bits |= 1;
    return (u8)((bits + 0x7F + ((bits >> 8) & 1)) >> 8);
}

// Eight halves as eight e5m2 bytes.
__device__ __forceinline__ uint2 e5m2_bytes(uint4 halves, float scale) {
    u32 words[4] = {halves.x, halves.y, halves.z, halves.w};
    u32 out[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < 8; i++) {
        half h = bits_half((u16)(words[i / 2] >> (16 * (i & 1))));
        out[i / 4] |= (u32)e5m2_of(__half2float(h), scale) << (8 * (i & 3));
    }
    return make_uint2(out[0], out[1]);
}

__device__ __forceinline__ int ceil_div(int a, int b) { return (a + b - 1) / b; }

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int lanes = 16; lanes; lanes >>= 1) x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, lanes));
    return x;
}

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int lanes = 16; lanes; lanes >>= 1) x += __shfl_xor_sync(0xFFFFFFFFu, x, lanes);
    return x;
}
