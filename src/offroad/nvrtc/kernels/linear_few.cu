// y = x W^T for up to TOKENS tokens over weights of 4 or 8 bits, in bf16, for Hopper: a stream of weights. A strip is 16
// outputs, of which a record (linear_pack.py) has 1 or 2 KB for 128 k's, in the order of the registers of a matrix operand.
// A block has STRIPS of them over all of k, so that nothing is added between blocks.
//
// Its first warps multiply, the last ones start copies. A slot of shared memory has one unit of 128 k's: x and the block's
// strips. GROUPS warps share a unit, each has some of the strips; so many slots are on their way as there is room for,
// weights before the kernel before this one, which writes x, has ended. A slot is of the same warps always: one that came
// to it a turn too early would not know that from its parity. Codes become numbers in bf16, exactly; sums of each group of
// k's are multiplied by its scale in fp32. At the end what warps have of different units is added, always in the same order.
//
// Specialised by TOKENS (8, 16), STRIPS, GROUPS, SLOTS, BITS (4: whole numbers; 8: e4m3), FOLD (scales that 128 k's have; 1
// of 8 bits), SCALES (0: bf16, 1: fp16, 2: fp32), MINIMA (zero points, as multiples of the scale; 0 of 8 bits) and GATE (0:
// y is the product; 1, 2: act(gate) * up, act silu, gelu_tanh, of a weight whose first half of outputs is the gate's: half
// of the strips are of the gate, half of up).
#include "codes.cuh"
#include "hopper.cuh"

constexpr int WARPS = 16, SPLITS = WARPS / GROUPS, PRODUCERS = SPLITS < 8 ? SPLITS : 8;
constexpr int OWN = (STRIPS + GROUPS - 1) / GROUPS;  // strips of a warp
constexpr int OUTPUTS = 16 * (GATE ? STRIPS / 2 : STRIPS);  // of y, of a block
constexpr int HALF_X = TOKENS * 128, SCALE_SIZE = SCALES == 2 ? 4 : 2;
constexpr int STRIP = BITS * 256, RECORD = 4 * STRIP;  // bytes, for 128 k's
constexpr int CODES_AT = 2 * HALF_X, SCALES_AT = CODES_AT + STRIPS * STRIP;
constexpr int MINIMA_AT = SCALES_AT + FOLD * STRIPS * 16 * SCALE_SIZE;
constexpr int SLOT = (MINIMA_AT + (MINIMA ? FOLD * STRIPS * 32 : 0) + 1023) / 1024 * 1024;
constexpr int BARRIERS_AT = SLOTS * SLOT;
static_assert(BITS == 4 || (BITS == 8 && FOLD == 1 && !MINIMA), "of e4m3: no zero points, one scale");
static_assert(1024 + BARRIERS_AT + 16 * SLOTS == SHARED_BYTES, "what Python reserves");
static_assert(SLOTS % SPLITS == 0 && SPLITS % PRODUCERS == 0, "a slot's warps");
constexpr int PITCH = TOKENS + 2;  // of sums, so that lanes read others' banks
static_assert(SPLITS * STRIPS * 16 * PITCH * 4 <= BARRIERS_AT, "sums take the place of slots");

struct Args {
    TensorMap x;       // [rows, k], boxes of TOKENS rows and 64 k's
    const u8* codes;   // [padded / 64, units, RECORD bytes]
    const u8* scales;  // [groups, padded]
    const u8* minima;  // the same, int16
    const u16* bias;   // [n]
    u16* y;            // [rows, n], with GATE [rows, n / 2]
    int rows, n, units;
    int first;         // output of y of the first block
    int padded;        // outputs that scales have
    int group_units;   // units that share a scale, where FOLD is 1
};

extern __shared__ __align__(16) unsigned char shared[];

__device__ __forceinline__ int width(const Args& p) { return GATE ? p.n / 2 : p.n; }

// Starts the copies of strips that are one after the other: `count` of them from output `output` on, to the place `to`.
__device__ __forceinline__ void copy_strips(const Args& p, unsigned char* slot, int to, int output, int count, int unit, u64* barrier) {
    constexpr int EACH = OUTPUTS / 16, RECORDS = EACH % 4 ? (EACH + 6) / 4 : EACH / 4;  // that have some of them
    const int first = EACH % 4 ? output / 16 % 4 : 0, group = FOLD > 1 ? unit * FOLD : unit / p.group_units;
    const u8* from = p.codes + ((i64)(output / 64) * p.units + unit) * RECORD;
#pragma unroll
    for (int r = 0; r < RECORDS; r++, from += (i64)p.units * RECORD) {
        const int begin = max(4 * r - first, 0), end = min(4 * r + 4 - first, count);
        if (begin < end) copy_once(slot + CODES_AT + (to + begin) * STRIP, from + (r ? 0 : first * STRIP), (end - begin) * STRIP, barrier);
    }
#pragma unroll
    for (int f = 0; f < FOLD; f++) {
        const i64 at = (i64)(group + f) * p.padded + output;
        const int place = (f * STRIPS + to) * 16;
        copy_once(slot + SCALES_AT + place * SCALE_SIZE, p.scales + at * SCALE_SIZE, count * 16 * SCALE_SIZE, barrier);
        if (MINIMA) copy_once(slot + MINIMA_AT + place * 2, p.minima + at * 2, count * 32, barrier);
    }
}

