"""Inputs for kernels that do a whole block: a layer made of the parts that the plan has, each with its kernel.

A block is judged by its parts' kernels called in turn, and these by their references: so what is left to find is
whether the block does the same as its parts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from offroad.device.profile import DeviceProfile
from offroad.evidence.kernel_trials import (
    EPS,
    MOST_EXPERTS,
    Maker,
    Outputs,
    Trial,
    attention_spec,
    canonical,
    laid_out,
    pages,
    rows_of,
)
from offroad.models.spec import FfnSpec, MoeSpec
from offroad.ops.bound import LayerOps
from offroad.ops.cells import Choice
from offroad.ops.rope import rope_table
from offroad.ops.spec import Bound, Problem, Registry
from offroad.quant.packed import Packed

Parts = tuple[tuple[str, Choice], ...]  # a block's parts as its problem names them


def block_trials(
    problem: Problem, parts: Parts, registry: Registry, device: DeviceProfile, place: torch.device
) -> Iterator[Trial]:
    """The trials of an `attention_block`, a `rope_attention`, an `mlp_block`, a `gated_linear` or of `experts`."""
    chosen = dict(parts)
    bounds = {name: registry.kernels[c.kernel].prepare(device, c.problem) for name, c in chosen.items()}
    make = {name: Maker(choice.problem, choice.layout, place) for name, choice in chosen.items()}
    linears = {
        name.partition(":")[2]: _weight(m, chosen[name])
        for name, m in make.items()
        if name.startswith(("linear:", "grouped_linear:"))
    }
    layer = LayerOps(bounds, linears, {}, EPS)
    known = {
        "attention_block": _attention, "rope_attention": _attention, "mlp_block": _mlp, "gated_linear": _gated,
        "experts": _experts,
    }  # fmt: skip
    yield from known[problem.op](make, layer)


def _weight(make: Maker, choice: Choice) -> Packed:
    """The weight, or that of the first few experts."""
    n, experts = make.sizes["n"], make.sizes.get("experts")
    rows = n // experts * min(experts, MOST_EXPERTS) if experts else n
    return laid_out(canonical(make, rows), choice.layout, make.dtype)


def _scale(make: Maker, size: int, seed: int) -> torch.Tensor:
    return 1 + make.random(size, seed=seed, scale=0.2)


def _attention(make: dict[str, Maker], layer: LayerOps) -> Iterator[Trial]:
    attention, rope, qkv = make["attention"], make["qkv_rope"], make.get("linear:qkv")
    seen = attention_spec(attention)
    spec = replace(attention_spec(rope), window=seen.window, softcap=seen.softcap, own_kv=seen.own_kv)
    tensors = {"q_norm": _scale(rope, spec.head_dim, 0), "k_norm": _scale(rope, spec.head_dim, 1)}
    layer = replace(
        layer,
        tensors=tensors if spec.qk_norm else {},
        mixer=spec,
        rope=rope_table(spec.rope, 512, rope.device),
        attention_verify=layer.bounds.get("attention.decode", layer.bounds["attention"]),
        attention_chunk=layer.bounds["attention"],
    )
    steps = ((90, 40), (0, 30)) if attention.problem.phase == "prefill" else ((300, 1), (0, 1), (64, 3))
    rows, view = rows_of(attention, steps), pages(attention, spec, steps)
    if spec.rope.sections:
        rows = replace(rows, streams=rows.positions.expand(3, -1).contiguous())
    own = spec.kv_heads * spec.head_dim * (1 if spec.k_eq_v else 2) if spec.own_kv else 0
    h = qkv.x(rows.tokens, qkv.sizes["k"]) if qkv else rope.x(rows.tokens, spec.q_width + own)

    def run(bound: Bound, wide: bool) -> Outputs:
        mine = replace(view, k=view.k.clone(), v=view.v.clone())
        return bound(h, rows, replace(layer, views={"kv": mine}, described={})), mine.k, mine.v

    timed = replace(layer, views={"kv": view}, described={})
    yield Trial(
        f"{rows.tokens} x {h.shape[1]:,}, {spec.heads} / {spec.kv_heads} heads of {spec.head_dim}",
        run,
        lambda bound: bound(h, rows, timed),
        2,
    )


def _mlp(make: dict[str, Maker], layer: LayerOps) -> Iterator[Trial]:
    wide, gate = make["linear:gate_up"], make["gated_activation"]
    hidden, size = wide.sizes["k"], gate.sizes["size"]
    names = ("mlp_norm", "post_attention_norm", "post_mlp_norm") if "sandwich_norm" in make else ("mlp_norm",)
    layer = replace(
        layer,
        tensors={name: _scale(wide, hidden, seed) for seed, name in enumerate(names)},
        ffn=FfnSpec(size, next(iter(gate.problem.features))),
        following=_scale(wide, hidden, 3),
    )
    for tokens in wide.counts():
        x, residual = (wide.x(tokens, hidden, seed=seed) for seed in (0, 1))
        yield Trial(
            f"{tokens} x {hidden:,} by {size:,}",
            lambda bound, widened, x=x, residual=residual: tuple(bound(x, residual, replace(layer, described={}))),
            lambda bound, x=x, residual=residual: bound(x, residual, layer),
        )


def _gated(make: dict[str, Maker], layer: LayerOps) -> Iterator[Trial]:
    wide, gate = make["linear:gate_up"], make["gated_activation"]
    layer = replace(layer, ffn=FfnSpec(gate.sizes["size"], next(iter(gate.problem.features))))
    for tokens in wide.counts():
        x = wide.x(tokens, wide.sizes["k"])
        yield Trial(
            f"{tokens} x {wide.sizes['k']:,} by {gate.sizes['size']:,}",
            lambda bound, widened, x=x: (bound(x, layer),),
            lambda bound, x=x: bound(x, layer),
        )


def _experts(make: dict[str, Maker], layer: LayerOps) -> Iterator[Trial]:
    wide, gate = make["grouped_linear:experts_gate_up"], make["gated_activation:experts"]
    combine, k = make["moe_combine"], wide.sizes["k"]
    count = min(wide.sizes["experts"], MOST_EXPERTS)
    top_k = min(combine.sizes["top_k"], count)
    moe = MoeSpec(count, top_k, gate.sizes["size"], next(iter(gate.problem.features)))
    layer = replace(layer, moe=moe)
    for tokens in wide.counts():
        generator = torch.Generator().manual_seed(tokens)
        chosen = torch.rand(tokens, count, generator=generator).topk(top_k).indices.to(wide.device)
        weights = wide.random(tokens, top_k).softmax(-1)
        x, shared = wide.x(tokens, k), (None, None)
        if combine.has("shared"):
            shared = wide.x(tokens, k, seed=1), wide.x(tokens, 1, seed=2)
        yield Trial(
            f"{tokens} x {top_k} of {count} experts, {k:,} by {moe.size:,}",
            lambda bound, widened, x=x, w=weights, e=chosen, s=shared: (bound(x, w, e, *s, layer),),
            lambda bound, x=x, w=weights, e=chosen, s=shared: bound(x, w, e, *s, layer),
        )
