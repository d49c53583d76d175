/* x w^T over weights in tiles of 16 output rows: a lane is an output row, so nothing is summed across lanes.

   With w = q * s + m in each group, a unit (a group, or a part of one) gives s * sum(x q) + m * sum(x): one fused
   multiply-add a weight, and the sums of x are shared by all output rows.

   Order of additions, the same for every number of rows M: inside a unit one chain of fused multiply-adds in order of
   k, from 0; then total = fma(chain, s, total), and total = fma(sum of x, m, total), unit by unit. So a row's result
   depends neither on what it is batched with nor on the number of threads. */
#include "ops.h"
#include "pool.h"
#include "vec.h"
#include <stdlib.h>

#define KB 128 /* k per panel: a multiple of every unit */
#define PT 2   /* tiles per panel */
#define PW (PT * TILE)
#define PV (PT * NV)
#if defined(__AVX512F__)
#define MR 12 /* rows of the microkernel */
#define SIDE 4 /* tiles side by side for one row: enough chains to hide the latency of additions */
#elif VL == 8
#define MR 6
#define SIDE 2
#else
#define MR 6
#define SIDE 2
#endif
#define MB 96 /* rows of x per task: a multiple of MR; its x stays in L2 */

enum { F32, BF16, Q4, Q8 };

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

INLINE vf scale_at(const weight_t *w, const void *base, int64_t at) {
    return w->half_scales ? load_half((const uint16_t *)base + at) : load((const float *)base + at);
}

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

/* One row of x: acc[t] = chain over k in [k0, k1) of tile t; x of q4 is divided by 16^j (see `scaled_row`). */
INLINE void chain(const weight_t *w, const int kind, const int tiles, int64_t tile, int64_t k0, int64_t k1,
                  const float *x, vf acc[SIDE][NV]) {
    UNROLL for (int t = 0; t < tiles; t++) UNROLL for (int v = 0; v < NV; v++) acc[t][v] = splat(0);
    if (kind == Q4) {
        int64_t stride = w->k / 32 * 64;
        const uint32_t *q = (const uint32_t *)w->q + tile * stride + k0 / 32 * 64;
        for (int64_t k = k0; k < k1; k += 32, q += 64) {
            /* Nibble j of word b is k = 4 j + b. It is converted where it stands, as q * 16^j: exact, and no shift (but
               for j = 7, whose place is the sign bit's). The compiler must not know that `q` and the mask stay the same:
               it would keep words and masks and put the sums on the stack. */
            uint32_t low = 15;
            __asm__ volatile("" : "+r"(low));
            /* The tiles to come: they lie beyond a page, where the hardware does not look ahead. */
            UNROLL for (int t = 0; t < tiles; t++) UNROLL for (int line = 0; line < 4; line++)
                __builtin_prefetch(q + (t + tiles) * stride + line * 16);
            vu mask = splat_u32(low);
            UNROLL for (int j = 0; j < 8; j++) {
                __asm__ volatile("" : "+r"(q));
                UNROLL for (int b = 0; b < 4; b++) {
                    vf xb = splat(x[k + 4 * j + b]);
                    UNROLL for (int t = 0; t < tiles; t++) UNROLL for (int v = 0; v < NV; v++) {
                        vu bits = load_u32(q + t * stride + b * TILE + v * VL);
                        vi nibble = (vi)((j < 7 ? bits : bits >> 4) & mask);
                        acc[t][v] = fma_(__builtin_convertvector(nibble, vf), xb, acc[t][v]);
                    }
                }
                if (j < 6) mask <<= 4;
            }
        }
        return;
    }
    const int64_t size = kind == Q8 ? 1 : kind == BF16 ? 2 : 4, row = TILE * size;
    for (int64_t k = k0; k < k1; k++) {
        if (k % (64 / row) == 0) UNROLL for (int t = 0; t < tiles; t++) /* the tiles to come, as above */
            __builtin_prefetch((const char *)w->q + ((tile + t + tiles) * w->k + k) * row);
        vf xb = splat(x[k]);
        UNROLL for (int t = 0; t < tiles; t++) UNROLL for (int v = 0; v < NV; v++) {
            int64_t at = ((tile + t) * w->k + k) * TILE + v * VL;
            vf q = kind == Q8    ? load_i8((const int8_t *)w->q + at)
                   : kind == F32 ? load((const float *)w->q + at)
                                 : load_bf16((const uint16_t *)w->q + at);
            acc[t][v] = fma_(q, xb, acc[t][v]);
        }
    }
}

