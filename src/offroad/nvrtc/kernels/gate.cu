// Gated activations: eight numbers a thread.
#include "block.cuh"

static_assert(SHARED_BYTES == 0, "none");

struct Args {
    const half *x, *gates;  // gated_activation: gate and up; output_gate: what is gated, and the fused projection
    half* out;
    i64 x_row, gates_row;
    int size;      // numbers of a token's output
    int head_dim;  // output_gate: gates of head h start at (2 h + 1) head_dim
    int gelu, unused;
};

// Grid: blocks of 256 * 8 numbers, tokens.
extern "C" __global__ void gated_activation(const Args p) {
    const int at = (blockIdx.x * blockDim.x + threadIdx.x) * 8;
    if (at >= p.size) return;
    const i64 token = blockIdx.y;
    float gate[8], up[8];
    widen(*reinterpret_cast<const uint4*>(p.x + token * p.x_row + at), gate);
    widen(*reinterpret_cast<const uint4*>(p.x + token * p.x_row + p.size + at), up);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const float g = gate[i];
        const float inner = 0.7978845608028654f * (g + 0.044715f * g * g * g);
        up[i] *= p.gelu ? 0.5f * g * (1.f + tanhf(inner)) : g * sigmoid(g);
    }
    *reinterpret_cast<uint4*>(p.out + token * p.size + at) = narrow(up);
}

extern "C" __global__ void output_gate(const Args p) {
    const int at = (blockIdx.x * blockDim.x + threadIdx.x) * 8;
    if (at >= p.size) return;
    const i64 token = blockIdx.y;
    const int head = at / p.head_dim;
    float x[8], gate[8];
    widen(*reinterpret_cast<const uint4*>(p.x + token * p.x_row + at), x);
    widen(*reinterpret_cast<const uint4*>(p.gates + token * p.gates_row + at + (head + 1) * p.head_dim), gate);
#pragma unroll
    for (int i = 0; i < 8; i++) x[i] *= sigmoid(gate[i]);
    *reinterpret_cast<uint4*>(p.out + token * p.size + at) = narrow(x);
}
