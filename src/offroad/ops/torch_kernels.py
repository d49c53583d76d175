"""Kernels made of PyTorch calls: the references, which run anywhere, and the good ones among torch's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from offroad.device.profile import DeviceProfile
from offroad.models.spec import AttentionSpec
from offroad.ops import attention, linear, moe
from offroad.ops.spec import Bound, Problem, Registry, Verdict, refuse
from offroad.quant.packed import PER_BYTE, Packed
from offroad.quant.scheme import layout_of
from offroad.run.rows import PagedView, Rows

_HOST_OPS = frozenset({"attention", "gated_delta", "grouped_linear"})  # references that loop over rows or experts

REFERENCE_COST, TORCH_COST, WIDENED_COST = 1000.0, 100.0, 2000.0


@dataclass(frozen=True)
class TorchKernel:
    """A kernel that is a Python function over tensors; `test` refuses problems it does not take. `capturable`: a CUDA
    graph can hold it."""

    name: str
    op: str
    function: Bound
    cost: float = TORCH_COST
    reference: bool = False
    test: Callable[[DeviceProfile, Problem], Verdict] = field(
        default=lambda device, problem: Verdict(True, "plain torch")
    )
    capturable: bool = False

    def check(self, device: DeviceProfile, problem: Problem) -> Verdict:
        verdict = self.test(device, problem)
        cost = verdict.cost or self.cost
        return replace(verdict, cost=cost) if verdict.ok else verdict

    def prepare(self, device: DeviceProfile, problem: Problem) -> Bound:
        return self.function


def _canonical(device: DeviceProfile, problem: Problem) -> Verdict:
    return Verdict(True, "dequantises on each call", layout=layout_of(problem.stored))


def _dense(device: DeviceProfile, problem: Problem) -> Verdict:
    if device.kind == "cuda" and problem.dtype == "bfloat16" and not device.has("mma_bf16"):
        return refuse("needs mma_bf16 for bfloat16; use --dtype float16")
    packed = [kind for kind in problem.stored if kind.partition(".")[0] in ("gguf", *PER_BYTE)]
    if packed and device.kind == "cuda":  # who has such a file has no memory for more: packed weights first
        return Verdict(True, f"{packed[0]} widened to {problem.dtype}, through torch's GEMM", WIDENED_COST, "dense")
    return Verdict(True, "dense weights through torch's GEMM", layout="dense")


def dense_linear(x: torch.Tensor, weight: Packed) -> torch.Tensor:
    """`x w^T + b` by torch's GEMM; the weight is dense in x's dtype."""
    return torch.nn.functional.linear(x, weight.tensors["w"], weight.bias)


def dense_embed(ids: torch.Tensor, weight: Packed, scale: float, dtype: torch.dtype) -> torch.Tensor:
    """Rows of a dense embedding times scale, [tokens, hidden]."""
    return linear.embed(ids, weight, scale, dtype)


def sdpa_attention(
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    view: PagedView,
    rows: Rows,
    spec: AttentionSpec,
) -> torch.Tensor:
    """The reference's contract with torch's fused attention: each row's pages are gathered, then one call a row."""
    out = torch.empty_like(q)
    for slot, start, width, offset in zip(rows.slot, rows.start, rows.width, rows.offset, strict=True):
        slot, start, width = int(slot), int(start), int(width)
        span = slice(int(offset), int(offset) + width)
        first, keys, values = attention.visible_rows(k, v, view, slot, start, span)
        mask = None if width == 1 else attention.visible(width, keys.shape[0], start - first, view.window, q.device)
        result = torch.nn.functional.scaled_dot_product_attention(
            *(x.to(q.dtype).transpose(0, 1)[None] for x in (q[span], keys, values)),
            attn_mask=mask,
            scale=spec.scale,
            enable_gqa=True,
        )
        out[span] = result[0].transpose(0, 1)
        if k is not None and view.writable:
            attention.store(view, k[span], v[span], slot, start)
    return out.flatten(1)


def _sdpa(device: DeviceProfile, problem: Problem) -> Verdict:
    if "softcap" in problem.features:
        return refuse("scaled_dot_product_attention has no score soft-cap")
    if device.kind == "cuda":
        return refuse("gathers pages row by row on the host: a CPU kernel")
    return Verdict(True, "gathers pages, then torch's fused attention a row")


def _route(device: DeviceProfile, problem: Problem) -> Verdict:
    if device.kind != "cuda":
        return refuse(f"four launches of a GPU; device: {device.kind}")
    return Verdict(True, "softmax and top-k of torch")


def _combine(device: DeviceProfile, problem: Problem) -> Verdict:
    if device.kind != "cuda":
        return refuse(f"some launches of a GPU; device: {device.kind}")
    # In fp32: a copy of what experts give, and its product with weights.
    copies = 2 * torch.float32.itemsize * problem.load.tokens * problem.size("hidden") * problem.size("top_k")
    return Verdict(True, "torch's products and sums, in fp32", temporary=copies)


def register(registry: Registry) -> None:
    """Adds the reference kernel of every op, then torch's own."""
    for op in registry.ops.values():
        if op.reference is None:
            continue
        test = (
            _canonical
            if op.name in ("linear", "embed", "grouped_linear")
            else TorchKernel.__dataclass_fields__["test"].default
        )
        name, fixed = f"torch.reference_{op.name}", op.name not in _HOST_OPS
        registry.add(TorchKernel(name, op.name, op.reference, REFERENCE_COST, True, test, fixed))
    registry.add(TorchKernel("torch.linear", "linear", dense_linear, test=_dense, capturable=True))
    registry.add(TorchKernel("torch.embed", "embed", dense_embed, test=_dense, capturable=True))
    registry.add(TorchKernel("torch.route", "route", moe.route, test=_route, capturable=True))
    registry.add(TorchKernel("torch.moe_combine", "moe_combine", moe.moe_combine, test=_combine, capturable=True))
    registry.add(TorchKernel("torch.sdpa", "attention", sdpa_attention, test=_sdpa))
