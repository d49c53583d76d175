// fp16 of CUDA's header for the emulator: what the kernels use of it, rounded as the GPU does.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

struct half {
    uint16_t bits;
};
struct half2 {
    half x, y;
};

inline float value_of(half h) {
    int sign = h.bits >> 15, exponent = h.bits >> 10 & 31, mantissa = h.bits & 1023;
    float magnitude = exponent == 0    ? std::ldexp((float)mantissa, -24)
                      : exponent == 31 ? (mantissa ? NAN : INFINITY)
                                       : std::ldexp((float)(1024 + mantissa), exponent - 25);
    return sign ? -magnitude : magnitude;
}

struct Values {
    float of[65536];
    Values() {
        for (int bits = 0; bits < 65536; bits++) of[bits] = value_of({(uint16_t)bits});
    }
};
inline const Values values;
inline float __half2float(half h) { return values.of[h.bits]; }

// To the nearest, ties to even, or toward zero.
inline half from_float(double x, bool nearest) {
    uint16_t sign = std::signbit(x) ? 0x8000 : 0;
    double m = std::fabs(x);
    if (x != x) return {0x7FFF};
    if (m == 0) return {sign};
    int exponent;
    std::frexp(m, &exponent);
    int unit = exponent - 11 < -24 ? -24 : exponent - 11;  // the value of the last bit is 2^unit
    double scaled = std::ldexp(m, -unit), whole = nearest ? std::nearbyint(scaled) : std::trunc(scaled);
    double rounded = std::ldexp(whole, unit);
    if (rounded >= 65536) return {(uint16_t)(sign | (nearest || std::isinf(x) ? 0x7C00 : 0x7BFF))};
    if (rounded == 0) return {sign};
    std::frexp(rounded, &exponent);
    if (exponent < -13) return {(uint16_t)(sign | (uint16_t)std::ldexp(rounded, 24))};
    uint16_t mantissa = (uint16_t)std::ldexp(rounded, 11 - exponent) - 1024;
    return {(uint16_t)(sign | (exponent + 14) << 10 | mantissa)};
}

inline half __float2half_rn(float x) { return from_float(x, true); }
inline half __float2half_rz(float x) { return from_float(x, false); }
inline half2 __floats2half2_rn(float x, float y) { return {__float2half_rn(x), __float2half_rn(y)}; }
inline half2 __float2half2_rn(float x) { return __floats2half2_rn(x, x); }
inline half2 __half2half2(half x) { return {x, x}; }
inline float __low2float(half2 x) { return __half2float(x.x); }
inline float __high2float(half2 x) { return __half2float(x.y); }

inline half add(half a, half b) { return from_float((double)__half2float(a) + __half2float(b), true); }
inline half mul(half a, half b) { return from_float((double)__half2float(a) * __half2float(b), true); }
inline half fma(half a, half b, half c) {
    return from_float((double)__half2float(a) * __half2float(b) + __half2float(c), true);
}
inline half2 __hadd2(half2 a, half2 b) { return {add(a.x, b.x), add(a.y, b.y)}; }
inline half2 __hmul2(half2 a, half2 b) { return {mul(a.x, b.x), mul(a.y, b.y)}; }
inline half2 __hfma2(half2 a, half2 b, half2 c) { return {fma(a.x, b.x, c.x), fma(a.y, b.y, c.y)}; }
