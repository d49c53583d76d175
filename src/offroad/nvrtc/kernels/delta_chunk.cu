// Gated DeltaNet over chunks of prompts, 32 tokens at a time on tensor cores; a block a head, a slice of its columns and
// a row of the step.
//
// With S the state before 32 tokens, G the running sum of their log decays and D_ij = e^(G_i - G_j) for i >= j, the
// updates delta solve (I + strictly lower(beta K K^T D)) delta = beta (V - e^G K S), row after row. Then the output is
// e^G Q S + (Q K^T D) delta, and the next state e^(G_31) S + (e^(G_31 - G) K)^T delta. (Yang et al., "Gated Delta
// Networks", 2024.) The state stays in fp32, in fragments; products take halves and add in fp32. q and k are multiplied
// as they come, their lengths divided out in fp32. Parts of 32 end at positions of a multiple of 32, so that a prompt
// which is cut there gives the same bits.
//
// Specialised by KEY_DIM, VALUE_DIM.
#include <mma.h>

#include "delta.cuh"

using namespace nvcuda;

constexpr int C = 32, WARPS = 8, THREADS = 32 * WARPS;
constexpr int KD = (KEY_DIM + 15) / 16 * 16, BV = VALUE_DIM >= 64 ? 64 : (VALUE_DIM + 15) / 16 * 16;
constexpr int SLICES = (VALUE_DIM + BV - 1) / BV, VT = BV / 16, CT = C / 16;
constexpr int K_PITCH = KD + 8, V_PITCH = BV + 4, H_PITCH = BV + 8, W_PITCH = C + 8;
constexpr int K_BYTES = 2 * C * K_PITCH, H_BYTES = 2 * C * H_PITCH, V_BYTES = 4 * C * V_PITCH;
constexpr int Q_BYTES = K_BYTES > 2 * H_BYTES ? K_BYTES : 2 * H_BYTES;  // queries, then the updates twice
constexpr int K_AT = Q_BYTES, S_AT = K_AT + K_BYTES, A_AT = S_AT + 2 * KD * H_PITCH, P_AT = A_AT + 4 * C * C,
              W_AT = P_AT + 4 * C * C, X_AT = W_AT + 2 * C * W_PITCH, O_AT = X_AT + V_BYTES, ROW_AT = O_AT + V_BYTES;
constexpr int TILES = KD / 16 * VT, OWN = (TILES + WARPS - 1) / WARPS;  // of the state, and a warp's share
constexpr bool WIDE = KEY_DIM % 8 == 0 && VALUE_DIM % 8 == 0;          // rows are whole 16-byte words

static_assert(ROW_AT + 5 * 4 * C == SHARED_BYTES, "what Python reserves");
static_assert(2 * C * C == WARPS * 256, "warps' scratch takes the place of two matrices");

typedef wmma::fragment<wmma::accumulator, 16, 16, 16, float> Sums;
typedef wmma::fragment<wmma::matrix_a, 16, 16, 16, half, wmma::row_major> Left;
typedef wmma::fragment<wmma::matrix_a, 16, 16, 16, half, wmma::col_major> LeftTurned;
typedef wmma::fragment<wmma::matrix_b, 16, 16, 16, half, wmma::row_major> Right;
typedef wmma::fragment<wmma::matrix_b, 16, 16, 16, half, wmma::col_major> RightTurned;

extern __shared__ __align__(32) unsigned char shared[];

// What is known of each token of a part: one over the lengths of q (and the root of KEY_DIM) and k, beta, the log decay
// and its running sum; 0 behind the last token.
struct Tokens {
    float *q_by, *k_by, *beta, *decay, *total;
};

// A tile of the state: where it begins.
struct Place {
    int key, column;
};

__device__ __forceinline__ Place place_of(int tile) { return {tile / VT * 16, tile % VT * 16}; }

