"""Sparse attention over rows that are keys and values in one, and over compressed rows (DeepSeek-V4, arXiv 2606.19348).

The row of position p is in a ring of the slot; the compressed row g, made of tokens up to rate (g + 1) - 1, in pages of
history. A query at p sees the rows of positions (p - window, p] and compressed rows g < (p + 1) // rate.
"""

from __future__ import annotations

from offroad.ops import attention, linear
from offroad.ops.spec import OpSpec

_ROPE = """(q [tokens, heads, dim], row [tokens, dim]) of projected q [tokens, heads * dim] and kv [tokens, dim]: q
normed per head without weights, kv with kv_norm, then the last rope_dim channels of both turned by the position,
neighbouring channels being a pair; the rows of the last positions are stored in the ring."""
_ATTENTION = """out [tokens, heads * dim]: a_j = exp(s_j - m) / (sum_j exp(s_j - m) + exp(sink - m)) over the rows R_j
that the query sees, s_j = scale q R_j, out = sum_j a_j R_j, its last rope_dim channels turned back by the query's
position. Rows before the step come from the ring, its own from the step; compressed ones are all, or those of
index_select."""
_COMPRESS = """Stores the compressed row of each group that ends in the step: softmax of the scores over the group's
tokens, for each channel, times their values; normed; its last rope_dim channels turned by the position of the group's
first token. Values and scores [tokens, dim] are linears of the layer's input, scores plus ape [rate, dim] by position
in the group. `overlap`: twice the channels; a row mixes the first half of the group before (absent for g = 0) with
the second half of its own. Values and scores of groups that have not ended are kept in a ring, in fp32."""
_SELECT = """int32 [tokens, top_k] numbers of compressed rows, -1 for none: the top_k largest of sum_h w_h relu(q_h
k_g) for those that the query sees, all of them where they are no more. q [tokens, heads, dim] turned by the position,
w [tokens, heads] scaled by (heads dim)^-0.5, k_g the index rows; in fp32."""
_BLOCKS = """Block-diagonal linear: x [tokens, blocks * k], weight [blocks * n, k] -> [tokens, blocks * n]."""

OPS = (
    OpSpec("mla_rope", _ROPE, None, attention.TOLERANCE),
    OpSpec("sparse_mla", _ATTENTION, None, attention.TOLERANCE),
    OpSpec("compress", _COMPRESS, None, attention.TOLERANCE),
    OpSpec("index_select", _SELECT, None, {}),
    OpSpec("block_linear", _BLOCKS, None, linear.TOLERANCE),
)
