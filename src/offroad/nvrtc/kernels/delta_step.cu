// Gated DeltaNet of verify rows for GPUs whose blocks have room for several states: convolution, gates, recurrence and
// gated norm of a value head, head after head in as many blocks as there are multiprocessors.
//
// What counts is that states [128, 128] in fp32 stream: a thread copies the 16-byte pieces that it will use itself into
// its part of a ring in shared memory, RING - 1 heads ahead, and needs no barrier for them; a state is changed in
// registers and written from there. A thread has 4 values (of a group of 16 that its warp has) for every eighth key.
//
// Columns are stored by another kernel: each value head of a key head reads them.
//
// Specialised by BF16, TAPS, SILU, RING.
#include "mma16816.cuh"

constexpr int DIM = 128, THREADS = 256, KEYS = 16, PIECES = THREADS * KEYS;

struct Args {
    const u16 *qkvz, *ba, *conv;
    float* states;
    const int *slots, *starts, *widths, *offsets;
    const float *taps, *a_log, *dt_bias, *norm;
    u16* out;
    i64 qkvz_row, ba_row, conv_slot, conv_row, state_slot, state_row;
    int rows, key_heads, value_heads, conv_capacity, state_capacity;
    float eps;
};

extern __shared__ __align__(16) unsigned char shared[];

struct Head {  // of a row
    int row, head, start, width, offset;
    i64 slot;
};

