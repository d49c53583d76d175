// Attention over pages for SM70: 8 x 32 x 16 tensor-core tiles, fp16 operands, fp32 sums.
//
// A block computes M packed query rows (tokens of one sequence times the query heads of one KV head) against one span of
// its keys. Verify rows split the keys over blocks, `finish` adds the splits in order; chunks take one span. Span borders
// depend on the sequence's own length only, so its result does not depend on what it is batched with.
//
// Specialised by HEAD_DIM, TILES_M (M = 8 * TILES_M), TILE_N (keys a step), MIN_BLOCKS an SM, KV_E5M2.
#include <mma.h>

#include "pages.cuh"

using namespace nvcuda;

constexpr int D = HEAD_DIM, MT = TILES_M, M = 8 * MT, N = TILE_N, WARPS = 8, THREADS = 32 * WARPS;
// Scores: warps are shared out over column tiles, groups of row tiles, and parts of the sum over D.
constexpr int NF = N / 32, ROOM = WARPS / NF, MG = MT < ROOM ? MT : ROOM, DS = ROOM / MG, MT_OF = MT / MG;
// Output: over column tiles, and parts of the sum over keys.
constexpr int VF = D / 32, KS = VF < WARPS ? WARPS / VF : 1, VF_OF = VF < WARPS ? 1 : VF / WARPS;
constexpr int Q_PITCH = D + 8, S_PITCH = N + 4, P_PITCH = N + 8, O_PITCH = D + 4;
constexpr int Q_BYTES = 2 * M * Q_PITCH, KV_BYTES = 2 * N * Q_PITCH, S_BYTES = 4 * DS * M * S_PITCH,
              P_BYTES = 2 * M * P_PITCH;
constexpr int KV_AT = Q_BYTES, S_AT = KV_AT + KV_BYTES, P_AT = S_AT + S_BYTES, ROW_AT = P_AT + P_BYTES;
constexpr int PARTS = D / 8, LOADS = N * PARTS / THREADS;
constexpr float LOG2E = 1.4426950408889634f, NONE = -1e30f;  // NONE: no key was seen

static_assert(ROW_AT + 3 * 4 * M == SHARED_BYTES, "what Python reserves");
static_assert(4 * M * O_PITCH <= ROW_AT, "the output takes the place of all tiles");
static_assert(N * PARTS % THREADS == 0 && (D / 16) % DS == 0 && (N / 16) % KS == 0 && MT % MG == 0, "whole tiles");

struct Args {
    const half *q, *k, *v;
    half* out;
    StoredNumber *k_pages, *v_pages;
    const int* table;
    const float *k_scale, *v_scale;
    const int *slot, *start, *width, *offset;
    float *partial, *stats;  // [tokens, heads, splits, D] and [tokens, heads, splits, 2]: largest score, sum
    int q_token, q_head, k_token, k_head, v_token, v_head;
    i64 table_row;
    i64 k_block, v_block;
    int k_row, k_page_head, v_row, v_page_head;
    int block, window, heads, kv_heads, splits, min_span, writable, unused;
    float scale, softcap;
};

extern __shared__ __align__(16) unsigned char shared[];

// The keys of one split of a row: [begin, end). No keys: the split is not live.
struct Span {
    int begin, end;
};

__device__ __forceinline__ int first_visible(const Args& p, int start) {
    return p.window ? max(0, start - p.window + 1) : 0;
}

__device__ __forceinline__ int span_size(const Args& p, int visible) {
    int size = max(ceil_div(visible, p.splits), p.min_span);
    return ceil_div(size, N) * N;
}

__device__ __forceinline__ Span span_of(const Args& p, int start, int width, int split) {
    int first = first_visible(p, start), end = start + width, size = span_size(p, end - first);
    int begin = first + split * size;
    return {begin, min(end, begin + size)};
}

