// Gated DeltaNet of verify rows for GPUs whose blocks have room for several states of 128 x 128 in fp32.
//
// `delta_mix` makes of the projections what the rule needs, once for all value heads of a key head: convolution, unit
// length, gates; and stores the newest columns, which are its own threads' only.
//
// `delta_step` has as many blocks as there are multiprocessors, each of which takes value head after value head. States
// stream: a thread copies the 16-byte pieces that it will use itself into its part of a ring in shared memory, RING - 1
// heads ahead, changes them in registers and writes them from there. It has 4 values (of 16 that its warp has) for every
// eighth key.
//
// Specialised by BF16, TAPS, SILU, RING.
#include "mma16816.cuh"

constexpr int DIM = 128, THREADS = 256, KEYS = 16, PIECES = THREADS * KEYS, BACK = TAPS - 1;
constexpr int VECTORS = 3 * DIM + DIM / 2 + 4;  // of a head and token: q, k, v, z in halves, decay and beta, padding

struct Args {
    const u16 *qkvz, *ba;
    u16* conv;
    float* states;
    const int *slots, *starts, *widths, *offsets;
    const float *taps, *a_log, *dt_bias, *norm;
    float *mixed, *gates;  // [tokens, heads of q, k and v, 128], [tokens, value heads, 2]
    u16* out;
    i64 qkvz_row, ba_row, conv_slot, conv_row, state_slot, state_row;
    int rows, key_heads, value_heads, conv_capacity, state_capacity;
    float eps;
};

extern __shared__ __align__(16) unsigned char shared[];

__device__ __forceinline__ float over_lanes(float x, int first, int last) {
#pragma unroll
    for (int d = first; d < last; d *= 2) x += __shfl_xor_sync(0xFFFFFFFFu, x, d);
    return x;
}

__device__ __forceinline__ float sigmoid(float x) { return 1.f / (1.f + __expf(-x)); }

// Grid: rows, heads of q, k and v. A thread has a channel of the head.
extern "C" __global__ void __launch_bounds__(DIM) delta_mix(const __grid_constant__ Args p) {
    float* squares = (float*)shared;
    const int row = blockIdx.x, head = blockIdx.y, heads = 2 * p.key_heads + p.value_heads, channel = head * DIM + threadIdx.x;
    float taps[TAPS], window[TAPS];
#pragma unroll
    for (int tap = 0; tap < TAPS; tap++) taps[tap] = p.taps[channel * TAPS + tap];
    take_turn();
    const int start = p.starts[row], width = p.widths[row], offset = p.offsets[row];
    u16* ring = p.conv + p.slots[row] * p.conv_slot + channel;
    const u16* raw = p.qkvz + offset * p.qkvz_row + channel;
    u16 old[BACK];
#pragma unroll
    for (int i = 0; i < BACK; i++) {
        const int position = max(start - BACK + i, 0);
        old[i] = ring[position % p.conv_capacity * p.conv_row];
    }
#pragma unroll
    for (int i = 0; i < BACK; i++) window[i + 1] = start - BACK + i >= 0 ? half_number(old[i]) : 0.f;
    for (int t = 0; t < width; t++) {
        const u16 newest = raw[t * p.qkvz_row];
        float sum = 0.f;
#pragma unroll
        for (int tap = 0; tap < BACK; tap++) window[tap] = window[tap + 1];
        window[BACK] = half_number(newest);
#pragma unroll
        for (int tap = 0; tap < TAPS; tap++) sum += window[tap] * taps[tap];
        float x = half_number(half_of(sum * sigmoid(sum)));
        if (head < 2 * p.key_heads) {
            const float square = over_lanes(x * x, 1, 32);
            if (threadIdx.x % 32 == 0) squares[t % 2 * 4 + threadIdx.x / 32] = square;
            __syncthreads();
            const float* all = squares + t % 2 * 4;
            x *= rsqrtf(all[0] + all[1] + all[2] + all[3] + 1e-6f) * (head < p.key_heads ? 0.08838834764831845f : 1.f);
        } else if (threadIdx.x == 0) {
            const int h = head - 2 * p.key_heads;
            const u16* ba = p.ba + (offset + t) * p.ba_row + h;
            const float a = half_number(ba[p.value_heads]) + p.dt_bias[h];
            const float softplus = fmaxf(a, 0.f) + __logf(1.f + __expf(-fabsf(a)));
            float* gates = p.gates + ((i64)(offset + t) * p.value_heads + h) * 2;
            gates[0] = __expf(-__expf(p.a_log[h]) * softplus);
            gates[1] = sigmoid(half_number(ba[0]));
        }
        p.mixed[((i64)(offset + t) * heads + head) * DIM + threadIdx.x] = x;
        if (t >= width - p.conv_capacity) ring[(start + t) % p.conv_capacity * p.conv_row] = newest;
    }
}

struct Head {  // of a row
    int head, start, width, offset;
    i64 slot;
};

__device__ __forceinline__ Head find(const Args& p, const int4* places, int item) {
    const int4 at = places[item / p.value_heads];
    return {item % p.value_heads, at.y, at.z, at.w, at.x};
}

__device__ __forceinline__ float* state_at(const Args& p, const Head& h, int position) {
    return p.states + h.slot * p.state_slot + (i64)((position + p.state_capacity) % p.state_capacity) * p.state_row +
           (i64)h.head * (DIM * DIM);
}

// The first element of piece j of this thread in a state.
__device__ __forceinline__ int piece(int j) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    return (lane / 4 + 8 * j) * DIM + warp * 16 + lane % 4 * 4;
}

