// hopper.cuh for the emulator. Copies are done later, in any order. Products are done as late as the kernel lets them,
// now and then early: from the registers and the shared memory that they name, as these are then.
#pragma once
#include <deque>
#include <map>

#include "together.h"

namespace emulator {
struct Barrier {
    short pending;
    unsigned short count : 15, phase : 1;
    int bytes;  // that copies still bring; below 0 if they came before they were expected
    void check() const {
        if (count == 0x7FFF) fail("a barrier that has not been initialised");
    }
    void settle() {
        if (pending == 0 && bytes == 0) pending = count, phase ^= 1, progress++;
    }
    void arrive(int expected) {
        check();
        if (--pending < 0) fail("more arrivals than a barrier waits for");
        bytes += expected, progress++;
        settle();
    }
    // A copy's: not by a thread.
    void bring(int brought) {
        bytes -= brought;
        settle();
    }
};
static_assert(sizeof(Barrier) == sizeof(u64), "");
inline Barrier* barrier_at(u64* at) { return (Barrier*)at; }

// What copies may read: pairs of an address and of bytes, to a pair of zeros.
inline const u64* readable;
inline void check_copy(const void* to, const void* from, size_t bytes) {
    if (((uintptr_t)from | ((unsigned char*)to - here().memory) | bytes) % 16) fail("a copy not of whole 16 bytes");
    const u64* range = readable;
    for (u64 at = (u64)from; range[1]; range += 2)
        if (at >= range[0] && at + bytes <= range[0] + range[1]) return;
    fail("a copy reads outside the tensors");
}

// Where copies of boxes and products have bytes of rows of 128: chunks of 16 in another order in each of 8 rows.
inline unsigned swizzled(unsigned address) { return address ^ (address >> 7 & 7) << 4; }

inline void place_box(unsigned char* memory, unsigned to, const TensorMap& map, int column, int row) {
    const u64 *w = map.words, columns = w[1], rows = w[2], pitch = w[3], wide = w[4], high = w[5], size = w[6];
    for (unsigned r = 0; r < high; r++)
        for (unsigned c = 0; c < wide; c++) {
            const bool inside = (u64)(row + r) < rows && (u64)(column + c) < columns;
            unsigned char* place = memory + swizzled(to + r * 128 + c * size);
            if (inside) memcpy(place, (const void*)(w[0] + (row + r) * pitch + (column + c) * size), size);
            else memset(place, 0, size);
        }
}

// A warp's 16 rows of a product of its warpgroup's 64.
struct Product {
    float* sums[32];
    const u32* a[32];
    u32 b;
    bool first;
    int columns, lanes = 0;
    long group;
};
struct Products {
    std::deque<Product> queue;
    long gone = 0, begun[32] = {}, ended[32] = {};  // products done, and of each lane products begun and groups ended
    bool fenced[32] = {};
};
inline std::map<const Warp*, Products> products;

inline float wide_bf16(u32 bits) { return __uint_as_float(bits << 16); }

// Fragments as in the PTX ISA's tables of wgmma, m64nNk16.
inline void compute(const Product& p) {
    float a[16][16], b[16][64], d[16][64] = {};
    for (int lane = 0; lane < 32; lane++)
        for (int i = 0; i < 8; i++)
            a[lane / 4 + i / 2 % 2 * 8][lane % 4 * 2 + i / 4 * 8 + i % 2] = wide_bf16(p.a[lane][i / 2] >> i % 2 * 16);
    const unsigned start = (p.b & 0x3FFF) << 4;
    for (int n = 0; n < p.columns; n++)
        for (int k = 0; k < 16; k++)
            b[k][n] = wide_bf16(*(const u16*)(here().memory + swizzled(start + n * 128 + k * 2)));
    auto each = [&](auto set) {
        for (int lane = 0; lane < 32; lane++)
            for (int i = 0; i < p.columns / 2; i++)
                set(d[lane / 4 + i / 2 % 2 * 8][i / 4 * 8 + lane % 4 * 2 + i % 2], p.sums[lane][i]);
    };
    if (!p.first) each([](float& sum, float given) { sum = given; });
    for (int row = 0; row < 16; row++)
        for (int k = 0; k < 16; k++)
            for (int n = 0; n < p.columns; n++) d[row][n] += a[row][k] * b[k][n];
    each([](float sum, float& given) { given = sum; });
}

inline void compute_until(Products& of, long group) {
    while (of.queue.size() && of.queue.front().group < group) {
        if (of.queue.front().lanes != 32) fail("a product without some lanes of its warp");
        compute(of.queue.front());
        of.queue.pop_front(), of.gone++;
    }
}

inline void start(float* sums, const u32* a, u32 b, bool first, int columns) {
    const int lane = current->number % 32;
    Products& own = products[&current_warp()];
    if (!own.fenced[lane]) fail("a product of registers that no fence has given it");
    const size_t at = own.begun[lane]++ - own.gone;
    const long group = own.ended[lane];
    if (at == own.queue.size()) {
        own.queue.emplace_back();
        Product& made = own.queue.back();
        made.b = b, made.first = first, made.columns = columns, made.group = group;
    }
    Product& p = own.queue[at];
    if (p.b != b || p.first != first || p.group != group) fail("lanes of a warp start different products");
    p.sums[lane] = sums, p.a[lane] = a, p.lanes++;
}

// Whether a group's products are done as soon as they are started: the same for a warp's lanes.
inline bool done_early(long group) {
    const u32 mixed = together_order * 2654435761u + group * 40503u + current->number / 32 * 9973u;
    return together_order && (mixed >> 7) % 4 == 0;
}

// What a launch calls behind the kernel.
inline void nothing_is_left() {
    if (products[&current_warp()].queue.size()) fail("a thread left while its products were on their way");
}

// Copies of words that a thread has not waited for.
inline std::map<const Thread*, std::vector<std::pair<u32, const u32*>>> words;

inline bool turn = true;  // the kernel before has ended
}  // namespace emulator

