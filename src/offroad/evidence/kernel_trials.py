"""Inputs for an op, made from a cell's problem: what a kernel and its reference are both given.

Values are drawn on the CPU, so that they are the same everywhere. Caches are copied for each call: an op that stores
rows or states gives them as outputs too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from offroad.models.spec import AttentionSpec, GatedDeltaSpec, RopeSpec
from offroad.ops.gated_delta import DeltaWeights
from offroad.ops.registry import packers
from offroad.ops.rope import rope_table
from offroad.ops.spec import Bound, Problem
from offroad.ops.states import LAG
from offroad.quant.packed import FP8_BLOCKS, PER_BYTE, Packed
from offroad.quant.scheme import FLOATS, fused_group, layout_of, to_dense, widen
from offroad.run.rows import PagedView, ReplayView, RingView, Rows

EPS = 1e-6
MOST_WEIGHTS = 1 << 26  # weights of a linear that is tried: the first rows of larger ones
MOST_EXPERTS = 8
DRAFTS = 2
FIRST = 5  # the first position that has a row, where the problem has such
_LARGEST = {"affine4": 8, "affine8": 128, "fp8": 448, "fp4": 6}
Outputs = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Trial:
    """One call. `run(bound, wide)` gives the outputs of a kernel, or with `wide` of the reference on the same numbers
    in fp32; `stored`: how many of the last outputs are caches. `bare(bound)` is the call alone, to be timed."""

    shape: str
    run: Callable[[Bound, bool], Outputs]
    bare: Callable[[Bound], object]
    stored: int = 0


@dataclass(frozen=True)
class Maker:
    """Makes the trials of a problem for a kernel that reads weights in `layout`, on `device`."""

    problem: Problem
    layout: str
    device: torch.device

    @property
    def dtype(self) -> torch.dtype:
        return getattr(torch, self.problem.dtype)

    @property
    def sizes(self) -> dict[str, int]:
        return dict(self.problem.sizes)

    def has(self, feature: str) -> bool:
        return feature in self.problem.features

    def random(self, *shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed + sum(shape))
        return torch.randn(shape, generator=generator).mul_(scale).to(self.device)

    def x(self, *shape: int, seed: int = 0) -> torch.Tensor:
        return self.random(*shape, seed=seed).to(self.dtype)

    def counts(self) -> tuple[int, ...]:
        """Numbers of tokens that are tried: kernels have tiles for few and for many."""
        if self.problem.phase != "prefill":
            return 1, 3, 16, 32
        return (70,) if self.device.type == "cpu" else (300, 2500)


def trials(problem: Problem, layout: str, device: torch.device) -> Iterator[Trial]:
    """The trials of a problem; none for an op that is made of others (a block)."""
    make = Maker(problem, layout, device)
    known: dict[str, Callable[[Maker], Iterator[Trial]]] = {
        "linear": _linear, "grouped_linear": _grouped, "embed": _embed, "norm": _norm, "add_norm": _add_norm,
        "sandwich_norm": _sandwich_norm, "gated_activation": _gated_activation, "output_gate": _output_gate,
        "qkv_rope": _qkv_rope, "attention": _attention, "gated_delta": _gated_delta, "route": _route,
        "moe_combine": _moe_combine,
    }  # fmt: skip
    if problem.op in known:
        yield from known[problem.op](make)


def _plain(shape: str, *args: Any, out: Callable[[Any], Outputs] = lambda x: (x,)) -> Trial:
    """A call without caches: tensors in half precision are widened for the reference."""

    def wide(x: Any) -> Any:
        return x.float() if isinstance(x, torch.Tensor) and x.is_floating_point() else x

    return Trial(
        shape,
        lambda bound, widened: out(bound(*(wide(x) for x in args) if widened else args)),
        lambda bound: bound(*args),
    )


def canonical(make: Maker, n: int, seed: int = 0) -> Packed:
    """A random weight [n, k] as the checkpoint's kinds foretell it, outputs of about 1."""
    kinds, k = make.problem.stored, make.sizes["k"]
    layout = layout_of(kinds) if kinds else "dense"
    random = torch.Generator().manual_seed(seed + n)
    bias = None
    if make.has("bias"):
        bias = torch.randn(n, generator=random).to(make.dtype).to(make.device)
    if layout not in PER_BYTE:
        stored = {FLOATS.get(kind, torch.float32) for kind in kinds} or {torch.float32}
        w = torch.randn(n, k, generator=random).mul_(k**-0.5).to(stored.pop() if len(stored) == 1 else torch.float32)
        return Packed("dense", n, k, {"w": w.to(make.dtype).to(make.device)}, bias=bias)
    group = fused_group(kinds, k)
    columns = k // PER_BYTE[layout]
    if layout == "fp8":
        q = (torch.randn(n, columns, generator=random) * 100).clamp_(-448, 448).to(torch.float8_e4m3fn)
    else:
        low, high = (-128, 128) if layout == "affine8" else (0, 256)
        q = torch.randint(low, high, (n, columns), generator=random, dtype=torch.int16)
        q = q.to(torch.int8 if layout == "affine8" else torch.uint8)
    s = (torch.rand(n, -(-k // group), generator=random) + 0.5).mul_(k**-0.5 / _LARGEST[layout]).half().float()
    if FP8_BLOCKS in kinds:
        s = s[::128].repeat_interleave(128, dim=0)[:n]
    tensors = {"q": q, "s": s} | ({"m": -8 * s} if layout == "affine4" else {})
    if any("_k" in kind for kind in kinds):  # minima of their own, and a group without a scale
        tensors["m"] = (torch.rand(s.shape, generator=random) * -15 * s).half().float()
        s[0, 0] = 0
    tensors = {name: tensor.to(make.device) for name, tensor in tensors.items()}
    ordered = any(kind.endswith("+order") for kind in kinds)
    perm = torch.randperm(k, generator=random).to(make.device) if ordered else None
    return Packed(layout, n, k, tensors, group, bias, perm)


def laid_out(weight: Packed, layout: str, dtype: torch.dtype) -> Packed:
    """The weight as a kernel reads it."""
    if layout in ("", weight.layout):
        return weight
    if layout == "dense":
        return to_dense(weight, dtype)
    return widen(weight, weight.group) if layout == "affine8" else packers()[layout](weight)


def _weights(make: Maker, n: int) -> tuple[Packed, Packed]:
    """(for the kernel, for the reference) of n rows."""
    plain = canonical(make, n)
    wide = plain if plain.bias is None else replace(plain, bias=plain.bias.float())
    return laid_out(plain, make.layout, make.dtype), to_dense(wide, torch.float32)


def _rows_of_weight(make: Maker) -> tuple[int, str]:
    """(rows that are tried, a note on how many there are)."""
    n, k = make.sizes["n"], make.sizes["k"]
    most = max(64, MOST_WEIGHTS // k // 64 * 64)
    return min(n, most), "" if n <= most else f" of {n:,}"


def _linear(make: Maker) -> Iterator[Trial]:
    n, note = _rows_of_weight(make)
    mine, wide = _weights(make, n)
    for tokens in make.counts():
        x = make.x(tokens, make.sizes["k"])
        yield Trial(
            f"{tokens} x {make.sizes['k']:,} by {n:,}{note} ({'+'.join(sorted(set(make.problem.stored)))})",
            lambda bound, widened, x=x: (bound(x.float(), wide) if widened else bound(x, mine),),
            lambda bound, x=x: bound(x, mine),
        )


def _grouped(make: Maker) -> Iterator[Trial]:
    k, experts = make.sizes["k"], make.sizes["experts"]
    each, count = make.sizes["n"] // experts, min(experts, MOST_EXPERTS)
    mine, wide = _weights(make, each * count)
    top_k = min(2, count)
    for tokens in make.counts()[:3]:
        generator = torch.Generator().manual_seed(tokens)
        chosen = torch.rand(tokens, count, generator=generator).topk(top_k).indices.to(make.device)
        for by_choice in (False, True):
            x = make.x(tokens, top_k, k) if by_choice else make.x(tokens, k)
            yield Trial(
                f"{tokens} x {top_k} of {count} experts, {k:,} by {each:,}{', each its own x' if by_choice else ''}",
                lambda bound, widened, x=x, e=chosen: (
                    bound(x.float(), e, wide, count) if widened else bound(x, e, mine, count),
                ),
                lambda bound, x=x, e=chosen: bound(x, e, mine, count),
            )


def _embed(make: Maker) -> Iterator[Trial]:
    n, note = _rows_of_weight(make)
    mine, wide = _weights(make, n)
    for tokens in make.counts():
        ids = torch.randint(0, n, (tokens,), generator=torch.Generator().manual_seed(tokens)).to(make.device)
        yield Trial(
            f"{tokens} of {n:,}{note} rows of {make.sizes['k']:,}",
            lambda bound, widened, ids=ids: (
                bound(ids, wide, 1.5, torch.float32) if widened else bound(ids, mine, 1.5, make.dtype),
            ),
            lambda bound, ids=ids: bound(ids, mine, 1.5, make.dtype),
        )


def _norm_weight(make: Maker, seed: int = 0) -> torch.Tensor:
    return 1 + make.random(make.sizes["hidden"], seed=seed, scale=0.2)


def _norm(make: Maker) -> Iterator[Trial]:
    for tokens in make.counts():
        x = make.x(tokens, make.sizes["hidden"])
        yield _plain(f"{tokens} x {make.sizes['hidden']:,}", x, _norm_weight(make), EPS)


def _add_norm(make: Maker) -> Iterator[Trial]:
    for tokens in make.counts():
        x, residual = (make.x(tokens, make.sizes["hidden"], seed=seed) for seed in (0, 1))
        yield _plain(f"{tokens} x {make.sizes['hidden']:,}", x, residual, _norm_weight(make), EPS, out=tuple)


def _sandwich_norm(make: Maker) -> Iterator[Trial]:
    for tokens in make.counts():
        x, residual = (make.x(tokens, make.sizes["hidden"], seed=seed) for seed in (0, 1))
        weights = (_norm_weight(make, seed) for seed in (0, 1))
        yield _plain(f"{tokens} x {make.sizes['hidden']:,}", x, residual, *weights, EPS, out=tuple)


def _gated_activation(make: Maker) -> Iterator[Trial]:
    kind = next(iter(make.problem.features))
    for tokens in make.counts():
        yield _plain(f"{tokens} x {make.sizes['size']:,}, {kind}", make.x(tokens, 2 * make.sizes["size"]), kind)


def attention_spec(make: Maker) -> AttentionSpec:
    """The layer of an attention, a rope or an output gate, as far as the problem says."""
    sizes, op = make.sizes, make.problem.op
    dim, heads = sizes["head_dim"], sizes["heads"]
    turned = sizes.get("rope_dim", dim)
    sections = (turned // 6, turned // 6) if make.has("mrope") else None
    return AttentionSpec(
        heads=heads,
        kv_heads=sizes.get("kv_heads", heads),
        head_dim=dim,
        scale=dim**-0.5,
        rope=RopeSpec(turned, 1e5, sections=sections),
        window=sizes.get("window"),
        qk_norm=make.has("qk_norm"),
        softcap=30.0 if make.has("softcap") else None,
        v_norm=make.has("v_norm"),
        k_eq_v=make.has("k_eq_v"),
        own_kv=not make.has("q_only") and not make.has("pages_only"),
        output_gate=make.has("output_gate") or op == "output_gate",
    )


def _output_gate(make: Maker) -> Iterator[Trial]:
    spec = attention_spec(make)
    width = spec.heads * spec.head_dim
    for tokens in make.counts():
        x, qkv = make.x(tokens, width), make.x(tokens, spec.q_width + 2 * spec.head_dim)
        yield _plain(f"{tokens} x {spec.heads} heads of {spec.head_dim}", x, qkv, spec)


def _qkv_rope(make: Maker) -> Iterator[Trial]:
    spec, length = attention_spec(make), 4000
    table = rope_table(spec.rope, length, make.device)
    width = spec.q_width + (spec.kv_heads * spec.head_dim * (1 if spec.k_eq_v else 2) if spec.own_kv else 0)
    q_norm, k_norm = (1 + make.random(spec.head_dim, seed=seed, scale=0.2) for seed in (0, 1))
    weights = (q_norm, k_norm if spec.own_kv else None) if spec.qk_norm else (None, None)
    for tokens in make.counts():
        shape = (tokens,) if spec.rope.sections is None else (3, tokens)
        positions = torch.randint(0, length, shape, generator=torch.Generator().manual_seed(tokens)).to(make.device)
        args = (make.x(tokens, width), positions, table, spec, *weights, EPS)
        yield _plain(
            f"{tokens} x {spec.heads} + {spec.kv_heads} heads of {spec.head_dim}",
            *args,
            out=lambda found: tuple(x for x in found if x is not None),
        )


def rows_of(make: Maker, parts: tuple[tuple[int, int], ...]) -> Rows:
    """Rows (start, width), row i in slot i + 1."""
    widths = [width for _, width in parts]
    values = (range(1, len(parts) + 1), [start for start, _ in parts], widths, np.cumsum([0, *widths[:-1]]))
    arrays = [np.array(list(v), np.int32) for v in values]
    positions = torch.cat([torch.arange(start, start + width) for start, width in parts]).to(make.device)
    tensors = [torch.from_numpy(a).to(make.device) for a in arrays]
    verify = 0 if make.problem.phase == "prefill" else len(parts)
    nothing = torch.zeros(0, dtype=torch.int64, device=make.device)
    return Rows(torch.zeros_like(positions), positions, *arrays, *tensors, verify, nothing, np.zeros_like(arrays[2]))


def pages(make: Maker, spec: AttentionSpec, parts: tuple[tuple[int, int], ...]) -> PagedView:
    """Pages that hold every row of the slots, in a shuffled order."""
    block, kind = make.sizes["block"], getattr(torch, make.problem.kv_dtype or make.problem.dtype)
    columns = max(-(-(start + width) // block) for start, width in parts)
    blocks = len(parts) * columns
    order = torch.randperm(blocks, generator=torch.Generator().manual_seed(0)).int().view(len(parts), columns) + 1
    table = torch.cat((order.new_zeros(1, columns), order)).to(make.device)
    shape = (blocks + 1, block, spec.kv_heads, spec.head_dim)
    k, v = (make.random(*shape, seed=seed).to(kind) for seed in (0, 1))
    first = FIRST if make.has("first") else 0
    return PagedView(k, v, table, block, spec.window, spec.own_kv, first=first)


def _attention(make: Maker) -> Iterator[Trial]:
    spec = attention_spec(make)
    small = make.device.type == "cpu"
    steps = (((90, 40), (0, 30)),) if make.problem.phase == "prefill" else (((300, 1), (0, 1), (64, 3)),)
    if not small:
        many = tuple((100 * row, 1) for row in range(32))
        steps += (((1500, 300),),) if make.problem.phase == "prefill" else (((4095, 1),), many)
    least = FIRST if make.has("first") else 0  # a query below sees nothing
    for parts in (tuple((max(start, least), width) for start, width in step) for step in steps):
        tokens, rows, view = sum(width for _, width in parts), rows_of(make, parts), pages(make, spec, parts)
        q = make.x(tokens, spec.heads, spec.head_dim)
        kv = make.x(tokens, 2 * spec.kv_heads, spec.head_dim)
        k, v = kv.split(spec.kv_heads, dim=1) if spec.own_kv else (None, None)

        def run(bound: Bound, wide: bool, q=q, k=k, v=v, view=view, rows=rows) -> Outputs:
            mine = replace(view, k=view.k.clone(), v=view.v.clone())
            if wide:
                q, k, v = (None if x is None else x.float() for x in (q, k, v))
            return bound(q, k, v, mine, rows, spec), mine.k, mine.v

        yield Trial(
            f"{spec.heads} / {spec.kv_heads} heads of {spec.head_dim}, rows {_said(parts)}, {view.k.dtype}",
            run,
            lambda bound, q=q, k=k, v=v, view=view, rows=rows: bound(q, k, v, view, rows, spec),
            2,
        )


def _said(parts: tuple[tuple[int, int], ...]) -> str:
    return ", ".join(f"{start}+{width}" for start, width in parts)


def _states(make: Maker, spec: GatedDeltaSpec, slots: int, drafts: int) -> tuple[RingView, RingView | ReplayView]:
    shape = (spec.value_heads, spec.key_dim, spec.value_dim)
    conv = make.x(slots, spec.kernel + drafts, spec.channels)
    if not make.has("replay"):
        return RingView(conv), RingView(make.random(slots, 1 + drafts, *shape, scale=0.2))
    records = ((spec.key_heads, spec.key_dim), (spec.value_heads, spec.value_dim), (spec.value_heads,))
    lag = max(LAG, drafts + 1)
    key, delta, decay = (make.random(slots, lag + drafts + 1, *record, scale=0.2) for record in records)
    base = torch.zeros(slots, dtype=torch.int64, device=make.device)
    return RingView(conv), ReplayView(make.random(slots, *shape, scale=0.2), key, delta, -decay.abs(), base, lag)


def _gated_delta(make: Maker) -> Iterator[Trial]:
    """The reference too has the activations' dtype: where it rounds to it is a part of the op, and the rule is in fp32
    anyway."""
    names = ("key_heads", "value_heads", "key_dim", "value_dim", "kernel")
    gate = "sigmoid" if make.has("sigmoid") else "silu"
    spec = GatedDeltaSpec(*(make.sizes[name] for name in names), gate)
    weights = DeltaWeights(
        make.random(spec.channels, spec.kernel, scale=0.5),
        make.random(spec.value_heads, scale=1.0),
        make.random(spec.value_heads, seed=1, scale=1.0) - 1,
        1 + make.random(spec.value_dim, scale=0.2),
    )
    wide = ((37, 90), (0, 70)) if make.device.type == "cpu" else ((37, 300), (0, 200))
    for parts in (wide,) if make.problem.phase == "prefill" else (((37, 1), (0, 1)), ((5, 3), (64, 2), (0, 3))):
        tokens, rows = sum(width for _, width in parts), rows_of(make, parts)
        qkvz, ba = make.x(tokens, spec.channels + spec.value_width), make.x(tokens, 2 * spec.value_heads)
        # Rows of one token alone have a kernel of their own where no step has drafts.
        drafts = DRAFTS if make.problem.phase == "prefill" else max(width for _, width in parts) - 1
        conv, state = _states(make, spec, len(parts) + 1, drafts)
        if isinstance(state, ReplayView):  # two records are behind the states, where there are two
            state.base[1:] = (rows.start_t.long() - 2).clamp(min=0)
        tensors = [name for name, value in vars(state).items() if isinstance(value, torch.Tensor) and name != "base"]

        def run(
            bound: Bound, widened: bool, qkvz=qkvz, ba=ba, conv=conv, state=state, rows=rows, tensors=tensors
        ) -> Outputs:
            ring = RingView(conv.data.clone())
            mine = replace(state, **{name: getattr(state, name).clone() for name in tensors})
            out = bound(qkvz, ba, ring, mine, rows, spec, weights, EPS)
            return out, ring.data, *(getattr(mine, name) for name in tensors)

        yield Trial(
            f"{spec.value_heads} heads of {spec.key_dim} x {spec.value_dim}, rows {_said(parts)}",
            run,
            lambda bound, qkvz=qkvz, ba=ba, conv=conv, state=state, rows=rows: bound(
                qkvz, ba, conv, state, rows, spec, weights, EPS
            ),
            1 + len(tensors),
        )


def _route(make: Maker) -> Iterator[Trial]:
    experts, top_k = make.sizes["experts"], make.sizes["top_k"]
    scale = make.random(experts, scale=0.2).add_(1) if make.has("expert_scale") else None
    for tokens in make.counts():
        # No two of a token are equal: which of equal ones is chosen is nobody's promise.
        order = make.random(tokens, experts).argsort(dim=1)
        logits = ((order - experts // 2) / 16).to(make.dtype)
        yield _plain(f"{tokens} x {top_k} of {experts}", logits, top_k, scale, out=tuple)


def _moe_combine(make: Maker) -> Iterator[Trial]:
    hidden, top_k = make.sizes["hidden"], make.sizes["top_k"]
    for tokens in make.counts():
        shared = (make.x(tokens, hidden, seed=1), make.x(tokens, 1, seed=2)) if make.has("shared") else (None, None)
        weights = make.random(tokens, top_k).softmax(-1)
        yield _plain(f"{tokens} x {top_k} of {hidden}", make.x(tokens, top_k, hidden), weights, *shared)
