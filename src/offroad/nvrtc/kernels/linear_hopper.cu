// y = x W^T for up to TOKENS tokens over weights of 4 bits or in e4m3, in bf16, for Hopper. Records of weights
// (linear_pack.py) are in the order of the registers of a matrix operand, so they go from memory to shared memory as they
// are, become bf16 in registers there and are the left operand of products whose right one, x, lies in shared memory.
//
// A block has a warpgroup that starts copies and WARPGROUPS that multiply, each two tiles of 64 outputs in turn. Weights
// of small groups are widened while products of the other tile run; where a step has one scale, all products end before
// sums are scaled, and ptxas leaves much of the widening to the time behind that, so the other warpgroup's products
// are what runs beside it. Blocks have equal shares of the steps of all tiles: a run from somewhere in a tile to somewhere
// in a later one. Where several blocks have a tile, they leave their sums in memory, and all but the last of them, which
// has more to do, add and store a share each; of two the first adds what the other has left. The order of sums is always
// the same. All blocks must be on the GPU at once, since they wait for one another.
//
// Specialised by BITS (4: integers, 8: e4m3), TOKENS, WARPGROUPS, STAGES, FOLD (scales that 128 k's have), SCALES (0: bf16,
// 1: fp16, 2: fp32), MINIMA (zero points of integers, as multiples of the scale) and GATE (0: y is the product; 1, 2:
// act(gate) * up, act silu, gelu_tanh, of a weight whose first half of outputs is the gate's).
#include "codes.cuh"
#include "hopper.cuh"

constexpr int OUTPUTS = 128 * WARPGROUPS, CONSUMERS = 128 * WARPGROUPS, WARPS = CONSUMERS / 32;
constexpr int RECORD = BITS * 1024, CODES_BYTES = 2 * WARPGROUPS * RECORD, HALF_X = TOKENS * 128;
constexpr int SCALE_SIZE = SCALES == 2 ? 4 : 2, SCALE_BYTES = FOLD * OUTPUTS * SCALE_SIZE;
constexpr int MINIMA_BYTES = MINIMA ? FOLD * OUTPUTS * 2 : 0;
constexpr int X_AT = CODES_BYTES, SCALES_AT = X_AT + 2 * HALF_X, MINIMA_AT = SCALES_AT + SCALE_BYTES;
constexpr int STAGE = (MINIMA_AT + MINIMA_BYTES + 1023) / 1024 * 1024;
constexpr int Y_AT = STAGES * STAGE, Y_BYTES = WARPS * TOKENS * 32, BARRIERS_AT = Y_AT + Y_BYTES;
static_assert(1024 + BARRIERS_AT + 16 * STAGES == SHARED_BYTES, "what Python reserves");
static_assert(BITS == 4 || (FOLD == 1 && !MINIMA), "e4m3 has no zero points, and no small groups");

struct Args {
    TensorMap x;          // [rows, k], boxes of TOKENS rows and 64 k's
    const u8* codes;      // [n / 64, units, RECORD bytes]
    const u8* scales;     // [groups, padded n]
    const u8* minima;     // the same, int16
    const u16* bias;      // [n]
    u16* y;               // [rows, n], with GATE [rows, n / 2]
    float* partial;       // [blocks, 2, OUTPUTS * TOKENS]
    u32* arrived;         // [tiles, warps], 0 between launches
    int rows, n, units;   // units: steps of 128 k's
    int records;          // tiles of 64 outputs
    int tiles;            // of a block
    int padded;           // n that scales have
    int group_units;      // steps that share a scale, where FOLD is 1
};

extern __shared__ __align__(16) unsigned char shared[];

__device__ __forceinline__ i64 share_begin(const Args& p, i64 block) { return block * p.tiles * p.units / gridDim.x; }

// The record of a warpgroup's first or second tile: with GATE the first is the gate's, the second up's.
__device__ __forceinline__ int record_of(const Args& p, int tile, int warpgroup, int second) {
    if (GATE) return tile * WARPGROUPS + warpgroup + second * (p.records / 2);
    return (tile * WARPGROUPS + warpgroup) * 2 + second;
}

struct Ring {
    unsigned char* base;
    u64* full;
    u64* empty;
    int stage = 0;
    u32 parity = 0;
    __device__ __forceinline__ void next() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
};

