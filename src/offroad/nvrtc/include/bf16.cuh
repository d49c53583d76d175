// bf16 as bits, one or two of them, without a header of CUDA's.
#pragma once

typedef unsigned int u32;
typedef unsigned short u16;

__device__ __forceinline__ float wide(u16 bits) { return __uint_as_float((u32)bits << 16); }

#ifdef OFFROAD_EMULATED
#include "bf16_emulated.h"
#else
__device__ __forceinline__ u16 narrow(float x) {
    u16 bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}

__device__ __forceinline__ u32 narrow_two(float low, float high) {
    u32 both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

// 2^x, to 2 in its last place; 0 below 2^-126.
__device__ __forceinline__ float power(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float wide_half(u16 bits) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
}

// (bits & mask) | more, by one instruction.
__device__ __forceinline__ u32 masked_or(u32 bits, u32 mask, u32 more) {
    u32 both;
    asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(both) : "r"(bits), "r"(mask), "r"(more));
    return both;
}

// Four bytes of a word, the first the lowest, by half-bytes: their numbers, or with 8 more their signs eight times.
__device__ __forceinline__ u32 picked(u32 word, u32 which) {
    u32 bytes;
    asm("prmt.b32 %0, %1, 0, %2;" : "=r"(bytes) : "r"(word), "r"(which));
    return bytes;
}

__device__ __forceinline__ u32 plus(u32 a, u32 b) {
    u32 sum;
    asm("add.rn.bf16x2 %0, %1, %2;" : "=r"(sum) : "r"(a), "r"(b));
    return sum;
}

__device__ __forceinline__ u32 times(u32 a, u32 b) {
    u32 product;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
    return product;
}
#endif

__device__ __forceinline__ u32 twice(u16 bits) { return bits * 0x10001u; }
