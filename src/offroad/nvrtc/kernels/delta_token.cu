// Gated DeltaNet of rows of one token each, over states that are replayed from records (run.rows.ReplayView), for heads
// of 128 by 128 in bf16: what single_kernel of triton_kernels/delta_replay_jit.py does, sum by sum in another order.
//
// A block has a row and a value head, and its state in registers, whose loads are all on their way before anything else
// is read. With S the state at the base and G the running sum of the decays of n records, the token's S_p^T k is
// g S^T k + e^decay sum_i exp(G_n - G_i) (key_i . k) delta_i with g = exp(G_n) e^decay, and likewise for q. So the block
// meets at two barriers, and four of its warps at a third; a state that is folded is so from registers.
//
// Specialised by LAG (records behind a state) and SILU (the gate: silu, else sigmoid).
#include "bf16.cuh"
#include "hopper.cuh"

constexpr int D = 128, WARPS = 8, THREADS = 32 * WARPS, KEYS = D / WARPS, TAPS = 4;
static_assert(LAG <= WARPS, "a warp has a record");

struct Shared {
    float q[D], k[D];         // not of unit length yet
    float sums[WARPS][2][D];  // of a warp's keys: S^T k, S^T q
    float keys[LAG][D], deltas[LAG][D];
    float near[LAG][2];  // what a record's delta is taken times, for k and for q
    float later[LAG];    // decay from a record to the one before the token
    float squares[WARPS], outputs[4], both;
};
static_assert(sizeof(Shared) == SHARED_BYTES, "what Python reserves");

struct Args {
    const u16* qkvz;
    const u16* ba;
    u16* ring;
    float* states;  // [slots, heads, 128, 128]
    float* keys;    // [slots, LAG + 1, key heads, 128]
    float* deltas;  // [slots, LAG + 1, heads, 128]
    float* decays;  // [slots, LAG + 1, heads]
    const i64* bases;
    const int* slots;
    const int* starts;
    const int* widths;
    const int* offsets;
    const float* taps;  // [channels, 4]
    const float* a_log;
    const float* dt_bias;
    const float* norm;
    u16* out;
    i64 stride, ba_stride, ring_slot, ring_stride, state_slot;
    int capacity, heads, group;
    float eps;
};

extern __shared__ __align__(16) unsigned char shared[];

__device__ __forceinline__ float4 four(const float* at) { return *reinterpret_cast<const float4*>(at); }
__device__ __forceinline__ float dot(float4 a, float4 b) { return a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w; }
__device__ __forceinline__ float sigmoid(float x) { return 1.f / (1.f + __expf(-x)); }

__device__ __forceinline__ float sum_of_warp(float x) {
#pragma unroll
    for (int lanes = 16; lanes; lanes >>= 1) x += __shfl_xor_sync(0xFFFFFFFFu, x, lanes);
    return x;
}

// silu(convolution) of a channel, rounded; `ring` is the slot's.
__device__ __forceinline__ float column(const Args& p, const u16* raw, const u16* ring, int channel, int start) {
    const float4 taps = four(p.taps + (i64)channel * TAPS);
    const float weights[TAPS] = {taps.x, taps.y, taps.z, taps.w};
    float total = 0.f;
#pragma unroll
    for (int tap = 0; tap < TAPS; tap++) {
        const int position = start + tap - (TAPS - 1);
        const u16* from = tap == TAPS - 1 ? raw : ring + (i64)((u32)max(position, 0) % (u32)p.capacity) * p.ring_stride;
        total += (position < 0 ? 0.f : wide(from[channel])) * weights[tap];
    }
    return wide(narrow(total * sigmoid(total)));
}

// What a thread has of a state: a warp's KEYS keys, four values of each.
typedef float4 State[KEYS];

