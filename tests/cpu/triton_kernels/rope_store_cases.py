"""Cases of `rope_store`, on any device: the same bits as rotation and store one after the other, in q and in pages."""

from __future__ import annotations

from dataclasses import replace

import torch
from attention_cases import BLOCK, Case, make
from rows_cases import EPS, ROPES

from offroad.models.spec import AttentionSpec
from offroad.ops.bound import LayerOps
from offroad.ops.rope import rope_table
from offroad.run.rows import Rows

STARTS, WIDTHS = (0, 61, 130, 200, 63), (1, 4, 0, 8, 3)
SPECS = {name: spec for name, spec in ROPES.items() if spec.own_kv}


def same(spec: AttentionSpec, kv: torch.dtype, dtype: torch.dtype, device: str, scaled: bool = False, **more) -> None:
    """Rows of several tokens, over blocks' ends, one of which sits out; `more` is for the case."""
    from offroad.triton_kernels.attention import store
    from offroad.triton_kernels.rope_jit import qkv_rope
    from offroad.triton_kernels.rope_store_jit import rope_store

    case = Case(
        **({"starts": STARTS, "widths": WIDTHS} | more), kv_heads=spec.kv_heads, dim=spec.head_dim, dtype=dtype, kv=kv,
        scaled=scaled, device=device,
    )  # fmt: skip
    *_, view, rows, _ = make(case)
    view.table[int(rows.slot[-1]), int(rows.start[-1]) // BLOCK] = 0  # rows of its first tokens are stored nowhere
    # In time, height and width, of which plain ropes take the first.
    rows = replace(rows, streams=torch.stack([rows.positions // by for by in (1, 2, 3)]))
    layer, qkv = layer_of(spec, rows, case)
    views = [replace(view, k=view.k.clone(), v=view.v.clone()) for _ in range(2)]
    q, k, v = qkv_rope(qkv, layer.positions(rows), layer.rope, spec, *layer.tensors.values(), EPS)
    store(k, v, views[0], rows, None)
    found = rope_store(qkv, rows, replace(layer, views={"kv": views[1]}))
    assert torch.equal(found, q)
    for mine, theirs in ((views[1].k, views[0].k), (views[1].v, views[0].v)):
        assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))
    if len(rows.slot) > 1:
        assert not torch.equal(views[0].k.view(torch.uint8), view.k.view(torch.uint8))


def layer_of(spec: AttentionSpec, rows: Rows, case: Case) -> tuple[LayerOps, torch.Tensor]:
    """(a layer without kernels, a projection of the rows' tokens)."""
    random = torch.Generator().manual_seed(3)
    width = spec.q_width + spec.kv_heads * spec.head_dim * (1 if spec.k_eq_v else 2)
    qkv = torch.randn(rows.tokens, width, generator=random).to(case.dtype).to(case.device)
    names = ("q_norm", "k_norm")
    weights = [(torch.rand(spec.head_dim, generator=random) + 0.5).to(case.device) for _ in names]
    tensors = dict(zip(names, weights if spec.qk_norm else (None, None), strict=True))
    layer = LayerOps({}, {}, tensors, EPS, mixer=spec, rope=rope_table(spec.rope, 512, case.device))
    return layer, qkv
