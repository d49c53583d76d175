/* x w^T over weights in tiles of 16 output rows: a lane is an output row, so nothing is summed across lanes.

   Order of additions, the same for every number of rows M: k is cut into blocks of KB; inside a block one chain of
   fused multiply-adds in order of k, from 0; the blocks' results are added in order. Weights are dequantised the same
   way in every regime. So a row's result does not depend on what it is batched with, nor on the number of threads. */
#include "pool.h"
#include "vec.h"

#define KB 128
#if defined(__AVX512F__)
#define MR 12 /* rows of the microkernel */
#define PT 2  /* tiles side by side in a panel */
#elif defined(__AVX2__)
#define MR 6
#define PT 1
#else
#define MR 4
#define PT 1
#endif
#define PW (PT * TILE)
#define PV (PT * NV)
#define MB 96     /* rows of x per task: a multiple of MR; its x stays in L2 */

enum { F32, BF16, Q4, Q8 };

typedef struct {
    int64_t n, k, group;
    int32_t kind, half_scales, has_m, reserved;
    const void *q, *s, *m;
    const float *bias;
} weight_t;


INLINE vf scale_at(const void *base, const int half, int64_t at) {
    return half ? load_half((const uint16_t *)base + at) : load((const float *)base + at);
}

/* Nibble j of a word is weight k = 4 j + b of the 32. It is converted where it stands, as q * 16^j, and meets a scale
   divided by 16^j: exact, and no shift (but for j = 7, whose place is the sign bit's). */
INLINE vf q4_weight(const uint32_t *word, const int j, vf s, vf m) {
    vu bits = load_u32(word), mask = splat_u32(15u << 4 * (j < 7 ? j : 6));
    return fma_(__builtin_convertvector((vi)((j < 7 ? bits : bits >> 4) & mask), vf), s, m);
}

/* One row of x: acc[t] += sum over k in [k0, k1) of tile t. */
INLINE void chain_q4(const weight_t *w, const int half, const int has_m, const int tiles, int64_t tile,
                     int64_t k0, int64_t k1, const float *x, vf acc[2][NV]) {
    for (int64_t k = k0; k < k1; k += 32) {
        const uint32_t *q[2];
        vf s[2][NV], m[2][NV];
        UNROLL for (int t = 0; t < tiles; t++) {
            int64_t at = ((tile + t) * (w->k / w->group) + k / w->group) * TILE;
            q[t] = (const uint32_t *)w->q + ((tile + t) * (w->k / 32) + k / 32) * 64;
            UNROLL for (int v = 0; v < NV; v++) {
                s[t][v] = scale_at(w->s, half, at + v * VL);
                m[t][v] = has_m ? scale_at(w->m, half, at + v * VL) : splat(0);
            }
        }
        UNROLL for (int j = 0; j < 8; j++) {
            UNROLL for (int b = 0; b < 4; b++)
                UNROLL for (int t = 0; t < tiles; t++)
                    UNROLL for (int v = 0; v < NV; v++) {
                        vf wide = q4_weight(q[t] + b * TILE + v * VL, j, s[t][v], m[t][v]);
                        acc[t][v] = fma_(wide, splat(x[k + 4 * j + b]), acc[t][v]);
                    }
            if (j < 6)
                UNROLL for (int t = 0; t < tiles; t++) UNROLL for (int v = 0; v < NV; v++) s[t][v] *= splat(0.0625f);
        }
    }
}

INLINE void chain_q8(const weight_t *w, const int half, const int has_m, const int tiles, int64_t tile,
                     int64_t k0, int64_t k1, const float *x, vf acc[2][NV]) {
    for (int64_t k = k0; k < k1;) {
        const int8_t *q[2];
        vf s[2][NV], m[2][NV];
        int64_t end = (k / w->group + 1) * w->group;
        if (end > k1) end = k1;
        UNROLL for (int t = 0; t < tiles; t++) {
            int64_t at = ((tile + t) * (w->k / w->group) + k / w->group) * TILE;
            q[t] = (const int8_t *)w->q + (tile + t) * w->k * TILE;
            UNROLL for (int v = 0; v < NV; v++) {
                s[t][v] = scale_at(w->s, half, at + v * VL);
                m[t][v] = has_m ? scale_at(w->m, half, at + v * VL) : splat(0);
            }
        }
        for (; k < end; k++)
            UNROLL for (int t = 0; t < tiles; t++) UNROLL for (int v = 0; v < NV; v++) {
                vf wide = load_i8(q[t] + k * TILE + v * VL);
                wide = has_m ? fma_(wide, s[t][v], m[t][v]) : wide * s[t][v];
                acc[t][v] = fma_(wide, splat(x[k]), acc[t][v]);
            }
    }
}

