// What Hopper (sm_90a) has for a kernel whose warps have tasks apart: barriers in shared memory, copies that arrive at
// them, and products that a warpgroup starts and waits for later.
#pragma once

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
typedef unsigned long long u64;
typedef long long i64;

// A tensor map of the driver (cuTensorMapEncodeTiled).
struct alignas(64) TensorMap {
    u64 words[16];
};

#ifdef OFFROAD_EMULATED
#include "hopper_emulated.h"
#else
__device__ __forceinline__ u32 shared_address(const void* at) { return (u32)__cvta_generic_to_shared(at); }

__device__ __forceinline__ void barrier_init(u64* barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

// Makes barriers that are initialised known to the copy engine.
__device__ __forceinline__ void barriers_are_made() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ __forceinline__ void arrive(u64* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// Arrives, and says how many bytes copies bring before the phase is over.
__device__ __forceinline__ void arrive_expecting(u64* barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
}

// Waits until the phase of this parity is over.
__device__ __forceinline__ void wait(u64* barrier, u32 parity) {
    asm volatile(
        "{\n .reg .pred p;\n"
        "again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
        " @p bra over;\n bra again;\nover:\n}" ::"r"(shared_address(barrier)), "r"(parity) : "memory");
}

// The policy of memory that is read once.
__device__ __forceinline__ u64 read_once() {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

// Copies whole 16 bytes of memory that is read once.
__device__ __forceinline__ void copy_once(void* to, const void* from, u32 bytes, u64* barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
            shared_address(to)),
        "l"(from), "r"(bytes), "r"(shared_address(barrier)), "l"(read_once()) : "memory");
}

// Copies the map's box at (column, row).
__device__ __forceinline__ void copy_box(void* to, const TensorMap* map, int column, int row, u64* barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
            shared_address(to)),
        "l"(map), "r"(column), "r"(row), "r"(shared_address(barrier)) : "memory");
}

// As `copy_box`, of a map with chunks of a row in front of rows, and of memory that is read once: rows from `row` on, all
// of the chunks of a box from `chunk` on, one behind the other.
__device__ __forceinline__ void copy_chunks_once(void* to, const TensorMap* map, int row, int chunk, u64* barrier) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(
            shared_address(to)),
        "l"(map), "r"(0), "r"(row), "r"(chunk), "r"(shared_address(barrier)), "l"(read_once()) : "memory");
}

// What threads have written to shared memory comes before copies that are started behind this.
__device__ __forceinline__ void copies_come_behind() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Copies 4 bytes, or zeros if not `real`: see `wait_for_words`.
__device__ __forceinline__ void copy_word(u32 to, const void* from, bool real) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(real ? 4 : 0) : "memory");
}

// Waits for the words that this thread copies.
__device__ __forceinline__ void wait_for_words() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Adds one to a counter, behind everything that this thread and those that it has synchronised with have written.
__device__ __forceinline__ void arrive_released(u32* counter) {
    asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
}

// The same; what it was before, in front of everything that is read from here on.
__device__ __forceinline__ u32 arrive_ordered(u32* counter) {
    u32 before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
    return before;
}

__device__ __forceinline__ u32 acquired(const u32* counter) {
    u32 count;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(count) : "l"(counter) : "memory");
    return count;
}

__device__ __forceinline__ void wait_a_little() { __nanosleep(40); }

// Lets the kernel after this one start, if it was launched so; it waits for its turn.
__device__ __forceinline__ void let_next_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
// Waits until the kernels before this one have ended, and what they wrote can be seen.
__device__ __forceinline__ void wait_turn() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// A number that all threads of a warp have, so that it is known to be the same for all.
__device__ __forceinline__ int same(int number) { return __shfl_sync(0xFFFFFFFFu, number, 0); }

// A barrier of `threads` threads of the block that have the number `id` in common.
__device__ __forceinline__ void sync_some(u32 id, u32 threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Gives registers of a warpgroup back, or takes them: what each of its threads has from then on.
template <int REGISTERS>
__device__ __forceinline__ void give_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS)); }
template <int REGISTERS>
__device__ __forceinline__ void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS)); }

// Four 8 x 8 matrices of halves, of which lane i has the shared address of row i % 8 of the i / 8-th: a lane gets elements 2 *
// (lane % 4) and the next of row lane / 4 of each.
__device__ __forceinline__ void load_matrices(u32 (&to)[4], u32 row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(row) : "memory");
}

// As `load_matrices`, of matrices that are transposed on the way.
__device__ __forceinline__ void load_matrices_across(u32 (&to)[4], u32 row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(row) : "memory");
}

// An 8 x 8 matrix of halves that lanes have as `load_matrices` gives it, transposed.
__device__ __forceinline__ u32 transposed(u32 halves) {
    u32 across;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(across) : "r"(halves));
    return across;
}

// sums += a b: 16 rows of `a`, 16 k's, 8 columns of `b`, a warp's.
__device__ __forceinline__ void add_product(float* sums, const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// What registers hold is what products that are started next read.
__device__ __forceinline__ void products_may_start() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
// Products started since the last call are one group.
__device__ __forceinline__ void end_group() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until no more than the last LEFT groups are on their way.
template <int LEFT>
__device__ __forceinline__ void wait_groups() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

// Describes rows of 64 halves (128 bytes, swizzled) that are one after the other: the half that has their address.
__device__ __forceinline__ u32 described(const void* rows) { return (shared_address(rows) & 0x3FFFF) >> 4 | 1 << 16; }

// Starts sums += a b: 64 rows of `a`, 16 k's, N columns of `b`, described rows of k's; `first`: sums are 0 before.
template <int N>
__device__ __forceinline__ void start_product(float (&sums)[N / 2], const u32 (&a)[4], u32 b, bool first);
#define PRODUCT(N, TYPE, LIST, D, A0, A1, A2, A3, B, P)                                                              \
    "{\n .reg .pred p;\n .reg .b64 d;\n setp.eq.u32 p, " P ", 0;\n mov.b64 d, {" B ", 0x40000040};\n wgmma.mma_async.sync.aligned.m64n" N "k16.f32." TYPE "." TYPE    \
    " {" LIST "}, {" A0 "," A1 "," A2 "," A3 "}, d, p, 1, 1, 0;\n}"
#define S8(at) "+f"(sums[at]), "+f"(sums[at + 1]), "+f"(sums[at + 2]), "+f"(sums[at + 3]), "+f"(sums[at + 4]), \
               "+f"(sums[at + 5]), "+f"(sums[at + 6]), "+f"(sums[at + 7])
#define L8 "%0,%1,%2,%3,%4,%5,%6,%7"
#define L16 L8 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define L32 L16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define INPUTS "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"((u32)first)
template <>
__device__ __forceinline__ void start_product<32>(float (&sums)[16], const u32 (&a)[4], u32 b, bool first) {
    asm volatile(PRODUCT("32", "bf16", L16, "", "%16", "%17", "%18", "%19", "%20", "%21") : S8(0), S8(8) : INPUTS);
}
template <>
__device__ __forceinline__ void start_product<64>(float (&sums)[32], const u32 (&a)[4], u32 b, bool first) {
    asm volatile(PRODUCT("64", "bf16", L32, "", "%32", "%33", "%34", "%35", "%36", "%37")
                 : S8(0), S8(8), S8(16), S8(24) : INPUTS);
}
#endif
