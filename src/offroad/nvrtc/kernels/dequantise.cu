// Packed weights as a matrix of halves [columns, k] for a library's GEMM: rounded as the fused kernel rounds them.
//
// A block has 32 columns and BLOCK_K k's: lanes take their 16 bytes apart, shared memory turns the tile, and rows leave
// as whole 16-byte words.
//
// Specialised by KIND, SCALES (scales that a lane's 16 bytes have).
#include "mma884.cuh"
#include "weights.cuh"

constexpr int THREADS = 256, WARPS = THREADS / 32, BLOCK_K = 256, PITCH = BLOCK_K + 8, OWN = BLOCK_K / WARPS / CHUNK;
constexpr int EIGHTS = CHUNK / 8, WORDS = 4 / EIGHTS;
static_assert(2 * 32 * PITCH == SHARED_BYTES, "what Python reserves");
static_assert(OWN * WARPS * CHUNK == BLOCK_K, "whole chunks");

struct Args {
    const uint4* weights;  // [n / 32, k / CHUNK, 32]
    const void* scales;    // [n / 32, groups, 32] of halves, or of (scale, zero) pairs for integers
    half* out;             // [columns, k], from column 32 * first_tile on
    int n, k, group, groups, first_tile, unused;
    float alpha, unused_float;
};

extern __shared__ __align__(16) unsigned char shared[];

__device__ __forceinline__ u32 times(u32 halves, float alpha) {
    const half2 h = as_half2(halves);
    return as_bits(__floats2half2_rn(__low2float(h) * alpha, __high2float(h) * alpha));
}

// Grid: tiles of 32 columns, parts of BLOCK_K k's.
extern "C" __global__ void __launch_bounds__(THREADS) dequantise(const Args p) {
    half* tile = reinterpret_cast<half*>(shared);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, chunks = p.k / CHUNK;
    const i64 from = p.first_tile + blockIdx.x;
    half* row = tile + (8 * quad_pair(lane) + own_row(lane)) * PITCH;
#pragma unroll
    for (int c = 0; c < OWN; c++) {
        const int own = warp * OWN + c, chunk = blockIdx.y * (BLOCK_K / CHUNK) + own;
        if (chunk >= chunks) continue;
        const uint4 packed = __ldcs(p.weights + (from * chunks + chunk) * 32 + lane);
        const u32 words[4] = {packed.x, packed.y, packed.z, packed.w};
        u32 pairs[SCALES];
#pragma unroll
        for (int s = 0; s < SCALES; s++)
            pairs[s] = scale_pair(p.scales, (from * p.groups + (chunk * CHUNK + s * (CHUNK / SCALES)) / p.group) * 32 + lane);
#pragma unroll
        for (int e = 0; e < EIGHTS; e++) {
            u32 b[4];
            scaled_halves_of(words[e * WORDS], words[e * WORDS + WORDS - 1], pairs[e * SCALES / EIGHTS], b);
            *reinterpret_cast<uint4*>(row + own * CHUNK + e * 8) =
                make_uint4(times(b[0], p.alpha), times(b[1], p.alpha), times(b[2], p.alpha), times(b[3], p.alpha));
        }
    }
    __syncthreads();
    for (int index = threadIdx.x; index < 32 * BLOCK_K / 8; index += THREADS) {
        const int column = index / (BLOCK_K / 8), k = blockIdx.y * BLOCK_K + index % (BLOCK_K / 8) * 8;
        if (k < p.k && 32 * from + column < p.n)
            *reinterpret_cast<uint4*>(p.out + ((i64)blockIdx.x * 32 + column) * p.k + k) =
                *reinterpret_cast<const uint4*>(tile + column * PITCH + index % (BLOCK_K / 8) * 8);
    }
}
