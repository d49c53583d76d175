// Attention of few queries a row over pages, in bf16, for Hopper: a stream of keys and values. A warp is on its own: it
// has an item (a row, a KV head, some queries, a partition of the history), a ring of shared memory that copies fill some
// steps ahead, and its own sums. Items are dealt out evenly over all warps of all SMs, however long each row is. Keys are
// the left operand of scores [keys, queries], values that of sums [dims, queries]: so a tile has as few as 8 queries.
//
// Partitions are those of triton_kernels/paged_decode.py: their ends depend on positions alone. When all blocks have kept
// what they give, it is added in their order; what a query does not see adds zeros. So neither the number of warps nor what
// else is in the step changes a bit of an answer.
//
// Specialised by DIM, KV_HEADS, GROUP (queries of a KV head and token), KIND (of stored rows: 0 bf16, 1 e5m2, 2 e4m3),
// BLOCK (tokens of a block of pages, a power of 2), WINDOW and SOFTCAP (whether there is one), TILES (of 8 queries, of an
// item), PARTS (items that queries of a row and KV head take), KEYS (of a step), SAME (partitions of one length), WARPS,
// SLOTS (of a ring) and MOST_ROWS.
#include "attention_sums.cuh"

constexpr int GROUPS = KEYS / 16, CHAINS = GROUPS < 4 ? 4 / GROUPS : 1;  // sums of a score: few products wait for one another
constexpr int QUERIES_AT = WARPS * SLOTS * SLOT, BARRIERS_AT = QUERIES_AT + WARPS * QUERIES * DIM * 2;
constexpr int COMING_AT = BARRIERS_AT + WARPS * SLOTS * 8, LISTS_AT = COMING_AT + WARPS * HELD * 4;
constexpr bool OWN = TILES * DIM <= 256;  // queries are in registers, and the next item's fetched at once
constexpr float LOG2_E = 1.4426950408889634f;
static_assert(1024 + LISTS_AT + sizeof(Lists) == SHARED_BYTES, "what Python reserves");

extern __shared__ __align__(16) unsigned char shared[];

// Two numbers of a stored pair, bytes by `which` as `picked` has them, in bf16. Each with its sign before it and 5 bits (of
// e4m3: 4) further up has its bits at bf16's places: that is the number times 2^-112 (2^-120), which a product takes back,
// exactly, also of subnormal numbers. Infinity of e5m2, which no stored row has, becomes 65,536.
__device__ __forceinline__ u32 pair_of(u32 word, u32 which) {
    const u32 bytes = picked(word, which);
    return KIND == 1 ? times(bytes * 32 & 0x8FE08FE0u, 0x77807780u) : times(bytes * 16 & 0x87F087F0u, 0x7B807B80u);
}

// Queries of an item, of the tokens of its row: in shared memory, as right operands.
struct Queries {
    uint2* words;            // [TILES, DIM / 16, 32], the warp's
    int position[TILES][2];  // of the two that a lane has sums of; -1: there is none
    uint2 own[OWN ? TILES * (DIM / 16) : 1];

    // Fetches those of an item, behind which others' words are read no more.
    __device__ __forceinline__ void fetch(const Args& p, const Item& item) {
        const int lane = threadIdx.x % 32;
        __syncwarp();
#pragma unroll
        for (int t = 0; t < TILES; t++) {
            const int first = item.part * QUERIES + t * 8, number = first + lane / 4, token = number / GROUP;
            const i64 head = item.head * GROUP + number % GROUP;
            const u16* from = p.q + (item.offset + token) * p.q_stride + head * DIM + lane % 4 * (KIND ? 4 : 2);
#pragma unroll
            for (int i = 0; i < DIM / 16; i++) {
                const u32 to = shared_address(words) + ((t * (DIM / 16) + i) * 32 + lane) * 8;
                copy_word(to, from + i * 16, token < item.width), copy_word(to + 4, from + i * 16 + (KIND ? 2 : 8), token < item.width);
            }
        }
    }
    __device__ __forceinline__ void begin(const Item& item) {
#pragma unroll
        for (int i = 0; i < 2 * TILES; i++) {
            const int of = (item.part * QUERIES + i / 2 * 8 + threadIdx.x % 4 * 2 + i % 2) / GROUP;
            position[i / 2][i % 2] = of < item.width ? item.start + of : -1;
        }
        wait_for_words();
        __syncwarp();
        if (!OWN) return;
#pragma unroll
        for (int i = 0; i < TILES * (DIM / 16); i++) own[i] = words[i * 32 + threadIdx.x % 32];
    }
    __device__ __forceinline__ uint2 operator()(int t, int i) const {
        return OWN ? own[t * (DIM / 16) + i] : words[(t * (DIM / 16) + i) * 32 + threadIdx.x % 32];
    }
};

typedef float Scores[TILES][GROUPS][4];
typedef Tile Sums[TILES];

