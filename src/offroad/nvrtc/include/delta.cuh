// What the kernels of Gated DeltaNet share: their arguments, the gates, and the ring of raw columns.
#pragma once
#include "block.cuh"

struct Args {
    const half *qkvz, *ba;
    half *mixed, *out;  // [tokens, channels], [tokens, value_heads * VALUE_DIM]
    half* conv;         // rings
    float* state;
    const float *conv_weight, *a_log, *dt_bias, *norm;
    const int *slot, *start, *width, *offset;
    i64 qkvz_row, ba_row, conv_slot, state_slot, state_row;
    int channels, key_heads, value_heads, conv_capacity, state_capacity, verify, silu, unused;
    float eps, unused_float;
};

__device__ __forceinline__ float softplus(float x) { return x > 20.f ? x : log1pf(expf(x)); }

// The logarithm of a token's decay, and how much of the difference it takes over.
__device__ __forceinline__ float log_decay(const Args& p, i64 token, int head) {
    return -expf(p.a_log[head]) * softplus(__half2float(p.ba[token * p.ba_row + p.value_heads + head]) + p.dt_bias[head]);
}

__device__ __forceinline__ float beta_of(const Args& p, i64 token, int head) {
    return sigmoid(__half2float(p.ba[token * p.ba_row + head]));
}

// The newest raw columns of a row, the head's share of the channels, into the ring.
__device__ __forceinline__ void keep_columns(const Args& p, int row, int head) {
    const int share = ceil_div(p.channels, p.value_heads), first = head * share, last = min(p.channels, first + share);
    const int width = p.width[row], oldest = max(0, width - p.conv_capacity);
    for (int at = oldest; at < width; at++) {
        half* to = p.conv + p.slot[row] * p.conv_slot + (i64)((p.start[row] + at) % p.conv_capacity) * p.channels;
        const half* from = p.qkvz + (i64)(p.offset[row] + at) * p.qkvz_row;
        for (int channel = first + threadIdx.x; channel < last; channel += blockDim.x) to[channel] = from[channel];
    }
}
