// mma.m8n8k4 for the emulator, from the table of fragments in the PTX ISA.
#pragma once

inline void mma884(float (&c)[8], unsigned a0, unsigned a1, unsigned b0, unsigned b1) {
    unsigned mine[4] = {a0, a1, b0, b1};
    auto& warp = emulator::exchange(mine);
    int lane = emulator::current->number % 32, group = lane / 4 % 4;
    auto value = [&](int row, int which, int k) {  // `which` 0: A, 2: B
        int owner = row % 4 + 4 * group + (row / 4) * 16;
        const unsigned* words = (const unsigned*)warp.items[owner];
        return __half2float({(uint16_t)(words[which + k / 2] >> (16 * (k & 1)))});
    };
    float sums[8];
    for (int i = 0; i < 8; i++) {
        int row = (lane & 1) + (i & 2) + (lane >= 16 ? 4 : 0), column = (i & 4) + (lane & 2) + (i & 1);
        sums[i] = c[i];
        for (int k = 0; k < 4; k++) sums[i] += value(row, 0, k) * value(column, 2, k);
    }
    emulator::warp_barrier();
    for (int i = 0; i < 8; i++) c[i] = sums[i];
}