__device__ __forceinline__ void multiply(Shared& all, const State& state, int warp, int lane) {
    float4 by_k = make_float4(0.f, 0.f, 0.f, 0.f), by_q = by_k;
#pragma unroll
    for (int i = 0; i < KEYS; i++) {
        const float k = all.k[warp * KEYS + i], q = all.q[warp * KEYS + i];
        by_k.x += state[i].x * k, by_k.y += state[i].y * k, by_k.z += state[i].z * k, by_k.w += state[i].w * k;
        by_q.x += state[i].x * q, by_q.y += state[i].y * q, by_q.z += state[i].z * q, by_q.w += state[i].w * q;
    }
    reinterpret_cast<float4*>(all.sums[warp][0])[lane] = by_k;
    reinterpret_cast<float4*>(all.sums[warp][1])[lane] = by_q;
}

// The state with all records; `further` is the decay from the base to the last of them, 0 where there was no state.
__device__ __forceinline__ void fold(const Shared& all, State& state, float4* to, float further, int warp, int lane) {
    float4 deltas[LAG];
#pragma unroll
    for (int r = 0; r < LAG; r++) {
        const float4 delta = reinterpret_cast<const float4*>(all.deltas[r])[lane];
        const float later = all.later[r];
        deltas[r] = make_float4(delta.x * later, delta.y * later, delta.z * later, delta.w * later);
    }
#pragma unroll
    for (int i = 0; i < KEYS; i++) {
        float4 s = make_float4(0.f, 0.f, 0.f, 0.f);  // not 0 times what lies there: it may be anything
        if (further != 0.f) s = make_float4(state[i].x * further, state[i].y * further, state[i].z * further, state[i].w * further);
#pragma unroll
        for (int r = 0; r < LAG; r++) {
            const float key = all.keys[r][warp * KEYS + i];
            s.x += key * deltas[r].x, s.y += key * deltas[r].y, s.z += key * deltas[r].z, s.w += key * deltas[r].w;
        }
        to[i * 32] = s;
    }
}

