"""Norms and their fusions with residual adds: one program a token, the whole row in registers, statistics in fp32.
Where a kernel may start early, its weights are on their way before its turn; else they would only take registers."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from offroad.triton_kernels.compile import Variant
from offroad.triton_kernels.dependent import launching, take_turn


@triton.jit
def _normed(x, size, eps):
    return x * tl.rsqrt(tl.sum(x * x, axis=0) / size + eps)


@triton.jit
def norm_kernel(x, weight, out, x_stride, size, eps, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """x [tokens, size] with rows `x_stride` apart -> out [tokens, size]."""
    at = tl.arange(0, BLOCK)
    live = at < size
    if PDL:
        by = tl.load(weight + at, mask=live, other=0.0).to(tl.float32) if WEIGHTED else 1.0
    take_turn(PDL)
    row = tl.program_id(0).to(tl.int64)
    value = _normed(tl.load(x + row * x_stride + at, mask=live, other=0.0).to(tl.float32), size, eps)
    if not PDL:
        by = tl.load(weight + at, mask=live, other=0.0).to(tl.float32) if WEIGHTED else 1.0
    value *= by
    tl.store(out + row * size + at, value.to(out.dtype.element_ty), mask=live)


@triton.jit
def add_norm_kernel(
    x,
    residual,
    post,
    weight,
    out,
    total,
    x_stride,
    residual_stride,
    size,
    eps,
    SANDWICH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """total = residual + x (or + norm(x, post)), out = norm(total, weight); rounded where the reference rounds."""
    at = tl.arange(0, BLOCK)
    live = at < size
    if PDL:
        by = tl.load(weight + at, mask=live, other=0.0).to(tl.float32)
        by_post = tl.load(post + at, mask=live, other=0.0).to(tl.float32) if SANDWICH else by
    take_turn(PDL)
    row = tl.program_id(0).to(tl.int64)
    kind = out.dtype.element_ty
    value = tl.load(x + row * x_stride + at, mask=live, other=0.0).to(tl.float32)
    if PDL:
        before = tl.load(residual + row * residual_stride + at, mask=live, other=0.0).to(tl.float32)
    if SANDWICH:
        if not PDL:
            by_post = tl.load(post + at, mask=live, other=0.0).to(tl.float32)
        value = (_normed(value, size, eps) * by_post).to(kind).to(tl.float32)
    if not PDL:
        before = tl.load(residual + row * residual_stride + at, mask=live, other=0.0).to(tl.float32)
    value += before
    rounded = value.to(kind)
    tl.store(total + row * size + at, rounded, mask=live)
    value = _normed(rounded.to(tl.float32), size, eps)
    if not PDL:
        by = tl.load(weight + at, mask=live, other=0.0).to(tl.float32)
    value *= by
    tl.store(out + row * size + at, value.to(kind), mask=live)


def warps_of(block: int) -> int:
    """Warps for a row of `block` elements: 8 to 32 elements a thread."""
    return min(16, max(1, block // 512))


def _rows(x: torch.Tensor) -> torch.Tensor:
    """x as rows whose elements lie side by side."""
    return x if x.ndim == 2 and x.stride(1) == 1 else x.contiguous().view(-1, x.shape[-1])


def norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """The contract of `ops.norm.norm`."""
    rows, out = _rows(x), torch.empty(x.shape, dtype=x.dtype, device=x.device)
    size = x.shape[-1]
    block = triton.next_power_of_2(size)
    if out.numel():
        norm_kernel[(rows.shape[0],)](
            rows,
            weight,
            out,
            rows.stride(0),
            size,
            eps,
            weight is not None,
            block,
            num_warps=warps_of(block),
            **launching(rows.shape[0]),
        )
    return out


def add_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The contract of `ops.norm.add_norm`."""
    return _add_norm(x, residual, None, weight, eps)


def sandwich_norm(
    x: torch.Tensor, residual: torch.Tensor, post: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The contract of `ops.norm.sandwich_norm`."""
    return _add_norm(x, residual, post, weight, eps)


def _add_norm(
    x: torch.Tensor, residual: torch.Tensor, post: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    x, residual = _rows(x), _rows(residual)
    out, total = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    tokens, size = x.shape
    block = triton.next_power_of_2(size)
    if tokens:
        strides = (x.stride(0), residual.stride(0))
        add_norm_kernel[(tokens,)](
            x,
            residual,
            post,
            weight,
            out,
            total,
            *strides,
            size,
            eps,
            post is not None,
            block,
            num_warps=warps_of(block),
            **launching(tokens),
        )
    return out, total


def variants() -> Iterator[Variant]:
    """Gemma-4-31B's blocks and Qwen3.5-27B's final norm."""
    block = 8192
    sizes = {"x_stride": "i32", "size": "i32", "eps": "fp32"}
    pointers = {"x": "*bf16", "weight": "*fp32", "out": "*bf16"}
    yield Variant("norm 5120", norm_kernel, pointers | sizes, {"WEIGHTED": True, "BLOCK": block}, warps_of(block))
    pointers |= {"residual": "*bf16", "post": "*fp32", "total": "*bf16", "residual_stride": "i32"}
    constants = {"SANDWICH": True, "BLOCK": block}
    yield Variant("sandwich_norm 5376", add_norm_kernel, pointers | sizes, constants, warps_of(block))
