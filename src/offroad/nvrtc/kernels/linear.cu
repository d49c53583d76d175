// out = x W^T over packed weights for SM70: weights go from memory to registers, become halves there and meet x in
// mma.m8n8k4; they never pass through shared memory. A warp has 32 columns of the output and 8 * TILES_M rows.
//
// Weights lie as the lanes want them (weights.cuh). Sums over k are split over warps and over blocks and added in a fixed
// order: the last block of a tile to arrive adds the parts, all of them out of memory and in their order.
//
// Specialised by KIND (0: 4-bit integers, 1: e4m3, 2: e2m1, 3: 8-bit integers), TILES_M, WARPS_N, SCALES (scales that a
// lane's 16 bytes have) and STEP (k's of a warp at a time).
#include "mma884.cuh"
#include "weights.cuh"

constexpr int MT = TILES_M, M = 8 * MT, WN = WARPS_N, WK = 8 / WN, THREADS = 256;
constexpr int CHUNKS = STEP / CHUNK, ROW = WK * STEP, PITCH = ROW + 8;
constexpr int X_LOADS = M * ROW / 8 / THREADS;
constexpr int X_BYTES = 2 * M * PITCH, SUM_BYTES = WK > 1 ? 4 * 8 * M * 32 : 0;
constexpr int ROWS_AT = X_BYTES > SUM_BYTES ? X_BYTES : SUM_BYTES;
static_assert(ROWS_AT + 4 * M == SHARED_BYTES, "what Python reserves");
static_assert(M * ROW / 8 % THREADS == 0 && STEP % CHUNK == 0, "whole loads");

struct Args {
    const half* x;
    half* out;
    const half* bias;
    const uint4* weights;  // [n / 32, k / CHUNK, 32]
    const void* scales;    // [n / 32, groups, 32] of halves, or of (scale, zero) pairs for integers
    float* partial;        // [splits, tokens, n]
    u32* tickets;          // one a block of the output, 0 between launches
    const i64* experts;    // of each row of the output, a block for each; null: one matrix for all, or `parts`
    const int* parts;      // of each block: its expert, where its rows begin in `order`, how many they are; or null
    const i64* order;      // rows of the output by expert
    i64 x_row;
    int tokens, n, k, group, groups, splits;
    float alpha;  // what scales were divided by
    int share;    // rows of the output that a row of x has
};

extern __shared__ __align__(16) unsigned char shared[];

// Which rows of the output the block has; those that are none are `tokens`.
__device__ __forceinline__ void find_rows(const Args& p) {
    const int r = threadIdx.x;
    if (r < M) {
        int row = blockIdx.y * M + r;
        if (p.experts) row = r == 0 ? blockIdx.y : p.tokens;
        if (p.parts) row = r < p.parts[3 * blockIdx.y + 2] ? (int)p.order[p.parts[3 * blockIdx.y + 1] + r] : p.tokens;
        reinterpret_cast<int*>(shared + ROWS_AT)[r] = row;
    }
    __syncthreads();
}

__device__ __forceinline__ int token_of(int r) { return reinterpret_cast<const int*>(shared + ROWS_AT)[r]; }

// What numbers of columns are counted from: the tile of the block's expert, or 0.
__device__ __forceinline__ int first_tile(const Args& p) {
    if (p.experts) return (int)p.experts[blockIdx.y] * (p.n / 32);
    return p.parts ? p.parts[3 * blockIdx.y] * (p.n / 32) : 0;
}

struct Stage {
    uint4 weights[CHUNKS];
    u32 scales[CHUNKS * SCALES];  // (scale, minus zero), or the scale twice
    uint4 x[X_LOADS];
};

__device__ __forceinline__ void fetch(Stage& stage, const Args& p, int step, int tile, int base, int part) {
    const int lane = threadIdx.x % 32, chunks = p.k / CHUNK;
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
        const int chunk = (step * WK + part) * CHUNKS + c;
        const bool there = chunk < chunks && tile * 32 < p.n;
        stage.weights[c] = there ? __ldcs(p.weights + ((i64)(base + tile) * chunks + chunk) * 32 + lane) : make_uint4(0, 0, 0, 0);
#pragma unroll
        for (int s = 0; s < SCALES; s++) {
            const i64 at = ((i64)(base + tile) * p.groups + (chunk * CHUNK + s * (CHUNK / SCALES)) / p.group) * 32 + lane;
            stage.scales[c * SCALES + s] = there ? scale_pair(p.scales, at) : 0;
        }
    }
#pragma unroll
    for (int i = 0; i < X_LOADS; i++) {
        const int index = i * THREADS + threadIdx.x, token = token_of(index / (ROW / 8));
        const int k = step * ROW + index % (ROW / 8) * 8;
        const bool there = token < p.tokens && k < p.k;
        stage.x[i] = there ? *reinterpret_cast<const uint4*>(p.x + token / p.share * p.x_row + k) : make_uint4(0, 0, 0, 0);
    }
}

__device__ __forceinline__ void put_x(const Stage& stage) {
    half* x = reinterpret_cast<half*>(shared);
#pragma unroll
    for (int i = 0; i < X_LOADS; i++) {
        const int index = i * THREADS + threadIdx.x;
        *reinterpret_cast<uint4*>(x + index / (ROW / 8) * PITCH + index % (ROW / 8) * 8) = stage.x[i];
    }
}