// Starts the copies of a tile of 64 outputs at a step: its codes, and its scales, FOLD of them for each output.
__device__ __forceinline__ void copy_tile(const Args& p, unsigned char* to, int record, int unit, int group, int t, u64* barrier) {
    copy_once(to + t * RECORD, p.codes + ((i64)record * p.units + unit) * RECORD, RECORD, barrier);
#pragma unroll
    for (int f = 0; f < FOLD; f++) {
        const i64 at = (i64)(group + f) * p.padded + (i64)record * 64;
        const int place = (t * FOLD + f) * 64;
        copy_once(to + SCALES_AT + place * SCALE_SIZE, p.scales + at * SCALE_SIZE, 64 * SCALE_SIZE, barrier);
        if (MINIMA) copy_once(to + MINIMA_AT + place * 2, p.minima + at * 2, 128, barrier);
    }
}

__device__ __forceinline__ void copy_x(const Args& p, unsigned char* to, int unit, u64* barrier) {
    copy_box(to + X_AT, &p.x, unit * 128, 0, barrier);
    copy_box(to + X_AT + HALF_X, &p.x, unit * 128 + 64, 0, barrier);
}

// Starts the copies for one warpgroup, for the first of them those of x too. As many weights as there is room for are on
// their way before the kernels before this one, which write x, have ended.
__device__ __forceinline__ void produce(const Args& p, Ring ring, i64 begin, i64 end, int warpgroup) {
    constexpr int TILE_BYTES = RECORD + FOLD * 64 * (SCALE_SIZE + (MINIMA ? 2 : 0));
    const bool chosen = threadIdx.x % 32 == 0, has_x = warpgroup == 0;
    const int early = (int)min((i64)STAGES, end - begin);
    int tile = (int)(begin / p.units), unit = (int)(begin % p.units), number = 0;
    for (i64 step = begin; step < end; unit = 0, tile++) {
        const int until = (int)min((i64)p.units, unit + end - step);
        const int near = record_of(p, tile, warpgroup, 0), far = record_of(p, tile, warpgroup, 1);
        const int bytes = (has_x ? 2 * HALF_X : 0) + ((near < p.records) + (far < p.records)) * TILE_BYTES;
        int group = FOLD > 1 ? unit * FOLD : unit / p.group_units, left = p.group_units - unit % p.group_units;
        for (; unit < until; unit++, step++, number++) {
            wait(&ring.empty[ring.stage], ring.parity ^ 1);
            unsigned char* to = ring.base + ring.stage * STAGE;
            u64* barrier = &ring.full[ring.stage];
            if (chosen) {
                arrive_expecting(barrier, bytes);
                if (near < p.records) copy_tile(p, to, near, unit, group, 2 * warpgroup, barrier);
                if (far < p.records) copy_tile(p, to, far, unit, group, 2 * warpgroup + 1, barrier);
                if (has_x && number >= early) copy_x(p, to, unit, barrier);
            }
            if (has_x && number == early - 1) {
                wait_turn();
                for (int i = 0; chosen && i < early; i++)
                    copy_x(p, ring.base + i * STAGE, (int)((begin + i) % p.units), &ring.full[i]);
            }
            if (FOLD > 1) group += FOLD;
            else if (--left == 0) group++, left = p.group_units;
            ring.next();
        }
    }
}

// A scale in bf16, twice.
__device__ __forceinline__ u32 scale_pair(const unsigned char* scales, int at) {
    if (SCALES == 2) return twice(narrow(reinterpret_cast<const float*>(scales)[at]));
    const u16 bits = reinterpret_cast<const u16*>(scales)[at];
    return twice(SCALES == 1 ? narrow(wide_half(bits)) : bits);
}

// What 128 + u has too much, negated: 136, less the zero point's distance from 8.
__device__ __forceinline__ u32 offset_pair(const unsigned char* minima, int at) {
    if (!MINIMA) return 0xC308C308u;
    return twice(narrow((float)(reinterpret_cast<const short*>(minima)[at] - 136)));
}

// A scale that a whole step has is multiplied into the step's sums, in fp32; others into weights, which bf16 rounds.
constexpr bool SUMS_SCALED = FOLD == 1;

