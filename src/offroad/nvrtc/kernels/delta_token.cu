// Gated DeltaNet of rows of one token each, over states that are replayed from records (run.rows.ReplayView), for heads
// of 128 by 128 in bf16: what single_kernel of triton_kernels/delta_replay_jit.py does, sum by sum in another order.
//
// An item is a row and a value head. A block has items one block of the grid apart. One warp starts the copies of all that
// an item reads, some items ahead, so that states are on their way all the time and nothing is waited for twice: a state's
// place in shared memory is filled again as soon as the state has been multiplied, or folded. With S the state at the base
// and G the running sum of the decays of n records, the token's S_p^T k is
// g S^T k + e^decay sum_i exp(G_n - G_i) (key_i . k) delta_i with g = exp(G_n) e^decay, and likewise for q.
//
// Specialised by LAG (records behind a state), SILU (the gate: silu, else sigmoid), STATES and SMALLS (places of states, and
// of what items have beside).
#include "bf16.cuh"
#include "hopper.cuh"

constexpr int D = 128, WARPS = 8, THREADS = 32 * WARPS, KEYS = D / WARPS, TAPS = 4, STATE_BYTES = D * D * 4;
static_assert(LAG <= WARPS, "a warp has a record");

// What an item reads beside its state. Of q, k and v: the taps of the convolution, and what the tokens before had.
struct alignas(16) Small {
    float keys[LAG][D], deltas[LAG][D];
    float taps[3][D][TAPS];
    u16 raw[4][D];  // of q, k, v and the gate
    u16 older[TAPS - 1][3][D];
    float upto[LAG];  // sums of the records' decays up to each of them
    float step, beta;  // the token's decay, what its delta is taken times
    int start, count, stored, slot, offset;  // count: of records, -1: no token; stored: whether there is a state
};

struct alignas(16) Shared {
    float q[D], k[D];         // not of unit length yet
    float sums[WARPS][2][D];  // of a warp's keys: S^T k, S^T q
    float near[LAG][2];       // what a record's delta is taken times, for k and for q
    float later[LAG];         // decay from a record to the one before the token
    float squares[WARPS], outputs[4], both;
};
constexpr int SMALLS_AT = STATES * STATE_BYTES, SHARED_AT = SMALLS_AT + SMALLS * sizeof(Small);
constexpr int BARRIERS_AT = SHARED_AT + sizeof(Shared);
static_assert(BARRIERS_AT + 16 * (STATES + SMALLS) == SHARED_BYTES, "what Python reserves");

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
    int capacity, heads, group, rows;
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

// silu(convolution) of a channel of q, k or v, rounded.
__device__ __forceinline__ float column(const Small& it, int which, int channel) {
    const float4 taps = four(it.taps[which][channel]);
    const float weights[TAPS] = {taps.x, taps.y, taps.z, taps.w};
    float total = 0.f;
#pragma unroll
    for (int tap = 0; tap < TAPS; tap++) {
        const u16 x = tap == TAPS - 1 ? it.raw[which][channel] : it.older[min(tap, TAPS - 2)][which][channel];
        total += (it.start + tap < TAPS - 1 ? 0.f : wide(x)) * weights[tap];
    }
    return wide(narrow(total * sigmoid(total)));
}

// Sums of a warp's KEYS keys; a thread has four values of each.
__device__ __forceinline__ void multiply(Shared& all, const float4* state, int warp, int lane) {
    float4 by_k = make_float4(0.f, 0.f, 0.f, 0.f), by_q = by_k;
#pragma unroll
    for (int i = 0; i < KEYS; i++) {
        const float k = all.k[warp * KEYS + i], q = all.q[warp * KEYS + i];
        const float4 s = state[i * 32];
        by_k.x += s.x * k, by_k.y += s.y * k, by_k.z += s.z * k, by_k.w += s.w * k;
        by_q.x += s.x * q, by_q.y += s.y * q, by_q.z += s.z * q, by_q.w += s.w * q;
    }
    reinterpret_cast<float4*>(all.sums[warp][0])[lane] = by_k;
    reinterpret_cast<float4*>(all.sums[warp][1])[lane] = by_q;
}