inline u32 shared_address(const void* at) { return (const unsigned char*)at - emulator::here().memory; }
inline void barrier_init(u64* barrier, u32 arrivals) {
    *emulator::barrier_at(barrier) = {(short)arrivals, (unsigned short)arrivals, 0, 0};
}
inline void barriers_are_made() {}
inline void arrive_expecting(u64* barrier, u32 bytes) {
    emulator::rest();
    emulator::barrier_at(barrier)->arrive(bytes);
}
inline void arrive(u64* barrier) { arrive_expecting(barrier, 0); }
inline void wait(u64* barrier, u32 parity) {
    emulator::rest();
    emulator::barrier_at(barrier)->check();
    emulator::hold([&] { return emulator::barrier_at(barrier)->phase != parity; });
}
inline void copy_once(void* to, const void* from, u32 bytes, u64* barrier) {
    emulator::check_copy(to, from, bytes);
    emulator::later.push_back([=] {
        memcpy(to, from, bytes);
        emulator::barrier_at(barrier)->bring(bytes);
    });
}
inline void copy_box(void* to, const TensorMap* given, int column, int row, u64* barrier) {
    const TensorMap map = *given;
    unsigned char* memory = emulator::here().memory;
    const unsigned address = shared_address(to);
    if (map.words[0] % 16 || map.words[3] % 16 || address % 128) emulator::fail("a box that copies cannot have");
    emulator::later.push_back([=] {
        emulator::place_box(memory, address, map, column, row);
        emulator::barrier_at(barrier)->bring(map.words[4] * map.words[5] * map.words[6]);
    });
}
inline void copy_chunks_once(void* to, const TensorMap* given, int row, int chunk, u64* barrier) {
    const u64 size = given->words[6], wide = given->words[4], high = given->words[5];
    for (u64 i = 0; i < given->words[7]; i++) {
        if (((chunk + i + 1) * wide) > given->words[1]) emulator::fail("a chunk that rows do not have");
        copy_box((unsigned char*)to + i * high * wide * size, given, (chunk + i) * wide, row, barrier);
    }
}
inline void copies_come_behind() {}
inline void copy_word(u32 to, const void* from, bool real) {
    if (to % 4 || (u64)from % 4) emulator::fail("a word not at whole 4 bytes");
    emulator::words[emulator::current].push_back({to, real ? (const u32*)from : nullptr});
}
inline void wait_for_words() {
    for (auto [to, from] : emulator::words[emulator::current]) *(u32*)(emulator::here().memory + to) = from ? *from : 0;
    emulator::words[emulator::current].clear();
}
inline u32 arrive_ordered(u32* counter) {
    emulator::rest();
    emulator::progress++;
    return (*counter)++;
}
inline void arrive_released(u32* counter) { arrive_ordered(counter); }
inline u32 acquired(const u32* counter) { return *counter; }
inline void wait_a_little() { emulator::pass(1); }
inline void let_next_start() {}
inline void wait_turn() {
    emulator::hold([] { return emulator::turn; });
}
inline int same(int number) { return __shfl_sync(0xFFFFFFFFu, number, 0); }
inline void sync_some(u32 id, u32 threads) {
    emulator::Named& named = emulator::block->named[id];
    const long round = named.round;
    if (++named.waiting == threads) named.waiting = 0, named.round++, emulator::progress++;
    emulator::hold([&] { return named.round != round; });
}
template <int REGISTERS>
inline void give_registers() {}
template <int REGISTERS>
inline void take_registers() {}

