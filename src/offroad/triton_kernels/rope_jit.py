"""Per-head norms and rotary embedding out of the fused projection, one launch for queries, keys and values."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from offroad.models.spec import AttentionSpec
from offroad.triton_kernels.compile import Variant
from offroad.triton_kernels.dependent import launching, take_turn

TOKENS = 4  # tokens of a program, one a warp: a head's sum is the same whatever the batch


@triton.jit
def inverse_rms(x, eps, DIM: tl.constexpr):
    """1 / rms [tokens, 1] of the heads x [tokens, BLOCK]."""
    return tl.rsqrt(tl.sum(x * x, axis=1) / DIM + eps)[:, None]


@triton.jit
def rotated(
    source, positions, table, weight, token, live_token, stride, position_stride, eps,
    NORM: tl.constexpr, STREAMS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    DIM: tl.constexpr, ROPE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A head's columns [TOKENS, BLOCK] at `source`, normed if NORM, then turned; rounded as the reference does."""
    at = tl.arange(0, BLOCK)
    live = at < DIM
    mask = live_token[:, None] & live[None]
    kind = source.dtype.element_ty
    half: tl.constexpr = ROPE // 2
    turns = at < ROPE
    partner = tl.where(turns, tl.where(at < half, at + half, at - half), at)
    base = source + token[:, None] * stride
    x = tl.load(base + at[None], mask=mask, other=0.0).to(tl.float32)
    other = tl.load(base + partner[None], mask=mask, other=0.0).to(tl.float32)
    if NORM:
        scale = inverse_rms(x, eps, DIM)
        w = tl.load(weight + at, mask=live, other=0.0).to(tl.float32)[None]
        x = (x * scale * w).to(kind).to(tl.float32)
        w_other = tl.load(weight + partner, mask=live, other=0.0).to(tl.float32)[None]
        other = (other * scale * w_other).to(kind).to(tl.float32)
    angle = at % half
    which = tl.zeros([BLOCK], tl.int64)
    if STREAMS:
        which = tl.where((angle % 3 == 1) & (angle < 3 * HEIGHT), 1, which)
        which = tl.where((angle % 3 == 2) & (angle < 3 * WIDTH), 2, which)
    wanted = live_token[:, None] & turns[None]
    position = tl.load(positions + which[None] * position_stride + token[:, None], mask=wanted, other=0).to(tl.int64)
    cos = tl.load(table + position * ROPE + angle[None], mask=wanted, other=1.0)
    sin = tl.load(table + position * ROPE + half + angle[None], mask=wanted, other=0.0)
    sin = tl.where((at < half)[None], -sin, sin)
    return tl.where(turns[None], x * cos + other * sin, x).to(kind)