// The four registers of a matrix operand of 16 k's, from word j of a lane: of 4 bits, of all 16 outputs; of 8, of the lower
// and the upper 8.
__device__ __forceinline__ void widen_word(u32 (&a)[4], u32 word, u32 upper, u32 low, u32 high, u32 less_low, u32 less_high) {
    if (BITS == 8) {
        a[0] = widened(word, false), a[1] = widened(upper, false);
        a[2] = widened(word, true), a[3] = widened(upper, true);
    } else {
        a[0] = plus(masked(word), less_low), a[1] = plus(masked(word >> 4), less_high);
        a[2] = plus(masked(word >> 8), less_low), a[3] = plus(masked(word >> 12), less_high);
    }
#pragma unroll
    for (int i = 0; i < 4 && !SUMS_SCALED; i++) a[i] = times(a[i], i % 2 ? high : low);
}

constexpr int LOADS = BITS / 4;  // of 16 bytes, that a lane has of 64 k's

// The weights of 64 k's that a lane has of a tile, four registers of a matrix operand for each 16 of them.
__device__ __forceinline__ void widen(u32 (&a)[4][4], const uint4* words, const unsigned char* place, int half, int tile, int row) {
    const uint4 lower = words[0], upper = words[LOADS - 1];
    const u32 all[4] = {lower.x, lower.y, lower.z, lower.w}, uppers[4] = {upper.x, upper.y, upper.z, upper.w};
    u32 low = 0, high = 0, less_low = 0, less_high = 0;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        constexpr int EACH = FOLD > 4 ? 1 : FOLD == 4 ? 2 : 4;  // runs of 16 k's that share a scale, of a half
        if (j % EACH == 0) {
            const int at = (tile * FOLD + (half * 4 + j) * FOLD / 8) * 64 + row;
            if (!SUMS_SCALED) low = scale_pair(place + SCALES_AT, at), high = scale_pair(place + SCALES_AT, at + 8);
            less_low = offset_pair(place + MINIMA_AT, at), less_high = offset_pair(place + MINIMA_AT, at + 8);
        }
        widen_word(a[j], all[j], uppers[j], low, high, less_low, less_high);
    }
}

typedef float Sums[2][TOKENS / 2];

// Adds a step's sums, of outputs of the lower and the upper 8.
__device__ __forceinline__ void add_scaled(float (&sums)[TOKENS / 2], const float (&found)[TOKENS / 2], float low, float high) {
#pragma unroll
    for (int i = 0; i < TOKENS / 2; i++) sums[i] += found[i] * (i / 2 % 2 ? high : low);
}

// Adds steps of one tile to nothing.
__device__ __forceinline__ void consume(const Args& p, Ring& ring, Sums& sums, int warpgroup, int steps) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, row = warp * 16 + lane / 4;
    u32 a[2][2][4][4];  // of a tile, of 64 k's
    float found[TOKENS / 2] = {}, low = 0, high = 0;  // of the last step of a tile, and its scales
    if (SUMS_SCALED) {
#pragma unroll
        for (int i = 0; i < TOKENS; i++) sums[i / (TOKENS / 2)][i % (TOKENS / 2)] = 0.f;
    }
    int before = 0;
    for (int step = 0; step < steps; step++) {
        wait(&ring.full[ring.stage], ring.parity);
        const unsigned char* place = ring.base + same(ring.stage * STAGE);
        const u32 x = described(place + X_AT);
#pragma unroll
        for (int t = 0; t < 2; t++) {
            const int tile = 2 * warpgroup + t;
            const uint4* from = reinterpret_cast<const uint4*>(place + tile * RECORD) + warp * (64 * LOADS) + lane;
            uint4 words[2 * LOADS];
#pragma unroll
            for (int i = 0; i < 2 * LOADS; i++) words[i] = from[i * 32];
            if (!SUMS_SCALED) wait_groups<1>();  // of this tile's last products: their operand is written next
            if (!SUMS_SCALED && t == 1 && step > 0 && lane == 0) arrive(&ring.empty[before]);
            widen(a[t][0], words, place, 0, tile, row);
            widen(a[t][1], words + LOADS, place, 1, tile, row);
            if (SUMS_SCALED) {
                wait_groups<0>();  // of the other tile's: their sums are read next
                if (t == 0 && step > 0 && lane == 0) arrive(&ring.empty[before]);
                add_scaled(sums[1 - t], found, low, high);
                low = scale_at(place + SCALES_AT, tile * 64 + row), high = scale_at(place + SCALES_AT, tile * 64 + row + 8);
            }
            products_may_start();
#pragma unroll
            for (int j = 0; j < 8; j++) {
                const u32 columns = x + (j / 4 * HALF_X + j % 4 * 32) / 16;
                if (SUMS_SCALED) start_product<TOKENS>(found, a[t][j / 4][j % 4], columns, j == 0);
                else start_product<TOKENS>(sums[t], a[t][j / 4][j % 4], columns, step + j == 0);
            }
            end_group();
        }
        before = ring.stage;
        ring.next();
    }
    wait_groups<0>();
    if (SUMS_SCALED) add_scaled(sums[1], found, low, high);
    if (lane == 0) arrive(&ring.empty[before]);
}

