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
    bool done, begun, held;  // held: waits for the block
};
inline Thread threads[MOST];
inline Warp warps[MOST / 32];
inline char* stacks;
inline jmp_buf home;
inline Thread* current;
inline int waiting, live;
inline long round_number;
inline void (*body)(const void*);
inline const void* body_argument;

inline void give_way() {
    if (!_setjmp(current->jump)) _longjmp(home, 1);
}

inline void enter() {
    body(body_argument);
    current->done = true;
    Warp& warp = warps[current->number / 32];
    live--, warp.live--;
    if (live && waiting == live) waiting = 0, round_number++;
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

inline Warp& warp_barrier() {
    Warp& warp = warps[current->number / 32];
    long round = warp.round;
    if (++warp.waiting == warp.live) warp.waiting = 0, warp.round++;
    while (warp.round == round) give_way();
    return warp;
}

// Every lane puts up an item and gets the others'; they stay valid until the lane calls `warp_barrier`.
inline Warp& exchange(const void* item) {
    warps[current->number / 32].items[current->number % 32] = item;
    return warp_barrier();
}
}  // namespace emulator

inline Index blockIdx, blockDim, gridDim;
#define threadIdx (emulator::current->index)

constexpr unsigned SHARED_ROOM = 1 << 17;
extern __align__(16) unsigned char shared[SHARED_ROOM];

inline void __syncthreads() {
    long round = emulator::round_number;
    if (++emulator::waiting == emulator::live) emulator::waiting = 0, emulator::round_number++;
    emulator::current->held = true;
    while (emulator::round_number == round) emulator::give_way();
    emulator::current->held = false;
}
inline void __syncwarp(unsigned = 0xFFFFFFFFu) { emulator::warp_barrier(); }
inline void __threadfence() {}
inline float __shfl_xor_sync(unsigned, float x, int lanes) {
    float result = *(const float*)emulator::exchange(&x).items[(emulator::current->number % 32) ^ lanes];
    emulator::warp_barrier();
    return result;
}
inline unsigned atomicAdd(unsigned* at, unsigned x) {
    unsigned before = *at;
    *at += x;
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
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __expf(float x) { return std::exp(x); }
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

// Lets each thread of a warp go on once, or, if `far`, until all of them wait for the block.
inline void go_far(unsigned warp, unsigned size, bool far) {
    for (bool again = true; again;) {
        again = false;
        for (unsigned i = warp * 32; i < size && i < warp * 32 + 32; i++) {
            Thread& thread = threads[i];
            if (thread.done) continue;
            go_on(thread);
            again |= far && !thread.done && !thread.held;
        }
    }
}

// Runs `call` for every thread of every block, blocks and threads in the order that `order` picks.
template <class Call>
inline void run(Call call, const unsigned grid[3], unsigned size, unsigned shared_bytes, unsigned order) {
    body = [](const void* given) { (*(const Call*)given)(); };
    body_argument = &call;
    gridDim = {grid[0], grid[1], grid[2]};
    blockDim = {size, 1, 1};
    if (!stacks) stacks = (char*)malloc((size_t)MOST * STACK);
    unsigned count = grid[0] * grid[1] * grid[2], *blocks = permutation(count, order), ceil = (size + 31) / 32;
    unsigned* warps_in_turn = permutation(ceil, order);
    for (unsigned number = 0; number < count; number++) {
        unsigned block = blocks[number];
        blockIdx = {block % grid[0], block / grid[0] % grid[1], block / grid[0] / grid[1]};
        memset(shared, 0xFF, SHARED_ROOM);  // NaN
        for (Warp& warp : warps) warp = Warp();
        live = size, waiting = 0;
        for (unsigned i = 0; i < size; i++) {
            Thread& thread = threads[i];
            thread.index = {i, 0, 0}, thread.number = i, thread.done = thread.begun = thread.held = false;
            warps[i / 32].live++;
            getcontext(&thread.context);
            thread.context.uc_stack.ss_sp = &stacks[(size_t)i * STACK];
            thread.context.uc_stack.ss_size = STACK;
            makecontext(&thread.context, enter, 0);
        }
        for (long idle = 0; live;) {
            int before = live;
            long steps = round_number;
            for (unsigned warp = 0; warp < ceil; warp++) go_far(warps_in_turn[warp], size, order != 0);
            idle = live == before && steps == round_number ? idle + 1 : 0;
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
