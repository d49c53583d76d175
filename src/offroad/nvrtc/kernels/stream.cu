// out = x W^T of at most 8 tokens, for compute capability 8.0 and later: weights come by asynchronous copies, a lane's
// own 16 bytes at a time, become bf16 or fp16 in registers, and are the left operand of m16n8k16.
//
// Weights are in the records of linear_pack.py: a lane's 16 bytes are its part of four operands of 16 outputs by 16 k.
// A block has a slice of k, of which x is in shared memory for as long as it runs, and a range of 16-output tiles; its
// warps take the tiles' records in turn, with DEPTH records in flight each. Sums go over a warp's records, then over
// the warps, then over the slices, each in a fixed order, so that a result depends neither on who comes last nor on
// the other tokens.
//
// A 4-bit code u is read as BASE + u, which costs no arithmetic; sums start at -(BASE + 8) times the sum of x instead.
//
// Specialised by KIND (0: 4-bit integers, 1: e4m3), BF16, DEPTH, SCALE_BITS (16: bf16 or fp16 as SCALE_BF16 says;
// 32: fp32), MINIMA (0: none, 1: int16 times the scale, 2: numbers like scales) and MIN_BLOCKS.
#include "mma16816.cuh"

constexpr int WARPS = 8, THREADS = 32 * WARPS, TOKENS = 8, UNIT = 128, LOADS = KIND == 0 ? 2 : 4;
constexpr float BASE = BF16 ? 128.f : 1024.f;
constexpr bool SUMS = KIND == 0 || MINIMA;  // those of x are needed

struct Args {
    const u16* x;
    u16* out;
    const u16* bias;
    const uint4* weights;  // [n / 64, units, LOADS * 128]
    const void* scales;    // [groups, scale_row]
    const void* minima;
    const float* row_scale;  // [n] or null
    float* partial;          // [slices, 16-output tiles, tokens, 16]
    u32* arrived;            // one a range of tiles, 0 between launches
    i64 x_row;
    int tokens, n, k, units, slices, group_shift, scale_row;
};

extern __shared__ __align__(16) unsigned char shared[];

// Bits of a scale, and their number: what is loaded ahead is not touched before it is used.
__device__ __forceinline__ u32 scale_bits(const void* from, i64 at) {
    return SCALE_BITS == 32 ? streamed_word((const u32*)from + at) : streamed_half((const u16*)from + at);
}

__device__ __forceinline__ float scale_number(u32 bits) {
    return SCALE_BITS == 32 ? __uint_as_float(bits) : half_number_of((u16)bits, SCALE_BF16);
}

// The operand of 16 outputs by 16 k out of word `step` of a lane's loads.
__device__ __forceinline__ void operand(u32 (&a)[4], u32 low, u32 high) {
    if (KIND == 0) {
        const u32 magic = BF16 ? 0x43004300u : 0x64006400u;
        a[0] = masked(low, 0x000F000Fu, magic);
        a[1] = masked(low >> 4, 0x000F000Fu, magic);
        a[2] = masked(low >> 8, 0x000F000Fu, magic);
        a[3] = masked(low >> 12, 0x000F000Fu, magic);
    } else {
        // A byte's bits at the top of the mantissa and the bottom of the exponent, times what the biases differ by.
        const u32 mask = BF16 ? 0x07F007F0u : 0x3F803F80u, factor = BF16 ? 0x7B807B80u : 0x5C005C00u;
        const int shift = BF16 ? 4 : 1;
        const u32 words[2] = {low, high};
#pragma unroll
        for (int i = 0; i < 2; i++) {
#pragma unroll
            for (int j = 0; j < 2; j++) {
                const u32 spread = bytes_apart(words[i], j);
                a[2 * j + i] = scaled2(masked(spread >> shift, mask, spread & 0x80008000u), factor);
            }
        }
    }
}

struct Scales {
    u32 scale[2], minimum[2];  // bits, of outputs 8 apart
};

// A lane's part of a record, and where its next one is: of 16-output tile `tile` and 128 k `unit`.
struct Place {
    int tile, unit;
    const uint4* words;

    __device__ __forceinline__ void find(const Args& p, int lane) {
        words = p.weights + ((i64)(tile >> 2) * p.units + unit) * (LOADS * 128) + (tile & 3) * (LOADS * 32) + lane;
    }

