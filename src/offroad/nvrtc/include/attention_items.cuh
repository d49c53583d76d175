// Items of attention_few.cu: what each of its warps works on, and the copies of their keys and values.
#pragma once
#include "hopper.cuh"

constexpr int SIZE = KIND ? 1 : 2, ROW = DIM * SIZE, CHUNKS = ROW / 128;  // bytes of a row, of 128
constexpr int SLOT = KEYS * ROW, BOX_ROWS = KEYS < BLOCK ? KEYS : BLOCK;  // of a step; rows of a block that it has
constexpr int QUERIES = 8 * TILES, ITEMS = KV_HEADS * PARTS;              // of an item; items of a partition
constexpr int HELD = 16;                                                  // blocks whose numbers a warp holds
static_assert(ROW % 128 == 0 && KEYS % 16 == 0 && KEYS % BOX_ROWS == 0 && BLOCK % BOX_ROWS == 0, "whole boxes");

struct Args {
    TensorMap k, v;  // [kv_heads * CHUNKS, blocks * BLOCK, 128 bytes], boxes of all chunks of a head and BOX_ROWS rows
    const u16* q;    // [tokens, heads, DIM], tokens `q_stride` apart
    u16* out;        // [tokens, heads, DIM]
    const int* table;
    const int *slots, *starts, *widths, *offsets;  // [rows]
    const float *k_scale, *v_scale;                // [KV_HEADS], or none
    float4* sums;    // of a partition and a tile: [DIM / 16, 8, pairs], two queries of two dims each
    float4* sizes;   // of a partition and a tile: largest scores and sums of weights of 4 pairs of queries
    u32* arrived;    // two counters of blocks
    i64 q_stride, table_stride;
    int rows, window, base_bits, partitions, pairs;
    float scale, softcap;
};

__device__ __forceinline__ int partition_of(const Args& p, int position) {
    const int times = WINDOW ? 0 : 32 - __clz(position / (2 * SAME) >> p.base_bits);
    return SAME * times + (position >> (p.base_bits + times));
}

__device__ __forceinline__ int begin_of(const Args& p, int partition) {
    const int times = WINDOW ? 0 : max(0, partition / SAME - 1);
    return (partition - SAME * times) << (p.base_bits + times);
}

// The first position that a row's first token sees.
__device__ __forceinline__ int low_of(const Args& p, int start) { return WINDOW ? max(0, start - p.window + 1) : 0; }

// Rows as a block has them in shared memory. `ends`: how many partitions rows up to each of them have in front of their last.
struct Lists {
    int ends[MOST_ROWS], starts[MOST_ROWS];
    u16 widths[MOST_ROWS], slots[MOST_ROWS], offsets[MOST_ROWS];
};

// By all threads of a block.
__device__ __forceinline__ void list_rows(const Args& p, Lists& lists) {
    for (int row = threadIdx.x; row < p.rows; row += blockDim.x) {
        const int start = p.starts[row], width = p.widths[row];
        lists.starts[row] = start, lists.widths[row] = width;
        lists.slots[row] = p.slots[row], lists.offsets[row] = p.offsets[row];
        lists.ends[row] = width ? partition_of(p, start + width - 1) - partition_of(p, low_of(p, start)) : 0;
    }
    __syncthreads();
    if (threadIdx.x < 32) {
        int before = 0;
        for (int row = threadIdx.x; row - (int)threadIdx.x < p.rows; row += 32) {
            int sum = row < p.rows ? lists.ends[row] : 0;
#pragma unroll
            for (int lanes = 1; lanes < 32; lanes *= 2) {
                const int other = __shfl_up_sync(0xFFFFFFFFu, sum, lanes);
                sum += threadIdx.x >= lanes ? other : 0;
            }
            sum += before, before = __shfl_sync(0xFFFFFFFFu, sum, 31);
            if (row < p.rows) lists.ends[row] = sum;
        }
    }
    __syncthreads();
}

// How many partitions a row has, one without tokens too.
__device__ __forceinline__ int count_of(const Lists& lists, int row) { return lists.ends[row] - (row ? lists.ends[row - 1] : 0) + 1; }

// Keys [begin, stop) of a row, for a part of the queries of a KV head. Last partitions, which most often are short, are
// behind all others, so that warps are done at about the same time.
struct Item {
    int row, head, part, partition, first, low, start, width, offset, begin, stop;
    bool alone;  // the row has one partition

