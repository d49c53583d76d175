// What kernels over packed weights have in common, specialised by SCALES (0: bf16, 1: fp16, 2: fp32) and GATE (0: none,
// 1: silu, 2: gelu_tanh).
#pragma once
#include "bf16.cuh"

// Two codes u in the mantissa of 128.
__device__ __forceinline__ u32 masked(u32 codes) { return masked_or(codes, 0x000F000Fu, 0x43004300u); }

// Two numbers in e4m3, bytes 0 and 1 of a word or, `upper`, 2 and 3, in bf16. Each with its sign before it and 4 bits
// further up has its bits at bf16's places: that is the number times 2^-120, also of those below 2^-6, since the product
// with a power of two keeps subnormal operands. NaN, which no weight is, becomes 480.
__device__ __forceinline__ u32 widened(u32 word, bool upper) {
    return times(picked(word, upper ? 0xB3A2u : 0x9180u) * 16 & 0x87F087F0u, 0x7B807B80u);
}

__device__ __forceinline__ float scale_at(const unsigned char* scales, int at) {
    if (SCALES == 2) return reinterpret_cast<const float*>(scales)[at];
    const u16 bits = reinterpret_cast<const u16*>(scales)[at];
    return SCALES == 1 ? wide_half(bits) : wide(bits);
}

__device__ __forceinline__ float activated(float gate) {
    // tanh(z) = 2 sigmoid(2 z) - 1
    const float z = GATE == 1 ? gate : 1.5957691216057308f * (gate + 0.044715f * gate * gate * gate);
    return gate / (1.f + __expf(-z));
}

// A number of y of an output, from sums of its product (with GATE of gate and up); `n` outputs have the bias [n], if any.
__device__ __forceinline__ u16 result(const u16* bias, int n, float sum, float up, int output) {
    const u16 y = narrow(bias ? sum + wide(bias[output]) : sum);
    if (!GATE) return y;
    return narrow(activated(wide(y)) * wide(narrow(bias ? up + wide(bias[n / 2 + output]) : up)));
}
