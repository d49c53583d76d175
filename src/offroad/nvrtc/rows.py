"""Ops on a token's row for SM70: norms, rotary embedding and activations, and how their kernels are launched."""

from __future__ import annotations

import torch

from offroad.device.profile import DeviceProfile
from offroad.models.spec import AttentionSpec
from offroad.nvrtc import launch
from offroad.nvrtc.compile import Source
from offroad.nvrtc.kernel import CudaKernel
from offroad.nvrtc.launch import LaunchError, Shapes
from offroad.ops.spec import Bound, Problem

NORM, GATE, ROPE = Source("norm.cu", shared=64), Source("gate.cu"), Source("rope.cu")
NORM_ARGS, GATE_ARGS, ROPE_ARGS = "@6P2q2i2f", "@3P2q4i", "@8P2q10i2f"
THREADS = 256
_WIDE = 8  # numbers that a thread takes at once: 16 bytes
_RESIDUAL = Shapes.of(
    "residual add and norm", x="tokens hidden", residual="tokens hidden", weight="hidden", post="hidden"
)
_GATED = Shapes.of("output_gate", x="tokens width", qkv="tokens _")
_QKV = Shapes.of("qkv_rope", qkv="tokens n", q_norm="dim", k_norm="dim", table="_ turned")


def _rows(x: torch.Tensor, op: str) -> torch.Tensor:
    """x as rows of whole 16-byte words: itself, or a copy. Raises LaunchError for sizes and dtypes of others."""
    if x.dtype != torch.float16 or x.shape[-1] % _WIDE:
        raise LaunchError(op, found=f"{x.dtype} {tuple(x.shape)}", accepted="torch.float16, rows of a multiple of 8")
    return x if x.stride(-1) == 1 and x.stride(0) % _WIDE == 0 and x.data_ptr() % 16 == 0 else x.contiguous()