// Starts the copies of a token's vectors, a piece a thread.
__device__ __forceinline__ void fetch_vectors(const Args& p, float* to, const Head& h, int t) {
    const int i = threadIdx.x, which = i / 32, lane = i % 32;
    const i64 token = h.offset + t;
    const int heads = 2 * p.key_heads + p.value_heads, key_head = h.head / (p.value_heads / p.key_heads);
    if (which < 3) {
        const int head = which == 0 ? key_head : which == 1 ? p.key_heads + key_head : 2 * p.key_heads + h.head;
        copy_async((uint4*)to + i, (const uint4*)(p.mixed + (token * heads + head) * DIM) + lane);
    } else if (which == 3 && lane < 16) {
        const u16* z = p.qkvz + token * p.qkvz_row + (i64)(heads + h.head) * DIM;
        copy_async((uint4*)to + i, (const uint4*)z + lane);
    } else if (which == 3 && lane == 16) {
        copy_async8((uint4*)to + i, p.gates + (token * p.value_heads + h.head) * 2);
    }
}

__device__ __forceinline__ void fetch(const Args& p, const int4* places, uint4* ring, float* vectors, int item, int items) {
    if (item < items) {
        const Head h = find(p, places, item);
        if (h.width > 0) {
            fetch_vectors(p, vectors, h, 0);
            if (h.start > 0) {
                const float* from = state_at(p, h, h.start - 1);
#pragma unroll
                for (int j = 0; j < KEYS; j++) copy_async(ring + j * THREADS, (const uint4*)(from + piece(j)));
            }
        }
    }
    copies_so_far();
}

// The rule for one token: changes the state, gives this thread's 4 values of y, the same for all of its keys' lanes.
__device__ __forceinline__ void rule(float (&s)[KEYS][4], float (&y)[4], const float* v) {
    const int lane = threadIdx.x % 32, own = threadIdx.x / 32 * 16 + lane % 4 * 4;
    const float decay = v[3 * DIM + DIM / 2], beta = v[3 * DIM + DIM / 2 + 1];
    float sums[4] = {}, keys[KEYS];
#pragma unroll
    for (int j = 0; j < KEYS; j++) {
        keys[j] = v[DIM + lane / 4 + 8 * j];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            s[j][i] *= decay;
            sums[i] += s[j][i] * keys[j];
        }
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        sums[i] = (v[2 * DIM + own + i] - over_lanes(sums[i], 4, 32)) * beta;
        y[i] = 0.f;
    }
#pragma unroll
    for (int j = 0; j < KEYS; j++) {
        const float q = v[lane / 4 + 8 * j];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            s[j][i] += keys[j] * sums[i];
            y[i] += s[j][i] * q;
        }
    }
#pragma unroll
    for (int i = 0; i < 4; i++) y[i] = half_number(half_of(over_lanes(y[i], 4, 32)));
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) delta_step(const __grid_constant__ Args p) {
    uint4* ring = (uint4*)shared + threadIdx.x;
    float* vectors = (float*)((uint4*)shared + RING * PIECES);
    float* squares = vectors + RING * VECTORS;
    int4* places = (int4*)(squares + 8);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, items = p.rows * p.value_heads;
    take_turn();
    for (int row = threadIdx.x; row < p.rows; row += THREADS)
        places[row] = make_int4(p.slots[row], p.starts[row], p.widths[row], p.offsets[row]);
    __syncthreads();
#pragma unroll
    for (int i = 0; i + 1 < RING; i++)
        fetch(p, places, ring + i * PIECES, vectors + i * VECTORS, blockIdx.x + i * gridDim.x, items);

    int at = 0;
    for (int item = blockIdx.x; item < items; item += gridDim.x) {
        const Head h = find(p, places, item);
        float *v = vectors + at * VECTORS, s[KEYS][4], y[4];
        const int ahead = at == 0 ? RING - 1 : at - 1;
        copies_but<RING - 2>();
        __syncthreads();  // all have their copies, and are past the head before
        fetch(p, places, ring + ahead * PIECES, vectors + ahead * VECTORS, item + (RING - 1) * gridDim.x, items);
#pragma unroll
        for (int j = 0; j < KEYS; j++) {
            const uint4 words = ring[at * PIECES + j * THREADS];
            const bool there = h.start > 0;
            s[j][0] = there ? __uint_as_float(words.x) : 0.f;
            s[j][1] = there ? __uint_as_float(words.y) : 0.f;
            s[j][2] = there ? __uint_as_float(words.z) : 0.f;
            s[j][3] = there ? __uint_as_float(words.w) : 0.f;
        }
        for (int t = 0; t < h.width; t++) {
            if (t > 0) {
                __syncthreads();
                fetch_vectors(p, v, h, t);
                copies_so_far();
                copies_but<0>();
                __syncthreads();
            }
            rule(s, y, v);
            float* to = state_at(p, h, h.start + t);
#pragma unroll
            for (int j = 0; j < KEYS; j++) *(float4*)(to + piece(j)) = make_float4(s[j][0], s[j][1], s[j][2], s[j][3]);
            float square = over_lanes(y[0] * y[0] + y[1] * y[1] + y[2] * y[2] + y[3] * y[3], 1, 4);
            if (lane == 0) squares[warp] = square;
            __syncthreads();
            if (lane < 4) {
                float total = 0.f;
#pragma unroll
                for (int w = 0; w < 8; w++) total += squares[w];
                const float by = rsqrtf(total / DIM + p.eps);
                const i64 token = h.offset + t;
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const int value = warp * 16 + lane * 4 + i;
                    const float z = half_number(((const u16*)(v + 3 * DIM))[value]), gate = sigmoid(z);
                    const float scaled = half_number(half_of(y[i] * by)) * p.norm[value];
                    p.out[(token * p.value_heads + h.head) * DIM + value] = half_of(scaled * (SILU ? z * gate : gate));
                }
            }
        }
        at = at + 1 == RING ? 0 : at + 1;
    }
}
