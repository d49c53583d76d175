/* Row-wise ops: norms, gated activations and rotary embedding. One task is a few rows; a row is one thread's. */
#include "ops.h"
#include "pool.h"
#include "vec.h"

#define INLINE_FLOATS 65536 /* below this much work a second thread costs more than it saves */

INLINE float sum_of_squares(const float *x, int64_t n) {
    vf a = splat(0), b = splat(0);
    int64_t i = 0;
    for (; i + 2 * VL <= n; i += 2 * VL) {
        vf u = load(x + i), v = load(x + i + VL);
        a = fma_(u, u, a), b = fma_(v, v, b);
    }
    float total = sum_lanes(a + b);
    for (; i < n; i++) total += x[i] * x[i];
    return total;
}

INLINE float inverse_rms(const float *x, int64_t n, float eps) {
    return 1.0f / sqrtf(sum_of_squares(x, n) / (float)n + eps);
}

INLINE void scaled(const float *x, float scale, const float *weight, float *out, int64_t n) {
    for (int64_t i = 0; i < n; i++) out[i] = x[i] * scale * weight[i];
}

static void norm_task(void *argument, int64_t index) {
    const norm_t *job = argument;
    int64_t n = job->n, end = (index + 1) * job->per_task;
    for (int64_t row = index * job->per_task; row < end && row < job->rows; row++) {
        const float *x = job->x + row * n;
        if (job->residual) {
            float *sum = job->sum + row * n;
            const float *residual = job->residual + row * n;
            if (job->post) {
                float scale = inverse_rms(x, n, (float)job->eps);
                for (int64_t i = 0; i < n; i++) sum[i] = residual[i] + x[i] * scale * job->post[i];
            } else {
                for (int64_t i = 0; i < n; i++) sum[i] = residual[i] + x[i];
            }
            x = sum;
        }
        scaled(x, inverse_rms(x, n, (float)job->eps), job->weight, job->out + row * n, n);
    }
}

static int64_t rows_per_task(int64_t rows, int64_t n) {
    if (rows * n < INLINE_FLOATS) return rows ? rows : 1;
    int64_t pieces = (int64_t)pool_threads() * 2;
    return (rows + pieces - 1) / pieces;
}

void offroad_norm(const norm_t *given) {
    norm_t job = *given;
    job.per_task = rows_per_task(job.rows, job.n);
    pool_run(norm_task, &job, (job.rows + job.per_task - 1) / job.per_task);
}

/* silu(g) = g / (1 + exp(-g)); gelu with tanh(y) is g / (1 + exp(-2 y)): no cancellation. */
INLINE vf gated(vf gate, vf up, int64_t gelu) {
    vf y = gate;
    if (gelu) y = splat(1.5957691216f) * gate * fma_(splat(0.044715f) * gate, gate, splat(1.0f));
    return gate / (splat(1.0f) + exp_(-y)) * up;
}

static void gate_task(void *argument, int64_t index) {
    const gated_t *job = argument;
    int64_t size = job->size, end = (index + 1) * job->per_task;
    for (int64_t row = index * job->per_task; row < end && row < job->rows; row++) {
        const float *gate = job->x + row * 2 * size, *up = gate + size;
        float *out = job->out + row * size;
        int64_t i = 0;
        for (; i + VL <= size; i += VL) store(out + i, gated(load(gate + i), load(up + i), job->gelu));
        if (i < size) {
            float parts[2][VL] = {{0}};
            memcpy(parts[0], gate + i, (size_t)(size - i) * 4);
            memcpy(parts[1], up + i, (size_t)(size - i) * 4);
            store(parts[0], gated(load(parts[0]), load(parts[1]), job->gelu));
            memcpy(out + i, parts[0], (size_t)(size - i) * 4);
        }
    }
}

void offroad_gated(const gated_t *given) {
    gated_t job = *given;
    job.per_task = rows_per_task(job.rows, job.size * 4);
    pool_run(gate_task, &job, (job.rows + job.per_task - 1) / job.per_task);
}

INLINE void rope_head(const float *x, const float *weight, const float *cos_, const float *sin_, float *out, int64_t dim,
                      int64_t rope_dim, float eps) {
    int64_t half = rope_dim / 2;
    if (weight) {
        scaled(x, inverse_rms(x, dim, eps), weight, out, dim);
    } else {
        memcpy(out, x, (size_t)dim * 4);
    }
    for (int64_t i = 0; i < half; i++) {
        float a = out[i], b = out[i + half];
        out[i] = a * cos_[i] - b * sin_[i];
        out[i + half] = b * cos_[i] + a * sin_[i];
    }
}

static void rope_task(void *argument, int64_t index) {
    const qkv_rope_t *job = argument;
    int64_t dim = job->dim, end = (index + 1) * job->per_task, half = job->rope_dim / 2;
    for (int64_t token = index * job->per_task; token < end && token < job->tokens; token++) {
        const float *from = job->qkv + token * (job->heads + 2 * job->kv_heads) * dim;
        const float *cos_ = job->table + job->positions[token] * job->rope_dim, *sin_ = cos_ + half;
        for (int64_t head = 0; head < job->heads; head++, from += dim)
            rope_head(from, job->q_norm, cos_, sin_, job->q + (token * job->heads + head) * dim, dim, job->rope_dim, (float)job->eps);
        for (int64_t head = 0; head < job->kv_heads; head++, from += dim)
            rope_head(from, job->k_norm, cos_, sin_, job->k + (token * job->kv_heads + head) * dim, dim, job->rope_dim, (float)job->eps);
        memcpy(job->v + token * job->kv_heads * dim, from, (size_t)(job->kv_heads * dim) * 4);
    }
}

void offroad_qkv_rope(const qkv_rope_t *given) {
    qkv_rope_t job = *given;
    job.per_task = rows_per_task(job.tokens, (job.heads + 2 * job.kv_heads) * job.dim);
    pool_run(rope_task, &job, (job.tokens + job.per_task - 1) / job.per_task);
}