def _address(x: torch.Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def bind_norm(device: DeviceProfile, problem: Problem) -> Bound:
    kernel = launch.load(NORM, "rms_norm", NORM_ARGS)

    def norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
        flat = _rows(x.reshape(-1, x.shape[-1]), "norm")
        out = torch.empty(flat.shape, dtype=x.dtype, device=x.device)
        if flat.shape[0]:
            pointers = (flat.data_ptr(), 0, 0, _address(weight), out.data_ptr(), 0)
            kernel.launch((flat.shape[0], 1, 1), THREADS, *pointers, flat.stride(0), 0, flat.shape[1], 0, eps, 0.0)
        return out.view(x.shape)

    return norm


def bind_add_norm(device: DeviceProfile, problem: Problem) -> Bound:
    sandwich = bind_sandwich_norm(device, problem)

    def add_norm(
        x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return sandwich(x, residual, None, weight, eps)

    return add_norm


def bind_sandwich_norm(device: DeviceProfile, problem: Problem) -> Bound:
    kernel = launch.load(NORM, "rms_norm", NORM_ARGS)

    def sandwich_norm(
        x: torch.Tensor, residual: torch.Tensor, post: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        _RESIDUAL.check(x=x, residual=residual, weight=weight, post=post)
        x, residual = _rows(x, "add_norm"), _rows(residual, "add_norm")
        out, total = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
        pointers = (_address(t) for t in (x, residual, post, weight, out, total))
        kernel.launch((x.shape[0], 1, 1), THREADS, *pointers, x.stride(0), residual.stride(0), x.shape[1], 0, eps, 0.0)
        return out, total

    return sandwich_norm


def bind_gated_activation(device: DeviceProfile, problem: Problem) -> Bound:
    kernel = launch.load(GATE, "gated_activation", GATE_ARGS)

    def gated_activation(gate_up: torch.Tensor, kind: str) -> torch.Tensor:
        assert kind in ("silu", "gelu_tanh"), kind
        gate_up = _rows(gate_up, "gated_activation")
        tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
        if size % _WIDE:
            raise LaunchError("gated_activation: gate_up", found=tuple(gate_up.shape), accepted="[tokens, 16 x]")
        out = torch.empty((tokens, size), dtype=gate_up.dtype, device=gate_up.device)
        pointers = (gate_up.data_ptr(), 0, out.data_ptr())
        grid = (-(-size // (THREADS * _WIDE)), tokens, 1)
        kernel.launch(grid, THREADS, *pointers, gate_up.stride(0), 0, size, 0, int(kind == "gelu_tanh"), 0)
        return out

    return gated_activation


def bind_output_gate(device: DeviceProfile, problem: Problem) -> Bound:
    kernel = launch.load(GATE, "output_gate", GATE_ARGS)

    def output_gate(x: torch.Tensor, qkv: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
        _GATED.check({"width": spec.heads * spec.head_dim}, x=x, qkv=qkv)
        x, qkv = _rows(x, "output_gate"), _rows(qkv, "output_gate")
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        pointers = (x.data_ptr(), qkv.data_ptr(), out.data_ptr())
        grid = (-(-x.shape[1] // (THREADS * _WIDE)), x.shape[0], 1)
        kernel.launch(grid, THREADS, *pointers, x.stride(0), qkv.stride(0), x.shape[1], spec.head_dim, 0, 0)
        return out

    return output_gate


def bind_qkv_rope(device: DeviceProfile, problem: Problem) -> Bound:
    kernel = launch.load(ROPE, "qkv_rope", ROPE_ARGS)

    def qkv_rope(
        qkv: torch.Tensor,
        positions: torch.Tensor,
        table: torch.Tensor,
        spec: AttentionSpec,
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
        eps: float,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        kv_width = 0 if not spec.own_kv else spec.kv_heads * spec.head_dim * (1 if spec.k_eq_v else 2)
        sizes = {"n": spec.q_width + kv_width, "dim": spec.head_dim, "turned": spec.rope.dim}
        _QKV.check(sizes, qkv=qkv, q_norm=q_norm, k_norm=k_norm, table=table)
        qkv, positions = qkv if qkv.stride(1) == 1 else qkv.contiguous(), positions.contiguous()
        tokens, shape = qkv.shape[0], {"dtype": qkv.dtype, "device": qkv.device}
        q = torch.empty((tokens, spec.heads, spec.head_dim), **shape)
        k, v = (torch.empty((tokens, spec.kv_heads, spec.head_dim), **shape) if spec.own_kv else None for _ in range(2))
        height, width = spec.rope.sections if spec.rope.sections and positions.ndim == 2 else (0, 0)
        flags = (int(spec.k_eq_v), int(spec.v_norm), int(spec.own_kv))
        heads = spec.heads + (2 * spec.kv_heads if spec.own_kv else 0)
        kernel.launch(
            (-(-heads // 8), tokens, 1),
            THREADS,
            *(_address(t) for t in (qkv, positions, table, q_norm, k_norm, q, k, v)),
            *(qkv.stride(0), tokens),
            *(spec.heads, spec.kv_heads, spec.head_dim, spec.rope.dim, spec.q_width, *flags, height, width),
            *(eps, 0.0),
        )
        return q, k, v

    return qkv_rope


def _eights(problem: Problem) -> str | None:
    odd = [f"{name} {size}" for name, size in problem.sizes if name in ("hidden", "size", "head_dim") and size % _WIDE]
    return f"needs sizes of a multiple of {_WIDE}; asked: {', '.join(odd)}" if odd else None


_ROPE_FEATURES = frozenset({"qk_norm", "v_norm", "k_eq_v", "q_only", "output_gate", "mrope"})
KERNELS = (
    CudaKernel("cuda.sm70_norm", "norm", bind_norm, _eights),
    CudaKernel("cuda.sm70_add_norm", "add_norm", bind_add_norm, _eights),
    CudaKernel("cuda.sm70_sandwich_norm", "sandwich_norm", bind_sandwich_norm, _eights),
    CudaKernel(
        "cuda.sm70_gated_activation",
        "gated_activation",
        bind_gated_activation,
        _eights,
        features=frozenset({"silu", "gelu_tanh"}),
    ),
    CudaKernel("cuda.sm70_output_gate", "output_gate", bind_output_gate, _eights),
    CudaKernel("cuda.sm70_qkv_rope", "qkv_rope", bind_qkv_rope, features=_ROPE_FEATURES),
)
