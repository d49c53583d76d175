// Packed weights in a lane's 16 bytes, and as halves: the same numbers for every kernel that reads them.
//
// For 32 columns and CHUNK k's, lane l has 16 bytes of column 8 * quad_pair(l) + own_row(l); where in its words which k
// stands is what `halves_of` undoes. KIND 0: 4-bit integers, 1: e4m3, 2: e2m1, 3: 8-bit integers.
#pragma once
#include "half.cuh"

constexpr bool FOUR_BITS = KIND == 0 || KIND == 2, PAIRS = KIND == 0 || KIND == 3;
constexpr int CHUNK = FOUR_BITS ? 32 : 16;

#define EACH_PAIR(at) _Pragma("unroll") for (int at = 0; at < 4; at++)

// Eight halves from 32 bits (4-bit kinds) or 64 bits, as (k0 k1) (k2 k3) (k4 k5) (k6 k7), without their scale.
__device__ __forceinline__ void halves_of(u32 low, u32 high, u32 zero, u32 (&out)[4]) {
    if (KIND == 0) {
        // 1024 + q has q in its lowest bits, 1024 + 16 q in the next ones; both are exact.
        const half2 offset = as_half2(0xE400E400), sixteenth = as_half2(0x2C002C00), offset64 = as_half2(0xD400D400);
        const u32 next = low >> 8;
        out[0] = as_bits(__hadd2(as_half2((low & 0x000F000F) | 0x64006400), offset));
        out[1] = as_bits(__hfma2(as_half2((low & 0x00F000F0) | 0x64006400), sixteenth, offset64));
        out[2] = as_bits(__hadd2(as_half2((next & 0x000F000F) | 0x64006400), offset));
        out[3] = as_bits(__hfma2(as_half2((next & 0x00F000F0) | 0x64006400), sixteenth, offset64));
    } else if (KIND == 1) {
        // The bits of e4m3 are those of an fp16 that is 2^8 times smaller.
        const u32 words[2] = {low, high};
        EACH_PAIR(i) {
            const u32 bytes = i & 1 ? words[i / 2] << 8 : words[i / 2];
            out[i] = (bytes & 0x80008000) | ((bytes & 0x7F007F00) >> 1);
        }
    } else if (KIND == 2) {
        // Those of e2m1 are those of an fp16 that is 2^14 times smaller.
        EACH_PAIR(i) {
            const u32 nibbles = low << (4 * i);
            out[i] = (nibbles & 0x80008000) | ((nibbles & 0x70007000) >> 3);
        }
    } else {
        const half2 offset = as_half2(0xE480E480);  // -1152: 1024, and 128 that makes the byte positive
        const u32 words[2] = {low ^ 0x80808080, high ^ 0x80808080};
        EACH_PAIR(i) {
            const u32 bytes = words[i / 2] >> (8 * (i & 1));
            out[i] = as_bits(__hadd2(as_half2((bytes & 0x00FF00FF) | 0x64006400), offset));
        }
    }
    if (PAIRS) EACH_PAIR(i) out[i] = as_bits(__hadd2(as_half2(out[i]), as_half2(zero)));
}

// The same times their scale; `pair`: scale and minus zero for integers, or the scale twice.
__device__ __forceinline__ void scaled_halves_of(u32 low, u32 high, u32 pair, u32 (&out)[4]) {
    const u32 scale = PAIRS ? (pair & 0xFFFF) * 0x10001u : pair, zero = PAIRS ? (pair >> 16) * 0x10001u : 0;
    halves_of(low, high, zero, out);
    EACH_PAIR(i) out[i] = as_bits(__hmul2(as_half2(out[i]), as_half2(scale)));
}

// Scale `at` of the packed ones, as `scaled_halves_of` wants it.
__device__ __forceinline__ u32 scale_pair(const void* scales, i64 at) {
    if (PAIRS) return __ldg(reinterpret_cast<const u32*>(scales) + at);
    return __ldg(reinterpret_cast<const u16*>(scales) + at) * 0x10001u;
}
