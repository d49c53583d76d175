// Tensor-core tiles for the emulator: a lane has 1/32 of each fragment, in an order that no GPU has.
#pragma once
#include "cuda_fp16.h"
#include "emulator.h"

namespace nvcuda {
namespace wmma {
struct matrix_a;
struct matrix_b;
struct accumulator;
struct row_major;
struct col_major;
enum layout_t { mem_row_major, mem_col_major };

template <class Use, int M, int N, int K>
struct Extent;
template <int M, int N, int K>
struct Extent<matrix_a, M, N, K> {
    static constexpr int rows = M, columns = K;
};
template <int M, int N, int K>
struct Extent<matrix_b, M, N, K> {
    static constexpr int rows = K, columns = N;
};
template <int M, int N, int K>
struct Extent<accumulator, M, N, K> {
    static constexpr int rows = M, columns = N;
};

template <class Use, int M, int N, int K, class T, class Layout = void>
struct fragment {
    using Size = Extent<Use, M, N, K>;
    static constexpr int num_elements = Size::rows * Size::columns / 32;
    T x[num_elements];
    static int row(int lane, int i) { return (lane * num_elements + i) / Size::columns; }
    static int column(int lane, int i) { return (lane * num_elements + i) % Size::columns; }
    static T at(const fragment* const* all, int r, int c) {
        int n = r * Size::columns + c;
        return all[n / num_elements]->x[n % num_elements];
    }
};

inline int lane() { return emulator::current->number % 32; }

inline bool rows_first(row_major*) { return true; }
inline bool rows_first(col_major*) { return false; }

template <class Use, int M, int N, int K, class T, class Layout>
void load_matrix_sync(fragment<Use, M, N, K, T, Layout>& f, const T* from, unsigned pitch) {
    bool by_row = rows_first((Layout*)nullptr);
    if ((uintptr_t)from % 16) std::abort();  // CUDA asks for more
    for (int i = 0; i < f.num_elements; i++) {
        int r = f.row(lane(), i), c = f.column(lane(), i);
        f.x[i] = by_row ? from[r * pitch + c] : from[c * pitch + r];
    }
}
template <int M, int N, int K, class T>
void load_matrix_sync(fragment<accumulator, M, N, K, T>& f, const T* from, unsigned pitch, layout_t) {
    for (int i = 0; i < f.num_elements; i++) f.x[i] = from[f.row(lane(), i) * pitch + f.column(lane(), i)];
}
template <int M, int N, int K, class T>
void store_matrix_sync(T* to, const fragment<accumulator, M, N, K, T>& f, unsigned pitch, layout_t) {
    for (int i = 0; i < f.num_elements; i++) to[f.row(lane(), i) * pitch + f.column(lane(), i)] = f.x[i];
}
template <class F, class T>
void fill_fragment(F& f, T value) {
    for (auto& x : f.x) x = value;
}

template <int M, int N, int K, class L, class R>
void mma_sync(fragment<accumulator, M, N, K, float>& d, const fragment<matrix_a, M, N, K, half, L>& a,
              const fragment<matrix_b, M, N, K, half, R>& b, const fragment<accumulator, M, N, K, float>& c) {
    struct Both {
        const void *a, *b;
    } both{&a, &b};
    auto& warp = emulator::exchange(&both);
    const fragment<matrix_a, M, N, K, half, L>* as[32];
    const fragment<matrix_b, M, N, K, half, R>* bs[32];
    for (int i = 0; i < 32; i++) {
        auto* item = (const Both*)warp.items[i];
        as[i] = (const fragment<matrix_a, M, N, K, half, L>*)item->a;
        bs[i] = (const fragment<matrix_b, M, N, K, half, R>*)item->b;
    }
    for (int i = 0; i < d.num_elements; i++) {
        int row = d.row(lane(), i), column = d.column(lane(), i);
        float sum = c.x[i];
        for (int k = 0; k < K; k++)
            sum += __half2float(a.at(as, row, k)) * __half2float(b.at(bs, k, column));
        d.x[i] = sum;
    }
    emulator::warp_barrier();
}
}  // namespace wmma
}  // namespace nvcuda