    __device__ __forceinline__ void next(const Args& p, int first, int units, int lane) {
        unit += WARPS;
        words += WARPS * LOADS * 128;
        if (unit >= first + units) {
            unit -= units;
            tile++;
            find(p, lane);
        }
    }
};

// Starts the loads of a record: words go to `to`, where the lane itself will read them, scales into registers.
__device__ __forceinline__ void load(const Args& p, uint4* to, Scales& r, const Place& at, int lane) {
#pragma unroll
    for (int i = 0; i < LOADS; i++) copy_async(to + i * 32, at.words + i * 32);
    const i64 place = (i64)(at.unit >> p.group_shift) * p.scale_row + at.tile * 16 + lane / 4;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        r.scale[i] = scale_bits(p.scales, place + 8 * i);
        if (MINIMA == 1) r.minimum[i] = streamed_half((const u16*)p.minima + place + 8 * i);
        if (MINIMA == 2) r.minimum[i] = scale_bits(p.minima, place + 8 * i);
    }
}

// x of a slice, [unit][half][2 words of steps][token][lane % 4] of 16 bytes, and its sums over units.
__device__ __forceinline__ void stage(const Args& p, u32* xs, float* sums, int first, int units) {
    constexpr int AT_ONCE = 4;
    const int pieces = units * 16, all = p.tokens * pieces;
    for (int group = 0; group < all; group += AT_ONCE * THREADS) {  // the same for all threads: they shuffle
        const int begin = group + threadIdx.x;
        uint4 v[AT_ONCE];
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) {
            const int i = begin + j * THREADS, token = i / pieces, k = first * UNIT + i % pieces * 8;
            v[j] = make_uint4(0, 0, 0, 0);
            if (i < all && k < p.k) v[j] = *(const uint4*)(p.x + token * p.x_row + k);
        }
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) {
            const int i = begin + j * THREADS, token = i / pieces, piece = i % pieces;
            if (group + j * THREADS >= all) break;
            const u32 words[4] = {v[j].x, v[j].y, v[j].z, v[j].w};
            const int quarter = piece / 4, word = piece % 4;  // 32 k; 8 of them
            float sum = 0.f;
#pragma unroll
            for (int w = 0; w < 4; w++) {
                if (i < all) xs[((quarter * p.tokens + token) * 4 + w) * 4 + word] = words[w];
                sum += half_number((u16)words[w]) + half_number((u16)(words[w] >> 16));
            }
            if (SUMS) {
#pragma unroll
                for (int d = 1; d < 16; d *= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, d);
                if (i < all && piece % 16 == 0) sums[piece / 16 * p.tokens + token] = sum;
            }
        }
    }
}

// acc += the tile's weights of a unit times x.
__device__ __forceinline__ void multiply(const Args& p, float (&acc)[4], const uint4* from, const Scales& r,
                                         const uint4* xs, const float* sums, int unit, int lane) {
    const int row = min(lane / 4, p.tokens - 1);  // lanes without a token read another's, for columns that nobody reads
    uint4 words[LOADS], b;
    float part[4], total[2];
#pragma unroll
    for (int i = 0; i < LOADS; i++) words[i] = from[i * 32];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        total[i] = SUMS ? sums[unit * p.tokens + min(lane % 4 * 2 + i, p.tokens - 1)] : 0.f;
        part[i] = part[2 + i] = KIND == 0 ? -(BASE + 8.f) * total[i] : 0.f;
    }
#pragma unroll
    for (int step = 0; step < 8; step++) {
        if (step % 2 == 0) b = xs[((unit * 4 + step / 2) * p.tokens + row) * 4 + lane % 4];
        const uint4& low = words[KIND == 0 ? step / 4 : step / 4 * 2];
        const uint4& high = words[KIND == 0 ? step / 4 : step / 4 * 2 + 1];
        const u32 lows[4] = {low.x, low.y, low.z, low.w}, highs[4] = {high.x, high.y, high.z, high.w};
        u32 a[4];
        operand(a, lows[step % 4], highs[step % 4]);
        mma16816(part, a, step % 2 ? b.z : b.x, step % 2 ? b.w : b.y);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float scale = scale_number(r.scale[i / 2]);
        const u32 bits = r.minimum[i / 2];
        acc[i] += part[i] * scale;
        if (MINIMA) acc[i] += total[i % 2] * (MINIMA == 1 ? (float)(short)bits * scale : scale_number(bits));
    }
}