// Starts the copies for the units of one of the warps that do.
struct Producer {
    const Args& p;
    unsigned char* base;
    u64 *full, *empty;
    int first, count;  // output of y, strips of y: fewer than a block's at the end
    bool chosen;

    __device__ __forceinline__ void weights(int unit, int slot) const {
        const int strips = count * (GATE ? 2 : 1), each = STRIP + FOLD * 16 * (SCALE_SIZE + (MINIMA ? 2 : 0));
        if (!chosen) return;
        arrive_expecting(full + slot, 2 * HALF_X + strips * each);
#pragma unroll 1
        for (int half = 0; half < (GATE ? 2 : 1); half++)
            copy_strips(p, base + slot * SLOT, half * (STRIPS / 2), half * (p.n / 2) + first, count, unit, full + slot);
    }
    __device__ __forceinline__ void x(int unit, int slot) const {
        if (!chosen) return;
        copy_box(base + slot * SLOT, &p.x, unit * 128, 0, full + slot);
        copy_box(base + slot * SLOT + HALF_X, &p.x, unit * 128 + 64, 0, full + slot);
    }
    __device__ __forceinline__ void all(int number) const {
        const int early = min(SLOTS, p.units);  // loops are not unrolled: these warps have few registers
#pragma unroll 1
        for (int unit = number; unit < early; unit += PRODUCERS) weights(unit, unit);
        wait_turn();
#pragma unroll 1
        for (int unit = number; unit < early; unit += PRODUCERS) x(unit, unit);
        u32 parity = 0;
#pragma unroll 1
        for (int unit = SLOTS + number, slot = number; unit < p.units; unit += PRODUCERS) {
            wait(empty + slot, parity);
            weights(unit, slot), x(unit, slot);
            slot += PRODUCERS;
            if (slot >= SLOTS) slot = number, parity ^= 1;
        }
    }
};

typedef float Sums[OWN][TOKENS / 2];

constexpr int WORDS = BITS / 4;  // that a lane has of a strip and 16 k's; of 8 bits one of each half of the outputs

// What a lane has of a strip and 16 k's, in bf16: a left operand.
__device__ __forceinline__ void widen(u32 (&a)[4], const u32 (&words)[WORDS]) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if (BITS == 4) a[i] = plus(masked(words[0] >> 4 * i), 0xC308C308u);
        else a[i] = widened(words[i % WORDS], i >= 2);
    }
}

// Adds a strip's products over one unit, whose x a warp has in registers: of 8 tokens, of 32 k's. `ones`: sums of x.
__device__ __forceinline__ void add_strip(float (&sums)[TOKENS / 2], const unsigned char* slot, int strip,
                                          const u32 (&x)[TOKENS / 8][4][4], const float (&ones)[FOLD][TOKENS / 8][2]) {
    const int lane = threadIdx.x % 32;
    constexpr int PARTS = BITS == 8 ? 1 : FOLD > 2 ? FOLD : 2;  // with sums of their own: one takes fewest registers
    const uint4* at = reinterpret_cast<const uint4*>(slot + CODES_AT + strip * STRIP) + lane;
    u32 words[8][WORDS];
#pragma unroll
    for (int i = 0; i < 2 * WORDS; i++) {
        const uint4 some = at[i * 32];
        const int j = i / WORDS * 4, w = i % WORDS;
        words[j][w] = some.x, words[j + 1][w] = some.y, words[j + 2][w] = some.z, words[j + 3][w] = some.w;
    }
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
        float found[TOKENS / 2] = {};
#pragma unroll
        for (int j = part * 8 / PARTS; j < (part + 1) * 8 / PARTS; j++) {
            u32 a[4];
            widen(a, words[j]);
#pragma unroll
            for (int t = 0; t < TOKENS / 8; t++) add_product(found + t * 4, a, x[t][j / 2][j % 2 * 2], x[t][j / 2][j % 2 * 2 + 1]);
        }
        const int f = part * FOLD / PARTS, row = (f * STRIPS + strip) * 16 + lane / 4;
        const float low = scale_at(slot + SCALES_AT, row), high = scale_at(slot + SCALES_AT, row + 8);
        const bool last = (part + 1) * FOLD / PARTS > f;  // of those with this scale
#pragma unroll
        for (int i = 0; i < TOKENS / 2; i++) {
            if (MINIMA && last) {
                const short* minima = reinterpret_cast<const short*>(slot + MINIMA_AT) + row;
                found[i] += (float)minima[i / 2 % 2 * 8] * ones[f][i / 4][i % 2];
            }
            sums[i] += found[i] * (i / 2 % 2 ? high : low);
        }
    }
}

