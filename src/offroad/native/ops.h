/* The ops as C functions. Each takes one struct (the order is that of the caller's struct.pack): one is cheaper to hand
   over from Python than many. Those that return int give 0, or 1 if memory could not be had. */
#pragma once
#include <stdint.h>

typedef struct {
    int64_t n, k, group;
    int32_t kind, half_scales, has_m, unit;
    const void *q, *s, *m;
    const float *bias;
} weight_t;

/* out [rows, n] = x [rows, k] w^T + bias. What follows `rows` is set by the function. */
typedef struct {
    const weight_t *w;
    const float *x;
    float *out;
    int64_t rows;
    int64_t per_task, panels;
    const float *sums; /* [rows][k / unit]: sums of x by unit, for weights with m */
} linear_t;
int offroad_linear(const linear_t *given);

/* out = norm(r), sum = r with r = x, residual + x, or residual + norm(x, post): see ops/norm.py. */
typedef struct {
    const float *x, *residual, *post, *weight;
    float *out, *sum;
    int64_t rows, n;
    double eps;
    int64_t per_task; /* set by the function, here and below */
} norm_t;
void offroad_norm(const norm_t *given);

/* out [rows, size] = act(gate) * up of x [rows, 2 size]. */
typedef struct {
    const float *x;
    float *out;
    int64_t rows, size, gelu, per_task;
} gated_t;
void offroad_gated(const gated_t *given);

/* q, k and v out of the fused projection, the first two normed where weights are given, and rotated. */
typedef struct {
    const float *qkv, *table, *q_norm, *k_norm;
    const int64_t *positions;
    float *q, *k, *v;
    int64_t tokens, heads, kv_heads, dim, rope_dim;
    double eps;
    int64_t per_task;
} qkv_rope_t;
void offroad_qkv_rope(const qkv_rope_t *given);

/* Attention of fresh rows over pages and each other, and the store of the fresh rows: see ops/attention.py. */
typedef struct {
    const float *q, *k, *v;
    float *out, *pages_k, *pages_v;
    const int32_t *table, *slot, *start, *width, *offset;
    int64_t rows, columns, block, window, heads, kv_heads, dim, writable;
    float scale, softcap;
} attention_t;
int offroad_attention(const attention_t *a);
