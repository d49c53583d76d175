// What mma16816.cuh takes from PTX, for the emulator. Asynchronous copies arrive when they are waited for, as late as they
// may: what is read before has not been copied.
#pragma once
#include <vector>

inline float __uint_as_float(u32 bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}
inline u32 bits_of(float x) {
    u32 bits;
    memcpy(&bits, &x, 4);
    return bits;
}
inline float half_number_of(u16 bits, bool bf16) {
    if (bf16) return __uint_as_float((u32)bits << 16);
    _Float16 x;
    memcpy(&x, &bits, 2);
    return (float)x;
}
inline float half_number(u16 bits) { return half_number_of(bits, BF16); }
inline u16 half_of(float x) {
    if (BF16) return x != x ? 0x7FFF : (u16)((bits_of(x) + 0x7FFF + (bits_of(x) >> 16 & 1)) >> 16);
    _Float16 h = (_Float16)x;
    u16 bits;
    memcpy(&bits, &h, 2);
    return bits;
}
inline u32 masked(u32 x, u32 mask, u32 bits) { return (x & mask) | bits; }
inline u32 scaled2(u32 x, u32 factor) {
    u32 low = half_of(half_number((u16)x) * half_number((u16)factor));
    return low | (u32)half_of(half_number((u16)(x >> 16)) * half_number((u16)(factor >> 16))) << 16;
}
inline u32 bytes_apart(u32 word, int upper) {
    word >>= upper ? 16 : 0;
    return (word & 0xFF) << 8 | (word & 0xFF00) << 16;
}
inline u32 streamed_word(const u32* at) { return *at; }
inline u32 streamed_half(const u16* at) { return *at; }
inline float shared_by_blocks(const float* at) { return *at; }
inline void take_turn() {}

namespace emulator {
struct Copy {
    uint4* to;
    const uint4* from;
};
inline std::vector<std::vector<Copy>> groups[MOST];  // of each thread; the last one is open
inline std::vector<std::vector<Copy>>& own_groups() {
    auto& own = groups[current->number];
    if (own.empty()) own.emplace_back();
    return own;
}
}  // namespace emulator
inline void copy_async(uint4* to, const uint4* from) { emulator::own_groups().back().push_back({to, from}); }
inline void copies_so_far() { emulator::own_groups().emplace_back(); }
template <int N>
inline void copies_but() {
    auto& own = emulator::own_groups();
    while ((int)own.size() - 1 > N) {
        for (auto& copy : own.front()) *copy.to = *copy.from;
        own.erase(own.begin());
    }
}

// From the table of fragments in the PTX ISA.
inline void mma16816(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    u32 mine[6] = {a[0], a[1], a[2], a[3], b0, b1};
    auto& warp = emulator::exchange(mine);
    int lane = emulator::current->number % 32;
    auto part = [&](int owner, int word, int which) {
        return half_number((u16)(((const u32*)warp.items[owner])[word] >> (16 * which)));
    };
    float sums[4];
    for (int i = 0; i < 4; i++) {
        int row = lane / 4 + 8 * (i / 2), column = lane % 4 * 2 + i % 2;
        sums[i] = c[i];
        for (int k = 0; k < 16; k++) {
            int pair = k % 8 / 2, upper = k / 8;
            sums[i] += part(row % 8 * 4 + pair, row / 8 + 2 * upper, k % 2) * part(column * 4 + pair, 4 + upper, k % 2);
        }
    }
    emulator::warp_barrier();
    for (int i = 0; i < 4; i++) c[i] = sums[i];
}
