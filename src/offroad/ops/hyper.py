"""Hyper-connections (mHC, arXiv 2606.19348): blocks that read from and write to a residual of several streams.

Everything in fp32; the streams X [tokens, n, hidden] keep the activation dtype.
"""

from __future__ import annotations

from offroad.ops.spec import OpSpec, Tolerance

TOLERANCE = {"float32": Tolerance(2e-5, 1e-5), "bfloat16": Tolerance(2e-2, 1.6e-2), "float16": Tolerance(2e-3, 2e-3)}

_PRE = """(x [tokens, hidden], post [tokens, n], mix [tokens, n, n]) that a block starts with. z [tokens, (2 + n) n]
is fn X / rms(X), X as one row, in parts of n, n and n n: a, b, c. With scale [3] and base as z: w = sigmoid(a scale_0
+ base_a) + eps, x = sum_j w_j X_j; post = 2 sigmoid(b scale_1 + base_b); mix = softmax over k of (c scale_2 +
base_c)[j, k], plus eps, its columns divided by their sums + eps, then `iterations` - 1 times its rows and its
columns."""
_POST = """X'_k = post_k y + sum_j mix[j, k] X_j; y [tokens, hidden] is what the block gave, post and mix those of
hyper_pre. The sum is over mix's first index: mix is not symmetric."""
_HEAD = """sum_j w_j X_j [tokens, hidden] with w = sigmoid(fn X / rms(X) * scale + base) + eps, fn [n, n hidden]."""

OPS = (
    OpSpec("hyper_pre", _PRE, None, TOLERANCE),
    OpSpec("hyper_post", _POST, None, TOLERANCE),
    OpSpec("hyper_head", _HEAD, None, TOLERANCE),
)