__device__ __forceinline__ PageSource source_of(const Args& p, bool keys, int row, int kv_head) {
    PageSource s;
    s.pages = keys ? p.k_pages + kv_head * p.k_page_head : p.v_pages + kv_head * p.v_page_head;
    s.block_stride = keys ? p.k_block : p.v_block;
    s.row_stride = keys ? p.k_row : p.v_row;
    s.table = p.table + p.slot[row] * p.table_row;
    s.block = p.block;
    s.start = p.start[row];
    s.fresh_stride = keys ? p.k_token : p.v_token;
    i64 at = (i64)p.offset[row] * s.fresh_stride + kv_head * (keys ? p.k_head : p.v_head);
    s.fresh = p.k == nullptr ? nullptr : (keys ? p.k : p.v) + at;
    const float* scale = keys ? p.k_scale : p.v_scale;
    s.scale = scale ? scale[kv_head] : 1.f;
    return s;
}

__device__ __forceinline__ void load_tile(Stored (&parts)[LOADS], const PageSource& s, int at, int low, int high) {
#pragma unroll
    for (int i = 0; i < LOADS; i++) {
        int index = i * THREADS + threadIdx.x, position = at + index / PARTS;
        parts[i] = position >= low && position < high ? load_part(s, position, index % PARTS) : nothing();
    }
}

__device__ __forceinline__ void put_tile(half* tile, const Stored (&parts)[LOADS]) {
#pragma unroll
    for (int i = 0; i < LOADS; i++) {
        int index = i * THREADS + threadIdx.x;
        *reinterpret_cast<uint4*>(tile + index / PARTS * Q_PITCH + index % PARTS * 8) = as_halves(parts[i]);
    }
}

typedef wmma::fragment<wmma::accumulator, 8, 32, 16, float> Sums;
typedef wmma::fragment<wmma::matrix_a, 8, 32, 16, half, wmma::row_major> Left;

// scores[part][M][N] = Q K^T over the part's columns of D.
__device__ __forceinline__ void score(const half* q, const half* k, float* scores) {
    const int warp = threadIdx.x / 32, column = warp % NF, group = warp / NF % MG, part = warp / (NF * MG);
    Sums sums[MT_OF];
#pragma unroll
    for (int m = 0; m < MT_OF; m++) wmma::fill_fragment(sums[m], 0.f);
#pragma unroll 2
    for (int step = part * (D / 16 / DS); step < (part + 1) * (D / 16 / DS); step++) {
        wmma::fragment<wmma::matrix_b, 8, 32, 16, half, wmma::col_major> keys;
        wmma::load_matrix_sync(keys, k + column * 32 * Q_PITCH + step * 16, Q_PITCH);
#pragma unroll
        for (int m = 0; m < MT_OF; m++) {
            Left left;
            wmma::load_matrix_sync(left, q + (group * MT_OF + m) * 8 * Q_PITCH + step * 16, Q_PITCH);
            wmma::mma_sync(sums[m], left, keys, sums[m]);
        }
    }
#pragma unroll
    for (int m = 0; m < MT_OF; m++)
        wmma::store_matrix_sync(scores + (part * M + (group * MT_OF + m) * 8) * S_PITCH + column * 32, sums[m], S_PITCH,
                                wmma::mem_row_major);
}

// What a warp knows of its rows (warp, warp + 8, ..): the largest score so far (times log2 e) and the sum of weights.
struct RowState {
    float largest[MT], sum[MT];
};

