// What items of attention_few.cu give: kept, added up in the order of partitions, stored as the answer.
#pragma once
#include "attention_items.cuh"
#include "bf16.cuh"

__device__ __forceinline__ float lowest() { return __uint_as_float(0xFF800000u); }

// Sums of a tile of 8 queries: a lane has two (2 * (lane % 4) and the next), and of each 16 dims two.
struct Tile {
    float acc[DIM / 16][4];      // of the first dim of each query, of the second of each
    float largest[2], total[2];  // of scores of base 2, and of weights

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < DIM / 4; i++) acc[i / 4][i % 4] = 0.f;
#pragma unroll
        for (int q = 0; q < 2; q++) largest[q] = lowest(), total[q] = 0.f;
    }
};

// Number of what the `partition`-th of a row gave for the `of_row`-th of its items of a partition.
__device__ __forceinline__ i64 place_of(const Args& p, int row, int of_row, int partition) {
    return ((i64)row * ITEMS + of_row) * p.partitions + partition;
}

// Keeps what a partition gave, the `partition`-th of its row.
__device__ __forceinline__ void keep(const Args& p, const Item& item, const Tile& tile, int t) {
    const int lane = threadIdx.x % 32;
    const i64 place = place_of(p, item.row, item.head * PARTS + item.part, item.partition - item.first) * TILES + t;
    if (lane % 4 >= p.pairs) return;
    float4* sums = p.sums + (place * (DIM / 2) + lane / 4) * p.pairs + lane % 4;
#pragma unroll
    for (int i = 0; i < DIM / 16; i++) sums[i * 8 * p.pairs] = make_float4(tile.acc[i][0], tile.acc[i][1], tile.acc[i][2], tile.acc[i][3]);
    if (lane < 4) p.sizes[place * 4 + lane] = make_float4(tile.largest[0], tile.total[0], tile.largest[1], tile.total[1]);
}

// Dims that a lane has of 16 as products give them; of rows of 8 bits two neighbours.
__device__ __forceinline__ int dim_of(int part, int second) {
    const int row = threadIdx.x % 32 / 4;
    return part * 16 + (KIND ? 2 * row + second : row + 8 * second);
}

// Stores COUNT times 16 dims of an answer, from the `from`-th on.
template <int COUNT>
__device__ __forceinline__ void store(const Args& p, const Lists& lists, int row, int of_row, int t, const float (&acc)[COUNT][4], const float (&total)[2], int from) {
    const int head = of_row / PARTS;
    const float by = p.v_scale ? p.v_scale[head] : 1.f;
#pragma unroll
    for (int q = 0; q < 2; q++) {
        const int number = of_row % PARTS * QUERIES + t * 8 + threadIdx.x % 4 * 2 + q, token = number / GROUP;
        if (token >= lists.widths[row]) continue;
        u16* to = p.out + ((i64)(lists.offsets[row] + token) * (KV_HEADS * GROUP) + head * GROUP + number % GROUP) * DIM;
        const float factor = by / total[q];
#pragma unroll
        for (int i = 0; i < 2 * COUNT; i++) to[dim_of(from + i / 2, i % 2)] = narrow(acc[i / 2][i % 2 * 2 + q] * factor);
    }
}

// Waits until all blocks have kept what they have.
__device__ __forceinline__ void meet(const Args& p) {
    __syncthreads();
    if (threadIdx.x == 0) {
        arrive_released(p.arrived);
        while (acquired(p.arrived) < gridDim.x) wait_a_little();
        // The last one to see it leaves counters as the next launch finds them.
        if (arrive_ordered(p.arrived + 1) == gridDim.x - 1) p.arrived[0] = p.arrived[1] = 0;
    }
    __syncthreads();
}

constexpr int ADDED = 2, AT_ONCE = 16;  // times 16 dims that a warp adds up; partitions that it asks for at once

// Adds up what the `count` partitions of a row gave, in their order, and stores dims from the `from`-th 16 on.
__device__ __forceinline__ void add_up(const Args& p, const Lists& lists, int row, int of_row, int t, int from, int count) {
    const int lane = threadIdx.x % 32;
    const i64 place = place_of(p, row, of_row, 0) * TILES + t;
    const float4* sizes = p.sizes + place * 4 + lane % 4;
    const float4* sums = p.sums + (place * (DIM / 2) + from * 8 + lane / 4) * p.pairs + min(lane % 4, p.pairs - 1);
    float largest[2] = {lowest(), lowest()}, total[2] = {}, acc[ADDED][4] = {};
#pragma unroll 4
    for (int of = lane / 4; of < count; of += 8) {
        const float4 size = __ldcg(sizes + (i64)of * TILES * 4);
        largest[0] = fmaxf(largest[0], size.x), largest[1] = fmaxf(largest[1], size.z);
    }
#pragma unroll
    for (int i = 0; i < 6; i++) largest[i % 2] = fmaxf(largest[i % 2], __shfl_xor_sync(0xFFFFFFFFu, largest[i % 2], 4 << i / 2));
#pragma unroll 1
    for (int first = 0; first < count; first += AT_ONCE) {
        float4 size[AT_ONCE], some[AT_ONCE][ADDED];
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) {
            const i64 of = (i64)min(first + j, count - 1) * TILES;
            size[j] = __ldcg(sizes + of * 4);
#pragma unroll
            for (int i = 0; i < ADDED; i++) some[j][i] = __ldcg(sums + (of * (DIM / 2) + i * 8) * p.pairs);
        }
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) {
            if (first + j >= count) continue;
            const float weights[2] = {power(size[j].x - largest[0]), power(size[j].z - largest[1])};
            total[0] += size[j].y * weights[0], total[1] += size[j].w * weights[1];
#pragma unroll
            for (int i = 0; i < ADDED; i++) {
                acc[i][0] += weights[0] * some[j][i].x, acc[i][1] += weights[1] * some[j][i].y;
                acc[i][2] += weights[0] * some[j][i].z, acc[i][3] += weights[1] * some[j][i].w;
            }
        }
    }
    store(p, lists, row, of_row, t, acc, total, from);
}

// Adds up all rows of more than one partition: warps of all blocks have about as much of it.
__device__ __forceinline__ void add_all(const Args& p, const Lists& lists) {
    constexpr int SHARES = DIM / (16 * ADDED), UNITS = ITEMS * TILES * SHARES;
#pragma unroll 1
    for (int unit = blockIdx.x + gridDim.x * (threadIdx.x / 32); unit < p.rows * UNITS; unit += gridDim.x * WARPS) {
        const int row = unit / UNITS, rest = unit % UNITS, t = rest / SHARES % TILES, of_row = rest / SHARES / TILES;
        const int count = count_of(lists, row);
        if (count < 2 || (of_row % PARTS * QUERIES + t * 8) / GROUP >= lists.widths[row]) continue;
        add_up(p, lists, row, of_row, t, rest % SHARES * ADDED, count);
    }
}
