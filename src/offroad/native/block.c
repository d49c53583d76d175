/* Blocks of a layer in one call: the ops of the other files one after the other, over scratch memory that is kept. No
   arithmetic of its own, so a block's result is bit for bit that of its parts. */
#include "ops.h"
#include <stdlib.h>

/* `floats` floats that stay valid until the thread's next call; 0 if there is no memory. */
static float *scratch(int64_t floats) {
    static _Thread_local float *space;
    static _Thread_local int64_t size;
    if (floats > size) {
        free(space);
        space = aligned_alloc(64, ((size_t)floats * sizeof(float) + 63) / 64 * 64);
        size = space ? floats : 0;
    }
    return space;
}

/* Rounded up, so that what follows in scratch memory begins a cache line. */
static int64_t lines(int64_t floats) { return (floats + 15) / 16 * 16; }

/* What is the same for every call of a layer. */
typedef struct {
    const weight_t *qkv, *o;
    const float *rope, *q_norm, *k_norm;
    float *pages_k, *pages_v;
    const int32_t *table;
    int64_t columns, block, window, heads, kv_heads, dim, rope_dim, writable;
    double eps;
    float scale, softcap;
} attention_layer_t;

typedef struct {
    const attention_layer_t *layer;
    const float *x;
    float *out;
    const int64_t *positions;
    const int32_t *slot, *start, *width, *offset;
    int64_t tokens, rows;
} attention_block_t;

/* out [tokens, hidden] = o(attention(rope(qkv(x)))). */
int offroad_attention_block(const attention_block_t *b) {
    const attention_layer_t *l = b->layer;
    if (!b->tokens) return 0;
    int64_t wide = lines(b->tokens * l->heads * l->dim), narrow = lines(b->tokens * l->kv_heads * l->dim);
    float *qkv = scratch(3 * wide + 4 * narrow);
    if (!qkv) return 1;
    float *q = qkv + wide + 2 * narrow, *k = q + wide, *v = k + narrow, *mixed = v + narrow;
    if (offroad_linear(&(linear_t){.w = l->qkv, .x = b->x, .out = qkv, .rows = b->tokens})) return 1;
    offroad_qkv_rope(&(qkv_rope_t){qkv, l->rope, l->q_norm, l->k_norm, b->positions, q, k, v, b->tokens, l->heads,
                                   l->kv_heads, l->dim, l->rope_dim, l->eps, 0});
    if (offroad_attention(&(attention_t){q, k, v, mixed, l->pages_k, l->pages_v, l->table, b->slot, b->start, b->width,
                                         b->offset, b->rows, l->columns, l->block, l->window, l->heads, l->kv_heads,
                                         l->dim, l->writable, l->scale, l->softcap}))
        return 1;
    return offroad_linear(&(linear_t){.w = l->o, .x = mixed, .out = b->out, .rows = b->tokens});
}

typedef struct {
    const weight_t *gate_up, *down;
    const float *post_attention, *norm, *post_mlp, *following; /* the post norms are 0 where a family has none */
    int64_t gelu;
    double eps;
} mlp_layer_t;

typedef struct {
    const mlp_layer_t *layer;
    const float *x, *residual;
    float *out, *sum;
    int64_t rows;
} mlp_block_t;

/* The residual add and norm before the mlp, the mlp, and the residual add and norm after it: out and sum [rows, hidden]. */
int offroad_mlp_block(const mlp_block_t *b) {
    const mlp_layer_t *l = b->layer;
    if (!b->rows) return 0;
    int64_t hidden = l->gate_up->k, size = l->down->k, row = lines(b->rows * hidden), act = lines(b->rows * size);
    float *h = scratch(3 * row + 3 * act);
    if (!h) return 1;
    float *sum = h + row, *down = sum + row, *gated = down + row, *gate_up = gated + act;
    offroad_norm(&(norm_t){b->x, b->residual, l->post_attention, l->norm, h, sum, b->rows, hidden, l->eps, 0});
    if (offroad_linear(&(linear_t){.w = l->gate_up, .x = h, .out = gate_up, .rows = b->rows})) return 1;
    offroad_gated(&(gated_t){gate_up, gated, b->rows, size, l->gelu, 0});
    if (offroad_linear(&(linear_t){.w = l->down, .x = gated, .out = down, .rows = b->rows})) return 1;
    offroad_norm(&(norm_t){down, sum, l->post_mlp, l->following, b->out, b->sum, b->rows, hidden, l->eps, 0});
    return 0;
}