@triton.jit(do_not_specialize=["tokens", "position_stride"], do_not_specialize_on_alignment=["positions"])
def qkv_rope_kernel(
    qkv, positions, table, q_weight, k_weight, q, k, v, tokens, stride, position_stride, eps,
    HEADS: tl.constexpr, KV: tl.constexpr, DIM: tl.constexpr, Q_STEP: tl.constexpr, ROPE: tl.constexpr,
    Q_NORM: tl.constexpr, K_NORM: tl.constexpr, K_EQ_V: tl.constexpr,
    STREAMS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (i, h): tokens [i TOKENS, (i + 1) TOKENS) of query head h, else of key head h - HEADS, else of a value
    head, which is normed without weights. Query heads lie Q_STEP columns apart."""
    take_turn(PDL)
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    live_token = token < tokens
    head = tl.program_id(1)
    at = tl.arange(0, BLOCK)
    mask = live_token[:, None] & (at < DIM)[None]
    if head < HEADS:
        turned = rotated(
            qkv + head * Q_STEP, positions, table, q_weight, token, live_token, stride, position_stride, eps,
            Q_NORM, STREAMS, HEIGHT, WIDTH, DIM, ROPE, BLOCK,
        )  # fmt: skip
        tl.store(q + (token[:, None] * HEADS + head) * DIM + at[None], turned, mask=mask)
    elif k is not None:  # decided while compiling: a layer without keys of its own has no such programs
        if head < HEADS + KV:
            turned = rotated(
                qkv + HEADS * Q_STEP + (head - HEADS) * DIM, positions, table, k_weight, token, live_token, stride,
                position_stride, eps, K_NORM, STREAMS, HEIGHT, WIDTH, DIM, ROPE, BLOCK,
            )  # fmt: skip
            tl.store(k + (token[:, None] * KV + head - HEADS) * DIM + at[None], turned, mask=mask)
        else:
            index = head - HEADS - KV
            column = HEADS * Q_STEP + (index if K_EQ_V else KV + index) * DIM
            x = tl.load(qkv + token[:, None] * stride + column + at[None], mask=mask, other=0.0).to(tl.float32)
            x *= inverse_rms(x, eps, DIM)
            tl.store(v + (token[:, None] * KV + index) * DIM + at[None], x.to(v.dtype.element_ty), mask=mask)


def qkv_rope(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    table: torch.Tensor,
    spec: AttentionSpec,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """The contract of `ops.rope.qkv_rope`; values that are not normed stay where they are, a view of qkv."""
    qkv = qkv if qkv.stride(1) == 1 else qkv.contiguous()
    tokens, heads, kv_heads, dim = qkv.shape[0], spec.heads, spec.kv_heads, spec.head_dim
    q = torch.empty((tokens, heads, dim), dtype=qkv.dtype, device=qkv.device)
    k = v = None
    programs = heads
    if spec.own_kv:
        k = torch.empty((tokens, kv_heads, dim), dtype=qkv.dtype, device=qkv.device)
        start = spec.q_width + (0 if spec.k_eq_v else kv_heads * dim)
        v = torch.empty_like(k) if spec.v_norm else qkv[:, start : start + kv_heads * dim].view(-1, kv_heads, dim)
        programs += kv_heads * (2 if spec.v_norm else 1)
    if tokens:
        sections = spec.rope.sections
        height, width = sections or (0, 0)
        positions = positions if positions.stride(-1) == 1 else positions.contiguous()
        qkv_rope_kernel[(triton.cdiv(tokens, TOKENS), programs)](
            qkv, positions, table, q_norm, k_norm, q, k, v, tokens, qkv.stride(0), positions.stride(0), eps,
            heads, kv_heads, dim, spec.q_width // heads, spec.rope.dim, q_norm is not None, k_norm is not None,
            spec.k_eq_v, sections is not None, height, width, TOKENS, triton.next_power_of_2(dim), num_warps=TOKENS,
            **launching(tokens),
        )  # fmt: skip
    return q, k, v


def variants() -> Iterator[Variant]:
    """Qwen3.5-27B (three streams, a quarter turned) and Gemma-4-31B's global layers (values are keys, normed)."""
    kinds = {name: "*bf16" for name in ("qkv", "q", "k", "v")} | {"positions": "*i64", "table": "*fp32"}
    kinds |= {"q_weight": "*fp32", "k_weight": "*fp32", "tokens": "i32", "stride": "i32", "position_stride": "i32"}
    kinds |= {"eps": "fp32"}
    common = {"Q_NORM": True, "K_NORM": True, "TOKENS": TOKENS}
    qwen = {"HEADS": 24, "KV": 4, "DIM": 256, "Q_STEP": 512, "ROPE": 64, "K_EQ_V": False, "BLOCK": 256}
    qwen |= {"STREAMS": True, "HEIGHT": 11, "WIDTH": 10}
    yield Variant("qkv_rope 27B", qkv_rope_kernel, kinds, common | qwen)
    gemma = {"HEADS": 32, "KV": 4, "DIM": 512, "Q_STEP": 512, "ROPE": 512, "K_EQ_V": True, "BLOCK": 512}
    gemma |= {"STREAMS": False, "HEIGHT": 0, "WIDTH": 0}
    yield Variant("qkv_rope 31B global", qkv_rope_kernel, kinds, common | gemma)
