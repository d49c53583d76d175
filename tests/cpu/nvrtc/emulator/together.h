// Runs all blocks of a grid at once, for kernels whose blocks wait for one another. What is done beside the threads
// (copies, the end of the kernel before) is done at moments that the order picks, and threads rest now and then, so
// that others come before them wherever a kernel lets them.
#pragma once
#include <functional>
#include <vector>

#include "emulator.h"

namespace emulator {
constexpr unsigned GUARD = 4096;
// A block with shared memory of its own. It has addresses from FIRST on, which need not be where the GPU begins rows.
struct Resident : Block {
    static constexpr unsigned FIRST = 1024;
    Index index;
    unsigned char* memory;  // of address 0
    unsigned char* shared;  // of the kernel's own
};
inline Resident& here() { return *(Resident*)block; }
#define OWN_SHARED (emulator::here().shared)

// The first thing that went wrong; the thread that found it goes no further.
inline const char* failure;
inline void fail(const char* what) {
    failure = what;
    hold([] { return false; });
}

inline unsigned together_order;
inline uint64_t dice;
inline unsigned roll(unsigned sides) {
    dice = dice * 6364136223846793005u + 1442695040888963407u;
    return (unsigned)(dice >> 33) % sides;
}

inline void pass(int turns) {
    hold([&] { return turns-- == 0; });
}
inline void rest() {
    if (together_order && roll(64) == 0) pass(1 + roll(8));
}

inline std::vector<std::function<void()>> later;  // to be done in any order

// Does some of what is to be done later; if no thread could go on, at least one thing.
inline void do_some(bool needed) {
    if (later.empty() || (!needed && roll(4))) return;
    for (unsigned count = 1 + roll(later.size()); count; count--) {
        unsigned i = roll(later.size());
        std::function<void()> now = later[i];
        later[i] = later.back(), later.pop_back(), progress++;
        now();
    }
}

inline bool untouched(const unsigned char* from, const unsigned char* to) {
    while (from < to && *from == 0xFF) from++;
    return from == to;
}

// A block's shared memory begins somewhere that has 16 bytes in common.
inline void make_room(Resident& block, unsigned bytes, unsigned order) {
    unsigned size = Resident::FIRST + 1024 + bytes + GUARD;
    block.memory = (unsigned char*)malloc(size);
    memset(block.memory, 0xFF, size);  // NaN
    block.shared = block.memory + Resident::FIRST + 16 * (order * 37 % 64);
}

inline void run_all(std::vector<Resident>& blocks, unsigned size) {
    unsigned ceil = (size + 31) / 32, total = blocks.size() * ceil, live = 1;
    for (int idle = 0; live && !failure;) {
        long before = progress;
        unsigned* turns = permutation(total, together_order ? 1 + roll(1 << 30) : 0);
        for (unsigned i = 0; i < total && !failure; i++) {
            block = &blocks[turns[i] / ceil], blockIdx = here().index;
            go_far(turns[i] % ceil, size, together_order && roll(2));
        }
        free(turns);
        bool moved = progress != before;
        idle = moved || later.size() ? 0 : idle + 1;
        if (idle > 1000) failure = "threads wait for each other";
        do_some(!moved);
        live = 0;
        for (Resident& block : blocks) live += block.live;
    }
}

// Runs `call` for every thread of a row of blocks. `before`: the end of the kernel before. Gives what went wrong, or
// null.
template <class Call>
inline const char* run_together(Call call, unsigned count, unsigned size, unsigned bytes, unsigned order,
                                std::function<void()> before) {
    const unsigned grid[3] = {count, 1, 1};
    begin(call, grid, size);
    std::vector<Resident> blocks(count);
    char* stacks = (char*)malloc((size_t)count * size * STACK);
    for (unsigned i = 0; i < count; i++) {
        blocks[i].index = {i, 0, 0};
        make_room(blocks[i], bytes, order);
        prepare(blocks[i], size, stacks + (size_t)i * size * STACK);
    }
    failure = nullptr, together_order = order, dice = order;
    later.assign(1, before);
    run_all(blocks, size);
    if (!failure && later.size()) failure = "a copy was on its way when all blocks had ended";
    for (Resident& block : blocks) {
        const unsigned char* end = block.shared + bytes;
        if (!untouched(block.memory, block.shared) || !untouched(end, end + GUARD))
            failure = "shared memory written outside the bytes that were reserved";
        free(block.memory);
    }
    free(stacks);
    return failure;
}
}  // namespace emulator