INLINE void chain_dense(const weight_t *w, const int kind, const int tiles, int64_t tile, int64_t k0,
                        int64_t k1, const float *x, vf acc[2][NV]) {
    for (int64_t k = k0; k < k1; k++)
        UNROLL for (int t = 0; t < tiles; t++) UNROLL for (int v = 0; v < NV; v++) {
            int64_t at = ((tile + t) * w->k + k) * TILE + v * VL;
            vf wide = kind == F32 ? load((const float *)w->q + at) : load_bf16((const uint16_t *)w->q + at);
            acc[t][v] = fma_(wide, splat(x[k]), acc[t][v]);
        }
}

INLINE void chain(const weight_t *w, const int tiles, int64_t tile, int64_t k0, int64_t k1,
                  const float *x, vf acc[2][NV]) {
#define ARGS tiles, tile, k0, k1, x, acc
    if (w->kind == Q4) {
        if (w->has_m) w->half_scales ? chain_q4(w, 1, 1, ARGS) : chain_q4(w, 0, 1, ARGS);
        else w->half_scales ? chain_q4(w, 1, 0, ARGS) : chain_q4(w, 0, 0, ARGS);
    } else if (w->kind == Q8) {
        if (w->has_m) w->half_scales ? chain_q8(w, 1, 1, ARGS) : chain_q8(w, 0, 1, ARGS);
        else w->half_scales ? chain_q8(w, 1, 0, ARGS) : chain_q8(w, 0, 0, ARGS);
    } else w->kind == F32 ? chain_dense(w, F32, ARGS) : chain_dense(w, BF16, ARGS);
#undef ARGS
}

/* One struct instead of four arguments: see rows.c. The last two are set here. */
typedef struct {
    const weight_t *w;
    const float *x;
    float *out;
    int64_t rows;
    int64_t per_task, panels;
} job_t;

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* Writes one tile's results of a row, cut to the rows the weight has, with the bias. */
INLINE void put(const weight_t *w, float *out, int64_t row, int64_t tile, const vf acc[NV]) {
    int64_t first = tile * TILE;
    float *to = out + row * w->n + first;
    if (first + TILE <= w->n) {
        UNROLL for (int v = 0; v < NV; v++)
            store(to + v * VL, w->bias ? acc[v] + load(w->bias + first + v * VL) : acc[v]);
        return;
    }
    float parts[TILE];
    UNROLL for (int v = 0; v < NV; v++) store(parts + v * VL, acc[v]);
    for (int64_t i = 0; first + i < w->n; i++) to[i] = w->bias ? parts[i] + w->bias[first + i] : parts[i];
}

/* One row of x times `tiles` tiles, from packed weights straight into the product. */
INLINE void direct(const weight_t *w, const int tiles, int64_t tile, const float *x, float *out) {
    vf total[2][NV];
    UNROLL for (int t = 0; t < tiles; t++) UNROLL for (int v = 0; v < NV; v++) total[t][v] = splat(0);
    for (int64_t k = 0; k < w->k; k += KB) {
        vf acc[2][NV];
        UNROLL for (int t = 0; t < tiles; t++) UNROLL for (int v = 0; v < NV; v++) acc[t][v] = splat(0);
        chain(w, tiles, tile, k, least(k + KB, w->k), x, acc);
        UNROLL for (int t = 0; t < tiles; t++) UNROLL for (int v = 0; v < NV; v++) total[t][v] += acc[t][v];
    }
    for (int t = 0; t < tiles; t++) put(w, out, 0, tile + t, total[t]);
}