// Scores to weights, as fp16 in `weights`; `factors[row]` is what sums so far must be multiplied by.
__device__ __forceinline__ void soften(const Args& p, const float* scores, half* weights, float* factors, RowState& rows,
                                       int at, int high, int first_row, int rows_here, int start, int group,
                                       float scale) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < MT; i++) {
        const int row = warp + 8 * i, position = start + (first_row + row) / group;
        const int low = p.window ? position - p.window : -1;
        float s[NF], largest = rows.largest[i];
#pragma unroll
        for (int j = 0; j < NF; j++) {
            const int column = j * 32 + lane, key = at + column;
            float sum = 0.f;
#pragma unroll
            for (int part = 0; part < DS; part++) sum += scores[(part * M + row) * S_PITCH + column];
            sum *= scale;
            if (p.softcap > 0.f) sum = tanhf(sum / p.softcap) * p.softcap;
            bool seen = row < rows_here && key <= position && key > low && key < high;
            s[j] = seen ? sum * LOG2E : NONE;
            largest = fmaxf(largest, s[j]);
        }
        largest = warp_max(largest);
        float total = 0.f;
#pragma unroll
        for (int j = 0; j < NF; j++) {
            half weight = __float2half_rn(s[j] == NONE ? 0.f : exp2f(s[j] - largest));
            total += __half2float(weight);
            weights[row * P_PITCH + j * 32 + lane] = weight;
        }
        float factor = rows.largest[i] == NONE ? 0.f : exp2f(rows.largest[i] - largest);
        rows.sum[i] = rows.sum[i] * factor + warp_sum(total);
        rows.largest[i] = largest;
        if (lane == 0) factors[row] = factor;
    }
}

// sums = sums * factors + weights V. `map` holds the row of each of a lane's numbers, four bits each.
__device__ __forceinline__ void add_values(Sums (&sums)[MT][VF_OF], const half* weights, const half* v,
                                           const float* factors, u32 map) {
    const int warp = threadIdx.x / 32, column = VF < WARPS ? warp % VF : warp * VF_OF, part = VF < WARPS ? warp / VF : 0;
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int i = 0; i < 8; i++) {
            float factor = factors[m * 8 + ((map >> (4 * i)) & 15)];
#pragma unroll
            for (int f = 0; f < VF_OF; f++) sums[m][f].x[i] *= factor;
        }
#pragma unroll
    for (int step = 0; step < N / 16 / KS; step++) {
        const int key = (part * (N / 16 / KS) + step) * 16;
#pragma unroll
        for (int f = 0; f < VF_OF; f++) {
            wmma::fragment<wmma::matrix_b, 8, 32, 16, half, wmma::row_major> values;
            wmma::load_matrix_sync(values, v + key * Q_PITCH + (column + f) * 32, Q_PITCH);
#pragma unroll
            for (int m = 0; m < MT; m++) {
                Left left;
                wmma::load_matrix_sync(left, weights + m * 8 * P_PITCH + key, P_PITCH);
                wmma::mma_sync(sums[m][f], left, values, sums[m][f]);
            }
        }
    }
}

// The sums of all warps in out[M][O_PITCH], parts added in order.
__device__ __forceinline__ void gather_sums(Sums (&sums)[MT][VF_OF], float* out) {
    const int warp = threadIdx.x / 32, column = VF < WARPS ? warp % VF : warp * VF_OF, part = VF < WARPS ? warp / VF : 0;
    for (int turn = 0; turn < KS; turn++) {
        __syncthreads();
        if (part == turn) {
#pragma unroll
            for (int m = 0; m < MT; m++)
#pragma unroll
                for (int f = 0; f < VF_OF; f++) {
                    float* place = out + m * 8 * O_PITCH + (column + f) * 32;
                    if (turn) {
                        Sums before;
                        wmma::load_matrix_sync(before, place, O_PITCH, wmma::mem_row_major);
#pragma unroll
                        for (int i = 0; i < 8; i++) sums[m][f].x[i] += before.x[i];
                    }
                    wmma::store_matrix_sync(place, sums[m][f], O_PITCH, wmma::mem_row_major);
                }
        }
    }
    __syncthreads();
}

// Which row each of a lane's numbers of an accumulator has: CUDA does not say, so a matrix of row numbers is loaded.
__device__ __forceinline__ u32 row_map(float* scratch) {
    scratch[threadIdx.x] = (float)(threadIdx.x / 32);
    __syncthreads();
    Sums rows;
    wmma::load_matrix_sync(rows, scratch, 32, wmma::mem_row_major);
    u32 map = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) map |= (u32)rows.x[i] << (4 * i);
    __syncthreads();
    return map;
}

