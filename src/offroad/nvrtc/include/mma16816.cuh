// What kernels for compute capability 8.0 and later use of PTX: m16n8k16 products of bf16 (BF16) or fp16, loads of
// weights past the first cache, and programmatic dependent launch where the target has it.
#pragma once

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
typedef long long i64;

#ifdef OFFROAD_EMULATED
#include "mma16816_emulated.h"
#else

// c += A B; A [16, 16] and B [16, 8] as the PTX ISA spreads them over a warp.
__device__ __forceinline__ void mma16816(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if BF16
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#endif
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// (x & mask) | bits
__device__ __forceinline__ u32 masked(u32 x, u32 mask, u32 bits) {
    u32 out;
    asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(out) : "r"(x), "r"(mask), "r"(bits));
    return out;
}

// Two numbers times a power of two.
__device__ __forceinline__ u32 scaled2(u32 x, u32 factor) {
    u32 out;
#if BF16
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(x), "r"(factor), "r"(0x80008000u));
#else
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(x), "r"(factor), "r"(0x80008000u));
#endif
    return out;
}

// 16 bytes from memory into shared memory, seen by this thread once `copies_but` has waited for them.
__device__ __forceinline__ void copy_async(uint4* to, const uint4* from) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"((u32)__cvta_generic_to_shared(to)), "l"(from) : "memory");
}

// Ends a group of copies.
__device__ __forceinline__ void copies_so_far() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits for all groups but the last N.
template <int N>
__device__ __forceinline__ void copies_but() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

__device__ __forceinline__ u32 streamed_word(const u32* at) {
    u32 v;
    asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(v) : "l"(at));
    return v;
}

__device__ __forceinline__ u32 streamed_half(const u16* at) {
    u16 v;
    asm volatile("ld.global.nc.L1::no_allocate.u16 %0, [%1];" : "=h"(v) : "l"(at));
    return v;
}

// A load that sees what other blocks wrote.
__device__ __forceinline__ float shared_by_blocks(const float* at) {
    float v;
    asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(v) : "l"(at));
    return v;
}

__device__ __forceinline__ float half_number_of(u16 bits, bool bf16) {
    float v;
    if (bf16) return __uint_as_float((u32)bits << 16);
    asm("cvt.f32.f16 %0, %1;" : "=f"(v) : "h"(bits));
    return v;
}

__device__ __forceinline__ float half_number(u16 bits) { return half_number_of(bits, BF16); }

// Bytes 0 and 1 of a word, or 2 and 3, each in the upper half of 16 bits.
__device__ __forceinline__ u32 bytes_apart(u32 word, int upper) {
    return __byte_perm(word, 0u, upper ? 0x3424 : 0x1404);
}

__device__ __forceinline__ u16 half_of(float x) {
    u16 bits;
#if BF16
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
#else
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
#endif
    return bits;
}

// Lets the kernel after this one start, and waits for the one before; see dependent.py.
__device__ __forceinline__ void take_turn() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents; griddepcontrol.wait;" ::: "memory");
#endif
}
#endif