__device__ __forceinline__ Head find(const Args& p, const int4* places, int item) {
    const int row = item / p.value_heads;
    const int4 at = places[row];
    return {row, item % p.value_heads, at.y, at.z, at.w, at.x};
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

__device__ __forceinline__ void fetch(const Args& p, const int4* places, uint4* ring, int item, int items) {
    if (item < items) {
        const Head h = find(p, places, item);
        if (h.start > 0 && h.width > 0) {
            const float* from = state_at(p, h, h.start - 1);
#pragma unroll
            for (int j = 0; j < KEYS; j++) copy_async(ring + j * THREADS, (const uint4*)(from + piece(j)));
        }
    }
    copies_so_far();
}

// silu(convolution) of token t of a row at a channel, rounded to the type of activations.
__device__ __forceinline__ float column(const Args& p, const Head& h, int t, int channel) {
    float sum = 0.f;
#pragma unroll
    for (int tap = 0; tap < TAPS; tap++) {
        const int behind = t - (TAPS - 1 - tap), position = h.start + behind;
        float x = 0.f;
        if (behind >= 0) x = half_number(p.qkvz[(i64)(h.offset + behind) * p.qkvz_row + channel]);
        else if (position >= 0)
            x = half_number(p.conv[h.slot * p.conv_slot + (i64)(position % p.conv_capacity) * p.conv_row + channel]);
        sum += x * p.taps[channel * TAPS + tap];
    }
    return half_number(half_of(sum / (1.f + __expf(-sum))));
}

__device__ __forceinline__ float over_lanes(float x, int first, int last) {
#pragma unroll
    for (int d = first; d < last; d *= 2) x += __shfl_xor_sync(0xFFFFFFFFu, x, d);
    return x;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) delta_step(const __grid_constant__ Args p) {
    uint4* ring = (uint4*)shared + threadIdx.x;
    float* vectors = (float*)((uint4*)shared + RING * PIECES);  // q, k, v
    float* squares = vectors + 3 * DIM;                         // of a warp's part of q or k, then of its values
    int4* places = (int4*)(squares + 16);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, quad = lane % 4, items = p.rows * p.value_heads;
    const int width_of_keys = p.key_heads * DIM, group = p.value_heads / p.key_heads;
    take_turn();
    for (int row = threadIdx.x; row < p.rows; row += THREADS)
        places[row] = make_int4(p.slots[row], p.starts[row], p.widths[row], p.offsets[row]);
    __syncthreads();
#pragma unroll
    for (int i = 0; i + 1 < RING; i++) fetch(p, places, ring + i * PIECES, blockIdx.x + i * gridDim.x, items);

    int at = 0;
    for (int item = blockIdx.x; item < items; item += gridDim.x) {
        const int ahead = at == 0 ? RING - 1 : at - 1;
        fetch(p, places, ring + ahead * PIECES, item + (RING - 1) * gridDim.x, items);
        const Head h = find(p, places, item);
        const int q_at = h.head / group * DIM, v_at = 2 * width_of_keys + h.head * DIM;
        const float rate = -__expf(p.a_log[h.head]), bias = p.dt_bias[h.head];
        float s[KEYS][4];
        for (int t = 0; t < h.width; t++) {
            const i64 token = h.offset + t;
            const int own = threadIdx.x % DIM;
            const float mine = column(p, h, t, (threadIdx.x < DIM ? 0 : width_of_keys) + q_at + own);
            if (threadIdx.x < DIM) vectors[2 * DIM + own] = column(p, h, t, v_at + own);
            const float square = over_lanes(mine * mine, 1, 32);
            if (lane == 0) squares[warp] = square;
            vectors[threadIdx.x] = mine;
            __syncthreads();
            if (t == 0) {
                copies_but<RING - 1>();
#pragma unroll
                for (int j = 0; j < KEYS; j++) {
                    const uint4 v = ring[at * PIECES + j * THREADS];
                    const bool there = h.start > 0;
                    s[j][0] = there ? __uint_as_float(v.x) : 0.f;
                    s[j][1] = there ? __uint_as_float(v.y) : 0.f;
                    s[j][2] = there ? __uint_as_float(v.z) : 0.f;
                    s[j][3] = there ? __uint_as_float(v.w) : 0.f;
                }
            }
            const float by_q = rsqrtf(squares[0] + squares[1] + squares[2] + squares[3] + 1e-6f) * 0.08838834764831845f;
            const float by_k = rsqrtf(squares[4] + squares[5] + squares[6] + squares[7] + 1e-6f);
            const float b = half_number(p.ba[token * p.ba_row + h.head]);
            const float x = half_number(p.ba[token * p.ba_row + p.value_heads + h.head]) + bias;
            const float beta = 1.f / (1.f + __expf(-b)), softplus = fmaxf(x, 0.f) + __logf(1.f + __expf(-fabsf(x)));
            const float decay = __expf(rate * softplus);
            float sums[4] = {}, y[4] = {}, keys[KEYS];
#pragma unroll
            for (int j = 0; j < KEYS; j++) {
                keys[j] = vectors[DIM + lane / 4 + 8 * j] * by_k;
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    s[j][i] *= decay;
                    sums[i] += s[j][i] * keys[j];
                }
            }
#pragma unroll
            for (int i = 0; i < 4; i++)
                sums[i] = (vectors[2 * DIM + warp * 16 + quad * 4 + i] - over_lanes(sums[i], 4, 32)) * beta;
#pragma unroll
            for (int j = 0; j < KEYS; j++) {
                const float q = vectors[lane / 4 + 8 * j] * by_q;
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    s[j][i] += keys[j] * sums[i];
                    y[i] += s[j][i] * q;
                }
            }
            float* to = state_at(p, h, h.start + t);
#pragma unroll
            for (int j = 0; j < KEYS; j++) *(float4*)(to + piece(j)) = make_float4(s[j][0], s[j][1], s[j][2], s[j][3]);
            float square_of_y = 0.f;
#pragma unroll
            for (int i = 0; i < 4; i++) {
                y[i] = half_number(half_of(over_lanes(y[i], 4, 32)));
                square_of_y += y[i] * y[i];
            }
            square_of_y = over_lanes(square_of_y, 1, 4);
            if (lane == 0) squares[8 + warp] = square_of_y;
            __syncthreads();
            if (lane < 4) {
                float total = 0.f;
#pragma unroll
                for (int w = 0; w < 8; w++) total += squares[8 + w];
                const float by = rsqrtf(total / DIM + p.eps);
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const int value = warp * 16 + quad * 4 + i;
                    const i64 z_at = token * p.qkvz_row + 2 * width_of_keys + (i64)(p.value_heads + h.head) * DIM + value;
                    const float z = half_number(p.qkvz[z_at]), gate = 1.f / (1.f + __expf(-z));
                    const float scaled = half_number(half_of(y[i] * by)) * p.norm[value];
                    p.out[token * ((i64)p.value_heads * DIM) + h.head * DIM + value] = half_of(scaled * (SILU ? z * gate : gate));
                }
            }
        }
        at = at + 1 == RING ? 0 : at + 1;
    }
}
