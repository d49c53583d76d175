"""What the kernels of verify rows do for each token of a Gated DeltaNet head: convolution and gates before the delta
rule, gated norm and storing of raw columns behind it."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _column(
    raw, ring, taps, at, live, t, offset, start, stride, ring_stride, capacity, BACK: tl.constexpr
):  # fmt: skip
    """silu(convolution) of token t of a row at columns `at`, rounded to raw's type, in fp32. `ring` is the slot's."""
    kind = raw.dtype.element_ty
    total = tl.zeros(at.shape, tl.float32)
    for tap in tl.static_range(BACK + 1):
        behind = t - (BACK - tap)
        position = start + behind
        new = tl.load(raw + (offset + behind) * stride + at, mask=live & (behind >= 0), other=0.0)
        kept = live & (behind < 0) & (position >= 0)
        old = tl.load(ring + (position % capacity) * ring_stride + at, mask=kept, other=0.0).to(kind)
        weight = tl.load(taps + at * (BACK + 1) + tap, mask=live, other=0.0)
        total += (new.to(tl.float32) + old.to(tl.float32)) * weight
    return (total * tl.sigmoid(total)).to(kind).to(tl.float32)


@triton.jit
def token_keys(
    qkvz, ring, taps, t, offset, start, stride, ring_stride, capacity, head,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DK: tl.constexpr, BACK: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """(q [K], k [K], and what they are to be taken times) of token t of a row in value head `head`: of unit length, q
    divided by sqrt(DK). A factor is for sums over [K]: numbers that are halves take half the registers until then."""
    key = tl.arange(0, K)
    live = key < DK
    q_at = head // GROUP * DK + key
    k_at = HEADS // GROUP * DK + q_at
    q = _column(qkvz, ring, taps, q_at, live, t, offset, start, stride, ring_stride, capacity, BACK)
    k = _column(qkvz, ring, taps, k_at, live, t, offset, start, stride, ring_stride, capacity, BACK)
    return q, k, tl.rsqrt(tl.sum(q * q, axis=0) + 1e-6) * (DK**-0.5), tl.rsqrt(tl.sum(k * k, axis=0) + 1e-6)


@triton.jit
def token_value(
    qkvz, ba, ring, taps, a_log, dt_bias, t, offset, start, stride, ba_stride, ring_stride, capacity, head,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BACK: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """(v [V], beta, log of the decay) of token t of a row in value head `head`, fp32."""
    value = tl.arange(0, V)
    v_at = 2 * (HEADS // GROUP * DK) + head * DV + value
    v = _column(qkvz, ring, taps, v_at, value < DV, t, offset, start, stride, ring_stride, capacity, BACK)
    gates = ba + (offset + t) * ba_stride + head
    beta = tl.sigmoid(tl.load(gates).to(tl.float32))
    x = tl.load(gates + HEADS).to(tl.float32) + tl.load(dt_bias + head)
    softplus = tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))
    return v, beta, -tl.exp(tl.load(a_log + head)) * softplus


@triton.jit
def token_inputs(
    qkvz, ba, ring, taps, a_log, dt_bias, t, offset, start, stride, ba_stride, ring_stride, capacity, head,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BACK: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """What `token_keys` and `token_value` give."""
    q, k, by_q, by_k = token_keys(
        qkvz, ring, taps, t, offset, start, stride, ring_stride, capacity, head, HEADS, GROUP, DK, BACK, K
    )
    v, beta, step = token_value(
        qkvz, ba, ring, taps, a_log, dt_bias, t, offset, start, stride, ba_stride, ring_stride, capacity, head,
        HEADS, GROUP, DK, DV, BACK, V,
    )  # fmt: skip
    return q, k, by_q, by_k, v, beta, step


@triton.jit
def token_rule(state, q, k, by_q, by_k, v, beta, decay):
    """(the state [K, V] behind a token, its delta [V], what the rule gives it [V]) from what `token_inputs` gives. Both
    sums are of the state before the token, so that q is not held while the state changes."""
    further = tl.exp(decay)
    old_q = tl.sum(state * q[:, None], axis=0) * (by_q * further)
    old_k = tl.sum(state * k[:, None], axis=0) * (by_k * further)
    delta = (v - old_k) * beta
    y = old_q + tl.sum(q * k, axis=0) * (by_q * by_k) * delta
    return state * further + k[:, None] * (delta * by_k)[None], delta, y


@triton.jit
def token_output(
    y, qkvz, norm, out, token, stride, eps, head,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, SILU: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """Stores the gated norm of what the rule gives a token, y [V] fp32."""
    value = tl.arange(0, V)
    live = value < DV
    kind = out.dtype.element_ty
    y = y.to(kind).to(tl.float32)
    y *= tl.rsqrt(tl.sum(y * y, axis=0) / DV + eps)
    y = y.to(kind).to(tl.float32) * tl.load(norm + value, mask=live, other=0.0)
    z_at = 2 * (HEADS // GROUP * DK) + (HEADS + head) * DV + value
    z = tl.load(qkvz + token * stride + z_at, mask=live, other=0.0).to(tl.float32)
    y *= tl.sigmoid(z) * (z if SILU else 1.0)
    tl.store(out + token * (HEADS * DV) + head * DV + value, y.to(kind), mask=live)


@triton.jit
def store_token_columns(
    qkvz, ring, t, offset, start, stride, ring_stride, capacity, head,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """Stores the raw columns of token t that are this head's: its value's, and the first of a group its key head's.
    The ring has room for them beside those that programs of other heads still read. `ring` is the slot's."""
    key, value = tl.arange(0, K), tl.arange(0, V)
    width_of_keys: tl.constexpr = HEADS // GROUP * DK
    source = qkvz + (offset + t) * stride
    place = ring + (start + t) % capacity * ring_stride
    kind = ring.dtype.element_ty
    v_at = 2 * width_of_keys + head * DV + value
    tl.store(place + v_at, tl.load(source + v_at, mask=value < DV).to(kind), mask=value < DV)
    q_at = head // GROUP * DK + key
    first = (key < DK) & (head % GROUP == 0)
    tl.store(place + q_at, tl.load(source + q_at, mask=first).to(kind), mask=first)
    k_at = width_of_keys + q_at
    tl.store(place + k_at, tl.load(source + k_at, mask=first).to(kind), mask=first)