// Sums of x that share a scale, of the tokens that a lane has.
__device__ __forceinline__ void sum_x(float (&ones)[FOLD][TOKENS / 8][2], const u32 (&x)[TOKENS / 8][4][4]) {
    const u32 one[4] = {0x3F803F80u, 0x3F803F80u, 0x3F803F80u, 0x3F803F80u};
#pragma unroll
    for (int f = 0; f < FOLD; f++)
#pragma unroll
        for (int t = 0; t < TOKENS / 8; t++) {
            float found[4] = {};
#pragma unroll
            for (int j = f * 8 / FOLD; j < (f + 1) * 8 / FOLD; j++) add_product(found, one, x[t][j / 2][j % 2 * 2], x[t][j / 2][j % 2 * 2 + 1]);
            ones[f][t][0] = found[0], ones[f][t][1] = found[1];
        }
}

// Adds the units that are a warp's.
__device__ __forceinline__ void consume(const Args& p, unsigned char* base, u64* full, u64* empty, Sums& sums) {
    const int lane = threadIdx.x % 32, warp = same(threadIdx.x / 32), group = warp % GROUPS;
#pragma unroll
    for (int i = 0; i < OWN * TOKENS / 2; i++) sums[i / (TOKENS / 2)][i % (TOKENS / 2)] = 0.f;
    u32 parity = 0;
    for (int unit = warp / GROUPS, number = unit; unit < p.units; unit += SPLITS) {
        const unsigned char* slot = base + number * SLOT;
        wait(full + number, parity);
        u32 x[TOKENS / 8][4][4];
#pragma unroll
        for (int i = 0; i < TOKENS / 2; i++) {
            const int token = i / 4 * 8 + lane % 8, chunk = i % 2 * 4 + lane / 8;
            load_matrices(x[i / 4][i % 4], shared_address(slot + i % 4 / 2 * HALF_X + token * 128 + (chunk ^ lane % 8) * 16));
        }
        float ones[FOLD][TOKENS / 8][2];
        if (MINIMA) sum_x(ones, x);
#pragma unroll
        for (int i = 0; i < OWN; i++)
            if ((i + 1) * GROUPS <= STRIPS || i * GROUPS + group < STRIPS) add_strip(sums[i], slot, i * GROUPS + group, x, ones);
        __syncwarp();
        if (lane == 0) arrive(empty + number);
        number += SPLITS;
        if (number >= SLOTS) number = warp / GROUPS, parity ^= 1;
    }
}

// Adds what warps have, and stores y.
__device__ __forceinline__ void finish(const Args& p, const Sums& sums, float* room, int first) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    sync_some(1, 32 * WARPS);  // slots are free
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        const int strip = i * GROUPS + warp % GROUPS;
        if (strip >= STRIPS) continue;
        float* to = room + ((warp / GROUPS * STRIPS + strip) * 16 + lane / 4) * PITCH + lane % 4 * 2;
#pragma unroll
        for (int t = 0; t < TOKENS / 2; t += 2)
            *reinterpret_cast<float2*>(to + t / 2 % 2 * 8 * PITCH + t / 4 * 8) = make_float2(sums[i][t], sums[i][t + 1]);
    }
    sync_some(1, 32 * WARPS);
    for (int i = threadIdx.x; i < OUTPUTS * p.rows; i += 32 * WARPS) {
        const int token = i / OUTPUTS, output = first + i % OUTPUTS;
        if (output >= width(p)) continue;
        const float* from = room + i % OUTPUTS * PITCH + token;
        float sum = 0, up = 0;
#pragma unroll
        for (int split = 0; split < SPLITS; split++) {
            sum += from[split * STRIPS * 16 * PITCH];
            if (GATE) up += from[(split * STRIPS * 16 + OUTPUTS) * PITCH];
        }
        p.y[(i64)token * width(p) + output] = result(p.bias, p.n, sum, up, output);
    }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS + 256, 1) linear(const __grid_constant__ Args p) {
    unsigned char* base = shared + (1024 - shared_address(shared) % 1024) % 1024;
    u64 *full = reinterpret_cast<u64*>(base + BARRIERS_AT), *empty = full + SLOTS;
    for (int i = threadIdx.x; i < SLOTS; i += blockDim.x) barrier_init(full + i, 1), barrier_init(empty + i, GROUPS);
    barriers_are_made();
    __syncthreads();
    let_next_start();
    const int first = p.first + blockIdx.x * OUTPUTS, warp = same(threadIdx.x / 32);
    if (warp >= WARPS) {
        give_registers<24>();
        const int count = (min(OUTPUTS, width(p) - first) + 15) / 16;
        if (warp - WARPS < PRODUCERS) Producer{p, base, full, empty, first, count, threadIdx.x % 32 == 0}.all(warp - WARPS);
    } else {
        take_registers<104>();
        Sums sums;
        consume(p, base, full, empty, sums);
        finish(p, sums, reinterpret_cast<float*>(base), first);
    }
}
