"""Gated activations, output gates and dense embeddings: one program for each token and block of columns."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from offroad.models.spec import AttentionSpec
from offroad.quant.packed import Packed
from offroad.triton_kernels.compile import Variant
from offroad.triton_kernels.dependent import launching, take_turn

BLOCK = 1024  # columns of a program


@triton.jit
def gated(gate, up, SILU: tl.constexpr):
    """act(gate) * up in fp32."""
    if SILU:
        return gate * tl.sigmoid(gate) * up
    else:  # tanh(y) = 2 sigmoid(2 y) - 1, so gelu_tanh is x sigmoid(2 y)
        return gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)) * up


@triton.jit
def gated_activation_kernel(gate_up, out, stride, size, SILU: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """out [tokens, size] = act(gate) * up; gate_up [tokens, 2 * size] with rows `stride` apart."""
    take_turn(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = at < size
    gate = tl.load(gate_up + row * stride + at, mask=live, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + size + at, mask=live, other=0.0).to(tl.float32)
    tl.store(out + row * size + at, gated(gate, up, SILU).to(out.dtype.element_ty), mask=live)


@triton.jit
def output_gate_kernel(
    x, qkv, out, x_stride, qkv_stride, size, DIM: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """out [tokens, size] = x * sigmoid(gate); the gates of a head's DIM columns follow its queries in qkv."""
    take_turn(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = at < size
    gate_at = at // DIM * (2 * DIM) + DIM + at % DIM
    gate = tl.load(qkv + row * qkv_stride + gate_at, mask=live, other=0.0).to(tl.float32)
    value = tl.load(x + row * x_stride + at, mask=live, other=0.0).to(tl.float32)
    tl.store(out + row * size + at, (value * tl.sigmoid(gate)).to(out.dtype.element_ty), mask=live)


@triton.jit(do_not_specialize_on_alignment=["ids"])
def embed_kernel(ids, weight, out, size, scale, SCALED: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """out [tokens, size] = rows `ids` of weight [n, size], rounded to out's type before and after the scale."""
    take_turn(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = at < size
    token = tl.load(ids + row).to(tl.int64)
    value = tl.load(weight + token * size + at, mask=live, other=0.0).to(out.dtype.element_ty)
    if SCALED:
        value = (value.to(tl.float32) * scale).to(out.dtype.element_ty)
    tl.store(out + row * size + at, value, mask=live)


def _grid(tokens: int, size: int) -> tuple[int, int]:
    return tokens, triton.cdiv(size, BLOCK)


def gated_activation(gate_up: torch.Tensor, kind: str) -> torch.Tensor:
    """The contract of `ops.activation.gated_activation`."""
    gate_up = gate_up if gate_up.stride(1) == 1 else gate_up.contiguous()
    tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((tokens, size), dtype=gate_up.dtype, device=gate_up.device)
    if tokens:
        gated_activation_kernel[_grid(tokens, size)](
            gate_up, out, gate_up.stride(0), size, kind == "silu", BLOCK, **launching(tokens)
        )
    return out


def output_gate(x: torch.Tensor, qkv: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
    """The contract of `ops.activation.output_gate`."""
    x, qkv = (t if t.stride(1) == 1 else t.contiguous() for t in (x, qkv))
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        strides = (x.stride(0), qkv.stride(0))
        output_gate_kernel[_grid(*x.shape)](
            x, qkv, out, *strides, x.shape[1], spec.head_dim, BLOCK, **launching(x.shape[0])
        )
    return out


def embed(ids: torch.Tensor, weight: Packed, scale: float, dtype: torch.dtype) -> torch.Tensor:
    """The contract of `ops.linear.embed`, of a dense weight."""
    table = weight.tensors["w"]
    out = torch.empty((ids.shape[0], weight.k), dtype=dtype, device=ids.device)
    if out.numel():
        rounded = float(torch.tensor(scale, dtype=dtype))
        embed_kernel[_grid(*out.shape)](
            ids.contiguous(), table, out, weight.k, rounded, scale != 1.0, BLOCK, **launching(ids.shape[0])
        )
    return out


def variants() -> Iterator[Variant]:
    """Qwen3.5-27B's gated activation and output gate."""
    kinds = {"gate_up": "*bf16", "out": "*bf16", "stride": "i32", "size": "i32"}
    yield Variant("gated_activation", gated_activation_kernel, kinds, {"SILU": True, "BLOCK": BLOCK})
    kinds = {"x": "*bf16", "qkv": "*bf16", "out": "*bf16", "x_stride": "i32", "qkv_stride": "i32", "size": "i32"}
    yield Variant("output_gate", output_gate_kernel, kinds, {"DIM": 256, "BLOCK": BLOCK})
