"""Kernels of blocks: by their parts, which always works, or in one C call where every part is a C kernel."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from dataclasses import dataclass

import torch

from offroad.device.profile import DeviceProfile
from offroad.errors import OffroadError
from offroad.native.library import library
from offroad.ops.blocks import OPS
from offroad.ops.bound import LayerOps
from offroad.ops.spec import Bound, Problem, Registry, Verdict, refuse
from offroad.run.rows import Rows

# The structs of block.c, in their order: what is the same for every call of a layer, then a call's own.
_ATTENTION_LAYER = struct.Struct("@8Q8qd2f")
_ATTENTION = struct.Struct("@8Q2q")
_MLP_LAYER = struct.Struct("@6Qqd")
_MLP = struct.Struct("@5Qq")


@dataclass(frozen=True)
class PartsKernel:
    """A block by its parts, each with the kernel of its own cell."""

    name: str
    op: str
    function: Bound
    reference: bool = False
    capturable: bool = True  # if its parts are
    invariant: bool = True  # likewise

    def check(self, device: DeviceProfile, problem: Problem) -> Verdict:
        return Verdict(True, "each part by the kernel of its own cell", cost=10.0)

    def prepare(self, device: DeviceProfile, problem: Problem) -> Bound:
        return self.function


@dataclass(frozen=True)
class FusedCpuKernel:
    """A block in one C call, which runs its parts' C functions in turn: the result is theirs, bit for bit."""

    name: str
    op: str
    bind: Callable[[], Bound]
    reference: bool = False
    invariant: bool = True

    def check(self, device: DeviceProfile, problem: Problem) -> Verdict:
        if device.kind != "cpu":
            return refuse(f"runs on CPUs; device: {device.kind}")
        for part, kernel in problem.parts:
            needed = f"cpu.{part.partition(':')[0].partition('.')[0]}"
            if kernel != needed:
                return refuse(f"needs {needed} for {part}; the plan has {kernel or 'no kernel'}")
        return Verdict(True, "every part is a C kernel: one call", cost=1.0)

    def prepare(self, device: DeviceProfile, problem: Problem) -> Bound:
        """The callable; compiles the kernels if the cache has none. Raises CompileError."""
        return self.bind()


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _kept(layer: LayerOps, op: str, describe: Callable[[LayerOps], bytes]) -> int:
    """The address of the layer's part of the arguments, which the layer keeps: its tensors stay where they are."""
    held = layer.described.get(op)
    if held is None:
        held = layer.described[op] = ctypes.create_string_buffer(describe(layer))
    return ctypes.addressof(held)


def _failed(op: str, tokens: int) -> OffroadError:
    return OffroadError(
        f"{op}: no memory for what lies between its parts",
        found=f"{tokens} tokens",
        next="lower --max-num-batched-tokens or --max-num-seqs",
    )


def _describe_attention(layer: LayerOps) -> bytes:
    view, spec, tensors = layer.view, layer.mixer, layer.tensors
    return _ATTENTION_LAYER.pack(
        layer.linears["qkv"].address,
        layer.linears["o"].address,
        layer.rope.data_ptr(),
        _address(tensors.get("q_norm")),
        _address(tensors.get("k_norm")),
        view.k.data_ptr(),
        view.v.data_ptr(),
        view.table.data_ptr(),
        view.table.stride(0),
        view.block,
        view.window or 0,
        spec.heads,
        spec.kv_heads,
        spec.head_dim,
        spec.rope.dim,
        view.writable,
        layer.eps,
        spec.scale,
        spec.softcap or 0.0,
    )


def _bind_attention() -> Bound:
    call, pack = library().offroad_attention_block, _ATTENTION.pack

    def attention_block(h: torch.Tensor, rows: Rows, layer: LayerOps) -> torch.Tensor:
        h = h.contiguous()
        out = torch.empty_like(h)
        at = _kept(layer, "attention_block", _describe_attention)
        if call(pack(at, h.data_ptr(), out.data_ptr(), *rows.addresses, h.size(0), len(rows.slot))):
            raise _failed("attention_block", h.size(0))
        return out

    return attention_block


def _describe_mlp(layer: LayerOps) -> bytes:
    assert layer.ffn.activation in ("silu", "gelu_tanh"), layer.ffn.activation
    tensors = layer.tensors
    return _MLP_LAYER.pack(
        layer.linears["gate_up"].address,
        layer.linears["down"].address,
        _address(tensors.get("post_attention_norm")),
        tensors["mlp_norm"].data_ptr(),
        _address(tensors.get("post_mlp_norm")),
        layer.following.data_ptr(),
        layer.ffn.activation == "gelu_tanh",
        layer.eps,
    )


def _bind_mlp() -> Bound:
    call, pack = library().offroad_mlp_block, _MLP.pack

    def mlp_block(x: torch.Tensor, residual: torch.Tensor, layer: LayerOps) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = x.contiguous(), residual.contiguous()
        out, total = torch.empty_like(x), torch.empty_like(x)
        at = _kept(layer, "mlp_block", _describe_mlp)
        if call(pack(at, x.data_ptr(), residual.data_ptr(), out.data_ptr(), total.data_ptr(), x.size(0))):
            raise _failed("mlp_block", x.size(0))
        return out, total

    return mlp_block


def register(registry: Registry) -> None:
    """Adds the kernels; their ops must be there."""
    for op in OPS:
        registry.add(PartsKernel(f"parts.{op.name}", op.name, op.reference))
    registry.add(FusedCpuKernel("cpu.attention_block", "attention_block", _bind_attention))
    registry.add(FusedCpuKernel("cpu.mlp_block", "mlp_block", _bind_mlp))
