/* Causal attention over pages and fresh rows, and the store of the fresh rows.

   A task is a run of queries of one row with the query heads of one KV head, over one span of SPAN positions. Spans
   and the key tiles inside them begin at multiples of their size in absolute positions, a span's softmax is its own,
   and spans are merged in order. So a query's result depends neither on the chunk it is in nor on the threads. */
#include "ops.h"
#include "pool.h"
#include "vec.h"
#include <stdlib.h>

#define KT 64           /* keys per tile */
#define SPAN 512        /* positions per span: a multiple of KT */
#define QR 48           /* (query, head) rows per task */
#define MAX_DIM 256

typedef struct {
    int32_t row, head, first, count; /* queries [first, first + count) of the row */
    int64_t span, spans, part;       /* first span, number of spans, where its partial results are */
} unit_t;

typedef struct {
    const attention_t *a;
    const unit_t *units;
    const int32_t *unit_of;
    const int64_t *span_of;
    float *partial; /* per (unit, span): sums [QR][dim], then top [QR] and mass [QR] */
} job_t;

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

/* The rows of positions [p, p + count) of a KV head, as addresses. */
static void find_rows(const attention_t *a, const unit_t *u, int64_t p, int64_t count, const float *k[KT], const float *v[KT]) {
    int64_t start = a->start[u->row], stride = a->kv_heads * a->dim;
    const int32_t *columns = a->table + a->slot[u->row] * a->columns;
    for (int64_t t = 0; t < count; t++, p++) {
        int64_t at = p >= start ? a->offset[u->row] + p - start : columns[p / a->block] * a->block + p % a->block;
        at = at * stride + u->head * a->dim;
        k[t] = (p >= start ? a->k : a->pages_k) + at;
        v[t] = (p >= start ? a->v : a->pages_v) + at;
    }
}