__device__ __forceinline__ void finish(const Args& p, float sum, int tile, int token, int output) {
    const int row = tile * 16 + output;
    if (row >= p.n || token >= p.tokens) return;
    if (p.row_scale) sum *= p.row_scale[row];
    if (p.bias) sum += half_number(p.bias[row]);
    p.out[(i64)token * p.n + row] = half_of(sum);
}

// Sums of a tile over the warps, which have put theirs in `room` [warp][token][17].
__device__ __forceinline__ void over_warps(const Args& p, const float* room, int tile, int slice, int tiles) {
    for (int i = threadIdx.x; i < p.tokens * 16; i += THREADS) {
        const int token = i / 16, output = i % 16;
        float sum = 0.f;
#pragma unroll
        for (int warp = 0; warp < WARPS; warp++) sum += room[(warp * TOKENS + token) * 17 + output];
        if (p.slices == 1) finish(p, sum, tile, token, output);
        else p.partial[(((i64)slice * tiles + tile) * p.tokens + token) * 16 + output] = sum;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) stream(const __grid_constant__ Args p) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int slice = blockIdx.x % p.slices, range = blockIdx.x / p.slices, ranges = gridDim.x / p.slices;
    const int tiles = (p.n + 15) / 16, first = (int)((i64)tiles * range / ranges), last = (int)((i64)tiles * (range + 1) / ranges);
    const int unit0 = (int)((i64)p.units * slice / p.slices), units = (int)((i64)p.units * (slice + 1) / p.slices) - unit0;
    uint4* ring = (uint4*)shared + warp * (DEPTH * LOADS * 32) + lane;
    u32* xs = (u32*)((uint4*)shared + WARPS * DEPTH * LOADS * 32);
    float* sums = (float*)(xs + units * p.tokens * 64);
    float* room = sums + (SUMS ? units * p.tokens : 0);

    Scales scales[DEPTH];
    Place ahead = {first, unit0 + warp}, here = ahead;
    ahead.find(p, lane);
#pragma unroll
    for (int d = 0; d < DEPTH; d++) {
        if (ahead.tile < last) load(p, ring + d * LOADS * 32, scales[d], ahead, lane);
        copies_so_far();
        ahead.next(p, unit0, units, lane);
    }
    take_turn();
    stage(p, xs, sums, unit0, units);
    __syncthreads();

    float acc[4] = {};
    int parity = 0;
    while (here.tile < last) {
#pragma unroll
        for (int d = 0; d < DEPTH; d++) {
            if (here.tile >= last) break;
            copies_but<DEPTH - 1>();
            multiply(p, acc, ring + d * LOADS * 32, scales[d], (const uint4*)xs, sums, here.unit - unit0, lane);
            if (ahead.tile < last) load(p, ring + d * LOADS * 32, scales[d], ahead, lane);
            copies_so_far();
            ahead.next(p, unit0, units, lane);
            const int tile = here.tile;
            here.unit += WARPS;
            if (here.unit >= unit0 + units) here.unit -= units, here.tile++;
            if (here.tile != tile) {
                float* own = room + parity * (WARPS * TOKENS * 17);
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    own[(warp * TOKENS + lane % 4 * 2 + i % 2) * 17 + lane / 4 + i / 2 * 8] = acc[i];
                    acc[i] = 0.f;
                }
                __syncthreads();
                over_warps(p, own, tile, slice, tiles);
                parity ^= 1;
            }
        }
    }
    if (p.slices == 1) return;
    __threadfence();
    __syncthreads();
    u32* last_one = (u32*)room;
    if (threadIdx.x == 0) {
        const u32 before = atomicAdd(p.arrived + range, 1u);
        *last_one = before == (u32)p.slices - 1;
        if (*last_one) p.arrived[range] = 0;
    }
    __syncthreads();
    if (!*last_one) return;
    __threadfence();
    const int count = (last - first) * p.tokens * 16;
    for (int i = threadIdx.x; i < count; i += THREADS) {
        const int output = i % 16, token = i / 16 % p.tokens, tile = first + i / 16 / p.tokens;
        float sum = 0.f;
        for (int s = 0; s < p.slices; s++)
            sum += shared_by_blocks(p.partial + (((i64)s * tiles + tile) * p.tokens + token) * 16 + output);
        finish(p, sum, tile, token, output);
    }
}