// Stores a warp's results: through shared memory, so that 32 bytes of a token are written at a time.
__device__ __forceinline__ void finish(const Args& p, const Sums& sums, int tile, int warpgroup, unsigned char* room) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, width = GATE ? p.n / 2 : p.n;
    u16* turned = reinterpret_cast<u16*>(room) + threadIdx.x / 32 * TOKENS * 16;
#pragma unroll
    for (int t = 0; t < (GATE ? 1 : 2); t++) {
        const int first = record_of(p, tile, warpgroup, t) * 64 + warp * 16;
#pragma unroll
        for (int i = 0; i < TOKENS / 2; i++) {
            const int token = i / 4 * 8 + lane % 4 * 2 + i % 2, output = lane / 4 + i / 2 % 2 * 8;
            turned[token * 16 + output] = first + output < width ? result(p.bias, p.n, sums[t][i], sums[1][i], first + output) : 0;
        }
        __syncwarp();
        for (int i = lane; i < TOKENS * 2; i += 32) {
            const int token = i / 2, output = first + i % 2 * 8;
            if (token >= p.rows) continue;
            const u16* from = turned + i * 8;
            u16* to = p.y + (i64)token * width + output;
            if (output + 8 <= width && width % 8 == 0) {
                *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
            } else {
                for (int o = 0; o < 8 && output + o < width; o++) to[o] = from[o];
            }
        }
        __syncwarp();
    }
}

// Sums of a tile that a block leaves in memory, of the last tile of its run or of the first: four of a thread at a time,
// those of two tokens and two outputs.
constexpr int QUADS = TOKENS / 4;

__device__ __forceinline__ float4* left_at(const Args& p, i64 block, bool first) {
    return reinterpret_cast<float4*>(p.partial + (block * 2 + first) * (OUTPUTS * TOKENS)) + threadIdx.x;
}

__device__ __forceinline__ void leave(const Args& p, const Sums& sums, bool first, u32* arrived) {
    float4* to = left_at(p, blockIdx.x, first);
#pragma unroll
    for (int q = 0; q < QUADS; q++) {
        const float* from = &sums[q * 8 / TOKENS][q * 4 % (TOKENS / 2)];
        to[q * CONSUMERS] = make_float4(from[0], from[1], from[2], from[3]);
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0) arrive_released(arrived);
}

__device__ __forceinline__ void await(u32* arrived, u32 count) {
    if (threadIdx.x % 32 == 0)
        while (acquired(arrived) < count) wait_a_little();
    __syncwarp();
}

// Adds to this block's sums what the one other block of the tile has left.
__device__ __forceinline__ void add_other(const Args& p, Sums& sums, u32* arrived) {
    await(arrived, 1);
    const float4* from = left_at(p, blockIdx.x + 1, true);
    constexpr int AT_ONCE = QUADS < 8 ? QUADS : 8;  // as many as registers hold
#pragma unroll
    for (int begin = 0; begin < QUADS; begin += AT_ONCE) {
        float4 other[AT_ONCE];
#pragma unroll
        for (int q = 0; q < AT_ONCE; q++) other[q] = __ldcg(from + (begin + q) * CONSUMERS);
#pragma unroll
        for (int q = 0; q < AT_ONCE; q++) {
            float* to = &sums[(begin + q) * 8 / TOKENS][(begin + q) * 4 % (TOKENS / 2)];
            to[0] += other[q].x, to[1] += other[q].y, to[2] += other[q].z, to[3] += other[q].w;
        }
    }
    if (threadIdx.x % 32 == 0) *arrived = 0;  // ready for the next launch
}