static __attribute__((noinline)) void direct_1(const weight_t *w, int64_t tile, const float *x, float *out) {
    direct(w, 1, tile, x, out);
}

static __attribute__((noinline)) void direct_2(const weight_t *w, int64_t tile, const float *x, float *out) {
    direct(w, 2, tile, x, out);
}

static void direct_task(void *argument, int64_t index) {
    const job_t *job = argument;
    const weight_t *w = job->w;
    int64_t tile = index * job->per_task, end = least(tile + job->per_task, (w->n + TILE - 1) / TILE);
    for (; tile + 2 <= end; tile += 2) direct_2(w, tile, job->x, job->out);
    if (tile < end) direct_1(w, tile, job->x, job->out);
}

/* Weights of tile and k in [k0, k1) as fp32, [k1 - k0][stride]: bit for bit what the chains multiply with. */
static void expand(const weight_t *w, int64_t tile, int64_t k0, int64_t k1, float *to, int64_t stride) {
    int64_t per_group = w->kind == Q4 || w->kind == Q8 ? w->group : w->k;
    for (int64_t k = k0; k < k1;) {
        int64_t at = (tile * (w->k / per_group) + k / per_group) * TILE, end = (k / per_group + 1) * per_group;
        vf s[NV], m[NV];
        if (end > k1) end = k1;
        UNROLL for (int v = 0; v < NV; v++) {
            s[v] = w->s ? scale_at(w->s, w->half_scales, at + v * VL) : splat(1);
            m[v] = w->has_m ? scale_at(w->m, w->half_scales, at + v * VL) : splat(0);
        }
        if (w->kind == Q4)
            for (; k < end; k += 32) {
                const uint32_t *q = (const uint32_t *)w->q + (tile * (w->k / 32) + k / 32) * 64;
                UNROLL for (int v = 0; v < NV; v++) {
                    vf scale = s[v];
                    UNROLL for (int j = 0; j < 8; j++) {
                        UNROLL for (int b = 0; b < 4; b++)
                            store(to + (k - k0 + 4 * j + b) * stride + v * VL, q4_weight(q + b * TILE + v * VL, j, scale, m[v]));
                        if (j < 6) scale *= splat(0.0625f);
                    }
                }
            }
        else
            for (; k < end; k++) UNROLL for (int v = 0; v < NV; v++) {
                int64_t place = (tile * w->k + k) * TILE + v * VL;
                vf wide;
                if (w->kind == F32) wide = load((const float *)w->q + place);
                else if (w->kind == BF16) wide = load_bf16((const uint16_t *)w->q + place);
                else {
                    wide = load_i8((const int8_t *)w->q + place);
                    wide = w->has_m ? fma_(wide, s[v], m[v]) : wide * s[v];
                }
                store(to + (k - k0) * stride + v * VL, wide);
            }
    }
}

/* out[rows][PW] (+)= x[rows][count] * panel[count][PW] */
INLINE void strip(const int rows, int64_t count, const float *x, int64_t ldx, const float *panel, float *out, int first) {
    vf acc[MR][PV];
    UNROLL for (int i = 0; i < rows; i++) UNROLL for (int v = 0; v < PV; v++) acc[i][v] = splat(0);
    for (int64_t k = 0; k < count; k++) {
        vf w[PV];
        UNROLL for (int v = 0; v < PV; v++) w[v] = load(panel + k * PW + v * VL);
        UNROLL for (int i = 0; i < rows; i++) {
            vf xb = splat(x[i * ldx + k]);
            UNROLL for (int v = 0; v < PV; v++) acc[i][v] = fma_(w[v], xb, acc[i][v]);
        }
    }
    UNROLL for (int i = 0; i < rows; i++) UNROLL for (int v = 0; v < PV; v++) {
        float *to = out + i * PW + v * VL;
        store(to, (first ? splat(0) : load(to)) + acc[i][v]);
    }
}

