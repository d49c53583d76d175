// bf16.cuh for the emulator: one or two numbers as bits, rounded to the nearest, ties to even.
#pragma once
#include "cuda_fp16.h"
#include "emulator.h"

inline u16 narrow(float x) {
    u32 bits;
    memcpy(&bits, &x, sizeof bits);
    return x != x ? 0x7FFF : (u16)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

// A sum or product of two of them: what fp32 does not hold leaves its last bit odd, so that no tie is made.
inline u16 narrow_exact(double x) {
    float near = (float)x;
    u32 bits;
    memcpy(&bits, &near, sizeof bits);
    if (std::isfinite(near) && near != x) bits = (bits - (std::fabs(near) > std::fabs(x))) | 1;
    return narrow(__uint_as_float(bits));
}

inline u32 narrow_two(float low, float high) { return narrow(low) | (u32)narrow(high) << 16; }
inline float power(float x) { return x < -126 ? 0 : std::exp2(x); }
inline float wide_half(u16 bits) { return __half2float({bits}); }
inline u32 masked_or(u32 bits, u32 mask, u32 more) { return (bits & mask) | more; }
inline u32 picked(u32 word, u32 which) {
    u32 bytes = 0;
    for (int i = 0; i < 4; i++) {
        u32 byte = word >> (which >> i * 4 & 3) * 8 & 0xFF;
        bytes |= (which >> i * 4 & 8 ? (byte >> 7) * 0xFF : byte) << i * 8;
    }
    return bytes;
}
inline u32 plus(u32 a, u32 b) {
    return narrow_exact((double)wide(a) + wide(b)) | narrow_exact((double)wide(a >> 16) + wide(b >> 16)) << 16;
}
inline u32 times(u32 a, u32 b) {
    return narrow_exact((double)wide(a) * wide(b)) | narrow_exact((double)wide(a >> 16) * wide(b >> 16)) << 16;
}