/* One row of x times `tiles` tiles, from packed weights straight into the product. */
INLINE void direct(const linear_t *job, const int kind, const int tiles, int64_t tile) {
    const weight_t *w = job->w;
    const int affine = kind == Q4 || kind == Q8;
    int64_t groups = affine ? w->k / w->group : 1;
    vf total[SIDE][NV], acc[SIDE][NV];
    UNROLL for (int t = 0; t < tiles; t++) UNROLL for (int v = 0; v < NV; v++) total[t][v] = splat(0);
    for (int64_t k = 0, u = 0, group = 0, end = w->group; k < w->k; k += w->unit, u++) {
        chain(w, kind, tiles, tile, k, least(k + w->unit, w->k), job->x, acc);
        if (affine && k == end) group++, end += w->group;
        UNROLL for (int t = 0; t < tiles; t++) UNROLL for (int v = 0; v < NV; v++) {
            if (!affine) {
                total[t][v] += acc[t][v];
                continue;
            }
            int64_t at = ((tile + t) * groups + group) * TILE + v * VL;
            total[t][v] = fma_(acc[t][v], scale_at(w, w->s, at), total[t][v]);
            if (w->has_m) total[t][v] = fma_(splat(job->sums[u]), scale_at(w, w->m, at), total[t][v]);
        }
    }
    for (int t = 0; t < tiles; t++) put(w, job->out, 0, tile + t, total[t]);
}

#define DIRECT(KIND)                                                                                                   \
    static __attribute__((noinline)) void direct_##KIND(const linear_t *job, int64_t tile, int64_t end) {                 \
        for (; tile + SIDE <= end; tile += SIDE) direct(job, KIND, SIDE, tile);                                        \
        for (; tile < end; tile++) direct(job, KIND, 1, tile);                                                         \
    }
DIRECT(F32) DIRECT(BF16) DIRECT(Q4) DIRECT(Q8)

static void direct_task(void *argument, int64_t index) {
    const linear_t *job = argument;
    int64_t tile = index * job->per_task, end = least(tile + job->per_task, (job->w->n + TILE - 1) / TILE);
    switch (job->w->kind) {
    case F32: direct_F32(job, tile, end); break;
    case BF16: direct_BF16(job, tile, end); break;
    case Q4: direct_Q4(job, tile, end); break;
    default: direct_Q8(job, tile, end);
    }
}

/* A piece of the weight [count k][PW], as the chains multiply with it, and the scales of its units [units][PW]. */
typedef struct {
    float q[KB * PW] __attribute__((aligned(64)));
    float s[KB * PW], m[KB * PW];
    int64_t count, unit;
    int affine, has_m;
} panel_t;