// The state with all records; `further` is the decay from the base to the last of them, 0 where there was no state.
__device__ __forceinline__ void fold(const Small& it, const Shared& all, const float4* state, float4* to, float further, int warp, int lane) {
    float4 deltas[LAG];
#pragma unroll
    for (int r = 0; r < LAG; r++) {
        const float4 delta = four(it.deltas[r] + lane * 4);
        const float later = all.later[r];
        deltas[r] = make_float4(delta.x * later, delta.y * later, delta.z * later, delta.w * later);
    }
#pragma unroll
    for (int i = 0; i < KEYS; i++) {
        float4 s = make_float4(0.f, 0.f, 0.f, 0.f);  // not 0 times what lies there: it may be anything
        if (further != 0.f) {
            const float4 old = state[i * 32];
            s = make_float4(old.x * further, old.y * further, old.z * further, old.w * further);
        }
#pragma unroll
        for (int r = 0; r < LAG; r++) {
            const float key = it.keys[r][warp * KEYS + i];
            s.x += key * deltas[r].x, s.y += key * deltas[r].y, s.z += key * deltas[r].z, s.w += key * deltas[r].w;
        }
        to[i * 32] = s;
    }
}

// A ring of places in shared memory, of which an item has one.
template <int PLACES>
struct Ring {
    u64 *full, *empty;

    __device__ __forceinline__ void init() const {
        for (int i = 0; i < PLACES; i++) barrier_init(full + i, 1), barrier_init(empty + i, 1);
    }
    __device__ __forceinline__ u64* coming(int item) const { return full + item % PLACES; }
    __device__ __forceinline__ void wait_for(int item) const { wait(coming(item), item / PLACES & 1); }
    __device__ __forceinline__ void wait_for_room(int item) const { wait(empty + item % PLACES, item / PLACES & 1 ^ 1); }
    __device__ __forceinline__ void leave(int item) const { arrive(empty + item % PLACES); }
};

// A block's items.
struct Items {
    const Args& p;
    Ring<STATES> states;
    Ring<SMALLS> smalls;

    __device__ __forceinline__ int number(int item) const { return blockIdx.x + gridDim.x * item; }
    __device__ __forceinline__ bool has(int item) const { return number(item) < p.rows * p.heads; }
    __device__ __forceinline__ unsigned char* state(int item) const { return shared + item % STATES * STATE_BYTES; }
    __device__ __forceinline__ Small& small(int item) const { return reinterpret_cast<Small*>(shared + SMALLS_AT)[item % SMALLS]; }
};

// What the copying warp knows of an item: numbers that all lanes have, and a lane's record's decay.
struct Ahead {
    int head, width, slot, start, offset, base;
    float decay, gate, beta, a_log, dt_bias;

    // Asks for them; what is asked for comes while the item before is on its way.
    __device__ __forceinline__ void read(const Args& p, int number) {
        const int row = number / p.heads, lane = threadIdx.x % 32;
        head = number % p.heads, width = p.widths[row], slot = p.slots[row], start = p.starts[row], offset = p.offsets[row];
        if (width == 0) return;
        base = (int)p.bases[slot];
        decay = lane < start - base ? p.decays[((i64)slot * (LAG + 1) + (base + lane) % (LAG + 1)) * p.heads + head] : 0.f;
        const u16* gates = p.ba + (i64)offset * p.ba_stride + head;
        gate = wide(gates[p.heads]), beta = wide(gates[0]), a_log = p.a_log[head], dt_bias = p.dt_bias[head];
    }
};

// Starts the copies of what an item has beside its state, one of each lane: of keys, deltas, raw columns, older ones, taps.
__device__ __forceinline__ void copy_small(const Args& p, const Ahead& of, Small& to, u64* barrier) {
    const int lane = threadIdx.x % 32, count = of.start - of.base, key_width = p.heads / p.group * D;
    const int of_key = of.head / p.group * D, of_value = 2 * key_width + of.head * D;
    auto column = [&](int which) { return which == 0 ? of_key : which == 1 ? of_key + key_width : of_value + (which - 2) * p.heads * D; };
    if (lane < 16) {
        const int record = lane % 8;
        if (record >= count) return;
        const i64 at = (i64)of.slot * (LAG + 1) + (of.base + record) % (LAG + 1);
        if (lane < 8) copy_once(to.keys[record], p.keys + at * key_width + of_key, 4 * D, barrier);
        else copy_once(to.deltas[record], p.deltas + (at * p.heads + of.head) * D, 4 * D, barrier);
    } else if (lane < 20) {
        const int which = lane - 16;
        copy_once(to.raw[which], p.qkvz + (i64)of.offset * p.stride + column(which), 2 * D, barrier);
    } else if (lane < 29) {
        const int tap = (lane - 20) / 3, which = (lane - 20) % 3, position = of.start + tap - (TAPS - 1);
        const u16* from = p.ring + of.slot * p.ring_slot + (i64)((u32)max(position, 0) % (u32)p.capacity) * p.ring_stride;
        if (position >= 0) copy_once(to.older[tap][which], from + column(which), 2 * D, barrier);
    } else {
        copy_once(to.taps[lane - 29], p.taps + (i64)column(lane - 29) * TAPS, 4 * TAPS * D, barrier);
    }
}

