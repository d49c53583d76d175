"""Routing of a mixture of experts: softmax over all experts and the top k of them, one program a token."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from offroad.triton_kernels.compile import Variant
from offroad.triton_kernels.dependent import launching, take_turn


@triton.jit
def route_kernel(
    logits, scale, weights, chosen, stride, experts,
    TOP: tl.constexpr, SCALED: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """weights fp32 and chosen int64 [tokens, TOP] of logits [tokens, experts]; of equal ones the first."""
    take_turn(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    live = at < experts
    x = tl.load(logits + row * stride + at, mask=live, other=float("-inf")).to(tl.float32)
    p = tl.exp(x - tl.max(x, axis=0))
    p = tl.where(live, p / tl.sum(p, axis=0), -1.0)
    slots = tl.arange(0, WIDTH)
    best = tl.zeros([WIDTH], tl.float32)
    which = tl.zeros([WIDTH], tl.int64)
    for i in tl.static_range(TOP):
        # Without the bound a row of NaN would choose an expert that is not there.
        expert = tl.minimum(tl.argmax(p, axis=0), experts - 1)
        best = tl.where(slots == i, tl.max(p, axis=0), best)
        which = tl.where(slots == i, expert.to(tl.int64), which)
        p = tl.where(at == expert, -1.0, p)
    best /= tl.sum(best, axis=0)
    kept = slots < TOP
    if SCALED:
        best *= tl.load(scale + which, mask=kept, other=0.0).to(tl.float32)
    tl.store(weights + row * TOP + slots, best, mask=kept)
    tl.store(chosen + row * TOP + slots, which, mask=kept)


def route(logits: torch.Tensor, top_k: int, scale: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The contract of `ops.moe.route`."""
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    tokens, experts = logits.shape
    weights = torch.empty((tokens, top_k), dtype=torch.float32, device=logits.device)
    chosen = torch.empty((tokens, top_k), dtype=torch.int64, device=logits.device)
    if tokens:
        blocks = (triton.next_power_of_2(experts), triton.next_power_of_2(top_k))
        route_kernel[(tokens,)](
            logits,
            scale,
            weights,
            chosen,
            logits.stride(0),
            experts,
            top_k,
            scale is not None,
            *blocks,
            num_warps=1,
            **launching(tokens),
        )
    return weights, chosen


def variants() -> Iterator[Variant]:
    """Qwen3.5-35B-A3B."""
    kinds = {
        "logits": "*bf16",
        "scale": "*fp32",
        "weights": "*fp32",
        "chosen": "*i64",
        "stride": "i32",
        "experts": "i32",
    }
    constants = {"TOP": 8, "SCALED": False, "BLOCK": 256, "WIDTH": 8}
    yield Variant("route 256 of 8", route_kernel, kinds, constants, warps=1)