// Grid: value heads, rows.
extern "C" __global__ void __launch_bounds__(THREADS, 2) token(const __grid_constant__ Args p) {
    Shared& all = *reinterpret_cast<Shared*>(shared);
    const int head = blockIdx.x, row = blockIdx.y, thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const int key_head = head / p.group, key_width = p.heads / p.group * D;
    let_next_start();
    wait_turn();
    if (p.widths[row] == 0) return;
    const i64 slot = p.slots[row];
    float4* states = reinterpret_cast<float4*>(p.states + slot * p.state_slot + (i64)head * D * D) + warp * KEYS * 32 + lane;
    State state;
#pragma unroll
    for (int i = 0; i < KEYS; i++) state[i] = __ldcs(states + i * 32);
    const int start = p.starts[row], base = (int)p.bases[slot], count = start - base, place = start % (LAG + 1);
    const u16* raw = p.qkvz + (i64)p.offsets[row] * p.stride;
    u16* ring = p.ring + slot * p.ring_slot;
    float* keys = p.keys + slot * (LAG + 1) * key_width + key_head * D;
    float* deltas = p.deltas + (slot * (LAG + 1) * p.heads + head) * D;
    float* decays = p.decays + slot * (LAG + 1) * p.heads + head;

    // A warp's record, and the decays of all.
    float4 key = make_float4(0.f, 0.f, 0.f, 0.f), delta = key;
    if (warp < count) {
        const int at = (base + warp) % (LAG + 1);
        key = four(keys + (i64)at * key_width + lane * 4), delta = four(deltas + (i64)at * p.heads * D + lane * 4);
    }
    float upto = lane < count ? decays[(base + lane) % (LAG + 1) * p.heads] : 0.f;  // becomes the sum up to it
    const u16* gates = p.ba + (i64)p.offsets[row] * p.ba_stride + head;
    const float x = wide(gates[p.heads]) + p.dt_bias[head], beta = sigmoid(wide(gates[0]));
    const float step = -__expf(p.a_log[head]) * (fmaxf(x, 0.f) + __logf(1.f + __expf(-fabsf(x))));

    // Half of the threads have q and the value, half have k.
    const int own = thread % D, value_at = 2 * key_width + head * D + own;
    const int key_at = key_head * D + own + (thread < D ? 0 : key_width);
    const float mine = column(p, raw, ring, key_at, start);
    const float value = thread < D ? column(p, raw, ring, value_at, start) : 0.f;
    const float z = thread < D ? wide(raw[value_at + p.heads * D]) : 0.f;
    (thread < D ? all.q : all.k)[own] = mine;
    const float square = sum_of_warp(mine * mine);
    if (lane == 0) all.squares[warp] = square;
    if (warp < LAG) {
        reinterpret_cast<float4*>(all.keys[warp])[lane] = key;
        reinterpret_cast<float4*>(all.deltas[warp])[lane] = delta;
    }
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes <<= 1) {
        const float before = __shfl_up_sync(0xFFFFFFFFu, upto, lanes);
        upto += lane >= lanes ? before : 0.f;
    }
    const float before = __shfl_sync(0xFFFFFFFFu, upto, 31);  // of all records
    __syncthreads();

    const float of_q = rsqrtf(all.squares[0] + all.squares[1] + all.squares[2] + all.squares[3] + 1e-6f) * 0.08838834764831845f;
    const float of_k = rsqrtf(all.squares[4] + all.squares[5] + all.squares[6] + all.squares[7] + 1e-6f);
    const float4 q = four(all.q + lane * 4), k = four(all.k + lane * 4);
    const float near_k = sum_of_warp(dot(key, k)) * of_k, near_q = sum_of_warp(dot(key, q)) * of_q;
    const float both = warp == 0 ? sum_of_warp(dot(k, q)) * of_k * of_q : 0.f;
    const float later = __expf(before - __shfl_sync(0xFFFFFFFFu, upto, warp));
    if (lane == 0 && warp < LAG) {
        const float left = later * __expf(step);
        all.near[warp][0] = near_k * left, all.near[warp][1] = near_q * left, all.later[warp] = later;
    }
    if (thread == 0) all.both = both;
    multiply(all, state, warp, lane);
    __syncthreads();

    if (thread < D) {
        float by_k = 0.f, by_q = 0.f;
#pragma unroll
        for (int w = 0; w < WARPS; w++) by_k += all.sums[w][0][own], by_q += all.sums[w][1][own];
        const float further = __expf(before + step);
        by_k = base > 0 ? by_k * of_k * further : 0.f, by_q = base > 0 ? by_q * of_q * further : 0.f;
#pragma unroll
        for (int r = 0; r < LAG; r++) by_k += all.near[r][0] * all.deltas[r][own], by_q += all.near[r][1] * all.deltas[r][own];
        const float made = (value - by_k) * beta;
        const bool first = head % p.group == 0;  // of the heads that have a key
        if (first) keys[(i64)place * key_width + own] = all.k[own] * of_k;
        deltas[(i64)place * p.heads * D + own] = made;
        if (thread == 0) decays[(i64)place * p.heads] = step;
        u16* columns = ring + (i64)((u32)start % (u32)p.capacity) * p.ring_stride;
        columns[value_at] = raw[value_at];
        if (first) columns[key_at] = raw[key_at], columns[key_at + key_width] = raw[key_at + key_width];
        float y = wide(narrow(by_q + all.both * made));
        const float squares = sum_of_warp(y * y);
        if (lane == 0) all.outputs[warp] = squares;
        sync_some(1, D);
        y *= rsqrtf((all.outputs[0] + all.outputs[1] + all.outputs[2] + all.outputs[3]) / D + p.eps);
        y = wide(narrow(y)) * p.norm[own] * sigmoid(z) * (SILU ? z : 1.f);
        p.out[((i64)p.offsets[row] * p.heads + head) * D + own] = narrow(y);
    }
    if (count == LAG) fold(all, state, states, base > 0 ? __expf(before) : 0.f, warp, lane);
}
