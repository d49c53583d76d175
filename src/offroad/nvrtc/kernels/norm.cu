// Root-mean-square norms of a token's row, alone or after a residual add. Sums of squares in fp32.
#include "block.cuh"

constexpr int THREADS = 256, ROOM = THREADS / 32;
static_assert(2 * 4 * ROOM == SHARED_BYTES, "what Python reserves");

struct Args {
    const half *x, *residual;    // residual null: `norm`
    const float *post, *weight;  // post: x is normed by it before it is added (`sandwich_norm`); null: by 1, or not at all
    half *out, *total;
    i64 x_row, residual_row;
    int hidden, unused;
    float eps, unused_float;
};

extern __shared__ __align__(16) unsigned char shared[];

__device__ __forceinline__ void load(const half* row, int at, float (&x)[8]) {
    widen(*reinterpret_cast<const uint4*>(row + at), x);
}

// Grid: tokens.
extern "C" __global__ void __launch_bounds__(THREADS) rms_norm(const Args p) {
    float* room = reinterpret_cast<float*>(shared);
    const i64 token = blockIdx.x;
    const half *row = p.x + token * p.x_row, *added = p.residual ? p.residual + token * p.residual_row : nullptr;
    half *out = p.out + token * p.hidden, *total = p.residual ? p.total + token * p.hidden : nullptr;
    float x[8], sum = 0.f, inner = 1.f;
    if (p.post) {
        for (int at = threadIdx.x * 8; at < p.hidden; at += THREADS * 8) {
            load(row, at, x);
#pragma unroll
            for (int i = 0; i < 8; i++) sum += x[i] * x[i];
        }
        inner = rsqrtf(block_sum(sum, room) / p.hidden + p.eps);
        sum = 0.f;
    }
    for (int at = threadIdx.x * 8; at < p.hidden; at += THREADS * 8) {
        load(row, at, x);
        if (added) {
            float before[8];
            load(added, at, before);
#pragma unroll
            for (int i = 0; i < 8; i++) x[i] = rounded(before[i] + (p.post ? rounded(x[i] * inner * p.post[at + i]) : x[i]));
            *reinterpret_cast<uint4*>(total + at) = narrow(x);
        }
#pragma unroll
        for (int i = 0; i < 8; i++) sum += x[i] * x[i];
    }
    const float outer = rsqrtf(block_sum(sum, room + ROOM) / p.hidden + p.eps);
    const half* from = added ? total : row;  // a thread reads what it wrote itself
    for (int at = threadIdx.x * 8; at < p.hidden; at += THREADS * 8) {
        load(from, at, x);
#pragma unroll
        for (int i = 0; i < 8; i++) x[i] *= p.weight ? outer * p.weight[at + i] : outer;
        *reinterpret_cast<uint4*>(out + at) = narrow(x);
    }
}