    __device__ __forceinline__ Item(const Args& p, const Lists& lists, int number) {
        const int unit = number / ITEMS, lasts = lists.ends[p.rows - 1];
        row = max(0, unit - lasts);
        for (int from = 0; unit < lasts && from < p.rows; from += 32) {
            const int lane = from + threadIdx.x % 32;
            row += __popc(__ballot_sync(0xFFFFFFFFu, lane < p.rows && lists.ends[lane] <= unit));
        }
        head = number % ITEMS / PARTS, part = number % PARTS;
        start = lists.starts[row], width = lists.widths[row], offset = lists.offsets[row], low = low_of(p, start);
        const int count = count_of(lists, row), number_of = unit < lasts ? unit - lists.ends[row] + count - 1 : count - 1;
        first = partition_of(p, low), partition = first + number_of, alone = count == 1;
        begin = max(begin_of(p, partition), low) / KEYS * KEYS;
        stop = min(begin_of(p, partition + 1), start + width);
    }
    // Whether the row has no tokens, or is narrower than the widest one, by this part.
    __device__ __forceinline__ bool empty() const { return part * QUERIES >= width * GROUP; }
};

// Where the copies of an item find its keys and values.
struct Source {
    int at, stop, head, from;
    const int* columns;

    // Fetches the numbers of HELD blocks from column `from` of the table on.
    __device__ __forceinline__ void fetch(int* held) {
        const int lane = threadIdx.x % 32;
        from = at / BLOCK;
        if (lane < HELD) copy_word(shared_address(held + lane), columns + min(from + lane, (stop - 1) / BLOCK), true);
    }
};

// Starts a warp's copies, of each step keys and then values, some steps ahead and into the items behind.
struct Stream {
    const Args& p;
    const Lists& lists;
    unsigned char* ring;
    u64* full;
    int slots, count, stride, number;  // number: of the item behind the one that is copied
    int* coming;  // numbers of blocks of `next`, which are fetched an item ahead
    int slot = 0, held = 0;  // held: a lane's, of the blocks of `now`
    bool values = false, over = false;
    Source now, next;

    // The items of a warp from `number` on.
    __device__ __forceinline__ void look_ahead() {
        for (; number < count; number += stride) {
            const Item item(p, lists, number);
            if (item.empty()) continue;
            next.at = item.begin, next.stop = item.stop, next.head = item.head;
            next.columns = p.table + lists.slots[item.row] * p.table_stride;
            return next.fetch(coming);
        }
    }
    __device__ __forceinline__ void begin() {
        over = number >= count;
        now = next, number += stride;
        take();
        look_ahead();
    }
    __device__ __forceinline__ void take() {
        wait_for_words();
        if (threadIdx.x % 32 < HELD) held = coming[threadIdx.x % 32];  // what the lane itself has fetched
    }
    __device__ __forceinline__ void start_next() {
        if (over) return;
        const bool chosen = threadIdx.x % 32 == 0;
        if (chosen) arrive_expecting(full + slot, SLOT);
#pragma unroll
        for (int b = 0; b < KEYS / BOX_ROWS; b++) {
            // What lies behind `stop` in its block is anything, as is what comes of blocks behind that one.
            const int key = now.at + b * BOX_ROWS, column = min(key, now.stop - 1) / BLOCK - now.from;
            const int row = __shfl_sync(0xFFFFFFFFu, held, column) * BLOCK + key % BLOCK;
            if (chosen) copy_chunks_once(ring + slot * SLOT + b * BOX_ROWS * ROW, values ? &p.v : &p.k, row, now.head * CHUNKS, full + slot);
        }
        slot = slot + 1 == slots ? 0 : slot + 1;
        if (values) next_step();
        values = !values;
    }
    __device__ __forceinline__ void next_step() {
        now.at += KEYS;
        if (now.at >= now.stop) begin();
        else if ((now.at + KEYS - 1) / BLOCK - now.from >= HELD) now.fetch(coming), take(), next.fetch(coming);
    }
};

// A warp's slots, as it reads them.
struct Ring {
    unsigned char* base;
    u64* full;
    int slots, slot = 0;
    u32 parity = 0;

    __device__ __forceinline__ unsigned char* wait_for() const {
        wait(full + slot, parity);
        return base + slot * SLOT;
    }
    __device__ __forceinline__ void next() {
        if (++slot == slots) slot = 0, parity ^= 1;
    }
};