__device__ __forceinline__ void load_queries(const Args& p, half* q, int row, int kv_head, int first_row, int rows_here,
                                             int group) {
    for (int index = threadIdx.x; index < M * PARTS; index += THREADS) {
        int r = index / PARTS, part = index % PARTS, packed = first_row + r;
        uint4 parts = make_uint4(0, 0, 0, 0);
        if (r < rows_here) {
            i64 token = p.offset[row] + packed / group, head = kv_head * group + packed % group;
            parts = reinterpret_cast<const uint4*>(p.q + token * p.q_token + head * p.q_head)[part];
        }
        *reinterpret_cast<uint4*>(q + r * Q_PITCH + part * 8) = parts;
    }
}

// Writes rows of out[M][O_PITCH], divided by their sums, or as a split for `finish`.
__device__ __forceinline__ void write_rows(const Args& p, const float* out, const float* sums, const float* largest,
                                           int row, int kv_head, int first_row, int rows_here, int group, float scale) {
    for (int index = threadIdx.x; index < rows_here * (D / 4); index += THREADS) {
        int r = index / (D / 4), at = index % (D / 4) * 4, packed = first_row + r;
        i64 token = p.offset[row] + packed / group, head = kv_head * group + packed % group;
        float4 x = *reinterpret_cast<const float4*>(out + r * O_PITCH + at);
        if (p.splits == 1) {
            float by = scale / sums[r];
            half2 low = __floats2half2_rn(x.x * by, x.y * by), high = __floats2half2_rn(x.z * by, x.w * by);
            *reinterpret_cast<uint2*>(p.out + (token * p.heads + head) * D + at) =
                make_uint2(as_bits(low), as_bits(high));
        } else {
            i64 place = (token * p.heads + head) * p.splits + blockIdx.z;
            *reinterpret_cast<float4*>(p.partial + place * D + at) = x;
            if (at == 0) {
                p.stats[2 * place] = largest[r];
                p.stats[2 * place + 1] = sums[r];
            }
        }
    }
}

// Grid: chunks of M packed rows times KV heads, rows, splits.
extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) attention(const Args p) {
    half* q = reinterpret_cast<half*>(shared);
    half* tile = reinterpret_cast<half*>(shared + KV_AT);
    float* scores = reinterpret_cast<float*>(shared + S_AT);
    half* weights = reinterpret_cast<half*>(shared + P_AT);
    float *factors = reinterpret_cast<float*>(shared + ROW_AT), *row_sum = factors + M, *row_largest = row_sum + M;
    const int row = blockIdx.y, kv_head = blockIdx.x % p.kv_heads, group = p.heads / p.kv_heads;
    const int first_row = blockIdx.x / p.kv_heads * M, start = p.start[row], width = p.width[row];
    if (first_row >= width * group) return;
    const int rows_here = min(M, width * group - first_row);
    const Span span = span_of(p, start, width, blockIdx.z);
    if (span.begin >= span.end) return;
    // Keys that some query of this block sees.
    const int low = p.window ? max(span.begin, start + first_row / group - p.window + 1) : span.begin;
    const int high = min(span.end, start + (first_row + rows_here - 1) / group + 1);
    const PageSource keys = source_of(p, true, row, kv_head), values = source_of(p, false, row, kv_head);

    const u32 map = row_map(scores);
    load_queries(p, q, row, kv_head, first_row, rows_here, group);
    Sums sums[MT][VF_OF];
    RowState rows;
#pragma unroll
    for (int m = 0; m < MT; m++) {
        rows.largest[m] = NONE;
        rows.sum[m] = 0.f;
#pragma unroll
        for (int f = 0; f < VF_OF; f++) wmma::fill_fragment(sums[m][f], 0.f);
    }
    Stored parts[LOADS];
    int at = span.begin + (max(low, span.begin) - span.begin) / N * N;
    load_tile(parts, keys, at, low, high);
    for (; at < high; at += N) {
        put_tile(tile, parts);
        __syncthreads();
        load_tile(parts, values, at, low, high);  // on its way while scores are computed
        score(q, tile, scores);
        __syncthreads();
        put_tile(tile, parts);
        soften(p, scores, weights, factors, rows, at, high, first_row, rows_here, start, group, p.scale * keys.scale);
        __syncthreads();
        load_tile(parts, keys, at + N, low, high);
        add_values(sums, weights, tile, factors, map);
        __syncthreads();
    }
    if (threadIdx.x % 32 == 0) {
#pragma unroll
        for (int i = 0; i < MT; i++) {
            row_sum[threadIdx.x / 32 + 8 * i] = rows.sum[i];
            row_largest[threadIdx.x / 32 + 8 * i] = rows.largest[i];
        }
    }
    float* out = reinterpret_cast<float*>(shared);
    gather_sums(sums, out);
    write_rows(p, out, row_sum, row_largest, row, kv_head, first_row, rows_here, group, values.scale);
}