static void expand(const weight_t *w, int64_t tile, int64_t k0, int64_t count, panel_t *panel, int64_t column) {
    float *to = panel->q + column;
    if (w->kind == Q4)
        for (int64_t k = 0; k < count; k += 32) {
            const uint32_t *q = (const uint32_t *)w->q + (tile * (w->k / 32) + (k0 + k) / 32) * 64;
            UNROLL for (int b = 0; b < 4; b++) UNROLL for (int v = 0; v < NV; v++) {
                vu bits = load_u32(q + b * TILE + v * VL);
                UNROLL for (int j = 0; j < 8; j++)
                    store(to + (k + 4 * j + b) * PW + v * VL, __builtin_convertvector((vi)(bits >> 4 * j & splat_u32(15)), vf));
            }
        }
    else
        for (int64_t k = 0; k < count; k++) UNROLL for (int v = 0; v < NV; v++) {
            int64_t at = (tile * w->k + k0 + k) * TILE + v * VL;
            vf q = w->kind == Q8    ? load_i8((const int8_t *)w->q + at)
                   : w->kind == F32 ? load((const float *)w->q + at)
                                    : load_bf16((const uint16_t *)w->q + at);
            store(to + k * PW + v * VL, q);
        }
    if (!panel->affine) return;
    for (int64_t u = 0; u * w->unit < count; u++) UNROLL for (int v = 0; v < NV; v++) {
        int64_t at = (tile * (w->k / w->group) + (k0 + u * w->unit) / w->group) * TILE + v * VL;
        store(panel->s + u * PW + column + v * VL, scale_at(w, w->s, at));
        if (w->has_m) store(panel->m + u * PW + column + v * VL, scale_at(w, w->m, at));
    }
}

/* totals[rows][vecs * VL at column] += what the panel adds to them */
INLINE void strip(const int rows, const int vecs, const panel_t *panel, const float *x, int64_t ldx, const float *sums,
                  int64_t units, float *totals, int64_t column) {
    for (int64_t u = 0, k = 0; k < panel->count; u++) {
        vf acc[MR][PV];
        int64_t end = least(k + panel->unit, panel->count);
        UNROLL for (int i = 0; i < rows; i++) UNROLL for (int v = 0; v < vecs; v++) acc[i][v] = splat(0);
        for (; k < end; k++) {
            vf q[PV];
            UNROLL for (int v = 0; v < vecs; v++) q[v] = load(panel->q + k * PW + column + v * VL);
            UNROLL for (int i = 0; i < rows; i++) {
                vf xb = splat(x[i * ldx + k]);
                UNROLL for (int v = 0; v < vecs; v++) acc[i][v] = fma_(q[v], xb, acc[i][v]);
            }
        }
        UNROLL for (int i = 0; i < rows; i++) UNROLL for (int v = 0; v < vecs; v++) {
            float *to = totals + i * PW + column + v * VL;
            int64_t at = u * PW + column + v * VL;
            vf total = panel->affine ? fma_(acc[i][v], load(panel->s + at), load(to)) : load(to) + acc[i][v];
            store(to, panel->has_m ? fma_(splat(sums[i * units + u]), load(panel->m + at), total) : total);
        }
    }
}

#define ARGS panel, x, ldx, sums, units, totals
#define WIDE(R) case R: strip(R, PV, ARGS, 0); break;
#define HALVES(R) case R: strip(R, PV / 2, ARGS, 0); strip(R, PV / 2, ARGS, TILE); break;
static void strips(int64_t rows, const panel_t *panel, const float *x, int64_t ldx, const float *sums, int64_t units, float *totals) {
    switch (rows) {
        WIDE(1) WIDE(2) WIDE(3)
#if MR == 12
        WIDE(4) WIDE(5) WIDE(6) WIDE(7) WIDE(8) WIDE(9) WIDE(10) WIDE(11) WIDE(12)
#else
        HALVES(4) HALVES(5) HALVES(6)
#endif
    }
}
#undef ARGS

