// Gated DeltaNet between its projections: causal convolution, then the recurrent rule, a block a head and row of the step.
//
// A thread has one column of the state in registers, KEY_DIM numbers in fp32, and never shares it; what all columns need
// of a token (q and k of unit length) is in shared memory, twice, so that one barrier a token is enough. For verify rows,
// and for chunks of heads that delta_chunk.cu is not for.
//
// Specialised by KEY_DIM, VALUE_DIM, TAPS.
#include "delta.cuh"

constexpr int THREADS = (VALUE_DIM + 31) / 32 * 32, WARPS = THREADS / 32, SEGMENT = 32;
static_assert(4 * (4 * KEY_DIM + 2 * WARPS) == SHARED_BYTES, "what Python reserves");
static_assert(KEY_DIM % 4 == 0, "whole words");

extern __shared__ __align__(16) unsigned char shared[];

// Column `position` of a channel: out of the step, or of the ring, or 0 before the sequence.
__device__ __forceinline__ float column_at(const Args& p, int row, int channel, int at) {
    if (at >= 0) return __half2float(p.qkvz[(i64)(p.offset[row] + at) * p.qkvz_row + channel]);
    const int position = p.start[row] + at;
    if (position < 0) return 0.f;
    return __half2float(p.conv[p.slot[row] * p.conv_slot + (i64)(position % p.conv_capacity) * p.channels + channel]);
}

// Grid: channels by 256, rows, segments of tokens.
extern "C" __global__ void convolve(const Args p) {
    const int channel = blockIdx.x * blockDim.x + threadIdx.x, row = blockIdx.y, width = p.width[row];
    const int begin = blockIdx.z * SEGMENT, end = min(width, begin + SEGMENT);
    if (channel >= p.channels || begin >= end) return;
    float window[TAPS], weight[TAPS];
#pragma unroll
    for (int tap = 0; tap < TAPS; tap++) {
        weight[tap] = p.conv_weight[channel * TAPS + tap];
        window[tap] = tap ? column_at(p, row, channel, begin - TAPS + tap) : 0.f;
    }
    for (int at = begin; at < end; at++) {
#pragma unroll
        for (int tap = 0; tap + 1 < TAPS; tap++) window[tap] = window[tap + 1];
        window[TAPS - 1] = column_at(p, row, channel, at);
        float sum = 0.f;
#pragma unroll
        for (int tap = 0; tap < TAPS; tap++) sum += window[tap] * weight[tap];
        p.mixed[(i64)(p.offset[row] + at) * p.channels + channel] = __float2half_rn(sum * sigmoid(sum));
    }
}

// A warp makes q or k of a token unit length (q also divided by the root of KEY_DIM).
__device__ __forceinline__ void put_unit(const half* from, float* to, float by) {
    const int lane = threadIdx.x % 32;
    float sum = 0.f;
    for (int d = lane; d < KEY_DIM; d += 32) sum += __half2float(from[d]) * __half2float(from[d]);
    const float scale = rsqrtf(warp_sum(sum) + 1e-6f) * by;
    for (int d = lane; d < KEY_DIM; d += 32) to[d] = __half2float(from[d]) * scale;
}

__device__ __forceinline__ float dot(const float (&state)[KEY_DIM], const float* x) {
    float sums[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int d = 0; d < KEY_DIM; d += 4) {
        const float4 four = *reinterpret_cast<const float4*>(x + d);
        sums[0] += state[d] * four.x, sums[1] += state[d + 1] * four.y;
        sums[2] += state[d + 2] * four.z, sums[3] += state[d + 3] * four.w;
    }
    return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

// Makes the compiler read shared memory again: kept in registers, k would drive the state out of them.
__device__ __forceinline__ void forget() { asm volatile("" ::: "memory"); }

// Grid: value heads, rows.
extern "C" __global__ void __launch_bounds__(THREADS) rule(const Args p) {
    float *units = reinterpret_cast<float*>(shared), *room = units + 4 * KEY_DIM;  // q, k of even and odd tokens
    const int head = blockIdx.x, row = blockIdx.y, column = threadIdx.x, warp = threadIdx.x / 32;
    const int start = p.start[row], width = p.width[row], key_head = head / (p.value_heads / p.key_heads);
    const bool live = column < VALUE_DIM, verify = row < p.verify;
    float* states = p.state + p.slot[row] * p.state_slot + (i64)head * KEY_DIM * VALUE_DIM + column;
    keep_columns(p, row, head);
    float state[KEY_DIM];
    const float* before = states + (i64)((start + p.state_capacity - 1) % p.state_capacity) * p.state_row;
#pragma unroll
    for (int d = 0; d < KEY_DIM; d++) state[d] = live && start > 0 ? before[d * VALUE_DIM] : 0.f;
    const float weight = live ? p.norm[column] : 0.f;
    for (int t = 0; t < width; t++) {
        const i64 token = p.offset[row] + t;
        const half* mixed = p.mixed + token * p.channels;
        float* q = units + t % 2 * 2 * KEY_DIM;
        float* k = q + KEY_DIM;
        if (warp == 0) put_unit(mixed + key_head * KEY_DIM, q, rsqrtf((float)KEY_DIM));
        if (warp == WARPS - 1) put_unit(mixed + (p.key_heads + key_head) * KEY_DIM, k, 1.f);
        const float v = live ? __half2float(mixed[2 * p.key_heads * KEY_DIM + head * VALUE_DIM + column]) : 0.f;
        const float z = live ? __half2float(p.qkvz[token * p.qkvz_row + p.channels + head * VALUE_DIM + column]) : 0.f;
        const float beta = beta_of(p, token, head), decay = expf(log_decay(p, token, head));
        __syncthreads();
        const float delta = (v - decay * dot(state, k)) * beta;
        forget();
#pragma unroll
        for (int d = 0; d < KEY_DIM; d += 4) {
            const float4 four = *reinterpret_cast<const float4*>(k + d);
            state[d] = state[d] * decay + four.x * delta, state[d + 1] = state[d + 1] * decay + four.y * delta;
            state[d + 2] = state[d + 2] * decay + four.z * delta, state[d + 3] = state[d + 3] * decay + four.w * delta;
        }
        const float o = rounded(dot(state, q));
        const float scale = rsqrtf(block_sum(live ? o * o : 0.f, room + t % 2 * WARPS) / VALUE_DIM + p.eps);
        if (live) {
            const float gate = sigmoid(z) * (p.silu ? z : 1.f);
            p.out[(token * p.value_heads + head) * VALUE_DIM + column] =
                __float2half_rn(rounded(o * scale) * weight * gate);
            if (verify || t == width - 1) {
                float* after = states + (i64)((start + t) % p.state_capacity) * p.state_row;
#pragma unroll
                for (int d = 0; d < KEY_DIM; d++) after[d * VALUE_DIM] = state[d];
            }
        }
    }
}