#define STRIP(R) case R: strip(R, count, x, ldx, panel, out, first); break;
static void strips(int rows, int64_t count, const float *x, int64_t ldx, const float *panel, float *out, int first) {
    switch (rows) {
        STRIP(1) STRIP(2) STRIP(3)
#if MR > 4
        STRIP(5)
#endif
#if MR > 6
        STRIP(6) STRIP(7) STRIP(8) STRIP(9) STRIP(10) STRIP(11)
#endif
#if MR > 4
        STRIP(4)
#endif
    default: strip(MR, count, x, ldx, panel, out, first);
    }
}

static void panel_task(void *argument, int64_t index) {
    const job_t *job = argument;
    const weight_t *w = job->w;
    int64_t tile = index % job->panels * PT, row = index / job->panels * MB;
    int64_t rows = least(MB, job->rows - row), tiles = least(PT, (w->n + TILE - 1) / TILE - tile);
    float panel[KB * PW] __attribute__((aligned(64))), out[MB * PW] __attribute__((aligned(64)));
    int64_t count = (rows + MR - 1) / MR, height = (rows + count - 1) / count;
    if (tiles < PT) memset(panel, 0, sizeof panel);
    for (int64_t k = 0; k < w->k; k += KB) {
        int64_t end = least(k + KB, w->k);
        for (int64_t t = 0; t < tiles; t++) expand(w, tile + t, k, end, panel + t * TILE, PW);
        for (int64_t i = 0; i < rows; i += height)
            strips((int)least(height, rows - i), end - k, job->x + (row + i) * w->k + k, w->k, panel, out + i * PW, k == 0);
    }
    for (int64_t i = 0; i < rows; i++)
        for (int64_t t = 0; t < tiles; t++) {
            vf acc[NV];
            UNROLL for (int v = 0; v < NV; v++) acc[v] = load(out + i * PW + t * TILE + v * VL);
            put(w, job->out, row + i, tile + t, acc);
        }
}

/* out [rows, n] = x [rows, k] w^T + bias. */
void offroad_linear(const job_t *given) {
    job_t job = *given;
    int64_t tiles = (job.w->n + TILE - 1) / TILE;
    if (job.rows > 1) {
        job.panels = (tiles + PT - 1) / PT;
        pool_run(panel_task, &job, job.panels * ((job.rows + MB - 1) / MB));
    } else if (job.rows) {
        int64_t pieces = (int64_t)pool_threads() * 4;
        job.per_task = (tiles + pieces - 1) / pieces;
        job.per_task += job.per_task & 1;
        pool_run(direct_task, &job, (tiles + job.per_task - 1) / job.per_task);
    }
}

/* out [tokens, k] = scale * rows `ids` of the weight; q * s, + m and * scale are rounded one by one, as the reference. */
void offroad_embed(const weight_t *w, const int64_t *ids, float *out, int64_t tokens, float scale) {
    for (int64_t token = 0; token < tokens; token++) {
        int64_t tile = ids[token] / TILE, lane = ids[token] % TILE, groups = w->group ? w->k / w->group : 1;
        float *to = out + token * w->k;
        for (int64_t k = 0; k < w->k; k++) {
            int64_t place = (tile * w->k + k) * TILE + lane;
            int64_t word = (tile * (w->k / 32) + k / 32) * 64 + k % 4 * TILE + lane;
            float q = w->kind == F32    ? ((const float *)w->q)[place]
                      : w->kind == BF16 ? bf16_to_float(((const uint16_t *)w->q)[place])
                      : w->kind == Q8   ? (float)((const int8_t *)w->q)[place]
                                        : (float)(((const uint32_t *)w->q)[word] >> k % 32 / 4 * 4 & 15);
            if (w->s) {
                int64_t at = (tile * groups + k / w->group) * TILE + lane;
                q *= w->half_scales ? half_to_float(((const uint16_t *)w->s)[at]) : ((const float *)w->s)[at];
                if (w->has_m) q += w->half_scales ? half_to_float(((const uint16_t *)w->m)[at]) : ((const float *)w->m)[at];
            }
            to[k] = scale == 1.0f ? q : q * scale;
        }
    }
}