// Adds the live splits of a token's head in order. Grid: heads, rows, widest row; D / 4 threads.
extern "C" __global__ void finish(const Args p) {
    const int head = blockIdx.x, row = blockIdx.y, start = p.start[row], width = p.width[row];
    if (blockIdx.z >= width) return;
    const int token = p.offset[row] + blockIdx.z;
    const int visible = start + width - first_visible(p, start), live = ceil_div(visible, span_size(p, visible));
    const i64 place = ((i64)token * p.heads + head) * p.splits;
    float largest = NONE, sum = 0.f;
    for (int split = 0; split < live; split++) largest = fmaxf(largest, p.stats[2 * (place + split)]);
    float4 total = make_float4(0.f, 0.f, 0.f, 0.f);
    for (int split = 0; split < live; split++) {
        const float by = exp2f(p.stats[2 * (place + split)] - largest);
        const float4 x = *reinterpret_cast<const float4*>(p.partial + (place + split) * D + threadIdx.x * 4);
        sum += p.stats[2 * (place + split) + 1] * by;
        total.x += x.x * by, total.y += x.y * by, total.z += x.z * by, total.w += x.w * by;
    }
    const float by = (p.v_scale ? p.v_scale[head / (p.heads / p.kv_heads)] : 1.f) / sum;
    const half2 first = __floats2half2_rn(total.x * by, total.y * by), last = __floats2half2_rn(total.z * by, total.w * by);
    *reinterpret_cast<uint2*>(p.out + ((i64)token * p.heads + head) * D + threadIdx.x * 4) =
        make_uint2(as_bits(first), as_bits(last));
}

// Stores this step's rows where the table has a block. Grid: KV heads, rows, widest row; D / 8 threads.
extern "C" __global__ void store(const Args p) {
    const int kv_head = blockIdx.x, row = blockIdx.y, position = p.start[row] + blockIdx.z;
    if (blockIdx.z >= p.width[row]) return;
    const i64 token = p.offset[row] + blockIdx.z;
    const i64 page = p.table[p.slot[row] * p.table_row + position / p.block];
    if (page <= 0) return;
    const int in_page = position % p.block;
    const uint4 k = reinterpret_cast<const uint4*>(p.k + token * p.k_token + kv_head * p.k_head)[threadIdx.x];
    const uint4 v = reinterpret_cast<const uint4*>(p.v + token * p.v_token + kv_head * p.v_head)[threadIdx.x];
    StoredNumber* k_at = p.k_pages + page * p.k_block + in_page * p.k_row + kv_head * p.k_page_head;
    StoredNumber* v_at = p.v_pages + page * p.v_block + in_page * p.v_row + kv_head * p.v_page_head;
    reinterpret_cast<Stored*>(k_at)[threadIdx.x] = as_stored(k, p.k_scale ? p.k_scale[kv_head] : 1.f);
    reinterpret_cast<Stored*>(v_at)[threadIdx.x] = as_stored(v, p.v_scale ? p.v_scale[kv_head] : 1.f);
}