__device__ __forceinline__ void load_row(const half* from, half* to, int lane, bool live, float& squares) {
    if (WIDE) {
        for (int part = lane; part < KD / 8; part += 32) {
            uint4 words = make_uint4(0, 0, 0, 0);
            if (live && part * 8 < KEY_DIM) words = reinterpret_cast<const uint4*>(from)[part];
            reinterpret_cast<uint4*>(to)[part] = words;
            float x[8];
            widen(words, x);
#pragma unroll
            for (int i = 0; i < 8; i++) squares += x[i] * x[i];
        }
    } else {
        for (int d = lane; d < KD; d += 32) {
            const half h = live && d < KEY_DIM ? from[d] : __float2half_rn(0.f);
            to[d] = h;
            squares += __half2float(h) * __half2float(h);
        }
    }
}

// Queries, keys and gates of `count` tokens from `token` on.
__device__ __forceinline__ void load_part(const Args& p, half* q, half* k, const Tokens& tokens, i64 token, int count,
                                          int head, int key_head) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int r = warp; r < C; r += WARPS) {
        const bool live = r < count;
        const half* mixed = p.mixed + (token + r) * p.channels;
        float q_squares = 0.f, k_squares = 0.f;
        load_row(mixed + key_head * KEY_DIM, q + r * K_PITCH, lane, live, q_squares);
        load_row(mixed + (p.key_heads + key_head) * KEY_DIM, k + r * K_PITCH, lane, live, k_squares);
        q_squares = warp_sum(q_squares), k_squares = warp_sum(k_squares);
        if (lane == 0) {
            tokens.q_by[r] = live ? rsqrtf(q_squares + 1e-6f) * rsqrtf((float)KEY_DIM) : 0.f;
            tokens.k_by[r] = live ? rsqrtf(k_squares + 1e-6f) : 0.f;
            tokens.beta[r] = live ? beta_of(p, token + r, head) : 0.f;
            tokens.decay[r] = live ? log_decay(p, token + r, head) : 0.f;
        }
    }
}

// A tile of left times right over KD numbers; `right` by rows of the sum's index, or turned.
template <class B>
__device__ __forceinline__ void product(const half* left, const half* right, int pitch, int step, float* to, int to_pitch) {
    Sums sums;
    wmma::fill_fragment(sums, 0.f);
#pragma unroll 4
    for (int d = 0; d < KD; d += 16) {
        Left a;
        B b;
        wmma::load_matrix_sync(a, left + d, K_PITCH);
        wmma::load_matrix_sync(b, right + d * step, pitch);
        wmma::mma_sync(sums, a, b, sums);
    }
    wmma::store_matrix_sync(to, sums, to_pitch, wmma::mem_row_major);
}

// K K^T, Q K^T, K S and Q S.
__device__ __forceinline__ void products(const half* q, const half* k, const half* state, float* kk, float* qk, float* ks,
                                         float* qs) {
    for (int tile = threadIdx.x / 32; tile < 2 * CT * (CT + VT); tile += WARPS) {
        const bool keys = tile < CT * (CT + VT);
        const int index = keys ? tile : tile - CT * (CT + VT), row = index / (CT + VT) * 16, column = index % (CT + VT);
        const half* left = (keys ? k : q) + row * K_PITCH;
        if (column < CT)
            product<RightTurned>(left, k + column * 16 * K_PITCH, K_PITCH, 1, (keys ? kk : qk) + row * C + column * 16, C);
        else
            product<Right>(left, state + (column - CT) * 16, H_PITCH, H_PITCH,
                           (keys ? ks : qs) + row * V_PITCH + (column - CT) * 16, V_PITCH);
    }
}

// The system's matrix, weights of the updates in the outputs, right sides and the state's part of the outputs.
__device__ __forceinline__ void weigh(const Args& p, const Tokens& tokens, float* kk, const float* qk, half* weights,
                                      float* sides, float* outside, i64 token, int count, int head, int first) {
    for (int index = threadIdx.x; index < C * C; index += THREADS) {
        const int i = index / C, j = index % C;
        const float between = j <= i ? expf(tokens.total[i] - tokens.total[j]) * tokens.k_by[j] : 0.f;
        weights[i * W_PITCH + j] = __float2half_rn(j <= i ? qk[index] * tokens.q_by[i] * between : 0.f);
        if (j < i) kk[index] *= tokens.k_by[i] * tokens.beta[i] * between;
    }
    const half* values = p.mixed + token * p.channels + 2 * p.key_heads * KEY_DIM + head * VALUE_DIM + first;
    for (int index = threadIdx.x; index < C * BV; index += THREADS) {
        const int i = index / BV, column = index % BV, at = i * V_PITCH + column;
        const bool live = i < count && first + column < VALUE_DIM;
        const float value = live ? __half2float(values[(i64)i * p.channels + column]) : 0.f, kept = expf(tokens.total[i]);
        sides[at] = tokens.beta[i] * (value - kept * tokens.k_by[i] * sides[at]);
        outside[at] *= kept * tokens.q_by[i];
    }
}