// What the copying warp computes of an item, by the records' decays and by what gates are made of.
__device__ __forceinline__ void write_numbers(const Ahead& of, Small& to, int count) {
    const int lane = threadIdx.x % 32;
    float upto = of.decay;
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes <<= 1) {
        const float before = __shfl_up_sync(0xFFFFFFFFu, upto, lanes);
        upto += lane >= lanes ? before : 0.f;
    }
    if (lane < LAG) to.upto[lane] = upto;
    if (lane == 0) {
        const float x = of.gate + of.dt_bias;
        to.step = -__expf(of.a_log) * (fmaxf(x, 0.f) + __logf(1.f + __expf(-fabsf(x)))), to.beta = sigmoid(of.beta);
        to.start = of.start, to.count = count, to.stored = of.base > 0, to.slot = of.slot, to.offset = of.offset;
    }
    __syncwarp();
}

// The copying warp: of each item what is small, and its state when there is room for it.
__device__ __forceinline__ void produce(const Args& p, const Items& items) {
    const bool chosen = threadIdx.x % 32 == 0;
    Ahead of;
    if (items.has(0)) of.read(p, items.number(0));
#pragma unroll 1
    for (int item = 0; items.has(item); item++) {
        const bool there = of.width != 0;
        const float* state = p.states + of.slot * p.state_slot + (i64)of.head * D * D;
        auto start_state = [&] {
            items.states.wait_for_room(item);
            __syncwarp();  // all lanes have seen it, before the place can be filled and left again
            if (!chosen) return;
            arrive_expecting(items.states.coming(item), there ? STATE_BYTES : 0);
            if (there) copy_once(items.state(item), state, STATE_BYTES, items.states.coming(item));
        };
        const int count = there ? of.start - of.base : -1;
        items.smalls.wait_for_room(item);
        __syncwarp();
        if (there) copy_small(p, of, items.small(item), items.smalls.coming(item));
        if (item < STATES) start_state();  // before the records' decays have come
        write_numbers(of, items.small(item), count);
        if (chosen) {
            const int bytes = count * (8 * D) + 8 * D + 12 * TAPS * D + min(of.start, TAPS - 1) * (6 * D);
            arrive_expecting(items.smalls.coming(item), there ? bytes : 0);
        }
        if (items.has(item + 1)) of.read(p, items.number(item + 1));
        if (item >= STATES) start_state();
    }
}