static void panel_task(void *argument, int64_t index) {
    const linear_t *job = argument;
    const weight_t *w = job->w;
    int64_t tile = index % job->panels * PT, row = index / job->panels * MB;
    int64_t rows = least(MB, job->rows - row), tiles = least(PT, (w->n + TILE - 1) / TILE - tile), units = w->k / w->unit;
    int64_t most_rows = MR == 6 && rows <= 9 ? 3 : MR, count = (rows + most_rows - 1) / most_rows, height = (rows + count - 1) / count;
    panel_t panel;
    float totals[MB * PW] __attribute__((aligned(64)));
    panel.affine = w->kind == Q4 || w->kind == Q8, panel.has_m = w->has_m, panel.unit = w->unit;
    memset(totals, 0, (size_t)(rows * PW) * sizeof(float));
    if (tiles < PT) memset(panel.q, 0, sizeof panel.q), memset(panel.s, 0, sizeof panel.s), memset(panel.m, 0, sizeof panel.m);
    for (int64_t k = 0; k < w->k; k += KB) {
        panel.count = least(KB, w->k - k);
        for (int64_t t = 0; t < tiles; t++) expand(w, tile + t, k, panel.count, &panel, t * TILE);
        for (int64_t i = 0; i < rows; i += height)
            strips(least(height, rows - i), &panel, job->x + (row + i) * w->k + k, w->k,
                   w->has_m ? job->sums + (row + i) * units + k / w->unit : 0, units, totals + i * PW);
    }
    for (int64_t i = 0; i < rows; i++)
        for (int64_t t = 0; t < tiles; t++) {
            vf acc[NV];
            UNROLL for (int v = 0; v < NV; v++) acc[v] = load(totals + i * PW + t * TILE + v * VL);
            put(w, job->out, row + i, tile + t, acc);
        }
}

static void sum_units(const float *x, int64_t count, int64_t unit, float *sums) {
    for (int64_t u = 0; u < count; u++, x += unit) {
        float parts[16] = {0};
        int64_t i = 0;
        for (; i + 16 <= unit; i += 16)
            for (int lane = 0; lane < 16; lane++) parts[lane] += x[i + lane];
        for (; i < unit; i++) parts[i % 16] += x[i];
        for (int width = 8; width; width /= 2)
            for (int lane = 0; lane < width; lane++) parts[lane] += parts[lane + width];
        sums[u] = parts[0];
    }
}

/* x divided by 16^j, j as in `chain`: exact but for numbers near the smallest. */
static void scaled_row(const float *x, int64_t k, float *to) {
    static const float inverse[8] = {1.0f, 0x1p-4f, 0x1p-8f, 0x1p-12f, 0x1p-16f, 0x1p-20f, 0x1p-24f, 0x1p-24f};
    for (int64_t i = 0; i < k; i += 32)
        for (int j = 0; j < 8; j++)
            for (int b = 0; b < 4; b++) to[i + 4 * j + b] = x[i + 4 * j + b] * inverse[j];
}

int offroad_linear(const linear_t *given) {
    static _Thread_local float *space;
    static _Thread_local int64_t size;
    linear_t job = *given;
    const weight_t *w = job.w;
    int64_t tiles = (w->n + TILE - 1) / TILE, units = w->has_m ? w->k / w->unit : 0, needed = job.rows * units + w->k;
    if (!job.rows) return 0;
    if (needed > size) {
        free(space);
        space = malloc((size_t)needed * sizeof(float));
        size = space ? needed : 0;
        if (!space) return 1;
    }
    for (int64_t row = 0; units && row < job.rows; row++) sum_units(job.x + row * w->k, units, w->unit, space + row * units);
    job.sums = space;
    if (job.rows > 1) {
        job.panels = (tiles + PT - 1) / PT;
        pool_run(panel_task, &job, job.panels * ((job.rows + MB - 1) / MB));
        return 0;
    }
    if (w->kind == Q4) {
        scaled_row(job.x, w->k, space + units);
        job.x = space + units;
    }
    int64_t pieces = (int64_t)pool_threads() * 4;
    job.per_task = (tiles + pieces - 1) / pieces;
    job.per_task = (job.per_task + SIDE - 1) / SIDE * SIDE;
    pool_run(direct_task, &job, (tiles + job.per_task - 1) / job.per_task);
    return 0;
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
