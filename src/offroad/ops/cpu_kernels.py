"""The C kernels for CPUs, as entries of the registry. Activations, KV cache and accumulation are fp32.

Batch invariance: a token's result is bit for bit the same whatever it is batched with, however a prompt is cut into
chunks, and for every number of threads (see linear.c and attention.c for the order of additions).
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass

import torch

from offroad.device.profile import DeviceProfile
from offroad.errors import OffroadError
from offroad.models.spec import AttentionSpec
from offroad.native.compile import INSTALL
from offroad.native.library import library, set_threads
from offroad.native.pack import LAYOUT, Tiled
from offroad.ops.spec import Bound, Problem, Registry, Verdict, refuse
from offroad.run.rows import PagedView, Rows

MAX_HEAD_DIM = 256
MAX_GROUP = 48
# The argument structs of the C functions, in their order.
_LINEAR = struct.Struct("@3Q4q")
_NORM = struct.Struct("@6Q2qdq")
_GATED = struct.Struct("@2Q4q")
_QKV_ROPE = struct.Struct("@8Q5qdq")
_ATTENTION = struct.Struct("@11Q8q2f")


@dataclass(frozen=True)
class CpuKernel:
    """A C kernel for one op: `features` are those that it has, `limits` says why a problem is not for it (None: it is),
    `bind` gives the callable."""

    name: str
    op: str
    limits: Callable[[Problem], str | None]
    bind: Callable[[], Bound]
    features: frozenset[str] = frozenset()
    cost: float = 1.0
    layout: str = ""
    reference: bool = False
    invariant: bool = True

    def check(self, device: DeviceProfile, problem: Problem) -> Verdict:
        if device.kind != "cpu":
            return refuse(f"runs on CPUs; device: {device.kind}")
        if device.tool("cc") is None:
            return refuse(f"needs a C compiler; {INSTALL}")
        if problem.dtype != "float32":
            return refuse(f"needs float32 activations; asked: {problem.dtype}")
        if lacks := sorted(problem.features - self.features):
            return refuse(f"has no {', '.join(lacks)}")
        if reason := self.limits(problem):
            return refuse(reason)
        return Verdict(True, "C kernel compiled for this CPU", cost=self.cost, layout=self.layout)

    def prepare(self, device: DeviceProfile, problem: Problem) -> Bound:
        """The callable; compiles the kernels if the cache has none. Raises CompileError."""
        library()
        return self.bind()


def configure(threads: int) -> int:
    """Starts the kernels' threads (see `set_threads`); gives the number that runs."""
    return set_threads(threads)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.is_contiguous() else tensor.contiguous()


def _bind_linear() -> Bound:
    call, pack, empty = library().offroad_linear, _LINEAR.pack, torch.empty

    def linear(x: torch.Tensor, weight: Tiled) -> torch.Tensor:
        if not x.is_contiguous():
            x = x.contiguous()
        rows = x.size(0)
        out = empty(rows, weight.n)
        if call(pack(weight.address, x.data_ptr(), out.data_ptr(), rows, 0, 0, 0)):
            raise OffroadError(
                "linear: no memory for sums of the input", found=f"{rows} tokens", next="lower --max-num-batched-tokens"
            )
        return out

    return linear


def _bind_embed() -> Bound:
    call = library().offroad_embed

    def embed(ids: torch.Tensor, weight: Tiled, scale: float, dtype: torch.dtype) -> torch.Tensor:
        assert dtype == torch.float32, dtype
        ids = _flat(ids)
        out = torch.empty((ids.shape[0], weight.k))
        call(weight.address, ids.data_ptr(), out.data_ptr(), ids.shape[0], scale)
        return out

    return embed


def _bind_norm() -> Bound:
    call, pack, empty = library().offroad_norm, _NORM.pack, torch.empty

    def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        x = _flat(x)
        rows, n = x.shape
        out = empty(rows, n)
        call(pack(x.data_ptr(), 0, 0, weight.data_ptr(), out.data_ptr(), 0, rows, n, eps, 0))
        return out

    return norm


