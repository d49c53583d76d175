// Heads of the fused projection, normed and rotated: a warp a head.
#include "block.cuh"

static_assert(SHARED_BYTES == 0, "none");
constexpr int WARPS = 8;

struct Args {
    const half* qkv;
    const i64* positions;  // [tokens], or [3, tokens]
    const float *table, *q_norm, *k_norm;
    half *q, *k, *v;
    i64 qkv_row, positions_row;
    int heads, kv_heads, dim, rope_dim, q_width, k_eq_v, v_norm, own_kv, height, width;  // sections; 0: none
    float eps, unused;
};

// The position that turns angle i: streams of time, height and width take turns in the first angles.
__device__ __forceinline__ i64 position_of(const Args& p, int token, int i) {
    int stream = 0;
    if (i % 3 == 1 && i < 3 * p.height) stream = 1;
    if (i % 3 == 2 && i < 3 * p.width) stream = 2;
    return p.positions[stream * p.positions_row + token];
}

// Number d of the head after its norm, as fp16 holds it.
__device__ __forceinline__ float normed(const half* head, const float* weight, float inverse, bool has_norm, int d) {
    const float x = __half2float(head[d]);
    if (!has_norm) return x;
    return rounded(weight ? x * inverse * weight[d] : x * inverse);
}

// Grid: heads of q, k and v by eights, tokens.
extern "C" __global__ void __launch_bounds__(32 * WARPS) qkv_rope(const Args p) {
    const int lane = threadIdx.x % 32, number = blockIdx.x * WARPS + threadIdx.x / 32, token = blockIdx.y;
    if (number >= p.heads + (p.own_kv ? 2 * p.kv_heads : 0)) return;
    const int kind = number < p.heads ? 0 : number < p.heads + p.kv_heads ? 1 : 2;
    const int head = number - (kind == 0 ? 0 : kind == 1 ? p.heads : p.heads + p.kv_heads);
    const half* row = p.qkv + token * p.qkv_row;
    const half* from = row + (kind == 0 ? head * (p.q_width / p.heads)
                                        : p.q_width + (kind == 2 && !p.k_eq_v ? p.kv_heads + head : head) * p.dim);
    half* out = kind == 0   ? p.q + ((i64)token * p.heads + head) * p.dim
                : kind == 1 ? p.k + ((i64)token * p.kv_heads + head) * p.dim
                            : p.v + ((i64)token * p.kv_heads + head) * p.dim;
    const float* weight = kind == 0 ? p.q_norm : kind == 1 ? p.k_norm : nullptr;
    const bool has_norm = weight != nullptr || (kind == 2 && p.v_norm);
    float sum = 0.f;
    if (has_norm)
        for (int d = lane; d < p.dim; d += 32) sum += __half2float(from[d]) * __half2float(from[d]);
    const float inverse = rsqrtf(warp_sum(sum) / p.dim + p.eps);
    const int turned = kind == 2 ? 0 : p.rope_dim, half_dim = turned / 2;
    for (int d = lane; d < p.dim; d += 32) {
        float x = normed(from, weight, inverse, has_norm, d);
        if (d < turned) {
            const int i = d < half_dim ? d : d - half_dim;
            const float* angles = p.table + position_of(p, token, i) * p.rope_dim;
            const float other = normed(from, weight, inverse, has_norm, d < half_dim ? d + half_dim : d - half_dim);
            x = x * angles[i] + (d < half_dim ? -other : other) * angles[half_dim + i];
        }
        out[d] = __float2half_rn(x);
    }
}
