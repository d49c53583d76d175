// Keys or values of one sequence and one KV head: older rows out of pages, this step's rows out of their own tensor.
#pragma once
#include "half.cuh"

#ifndef KV_E5M2
#define KV_E5M2 0
#endif
#if KV_E5M2
typedef uint2 Stored;  // eight numbers as they are stored
typedef u8 StoredNumber;
#else
typedef uint4 Stored;
typedef u16 StoredNumber;
#endif

struct PageSource {
    const StoredNumber* pages;  // at the KV head
    i64 block_stride;
    int row_stride;
    const int* table;  // the slot's columns
    int block;
    const half* fresh;  // at the KV head and the sequence's first new token; null: all rows are in pages
    int fresh_stride;
    int start;    // position of the first new token
    float scale;  // of stored numbers
};

__device__ __forceinline__ Stored nothing() {
#if KV_E5M2
    return make_uint2(0, 0);
#else
    return make_uint4(0, 0, 0, 0);
#endif
}

__device__ __forceinline__ Stored as_stored(uint4 halves, float scale) {
#if KV_E5M2
    return e5m2_bytes(halves, scale);
#else
    return halves;
#endif
}

// Numbers 8 * part .. 8 * part + 7 of the row at `position`, as stored.
__device__ __forceinline__ Stored load_part(const PageSource& s, int position, int part) {
    if (s.fresh && position >= s.start) {
        const half* row = s.fresh + (i64)(position - s.start) * s.fresh_stride;
        return as_stored(reinterpret_cast<const uint4*>(row)[part], s.scale);
    }
    const StoredNumber* row =
        s.pages + (i64)s.table[position / s.block] * s.block_stride + position % s.block * s.row_stride;
    return reinterpret_cast<const Stored*>(row)[part];
}

__device__ __forceinline__ uint4 as_halves(Stored stored) {
#if KV_E5M2
    return e5m2_halves(stored);
#else
    return stored;
#endif
}