// Where a lane finds its row of matrices of 16 keys and 32 bytes, as keys stand (or, `across`, as dims do). A row's pieces
// of 16 bytes are in another order in each of 8 rows; the bytes `32 * i` of 128 are at `first ^ 32 * i`.
struct Rows {
    u32 first;

    __device__ __forceinline__ Rows(const unsigned char* slot, bool across) {
        const int lane = threadIdx.x % 32, row = across ? lane % 8 + lane / 16 * 8 : lane % 16;
        first = shared_address(slot) + row * 128 + ((across ? lane / 8 % 2 : lane / 16) ^ row % 8) * 16;
    }
    __device__ __forceinline__ u32 at(int group, int part) const {
        const int key = group * 16, box = key / BOX_ROWS * BOX_ROWS * ROW;
        return (first ^ part % 4 * 32) + box + (part / 4 * BOX_ROWS + key % BOX_ROWS) * 128;
    }
};

__device__ __forceinline__ void multiply_keys(Scores& scores, const unsigned char* slot, const Queries& queries) {
    const Rows rows(slot, false);
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
        float found[CHAINS][TILES][4] = {};
#pragma unroll
        for (int part = 0; part < ROW / 32; part++) {
            u32 words[4], a[2][4];
            load_matrices(words, rows.at(g, part));
#pragma unroll
            for (int i = 0; i < 4; i++) {
                if (!KIND) a[0][i] = words[i];
                else
                    for (int h = 0; h < 2; h++) a[h][i] = pair_of(words[2 * h + i % 2], i < 2 ? 0x9180u : 0xB3A2u);
            }
#pragma unroll
            for (int h = 0; h < 2 / SIZE; h++)
#pragma unroll
                for (int t = 0; t < TILES; t++) {
                    const int i = part * (2 / SIZE) + h;
                    const uint2 b = queries(t, i);
                    add_product(found[i % CHAINS][t], a[h], b.x, b.y);
                }
        }
#pragma unroll
        for (int i = 0; i < 4 * TILES; i++) {
            float sum = found[0][i / 4][i % 4];
#pragma unroll
            for (int c = 1; c < CHAINS; c++) sum += found[c][i / 4][i % 4];
            scores[i / 4][g][i % 4] = sum;
        }
    }
}

// Scores, times `factor` those of base 2, become weights: of keys from `at` on, of which queries see some.
__device__ __forceinline__ void weigh(const Args& p, Scores& scores, Sums& sums, const Queries& queries, int at, float factor) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int t = 0; t < TILES; t++) {
        float most[2] = {lowest(), lowest()}, shrink[2];
#pragma unroll
        for (int i = 0; i < 4 * GROUPS; i++) {
            float& score = scores[t][i / 4][i % 4];
            const int behind = queries.position[t][i % 2] - at - lane / 4 - i / 4 * 16 - i % 4 / 2 * 8;  // of the query, the key
            if (SOFTCAP) score = p.softcap * (1.f - 2.f / (power(score * factor * (2.f * LOG2_E / p.softcap)) + 1.f));
            score = behind < 0 || (WINDOW && behind >= p.window) ? lowest() : score;
            most[i % 2] = fmaxf(most[i % 2], score);
        }
        const float by = SOFTCAP ? LOG2_E : factor;
#pragma unroll
        for (int q = 0; q < 2; q++) {
#pragma unroll
            for (int lanes = 4; lanes < 32; lanes *= 2) most[q] = fmaxf(most[q], __shfl_xor_sync(0xFFFFFFFFu, most[q], lanes));
            const float largest = fmaxf(most[q] * by, sums[t].largest[q]), base = largest == lowest() ? 0.f : largest;
            shrink[q] = largest == sums[t].largest[q] ? 1.f : power(sums[t].largest[q] - base);
            sums[t].largest[q] = largest, sums[t].total[q] *= shrink[q];
#pragma unroll
            for (int i = q; i < 4 * GROUPS; i += 2) {
                float& score = scores[t][i / 4][i % 4];
                score = power(score * by - base), sums[t].total[q] += score;
            }
        }
        // Most steps have nothing larger than those before.
        if (__any_sync(0xFFFFFFFFu, shrink[0] != 1.f || shrink[1] != 1.f)) {
#pragma unroll
            for (int i = 0; i < DIM / 4; i++) sums[t].acc[i / 4][i % 4] *= shrink[i % 2];
        }
    }
}

// Values of keys outside of an item's row become zeros: they may be anything, also not a number.
__device__ __forceinline__ void clear_outside(unsigned char* slot, const Item& item, int at) {
#pragma unroll 1
    for (int i = threadIdx.x % 32; i < SLOT / 16; i += 32) {
        const int key = at + i / (BOX_ROWS * ROW / 16) * BOX_ROWS + i / 8 % BOX_ROWS;
        if (key < item.low || key >= item.stop) reinterpret_cast<uint4*>(slot)[i] = make_uint4(0, 0, 0, 0);
    }
    copies_come_behind();
    __syncwarp();
}

