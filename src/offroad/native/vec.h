/* Vectors of the compile target: `vf` holds VL floats, and a tile is TILE output rows = NV vectors. */
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
#define VL 16
#elif defined(__AVX2__)
#define VL 8
#else
#define VL 4
#endif
#define TILE 16
#define NV (TILE / VL)
#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

typedef float vf __attribute__((vector_size(4 * VL)));
typedef int32_t vi __attribute__((vector_size(4 * VL)));
typedef uint32_t vu __attribute__((vector_size(4 * VL)));

INLINE vf load(const float *p) { vf r; memcpy(&r, p, sizeof r); return r; }
INLINE vu load_u32(const uint32_t *p) { vu r; memcpy(&r, p, sizeof r); return r; }
INLINE void store(float *p, vf v) { memcpy(p, &v, sizeof v); }
INLINE vf splat(float x) { return x - (vf){0}; }
INLINE vu splat_u32(uint32_t x) { return x + (vu){0}; }

/* a * b + c with one rounding where the target has it: everywhere the same function, so results do not depend on M. */
INLINE vf fma_(vf a, vf b, vf c) {
#if defined(__AVX512F__)
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__ARM_NEON)
    return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

INLINE float half_to_float(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, mantissa = h & 0x3ff, exponent = (h >> 10) & 31, bits;
    if (exponent == 31) bits = 0x7f800000 | mantissa << 13;
    else if (exponent) bits = (exponent + 112) << 23 | mantissa << 13;
    else { float f = (float)mantissa * 0x1p-24f; memcpy(&bits, &f, 4); }
    bits |= sign;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

INLINE float bf16_to_float(uint16_t b) {
    uint32_t bits = (uint32_t)b << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

INLINE vf load_half(const uint16_t *p) {
#if defined(__AVX512F__)
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#elif defined(__AVX2__) && defined(__F16C__)
    return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
#else
    vf r;
    for (int i = 0; i < VL; i++) r[i] = half_to_float(p[i]);
    return r;
#endif
}

INLINE vf load_bf16(const uint16_t *p) {
#if defined(__AVX512F__)
    return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16);
#elif defined(__AVX2__)
    return (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16);
#else
    vu r;
    for (int i = 0; i < VL; i++) r[i] = (uint32_t)p[i] << 16;
    return (vf)r;
#endif
}

INLINE vf load_i8(const int8_t *p) {
#if defined(__AVX512F__)
    return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
#elif defined(__AVX2__)
    return (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
#else
    vf r;
    for (int i = 0; i < VL; i++) r[i] = (float)p[i];
    return r;
#endif
}

INLINE float sum_lanes(vf v) {
    float parts[VL], total = 0;
    store(parts, v);
    for (int width = VL / 2; width; width /= 2)
        for (int i = 0; i < width; i++) parts[i] += parts[i + width];
    total = parts[0];
    return total;
}

INLINE float max_lanes(vf v) {
    float parts[VL];
    store(parts, v);
    float top = parts[0];
    for (int i = 1; i < VL; i++) top = parts[i] > top ? parts[i] : top;
    return top;
}

INLINE vf select_(vi mask, vf a, vf b) { return (vf)((mask & (vi)a) | (~mask & (vi)b)); }
/* Where a comparison with NaN decides, the second operand is taken. */
INLINE vf min_(vf a, vf b) { return select_(a < b, a, b); }
INLINE vf max_(vf a, vf b) { return select_(a > b, a, b); }

/* exp to about 1 ulp; below -87.3 it is 0, above 88 it is exp(88), NaN stays NaN. */
INLINE vf exp_(vf x) {
    vi tiny = x < splat(-87.3f);
    x = max_(splat(-87.3f), min_(splat(88.0f), x));
    vf magic = splat(12582912.0f);
    vf rounded = fma_(x, splat(1.44269504f), magic);
    vi power = (vi)rounded - (vi)magic;
    vf n = rounded - magic;
    vf r = fma_(n, splat(-0.693359375f), x);
    r = fma_(n, splat(2.12194440e-4f), r);
    vf p = splat(1.9875691500e-4f);
    p = fma_(p, r, splat(1.3981999507e-3f));
    p = fma_(p, r, splat(8.3334519073e-3f));
    p = fma_(p, r, splat(4.1665795894e-2f));
    p = fma_(p, r, splat(1.6666665459e-1f));
    p = fma_(p, r, splat(5.0000001201e-1f));
    p = fma_(p, r * r, r) + splat(1.0f);
    return select_(tiny, splat(0.0f), p * (vf)((power + 127) << 23));
}
