// Runs CUDA kernels on the CPU, thread by thread: a thread is a coroutine that gives way at barriers and at what a warp
// does together. Blocks and warps run in an order that the caller picks: a kernel whose result depends on it lacks a
// barrier. In a shuffled order a warp runs until it waits for its block, as far ahead of the others as it can be.
#pragma once
#include <setjmp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#include <cmath>

#define __global__
#define __grid_constant__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __restrict__
#define __shared__
#define OFFROAD_EMULATED 1

template <class T>
inline T max(T a, T b) {
    return a < b ? b : a;
}
template <class T>
inline T min(T a, T b) {
    return b < a ? b : a;
}
struct uint2 {
    unsigned x, y;
};
struct uint4 {
    unsigned x, y, z, w;
};
struct float2 {
    float x, y;
};
struct float4 {
    float x, y, z, w;
};
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
struct Index {
    unsigned x, y, z;
};

namespace emulator {
constexpr int STACK = 1 << 17, MOST = 1024;
struct Warp {
    const void* items[32];
    int waiting = 0, live = 0;
    long round = 0;
};
struct Thread {
    ucontext_t context;  // to begin with; then `jump`, which asks nothing of the system
    jmp_buf jump;
    Index index;
    int number;
    bool done, begun, held;  // held: waits for others
};
struct Named {
    unsigned waiting = 0;
    long round = 0;
};
struct Block {
    Thread threads[MOST];
    Warp warps[MOST / 32];
    Named named[16];  // barriers of some threads
    int waiting, live;
    long round;
};
inline Block* block;  // whose threads run
inline jmp_buf home;
inline Thread* current;
inline long progress;  // grows whenever something comes that threads may wait for
inline void (*body)(const void*);
inline const void* body_argument;

inline Warp& current_warp() { return block->warps[current->number / 32]; }

inline void give_way() {
    if (!_setjmp(current->jump)) _longjmp(home, 1);
}

// Waits as long as `ready` says no.
template <class Ready>
inline void hold(Ready ready) {
    current->held = true;
    while (!ready()) give_way();
    current->held = false;
}

inline void enter() {
    body(body_argument);
    current->done = true;
    Warp& warp = current_warp();
    block->live--, warp.live--, progress++;
    if (block->live && block->waiting == block->live) block->waiting = 0, block->round++;
    if (warp.live && warp.waiting == warp.live) {
        fprintf(stderr, "a thread left while its warp waited for it\n");
        abort();
    }
    _longjmp(home, 1);
}

inline void go_on(Thread& thread) {
    current = &thread;
    if (_setjmp(home)) return;
    if (thread.begun) _longjmp(thread.jump, 1);
    thread.begun = true;
    setcontext(&thread.context);
}

// The last lane does `together` before any goes on.
template <class Together>
inline Warp& warp_barrier(Together together) {
    Warp& warp = current_warp();
    long round = warp.round;
    if (++warp.waiting == warp.live) {
        together();
        warp.waiting = 0, warp.round++, progress++;
    }
    hold([&] { return warp.round != round; });
    return warp;
}
inline Warp& warp_barrier() {
    return warp_barrier([] {});
}

// Every lane puts up an item and gets the others'; they stay valid until the lane calls `warp_barrier`.
inline Warp& exchange(const void* item) {
    current_warp().items[current->number % 32] = item;
    return warp_barrier();
}
}  // namespace emulator

inline Index blockIdx, blockDim, gridDim;
#define threadIdx (emulator::current->index)

constexpr unsigned SHARED_ROOM = 1 << 17;
extern __align__(16) unsigned char shared[SHARED_ROOM];