// Products of eight k's: `b` eight halves of the lane's column, x at `k` of the block's rows.
__device__ __forceinline__ void multiply(float (&sums)[MT][8], const u32 (&b)[4], int k) {
    const half* x = reinterpret_cast<const half*>(shared) + own_row(threadIdx.x % 32) * PITCH + k;
#pragma unroll
    for (int m = 0; m < MT; m++) {
        const uint4 a = *reinterpret_cast<const uint4*>(x + m * 8 * PITCH);
        mma884(sums[m], a.x, a.y, b[0], b[1]);
        mma884(sums[m], a.z, a.w, b[2], b[3]);
    }
}

__device__ __forceinline__ void compute(float (&sums)[MT][8], const Stage& stage, int part) {
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
        const u32 words[4] = {stage.weights[c].x, stage.weights[c].y, stage.weights[c].z, stage.weights[c].w};
        constexpr int EIGHTS = CHUNK / 8, WORDS = 4 / EIGHTS;
#pragma unroll
        for (int e = 0; e < EIGHTS; e++) {
            u32 b[4];
            scaled_halves_of(words[e * WORDS], words[e * WORDS + WORDS - 1], stage.scales[c * SCALES + e * SCALES / EIGHTS], b);
            multiply(sums, b, part * STEP + c * CHUNK + e * 8);
        }
    }
}

__device__ __forceinline__ void finish(const Args& p, int token, int column, float sum) {
    sum *= p.alpha;
    if (p.bias) sum += __half2float(p.bias[column]);
    p.out[(i64)token * p.n + column] = __float2half_rn(sum);
}

// A number of the block's tile: the output, or a part of it.
__device__ __forceinline__ void keep(const Args& p, int row, int column, float sum) {
    const int token = token_of(row);
    if (token >= p.tokens || column >= p.n) return;
    if (p.splits == 1) finish(p, token, column, sum);
    else p.partial[((i64)blockIdx.z * p.tokens + token) * p.n + column] = sum;
}

// The last block of the tile to come adds the parts of all splits, in order.
__device__ __forceinline__ void add_splits(const Args& p) {
    u32* last = reinterpret_cast<u32*>(shared);
    __threadfence();
    __syncthreads();
    u32* ticket = p.tickets + blockIdx.y * gridDim.x + blockIdx.x;
    if (threadIdx.x == 0) *last = atomicAdd(ticket, 1u) == p.splits - 1;
    __syncthreads();
    if (!*last) return;
    __threadfence();
    for (int index = threadIdx.x; index < M * WN * 32; index += THREADS) {
        const int token = token_of(index / (WN * 32)), column = blockIdx.x * WN * 32 + index % (WN * 32);
        if (token >= p.tokens || column >= p.n) continue;
        float sum = 0.f;
        for (int split = 0; split < p.splits; split++)
            sum += __ldcg(p.partial + ((i64)split * p.tokens + token) * p.n + column);
        finish(p, token, column, sum);
    }
    if (threadIdx.x == 0) *ticket = 0;
}

// Grid: 32 * WARPS_N columns, M tokens (or one row of an expert, or up to M of its), splits of k.
extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) linear(const Args p) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, part = warp / WN, tile = blockIdx.x * WN + warp % WN;
    if (p.parts && p.parts[3 * blockIdx.y + 2] == 0) return;  // more blocks than there are parts
    find_rows(p);
    const int base = first_tile(p);
    const int steps = (p.k + ROW - 1) / ROW, each = ceil_div(steps, p.splits);
    const int begin = blockIdx.z * each, end = min(steps, begin + each);
    float sums[MT][8] = {};
    Stage stage;
    if (begin < end) fetch(stage, p, begin, tile, base, part);
    for (int step = begin; step < end; step++) {
        put_x(stage);
        __syncthreads();
        Stage now = stage;
        if (step + 1 < end) fetch(stage, p, step + 1, tile, base, part);
        compute(sums, now, part);
        __syncthreads();
    }
    if (WK == 1) {
#pragma unroll
        for (int m = 0; m < MT; m++)
#pragma unroll
            for (int i = 0; i < 8; i++)
                keep(p, m * 8 + sum_row(lane, i), tile * 32 + quad_pair(lane) * 8 + sum_column(lane, i), sums[m][i]);
    } else {
        float* all = reinterpret_cast<float*>(shared);  // [parts, WN, M, 32]
#pragma unroll
        for (int m = 0; m < MT; m++)
#pragma unroll
            for (int i = 0; i < 8; i++)
                all[(warp * M + m * 8 + sum_row(lane, i)) * 32 + quad_pair(lane) * 8 + sum_column(lane, i)] = sums[m][i];
        __syncthreads();
        for (int index = threadIdx.x; index < WN * M * 32; index += THREADS) {
            float sum = 0.f;
#pragma unroll
            for (int k = 0; k < WK; k++) sum += all[k * WN * M * 32 + index];
            keep(p, index / 32 % M, (blockIdx.x * WN + index / (32 * M)) * 32 + index % 32, sum);
        }
    }
    if (p.splits > 1) add_splits(p);
}