__device__ __forceinline__ void multiply_values(Sums& sums, const Scores& scores, const unsigned char* slot) {
    const Rows rows(slot, true);
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
        u32 weights[TILES][2];
#pragma unroll
        for (int i = 0; i < 2 * TILES; i++) weights[i / 2][i % 2] = transposed(narrow_two(scores[i / 2][g][i % 2 * 2], scores[i / 2][g][i % 2 * 2 + 1]));
#pragma unroll
        for (int part = 0; part < ROW / 32; part++) {
            u32 words[4], a[2][4];
            load_matrices_across(words, rows.at(g, part));
#pragma unroll
            for (int i = 0; i < 4; i++) {
                if (!KIND) a[0][i] = words[i];
                else
                    for (int h = 0; h < 2; h++) a[h][i] = pair_of(words[i / 2 * 2 + h], i % 2 ? 0xB391u : 0xA280u);
            }
#pragma unroll
            for (int h = 0; h < 2 / SIZE; h++)
#pragma unroll
                for (int t = 0; t < TILES; t++) add_product(sums[t].acc[part * (2 / SIZE) + h], a[h], weights[t][0], weights[t][1]);
        }
    }
}

// Sums of an item, of its keys in their order. Queries of the next one are fetched when its own have been read.
template <class Fetch>
__device__ __forceinline__ void add_item(const Args& p, const Item& item, const Queries& queries, Stream& stream, Ring& ring, Sums& sums, Fetch fetch_next) {
    const float factor = p.scale * (p.k_scale ? p.k_scale[item.head] : 1.f) * (SOFTCAP ? 1.f : LOG2_E);
#pragma unroll
    for (int t = 0; t < TILES; t++) sums[t].clear();
#pragma unroll 1
    for (int at = item.begin; at < item.stop; at += KEYS) {
        Scores scores;
        multiply_keys(scores, ring.wait_for(), queries);
        __syncwarp();
        stream.start_next(), ring.next();
        if (!OWN && at + KEYS >= item.stop) fetch_next();
        weigh(p, scores, sums, queries, at, factor);
        unsigned char* slot = ring.wait_for();
        if (at < item.low || at + KEYS > item.stop) clear_outside(slot, item, at);
        multiply_values(sums, scores, slot);
        __syncwarp();
        stream.start_next(), ring.next();
    }
#pragma unroll
    for (int i = 0; i < 2 * TILES; i++)
#pragma unroll
        for (int lanes = 4; lanes < 32; lanes *= 2) sums[i / 2].total[i % 2] += __shfl_xor_sync(0xFFFFFFFFu, sums[i / 2].total[i % 2], lanes);
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, 1) attend(const __grid_constant__ Args p) {
    unsigned char* base = shared + (1024 - shared_address(shared) % 1024) % 1024;
    const int warp = same(threadIdx.x / 32);
    u64* full = reinterpret_cast<u64*>(base + BARRIERS_AT);
    for (int i = threadIdx.x; i < WARPS * SLOTS; i += blockDim.x) barrier_init(full + i, 1);
    barriers_are_made();
    let_next_start();
    wait_turn();
    Lists& lists = *reinterpret_cast<Lists*>(base + LISTS_AT);
    list_rows(p, lists);
    const int count = (lists.ends[p.rows - 1] + p.rows) * ITEMS, first = blockIdx.x + gridDim.x * warp, stride = gridDim.x * WARPS;
    int rings = WARPS;  // warps that have no item leave their slots to those that do
    while (rings > 1 && count <= gridDim.x * (rings / 2)) rings /= 2;
    const int slots = SLOTS * (WARPS / rings);
    if (warp < rings) {
        unsigned char* own = base + warp * slots * SLOT;
        int* coming = reinterpret_cast<int*>(base + COMING_AT) + warp * HELD;
        Stream stream{p, lists, own, full + warp * slots, slots, count, stride, first, coming};
        Ring ring{own, full + warp * slots, slots};
        Queries queries{reinterpret_cast<uint2*>(base + QUERIES_AT) + warp * (QUERIES * DIM / 4)};
        auto fetch_from = [&](int number) {
            if (number < count) queries.fetch(p, Item(p, lists, number));
        };
        fetch_from(first);
        stream.look_ahead(), stream.begin();
#pragma unroll 1
        for (int i = 0; i < slots; i++) stream.start_next();
#pragma unroll 1
        for (int number = first; number < count; number += stride) {
            const Item item(p, lists, number);
            queries.begin(item);
            if (OWN || item.empty()) fetch_from(number + stride);
            if (item.empty()) continue;
            Sums sums;
            add_item(p, item, queries, stream, ring, sums, [&] { fetch_from(number + stride); });
#pragma unroll
            for (int t = 0; t < TILES; t++) {
                if (item.alone) store(p, lists, item.row, item.head * PARTS + item.part, t, sums[t].acc, sums[t].total, 0);
                else keep(p, item, sums[t], t);
            }
        }
    }
    if (!lists.ends[p.rows - 1]) return;  // each row has one partition
    meet(p);
    add_all(p, lists);
}