// A token of a row and a head, by all other warps.
__device__ __forceinline__ void work(const Args& p, Shared& all, const Items& items, int item, float weight) {
    const int head = items.number(item) % p.heads;
    const int thread = threadIdx.x, warp = same(thread / 32), lane = thread % 32, own = thread % D;
    const bool leaves = thread == D;  // of the half that has less to do
    auto meet = [] { sync_some(1, THREADS); };
    const Small& it = items.small(item);
    items.smalls.wait_for(item);
    const int count = it.count;
    if (count < 0) {
        meet();
        if (leaves) items.smalls.leave(item), items.states.wait_for(item), items.states.leave(item);
        __syncwarp();  // a warp comes to the next meeting as one
        return;
    }
    // Half of the threads have q and the value, half have k.
    const float mine = column(it, thread / D, own);
    const float value = thread < D ? column(it, 2, own) : 0.f;
    (thread < D ? all.q : all.k)[own] = mine;
    const float square = sum_of_warp(mine * mine);
    if (lane == 0) all.squares[warp] = square;
    meet();

    const float of_q = rsqrtf(all.squares[0] + all.squares[1] + all.squares[2] + all.squares[3] + 1e-6f) * 0.08838834764831845f;
    const float of_k = rsqrtf(all.squares[4] + all.squares[5] + all.squares[6] + all.squares[7] + 1e-6f);
    const float before = count ? it.upto[count - 1] : 0.f;  // the decay of all records
    const float4 q = four(all.q + lane * 4), k = four(all.k + lane * 4);
    if (warp < count) {
        const float4 key = four(it.keys[warp] + lane * 4);
        const float near_k = sum_of_warp(dot(key, k)) * of_k, near_q = sum_of_warp(dot(key, q)) * of_q;
        const float later = __expf(before - it.upto[warp]), left = later * __expf(it.step);
        if (lane == 0) all.near[warp][0] = near_k * left, all.near[warp][1] = near_q * left, all.later[warp] = later;
    }
    const float both = warp == WARPS - 1 ? sum_of_warp(dot(k, q)) * of_k * of_q : 0.f;
    if (thread == THREADS - 1) all.both = both;
    items.states.wait_for(item);
    const float4* state = reinterpret_cast<const float4*>(items.state(item)) + warp * KEYS * 32 + lane;
    multiply(all, state, warp, lane);
    meet();
    const bool folds = count == LAG;
    if (!folds && leaves) items.states.leave(item);

    if (thread < D) {
        const int key_head = head / p.group, key_width = p.heads / p.group * D, place = it.start % (LAG + 1);
        const i64 record = (i64)it.slot * (LAG + 1) + place;
        float by_k = 0.f, by_q = 0.f;
#pragma unroll
        for (int w = 0; w < WARPS; w++) by_k += all.sums[w][0][own], by_q += all.sums[w][1][own];
        const float further = __expf(before + it.step);
        by_k = it.stored ? by_k * of_k * further : 0.f, by_q = it.stored ? by_q * of_q * further : 0.f;
#pragma unroll
        for (int r = 0; r < LAG; r++)
            if (r < count) by_k += all.near[r][0] * it.deltas[r][own], by_q += all.near[r][1] * it.deltas[r][own];
        const float made = (value - by_k) * it.beta;
        const bool first = head % p.group == 0;  // of the heads that have a key
        p.deltas[(record * p.heads + head) * D + own] = made;
        if (thread == 0) p.decays[record * p.heads + head] = it.step;
        u16* columns = p.ring + it.slot * p.ring_slot + (i64)((u32)it.start % (u32)p.capacity) * p.ring_stride;
        columns[2 * key_width + head * D + own] = it.raw[2][own];
        if (first) {
            const int at = key_head * D + own;
            p.keys[record * key_width + at] = all.k[own] * of_k;
            columns[at] = it.raw[0][own], columns[at + key_width] = it.raw[1][own];
        }
        float y = wide(narrow(by_q + all.both * made));
        const float squares = sum_of_warp(y * y), z = wide(it.raw[3][own]);
        if (lane == 0) all.outputs[warp] = squares;
        sync_some(2, D);
        y *= rsqrtf((all.outputs[0] + all.outputs[1] + all.outputs[2] + all.outputs[3]) / D + p.eps);
        y = wide(narrow(y)) * weight * sigmoid(z) * (SILU ? z : 1.f);
        p.out[((i64)it.offset * p.heads + head) * D + own] = narrow(y);
    }
    if (folds) {
        float4* to = reinterpret_cast<float4*>(p.states + it.slot * p.state_slot + (i64)head * D * D) + warp * KEYS * 32 + lane;
        fold(it, all, state, to, it.stored ? __expf(before) : 0.f, warp, lane);
    }
    meet();
    if (leaves) items.smalls.leave(item);
    if (folds && leaves) items.states.leave(item);
}

// Grid: blocks, as many as SMs at most.
extern "C" __global__ void __launch_bounds__(THREADS + 32, 1) token(const __grid_constant__ Args p) {
    u64* barriers = reinterpret_cast<u64*>(shared + BARRIERS_AT);
    const Items items{p, {barriers, barriers + STATES}, {barriers + 2 * STATES, barriers + 2 * STATES + SMALLS}};
    if (threadIdx.x == 0) items.states.init(), items.smalls.init(), barriers_are_made();
    __syncthreads();
    let_next_start();
    const float weight = p.norm[threadIdx.x % D];
    wait_turn();
    if (threadIdx.x >= THREADS) return produce(p, items);
    Shared& all = *reinterpret_cast<Shared*>(shared + SHARED_AT);
#pragma unroll 1
    for (int item = 0; items.has(item); item++) work(p, all, items, item, weight);
}