inline void __syncthreads() {
    emulator::Block& block = *emulator::block;
    long round = block.round;
    if (++block.waiting == block.live) block.waiting = 0, block.round++, emulator::progress++;
    emulator::hold([&] { return block.round != round; });
}
inline void __syncwarp(unsigned = 0xFFFFFFFFu) { emulator::warp_barrier(); }
inline void __threadfence() {}
inline float __shfl_xor_sync(unsigned, float x, int lanes) {
    float result = *(const float*)emulator::exchange(&x).items[(emulator::current->number % 32) ^ lanes];
    emulator::warp_barrier();
    return result;
}
template <class T>
inline T __shfl_sync(unsigned, T x, int lane) {
    T result = *(const T*)emulator::exchange(&x).items[lane];
    emulator::warp_barrier();
    return result;
}
template <class T>
inline T __shfl_up_sync(unsigned mask, T x, int lanes) {
    int lane = emulator::current->number % 32;
    return __shfl_sync(mask, x, lane < lanes ? lane : lane - lanes);
}
inline unsigned __ballot_sync(unsigned, bool x) {
    unsigned bits = 0;
    auto& warp = emulator::exchange(&x);
    for (int i = 0; i < 32; i++) bits |= (unsigned)*(const bool*)warp.items[i] << i;
    emulator::warp_barrier();
    return bits;
}
inline bool __any_sync(unsigned mask, bool x) { return __ballot_sync(mask, x); }
inline unsigned atomicAdd(unsigned* at, unsigned x) {
    unsigned before = *at;
    *at += x, emulator::progress++;
    return before;
}
inline float __ldcg(const float* at) { return *at; }
inline float4 __ldcg(const float4* at) { return *at; }
template <class T>
inline T __ldg(const T* at) {
    return *at;
}
template <class T>
inline T __ldcs(const T* at) {
    return *at;
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __clz(unsigned x) { return x ? __builtin_clz(x) : 32; }
inline float __uint_as_float(unsigned bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __expf(float x) { return std::exp(x); }
inline float __logf(float x) { return std::log(x); }
inline float rsqrtf(float x) { return 1 / std::sqrt(x); }
inline float __fdividef(float a, float b) { return a / b; }

namespace emulator {
// A permutation of [0, count): ascending for `order` 0.
inline unsigned* permutation(unsigned count, unsigned order) {
    unsigned* places = (unsigned*)malloc(count * sizeof(unsigned));
    uint64_t state = order;
    for (unsigned i = 0; i < count; i++) {
        state = state * 6364136223846793005u + 1442695040888963407u;  // Knuth's generator
        unsigned other = order ? (unsigned)(state >> 33) % (i + 1) : i;
        places[i] = places[other], places[other] = i;
    }
    return places;
}

// Lets each thread of a warp go on once, or, if `far`, until all of them wait for others.
inline void go_far(unsigned warp, unsigned size, bool far) {
    for (bool again = true; again;) {
        long round = block->warps[warp].round;
        again = false;
        for (unsigned i = warp * 32; i < size && i < warp * 32 + 32; i++) {
            Thread& thread = block->threads[i];
            if (thread.done) continue;
            go_on(thread);
            again |= far && !thread.done && !thread.held;
        }
        again |= far && block->warps[warp].round != round;
    }
}

// Makes a block's threads ready to begin, with STACK bytes for each of them.
inline void prepare(Block& block, unsigned size, char* stacks) {
    for (Warp& warp : block.warps) warp = Warp();
    for (Named& named : block.named) named = Named();
    block.live = size, block.waiting = 0, block.round = 0;
    for (unsigned i = 0; i < size; i++) {
        Thread& thread = block.threads[i];
        thread.index = {i, 0, 0}, thread.number = i, thread.done = thread.begun = thread.held = false;
        block.warps[i / 32].live++;
        getcontext(&thread.context);
        thread.context.uc_stack.ss_sp = &stacks[(size_t)i * STACK];
        thread.context.uc_stack.ss_size = STACK;
        makecontext(&thread.context, enter, 0);
    }
}

// What the launch that follows runs for each thread.
template <class Call>
inline void begin(const Call& call, const unsigned grid[3], unsigned size) {
    body = [](const void* given) { (*(const Call*)given)(); };
    body_argument = &call;
    gridDim = {grid[0], grid[1], grid[2]};
    blockDim = {size, 1, 1};
}

// Runs `call` for every thread of every block, one block after the other, blocks and threads in the order that `order`
// picks.
template <class Call>
inline void run(Call call, const unsigned grid[3], unsigned size, unsigned shared_bytes, unsigned order) {
    static Block only;
    static char* stacks = (char*)malloc((size_t)MOST * STACK);
    begin(call, grid, size);
    block = &only;
    unsigned count = grid[0] * grid[1] * grid[2], *blocks = permutation(count, order), ceil = (size + 31) / 32;
    unsigned* warps_in_turn = permutation(ceil, order);
    for (unsigned number = 0; number < count; number++) {
        unsigned place = blocks[number];
        blockIdx = {place % grid[0], place / grid[0] % grid[1], place / grid[0] / grid[1]};
        memset(shared, 0xFF, SHARED_ROOM);  // NaN
        prepare(only, size, stacks);
        for (long idle = 0; only.live;) {
            int before = only.live;
            long steps = only.round;
            for (unsigned warp = 0; warp < ceil; warp++) go_far(warps_in_turn[warp], size, order != 0);
            idle = only.live == before && steps == only.round ? idle + 1 : 0;
            if (idle > 1000000) {
                fprintf(stderr, "threads wait for each other\n");
                abort();
            }
        }
        for (unsigned i = shared_bytes; i < SHARED_ROOM; i++)
            if (shared[i] != 0xFF) {
                fprintf(stderr, "shared memory written behind the %u bytes that were reserved\n", shared_bytes);
                abort();
            }
    }
    free(blocks), free(warps_in_turn);
}
}  // namespace emulator