// Solves for the updates, a column a thread; `left` are those that are still there after the part's last token.
__device__ __forceinline__ void solve(const Tokens& tokens, const float* kk, const float* sides, half* delta, half* left) {
    const int column = threadIdx.x;
    if (column >= BV) return;
    float x[C];
#pragma unroll
    for (int i = 0; i < C; i++) {
        float sums[4] = {sides[i * V_PITCH + column], 0.f, 0.f, 0.f};
#pragma unroll
        for (int j = 0; j < i; j++) sums[j % 4] -= kk[i * C + j] * x[j];
        x[i] = (sums[0] + sums[1]) + (sums[2] + sums[3]);
        delta[i * H_PITCH + column] = __float2half_rn(x[i]);
        const float stays = expf(tokens.total[C - 1] - tokens.total[i]) * tokens.k_by[i];
        left[i * H_PITCH + column] = __float2half_rn(x[i] * stays);
    }
}

// A tile of the state as halves, through the warp's scratch.
__device__ __forceinline__ void put_halves(const Sums& sums, half* state, float* scratch, Place place) {
    wmma::store_matrix_sync(scratch, sums, 16, wmma::mem_row_major);
    __syncwarp();
    for (int i = threadIdx.x % 32; i < 256; i += 32)
        state[(place.key + i / 16) * H_PITCH + place.column + i % 16] = __float2half_rn(scratch[i]);
    __syncwarp();
}