// What three blocks and more have left.
__device__ __forceinline__ float4 all_of(const Args& p, i64 first, int count, int q) {
    float4 sum = __ldcg(left_at(p, first, false) + q * CONSUMERS);
#pragma unroll 6
    for (int block = 1; block < count; block++) {
        const float4 other = __ldcg(left_at(p, first + block, block == count - 1) + q * CONSUMERS);
        sum.x += other.x, sum.y += other.y, sum.z += other.z, sum.w += other.w;
    }
    return sum;
}

// Adds and stores this block's share of what all blocks of a tile have left, `count` from `first` on; the last of them
// has no share, since it has more to do.
__device__ __forceinline__ void share_out(const Args& p, int tile, int warpgroup, i64 first, int count, u32* arrived) {
    await(arrived, count);
    constexpr int LOTS = GATE ? QUADS / 2 : QUADS;
    const int lane = threadIdx.x % 32, width = GATE ? p.n / 2 : p.n, own = (int)(blockIdx.x - first);
    for (int q = own * LOTS / (count - 1); q < (own + 1) * LOTS / (count - 1); q++) {
        const int t = GATE ? 0 : q * 8 / TOKENS, token = q % (QUADS / 2) * 8 + lane % 4 * 2;
        const int output = record_of(p, tile, warpgroup, t) * 64 + threadIdx.x / 32 % 4 * 16 + lane / 4;
        const float4 sums = all_of(p, first, count, q);
        const float4 ups = GATE ? all_of(p, first, count, q + QUADS / 2) : sums;
        const float each[4] = {sums.x, sums.y, sums.z, sums.w}, up[4] = {ups.x, ups.y, ups.z, ups.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int o = output + i / 2 * 8;
            if (o < width && token + i % 2 < p.rows) p.y[(i64)(token + i % 2) * width + o] = result(p.bias, p.n, each[i], up[i], o);
        }
    }
    if (lane == 0 && atomicAdd(arrived, 1u) == 2 * count - 2) *arrived = 0;  // the last to leave, for the next launch
}

// The runs of tiles that a block's warpgroup has.
__device__ __forceinline__ void multiply(const Args& p, Ring ring, i64 begin, i64 end, unsigned char* room) {
    const int warpgroup = threadIdx.x / 128, warp = threadIdx.x / 32;
    const i64 total = (i64)p.tiles * p.units;
    for (i64 step = begin; step < end;) {
        const int tile = (int)(step / p.units);
        const i64 whole = (i64)tile * p.units, until = min(end, whole + p.units);
        Sums sums;
        consume(p, ring, sums, warpgroup, (int)(until - step));
        // Blocks from the one that has the tile's first step to the one that has its last, which has more to do.
        const i64 first = ((whole + 1) * gridDim.x - 1) / total;
        const int count = (int)(((whole + p.units) * gridDim.x - 1) / total - first) + 1;
        const bool is_last = blockIdx.x - first == count - 1;
        u32* arrived = p.arrived + (i64)tile * WARPS + warp;
        if (count == 2 && !is_last) add_other(p, sums, arrived);
        if (count == 1 || (count == 2 && !is_last)) {
            finish(p, sums, tile, warpgroup, room);
        } else {
            leave(p, sums, is_last, arrived);
            if (!is_last) share_out(p, tile, warpgroup, first, count, arrived);
        }
        step = until;
    }
}

// Grid: blocks that have equal shares of all tiles' steps, one at least.
extern "C" __global__ void __launch_bounds__(CONSUMERS + 128, 1) linear(const __grid_constant__ Args p) {
    unsigned char* base = shared + (1024 - shared_address(shared) % 1024) % 1024;
    u64* full = reinterpret_cast<u64*>(base + BARRIERS_AT);
    const Ring ring{base, full, full + STAGES};
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) barrier_init(full + i, WARPGROUPS), barrier_init(ring.empty + i, WARPS);
        barriers_are_made();
    }
    __syncthreads();
    let_next_start();
    const i64 begin = share_begin(p, blockIdx.x), end = share_begin(p, blockIdx.x + 1);
    if (threadIdx.x >= CONSUMERS) {
        give_registers<24>();
        const int warpgroup = same((threadIdx.x - CONSUMERS) / 32);
        if (warpgroup < WARPGROUPS) produce(p, ring, begin, end, warpgroup);
    } else {
        take_registers<232>();
        wait_turn();
        multiply(p, ring, begin, end, base + Y_AT);
    }
}