inline const void* matrix_row(u32 address) {
    emulator::rest();
    if (address % 16) emulator::fail("a matrix's row not at whole 16 bytes");
    return emulator::here().memory + address;
}
inline void load_matrices(u32 (&to)[4], u32 address) {
    const void* row = matrix_row(address);
    auto& warp = emulator::exchange(&row);
    const int lane = emulator::current->number % 32;
    for (int i = 0; i < 4; i++)
        memcpy(&to[i], *(const unsigned char* const*)warp.items[i * 8 + lane / 4] + lane % 4 * 4, 4);
    emulator::warp_barrier();
}
// Lane's column of the matrix whose rows begin at `rows[8]`.
inline u32 column_of(const void* const* rows, int lane) {
    const int column = lane / 4, first = lane % 4 * 2;
    return ((const u16*)rows[first])[column] | (u32)((const u16*)rows[first + 1])[column] << 16;
}
inline void load_matrices_across(u32 (&to)[4], u32 address) {
    const void* row = matrix_row(address);
    auto& warp = emulator::exchange(&row);
    const void* rows[32];
    for (int i = 0; i < 32; i++) rows[i] = *(const void* const*)warp.items[i];
    for (int i = 0; i < 4; i++) to[i] = column_of(rows + i * 8, emulator::current->number % 32);
    emulator::warp_barrier();
}
inline u32 transposed(u32 halves) {
    auto& warp = emulator::exchange(&halves);
    u16 matrix[8][8];
    const void* rows[8];
    for (int i = 0; i < 32; i++) memcpy(&matrix[i / 4][i % 4 * 2], warp.items[i], 4);
    for (int i = 0; i < 8; i++) rows[i] = matrix[i];
    const u32 across = column_of(rows, emulator::current->number % 32);
    emulator::warp_barrier();
    return across;
}
inline void add_product(float* sums, const u32 (&a)[4], u32 b0, u32 b1) {
    const u32 mine[6] = {a[0], a[1], a[2], a[3], b0, b1};
    auto& warp = emulator::exchange(mine);
    const int lane = emulator::current->number % 32;
    auto value = [&](int owner, int word, int k) {
        return emulator::wide_bf16((u16)(((const u32*)warp.items[owner])[word] >> 16 * (k % 2)));
    };
    for (int i = 0; i < 4; i++) {
        const int row = lane / 4, column = lane % 4 * 2 + i % 2;
        for (int k = 0; k < 16; k++)
            sums[i] += value(row * 4 + k % 8 / 2, i / 2 + k / 8 * 2, k) * value(column * 4 + k % 8 / 2, 4 + k / 8, k);
    }
    emulator::warp_barrier();
}

inline void products_may_start() {
    emulator::rest();
    emulator::products[&emulator::current_warp()].fenced[emulator::current->number % 32] = true;
}
inline void end_group() {
    auto& own = emulator::products[&emulator::current_warp()];
    const int lane = emulator::current->number % 32;
    const long group = own.ended[lane]++;
    own.fenced[lane] = false;
    if (emulator::done_early(group)) emulator::warp_barrier([&] { emulator::compute_until(own, group + 1); });
    emulator::rest();
}
template <int LEFT>
inline void wait_groups() {
    emulator::rest();
    auto& own = emulator::products[&emulator::current_warp()];
    const long group = own.ended[emulator::current->number % 32] - LEFT;
    emulator::warp_barrier([&] { emulator::compute_until(own, group); });
    emulator::rest();
}
inline u32 described(const void* rows) { return (shared_address(rows) & 0x3FFFF) >> 4 | 1 << 16; }
template <int N>
inline void start_product(float (&sums)[N / 2], const u32 (&a)[4], u32 b, bool first) {
    emulator::rest();
    emulator::start(sums, a, b, first, N);
}