// Grid: value heads by slices of columns, chunks.
extern "C" __global__ void __launch_bounds__(THREADS, 1) chunk(const Args p) {
    half *q = reinterpret_cast<half*>(shared), *k = reinterpret_cast<half*>(shared + K_AT);
    half *state = reinterpret_cast<half*>(shared + S_AT), *weights = reinterpret_cast<half*>(shared + W_AT);
    half *delta = q, *left = q + C * H_PITCH;
    float *kk = reinterpret_cast<float*>(shared + A_AT), *qk = reinterpret_cast<float*>(shared + P_AT);
    float *sides = reinterpret_cast<float*>(shared + X_AT), *out = reinterpret_cast<float*>(shared + O_AT);
    float* per_token = reinterpret_cast<float*>(shared + ROW_AT);
    const Tokens tokens = {per_token, per_token + C, per_token + 2 * C, per_token + 3 * C, per_token + 4 * C};
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = p.verify + blockIdx.y;
    const int head = blockIdx.x / SLICES, first = blockIdx.x % SLICES * BV, key_head = head / (p.value_heads / p.key_heads);
    const int start = p.start[row], width = p.width[row];
    if (width == 0) return;
    float *scratch = kk + warp * 256, *states = p.state + p.slot[row] * p.state_slot + (i64)head * KEY_DIM * VALUE_DIM;
    if (first == 0) keep_columns(p, row, head);

    Sums sums[OWN];
    const float* before = states + (i64)((start + p.state_capacity - 1) % p.state_capacity) * p.state_row;
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        if (warp + i * WARPS >= TILES) continue;
        const Place place = place_of(warp + i * WARPS);
        for (int n = lane; n < 256; n += 32) {
            const int d = place.key + n / 16, column = first + place.column + n % 16;
            scratch[n] = start > 0 && d < KEY_DIM && column < VALUE_DIM ? before[d * VALUE_DIM + column] : 0.f;
        }
        __syncwarp();
        wmma::load_matrix_sync(sums[i], scratch, 16, wmma::mem_row_major);
        __syncwarp();
        put_halves(sums[i], state, scratch, place);
    }
    for (int at = 0; at < width;) {
        const int count = min(width - at, C - (start + at) % C);
        const i64 token = p.offset[row] + at;
        load_part(p, q, k, tokens, token, count, head, key_head);
        __syncthreads();
        if (threadIdx.x < C) {
            float total = 0.f;
            for (int i = 0; i <= threadIdx.x; i++) total += tokens.decay[i];
            tokens.total[threadIdx.x] = total;
        }
        products(q, k, state, kk, qk, sides, out);
        __syncthreads();
        weigh(p, tokens, kk, qk, weights, sides, out, token, count, head, first);
        __syncthreads();
        solve(tokens, kk, sides, delta, left);
        __syncthreads();
        for (int tile = warp; tile < CT * VT; tile += WARPS) {
            float* place = out + tile / VT * 16 * V_PITCH + tile % VT * 16;
            Sums o;
            wmma::load_matrix_sync(o, place, V_PITCH, wmma::mem_row_major);
#pragma unroll
            for (int step = 0; step < CT; step++) {
                Left a;
                Right b;
                wmma::load_matrix_sync(a, weights + tile / VT * 16 * W_PITCH + step * 16, W_PITCH);
                wmma::load_matrix_sync(b, delta + step * 16 * H_PITCH + tile % VT * 16, H_PITCH);
                wmma::mma_sync(o, a, b, o);
            }
            wmma::store_matrix_sync(place, o, V_PITCH, wmma::mem_row_major);
        }
        const float kept = expf(tokens.total[C - 1]);
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            if (warp + i * WARPS >= TILES) continue;
            const Place place = place_of(warp + i * WARPS);
#pragma unroll
            for (int n = 0; n < 8; n++) sums[i].x[n] *= kept;
#pragma unroll
            for (int step = 0; step < CT; step++) {
                LeftTurned a;
                Right b;
                wmma::load_matrix_sync(a, k + step * 16 * K_PITCH + place.key, K_PITCH);
                wmma::load_matrix_sync(b, left + step * 16 * H_PITCH + place.column, H_PITCH);
                wmma::mma_sync(sums[i], a, b, sums[i]);
            }
            put_halves(sums[i], state, scratch, place);
        }
        __syncthreads();
        for (int index = threadIdx.x; index < count * BV; index += THREADS) {
            const int i = index / BV, column = index % BV;
            if (first + column < VALUE_DIM)
                p.out[((token + i) * p.value_heads + head) * VALUE_DIM + first + column] =
                    __float2half_rn(out[i * V_PITCH + column]);
        }
        at += count;
    }
    float* after = states + (i64)((start + width - 1) % p.state_capacity) * p.state_row;
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        if (warp + i * WARPS >= TILES) continue;
        const Place place = place_of(warp + i * WARPS);
        wmma::store_matrix_sync(scratch, sums[i], 16, wmma::mem_row_major);
        __syncwarp();
        for (int n = lane; n < 256; n += 32) {
            const int d = place.key + n / 16, column = first + place.column + n % 16;
            if (d < KEY_DIM && column < VALUE_DIM) after[d * VALUE_DIM + column] = scratch[n];
        }
        __syncwarp();
    }
}

// Norms the chunks' outputs over a head's columns and multiplies by the gates: a warp a token and head.
// Grid: value heads, chunks, tokens by eights.
extern "C" __global__ void __launch_bounds__(THREADS) gated_norm(const Args p) {
    const int head = blockIdx.x, row = p.verify + blockIdx.y, lane = threadIdx.x % 32;
    const int at = blockIdx.z * WARPS + threadIdx.x / 32;
    if (at >= p.width[row]) return;
    const i64 token = p.offset[row] + at;
    half* out = p.out + (token * p.value_heads + head) * VALUE_DIM;
    const half* gates = p.qkvz + token * p.qkvz_row + p.channels + head * VALUE_DIM;
    float squares = 0.f;
    for (int column = lane; column < VALUE_DIM; column += 32)
        squares += __half2float(out[column]) * __half2float(out[column]);
    const float scale = rsqrtf(warp_sum(squares) / VALUE_DIM + p.eps);
    for (int column = lane; column < VALUE_DIM; column += 32) {
        const float z = __half2float(gates[column]), gate = sigmoid(z) * (p.silu ? z : 1.f);
        out[column] = __float2half_rn(rounded(__half2float(out[column]) * scale) * p.norm[column] * gate);
    }
}