def _bind_add_norm() -> Bound:
    call, pack, empty = library().offroad_norm, _NORM.pack, torch.empty

    def add_norm(
        x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = _flat(x), _flat(residual)
        rows, n = x.shape
        out, total = empty(rows, n), empty(rows, n)
        call(
            pack(
                x.data_ptr(),
                residual.data_ptr(),
                0,
                weight.data_ptr(),
                out.data_ptr(),
                total.data_ptr(),
                rows,
                n,
                eps,
                0,
            )
        )
        return out, total

    return add_norm


def _bind_sandwich_norm() -> Bound:
    call, pack, empty = library().offroad_norm, _NORM.pack, torch.empty

    def sandwich_norm(
        x: torch.Tensor, residual: torch.Tensor, post: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = _flat(x), _flat(residual)
        rows, n = x.shape
        out, total = empty(rows, n), empty(rows, n)
        call(
            pack(
                x.data_ptr(),
                residual.data_ptr(),
                post.data_ptr(),
                weight.data_ptr(),
                out.data_ptr(),
                total.data_ptr(),
                rows,
                n,
                eps,
                0,
            )
        )
        return out, total

    return sandwich_norm


def _bind_gated() -> Bound:
    call, pack, empty = library().offroad_gated, _GATED.pack, torch.empty

    def gated_activation(gate_up: torch.Tensor, kind: str) -> torch.Tensor:
        assert kind in ("silu", "gelu_tanh"), kind
        gate_up = _flat(gate_up)
        rows, size = gate_up.shape
        out = empty(rows, size // 2)
        call(pack(gate_up.data_ptr(), out.data_ptr(), rows, size // 2, kind == "gelu_tanh", 0))
        return out

    return gated_activation


def _bind_qkv_rope() -> Bound:
    call, pack, empty = library().offroad_qkv_rope, _QKV_ROPE.pack, torch.empty

    def qkv_rope(
        qkv: torch.Tensor,
        positions: torch.Tensor,
        table: torch.Tensor,
        spec: AttentionSpec,
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
        eps: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        qkv, positions = _flat(qkv), _flat(positions)
        tokens, heads, kv_heads, dim = qkv.size(0), spec.heads, spec.kv_heads, spec.head_dim
        q, k, v = empty(tokens, heads, dim), empty(tokens, kv_heads, dim), empty(tokens, kv_heads, dim)
        call(
            pack(
                qkv.data_ptr(),
                table.data_ptr(),
                0 if q_norm is None else q_norm.data_ptr(),
                0 if k_norm is None else k_norm.data_ptr(),
                positions.data_ptr(),
                q.data_ptr(),
                k.data_ptr(),
                v.data_ptr(),
                tokens,
                heads,
                kv_heads,
                dim,
                spec.rope.dim,
                eps,
                0,
            )
        )
        return q, k, v

    return qkv_rope


def _bind_attention() -> Bound:
    call, pack, empty = library().offroad_attention, _ATTENTION.pack, torch.empty

    def attention(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, view: PagedView, rows: Rows, spec: AttentionSpec
    ) -> torch.Tensor:
        q, k, v = _flat(q), _flat(k), _flat(v)
        out = empty(q.size(0), spec.heads * spec.head_dim)
        failed = call(
            pack(
                q.data_ptr(),
                k.data_ptr(),
                v.data_ptr(),
                out.data_ptr(),
                view.k.data_ptr(),
                view.v.data_ptr(),
                view.table.data_ptr(),
                rows.slot_t.data_ptr(),
                rows.start_t.data_ptr(),
                rows.width_t.data_ptr(),
                rows.offset_t.data_ptr(),
                rows.slot_t.size(0),
                view.table.stride(0),
                view.block,
                view.window or 0,
                spec.heads,
                spec.kv_heads,
                spec.head_dim,
                view.writable,
                spec.scale,
                spec.softcap or 0.0,
            )
        )
        if failed:
            raise OffroadError(
                "attention: no memory for its work list",
                found=f"{rows.tokens} tokens",
                next="lower --max-num-batched-tokens or --max-num-seqs",
            )
        return out

    return attention


def _any(problem: Problem) -> str | None:
    return None


def _linear_limits(problem: Problem) -> str | None:
    if not problem.stored:
        return None
    from offroad.quant.scheme import layout_of

    if any(kind.endswith("+order") for kind in problem.stored):
        return "needs groups of neighbouring columns; the weight's stand apart (actorder)"
    k = dict(problem.sizes)["k"]
    if k % 32 and layout_of(problem.stored) == "affine4":
        return f"4-bit weights need k of a multiple of 32; asked: {k}"
    return None


def _attention_limits(problem: Problem) -> str | None:
    sizes = dict(problem.sizes)
    dim, heads, kv_heads = sizes.get("head_dim", 64), sizes.get("heads", 1), sizes.get("kv_heads", 1)
    if problem.kv_dtype not in ("", "float32"):
        return f"needs a float32 KV cache; asked: {problem.kv_dtype}"
    if dim % 32 or dim > MAX_HEAD_DIM:
        return f"needs a head size of a multiple of 32 up to {MAX_HEAD_DIM}; asked: {dim}"
    if heads // kv_heads > MAX_GROUP:
        return f"takes up to {MAX_GROUP} query heads for a KV head; asked: {heads // kv_heads}"
    return None


KERNELS: tuple[CpuKernel, ...] = (
    CpuKernel("cpu.linear", "linear", _linear_limits, _bind_linear, frozenset({"bias"}), layout=LAYOUT),
    CpuKernel("cpu.embed", "embed", _linear_limits, _bind_embed, layout=LAYOUT),
    CpuKernel("cpu.norm", "norm", _any, _bind_norm),
    CpuKernel("cpu.add_norm", "add_norm", _any, _bind_add_norm),
    CpuKernel("cpu.sandwich_norm", "sandwich_norm", _any, _bind_sandwich_norm),
    CpuKernel("cpu.gated_activation", "gated_activation", _any, _bind_gated, frozenset({"silu", "gelu_tanh"})),
    CpuKernel("cpu.qkv_rope", "qkv_rope", _any, _bind_qkv_rope, frozenset({"qk_norm"})),
    CpuKernel("cpu.attention", "attention", _attention_limits, _bind_attention, frozenset({"window", "softcap"})),
)


def register(registry: Registry) -> None:
    """Adds the kernels; their ops must be there."""
    for kernel in KERNELS:
        registry.add(kernel)