#if VL >= 8
INLINE void transpose_8x8(const float *const rows[8], int64_t d, float *to) {
    __m256 r[8], t[8];
    for (int i = 0; i < 8; i++) r[i] = _mm256_loadu_ps(rows[i] + d);
    for (int i = 0; i < 8; i += 2) {
        t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
        t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
        r[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
        r[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
        r[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
        r[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
    }
    for (int i = 0; i < 4; i++) {
        _mm256_storeu_ps(to + (d + i) * KT, _mm256_permute2f128_ps(r[i], r[i + 4], 0x20));
        _mm256_storeu_ps(to + (d + i + 4) * KT, _mm256_permute2f128_ps(r[i], r[i + 4], 0x31));
    }
}
#endif

/* Keys as [dim][KT]; behind the last key come 0s up to whole pairs of vectors, which is what is scored. */
static void transpose(const float *k[KT], int64_t count, int64_t dim, float *to) {
    int64_t t = 0;
#if VL >= 8
    for (; t + 8 <= count; t += 8)
        for (int64_t d = 0; d < dim; d += 8) transpose_8x8(k + t, d, to + t);
#endif
    for (; t < count; t++)
        for (int64_t d = 0; d < dim; d++) to[d * KT + t] = k[t][d];
    for (; t % (2 * VL); t++)
        for (int64_t d = 0; d < dim; d++) to[d * KT + t] = 0;
}

/* scores[rows][count] = q[rows][dim] * keys[dim][count], 2 vectors of keys at a time; rows of both are KT long */
INLINE void score(const int rows, const float *const q[], const float *keys, int64_t count, int64_t dim, float *scores) {
    for (int c = 0; c * VL < count; c += 2) {
        vf acc[4][2];
        UNROLL for (int i = 0; i < rows; i++) acc[i][0] = acc[i][1] = splat(0);
        for (int64_t d = 0; d < dim; d++) {
            vf k0 = load(keys + d * KT + c * VL), k1 = load(keys + d * KT + (c + 1) * VL);
            UNROLL for (int i = 0; i < rows; i++) {
                vf x = splat(q[i][d]);
                acc[i][0] = fma_(k0, x, acc[i][0]);
                acc[i][1] = fma_(k1, x, acc[i][1]);
            }
        }
        UNROLL for (int i = 0; i < rows; i++) {
            store(scores + i * KT + c * VL, acc[i][0]);
            store(scores + i * KT + (c + 1) * VL, acc[i][1]);
        }
    }
}

/* sums[rows][dim] = sums * keep + weights[rows][count] * v[count][dim] */
INLINE void gather(const int rows, const float *weights, const float *const v[], int64_t count, int64_t dim,
                   const float *keep, float *sums) {
    for (int64_t d = 0; d < dim; d += 2 * VL) {
        vf acc[4][2];
        UNROLL for (int i = 0; i < rows; i++) {
            acc[i][0] = load(sums + i * dim + d) * splat(keep[i]);
            acc[i][1] = load(sums + i * dim + d + VL) * splat(keep[i]);
        }
        for (int64_t t = 0; t < count; t++) {
            vf v0 = load(v[t] + d), v1 = load(v[t] + d + VL);
            UNROLL for (int i = 0; i < rows; i++) {
                vf w = splat(weights[i * KT + t]);
                acc[i][0] = fma_(v0, w, acc[i][0]);
                acc[i][1] = fma_(v1, w, acc[i][1]);
            }
        }
        UNROLL for (int i = 0; i < rows; i++) {
            store(sums + i * dim + d, acc[i][0]);
            store(sums + i * dim + d + VL, acc[i][1]);
        }
    }
}

/* Turns one row of scores into weights; keys [low, high) of the tile are visible. Returns the factor for older sums. */
static float soften(float *s, int64_t low, int64_t high, float scale, float softcap, float *top, float *mass) {
    vf best = splat(-INFINITY), total = splat(0), cap = splat(softcap);
    int64_t vecs = (high + VL - 1) / VL;
    for (int c = 0; c < vecs; c++) {
        vf x = load(s + c * VL) * splat(scale);
        if (softcap != 0) {
            /* tanh(y) = 1 - 2 / (exp(2 y) + 1) */
            vf e = exp_(x / cap * splat(2.0f));
            x = cap * (splat(1.0f) - splat(2.0f) / (e + splat(1.0f)));
        }
        store(s + c * VL, x);
    }
    for (int64_t t = 0; t < low; t++) s[t] = -INFINITY;
    for (int64_t t = high; t < vecs * VL; t++) s[t] = -INFINITY;
    for (int64_t t = vecs * VL; t < KT; t++) s[t] = 0;
    for (int c = 0; c < vecs; c++) best = max_(load(s + c * VL), best);
    float new_top = max_lanes(best);
    if (new_top < *top) new_top = *top;
    float keep = 0;
    if (*top != -INFINITY) {
        float parts[VL];
        store(parts, exp_(splat(*top - new_top)));
        keep = parts[0];
    }
    for (int c = 0; c < vecs; c++) {
        vf w = exp_(load(s + c * VL) - splat(new_top));
        store(s + c * VL, w);
        total += w;
    }
    *mass = *mass * keep + sum_lanes(total);
    *top = new_top;
    return keep;
}

/* One span of one unit: unnormalised sums with their top score and mass. */
static void attend(const attention_t *a, const unit_t *u, int64_t span, float *sums, float *top, float *mass) {
    static _Thread_local float keys[MAX_DIM * KT] __attribute__((aligned(64)));
    float scores[QR * KT] __attribute__((aligned(64))), keep[QR];
    const float *k[KT], *v[KT], *q[QR];
    int64_t group = a->heads / a->kv_heads, rows = u->count * group, begin = a->start[u->row] + u->first;
    int64_t low = a->window ? most(0, begin - a->window + 1) : 0, high = begin + u->count;
    low = most(low, span * SPAN), high = least(high, (span + 1) * SPAN);
    for (int64_t r = 0; r < rows; r++) {
        int64_t token = a->offset[u->row] + u->first + r / group;
        q[r] = a->q + (token * a->heads + u->head * group + r % group) * a->dim;
        top[r] = -INFINITY, mass[r] = 0;
    }
    memset(sums, 0, (size_t)(rows * a->dim) * sizeof(float));
    for (int64_t tile = low / KT * KT; tile < high; tile += KT) {
        int64_t from = most(tile, low), until = least(tile + KT, high);
        int64_t shift = from - tile, count = until - from;
        find_rows(a, u, from, count, k + shift, v + shift);
        for (int64_t t = 0; t < shift; t++) k[t] = k[shift], v[t] = v[shift];
        transpose(k, shift + count, a->dim, keys);
        for (int64_t r = 0; r < rows; r += 4) {
            float *s = scores + r * KT;
            switch (least(4, rows - r)) {
            case 1: score(1, q + r, keys, shift + count, a->dim, s); break;
            case 2: score(2, q + r, keys, shift + count, a->dim, s); break;
            case 3: score(3, q + r, keys, shift + count, a->dim, s); break;
            default: score(4, q + r, keys, shift + count, a->dim, s);
            }
        }
        for (int64_t r = 0; r < rows; r++) {
            int64_t p = begin + r / group, first = a->window ? most(0, p - a->window + 1) : 0;
            int64_t seen_from = most(first, from) - tile, seen_until = least(p + 1, until) - tile;
            if (seen_from >= seen_until) {
                memset(scores + r * KT, 0, KT * sizeof(float));
                keep[r] = 1;
            } else
                keep[r] = soften(scores + r * KT, seen_from, seen_until, a->scale, a->softcap, top + r, mass + r);
        }
        for (int64_t r = 0; r < rows; r += 4) {
            const float *s = scores + r * KT;
            float *to = sums + r * a->dim;
            switch (least(4, rows - r)) {
            case 1: gather(1, s, v, shift + count, a->dim, keep + r, to); break;
            case 2: gather(2, s, v, shift + count, a->dim, keep + r, to); break;
            case 3: gather(3, s, v, shift + count, a->dim, keep + r, to); break;
            default: gather(4, s, v, shift + count, a->dim, keep + r, to);
            }
        }
    }
}

INLINE float exp_scalar(float x) {
    float parts[VL];
    store(parts, exp_(splat(x)));
    return parts[0];
}

/* Adds a span's results to those of the spans before it. */
static void merge(float *sums, float *top, float *mass, const float *more, float more_top, float more_mass, int64_t dim) {
    if (more_top == -INFINITY) return;
    if (*top == -INFINITY) {
        memcpy(sums, more, (size_t)dim * sizeof(float));
        *top = more_top, *mass = more_mass;
        return;
    }
    float best = *top > more_top ? *top : more_top, a = exp_scalar(*top - best), b = exp_scalar(more_top - best);
    for (int64_t d = 0; d < dim; d++) sums[d] = sums[d] * a + more[d] * b;
    *mass = *mass * a + more_mass * b;
    *top = best;
}

static void finish(const attention_t *a, const unit_t *u, float *sums, const float *mass) {
    int64_t group = a->heads / a->kv_heads;
    for (int64_t r = 0; r < u->count * group; r++) {
        int64_t token = a->offset[u->row] + u->first + r / group;
        float *out = a->out + (token * a->heads + u->head * group + r % group) * a->dim, inverse = 1.0f / mass[r];
        for (int64_t d = 0; d < a->dim; d++) out[d] = sums[r * a->dim + d] * inverse;
    }
}

static void keep_rows(const attention_t *a, const unit_t *u) {
    const int32_t *columns = a->table + a->slot[u->row] * a->columns;
    for (int64_t i = u->first; i < u->first + u->count; i++) {
        int64_t p = a->start[u->row] + i, block = columns[p / a->block];
        if (block <= 0) continue;
        int64_t to = ((block * a->block + p % a->block) * a->kv_heads + u->head) * a->dim;
        int64_t from = ((a->offset[u->row] + i) * a->kv_heads + u->head) * a->dim;
        memcpy(a->pages_k + to, a->k + from, (size_t)a->dim * sizeof(float));
        memcpy(a->pages_v + to, a->v + from, (size_t)a->dim * sizeof(float));
    }
}

static void whole_task(void *argument, int64_t index) {
    const job_t *job = argument;
    const attention_t *a = job->a;
    const unit_t *u = job->units + index;
    static _Thread_local float sums[QR * MAX_DIM], more[QR * MAX_DIM];
    float top[QR], mass[QR], more_top[QR], more_mass[QR];
    int64_t rows = u->count * (a->heads / a->kv_heads);
    attend(a, u, u->span, sums, top, mass);
    for (int64_t span = u->span + 1; span < u->span + u->spans; span++) {
        attend(a, u, span, more, more_top, more_mass);
        for (int64_t r = 0; r < rows; r++)
            merge(sums + r * a->dim, top + r, mass + r, more + r * a->dim, more_top[r], more_mass[r], a->dim);
    }
    finish(a, u, sums, mass);
    if (a->writable) keep_rows(a, u);
}

static void span_task(void *argument, int64_t index) {
    const job_t *job = argument;
    const unit_t *u = job->units + job->unit_of[index];
    float *to = job->partial + index * QR * (job->a->dim + 2);
    attend(job->a, u, job->span_of[index], to, to + QR * job->a->dim, to + QR * (job->a->dim + 1));
}

static void merge_task(void *argument, int64_t index) {
    const job_t *job = argument;
    const attention_t *a = job->a;
    const unit_t *u = job->units + index;
    int64_t rows = u->count * (a->heads / a->kv_heads), size = QR * (a->dim + 2);
    float *sums = job->partial + u->part * size, *top = sums + QR * a->dim, *mass = top + QR;
    for (int64_t span = 1; span < u->spans; span++) {
        const float *more = sums + span * size, *more_top = more + QR * a->dim, *more_mass = more_top + QR;
        for (int64_t r = 0; r < rows; r++)
            merge(sums + r * a->dim, top + r, mass + r, more + r * a->dim, more_top[r], more_mass[r], a->dim);
    }
    finish(a, u, sums, mass);
    if (a->writable) keep_rows(a, u);
}

static int64_t make_units(const attention_t *a, unit_t *units, int64_t *parts) {
    int64_t count = 0, per_unit = most(1, QR / (a->heads / a->kv_heads));
    *parts = 0;
    for (int64_t row = 0; row < a->rows; row++)
        for (int64_t first = 0; first < a->width[row]; first += per_unit)
            for (int64_t head = 0; head < a->kv_heads; head++, count++) {
                if (!units) continue;
                int64_t queries = least(per_unit, a->width[row] - first), begin = a->start[row] + first;
                int64_t low = (a->window ? most(0, begin - a->window + 1) : 0) / SPAN;
                int64_t spans = (begin + queries - 1) / SPAN - low + 1;
                units[count] = (unit_t){(int32_t)row, (int32_t)head, (int32_t)first, (int32_t)queries, low, spans, *parts};
                *parts += spans;
            }
    return count;
}

int offroad_attention(const attention_t *a) {
    int64_t parts, units = make_units(a, 0, &parts), failed = 0;
    unit_t few[64], *list = units <= 64 ? few : malloc((size_t)units * sizeof(unit_t));
    if (!list) return 1;
    make_units(a, list, &parts);
    job_t job = {a, list, 0, 0, 0};
    if (parts == units || units >= 2 * pool_threads()) {
        pool_run(whole_task, &job, units);
    } else {
        /* Few queries over long contexts: spans are tasks of their own. */
        int32_t *unit_of = malloc((size_t)parts * sizeof(int32_t));
        int64_t *span_of = malloc((size_t)parts * sizeof(int64_t));
        job.partial = malloc((size_t)(parts * QR * (a->dim + 2)) * sizeof(float));
        failed = !unit_of || !span_of || !job.partial;
        if (!failed) {
            for (int64_t i = 0; i < units; i++)
                for (int64_t s = 0; s < list[i].spans; s++) {
                    unit_of[list[i].part + s] = (int32_t)i;
                    span_of[list[i].part + s] = list[i].span + s;
                }
            job.unit_of = unit_of, job.span_of = span_of;
            pool_run(span_task, &job, parts);
            pool_run(merge_task, &job, units);
        }
        free(unit_of), free(span_of), free(job.partial);
    }
    if (list != few) free(list);
    return (int)failed;
}
