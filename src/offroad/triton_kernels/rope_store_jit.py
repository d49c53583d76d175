"""`qkv_rope` of rows that decode, whose keys and values go straight to their pages: one launch less a layer, and no
copy of them in between."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from offroad.ops import blocks
from offroad.ops.bound import LayerOps
from offroad.run.rows import Rows
from offroad.triton_kernels import attention as paged
from offroad.triton_kernels.compile import Variant
from offroad.triton_kernels.dependent import launching, take_turn
from offroad.triton_kernels.kv_rows import LISTS, stored
from offroad.triton_kernels.rope_jit import TOKENS, inverse_rms, rotated


@triton.jit(
    do_not_specialize=["tokens", "position_stride", "tiles", "row_tiles"],
    do_not_specialize_on_alignment=[name for name in LISTS if not name.startswith("part")],
)
def rope_store_kernel(
    qkv, positions, table, q_weight, k_weight, q, k_pages, v_pages, block_table, slots, starts, widths, offsets,
    k_scale, v_scale, tokens, stride, position_stride, table_stride, eps, tiles, row_tiles,
    HEADS: tl.constexpr, KV: tl.constexpr, DIM: tl.constexpr, Q_STEP: tl.constexpr, ROPE: tl.constexpr,
    Q_NORM: tl.constexpr, K_NORM: tl.constexpr, V_NORM: tl.constexpr, K_EQ_V: tl.constexpr,
    STREAMS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
    PAGE: tl.constexpr, KIND: tl.constexpr, SCALED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The first programs have TOKENS tokens of a query head each, of `tiles` a head; then those of keys and values have
    as many of a row, of `row_tiles` a row, and store them where the row's table has a block of PAGE tokens."""
    take_turn(PDL)
    program = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    if program < HEADS * tiles:
        head = program % HEADS
        token = (program // HEADS).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
        live = token < tokens
        turned = rotated(
            qkv + head * Q_STEP, positions, table, q_weight, token, live, stride, position_stride, eps,
            Q_NORM, STREAMS, HEIGHT, WIDTH, DIM, ROPE, BLOCK,
        )  # fmt: skip
        mask = live[:, None] & (at < DIM)[None]
        tl.store(q + (token[:, None] * HEADS + head) * DIM + at[None], turned, mask=mask)
    else:
        number = program - HEADS * tiles
        head, tile = number % (2 * KV), number // (2 * KV)
        row = tile // row_tiles
        inside = tile % row_tiles * TOKENS + tl.arange(0, TOKENS)
        live = inside < tl.load(widths + row)
        token = (tl.load(offsets + row) + inside).to(tl.int64)
        position = tl.load(starts + row) + inside
        columns = block_table + tl.load(slots + row).to(tl.int64) * table_stride + position // PAGE
        page = tl.load(columns, mask=live, other=0).to(tl.int64)
        mask = (live & (page > 0))[:, None] & (at < DIM)[None]
        to = (page * PAGE + position % PAGE)[:, None] * (KV * DIM) + at[None]
        if head < KV:
            turned = rotated(
                qkv + HEADS * Q_STEP + head * DIM, positions, table, k_weight, token, live, stride, position_stride,
                eps, K_NORM, STREAMS, HEIGHT, WIDTH, DIM, ROPE, BLOCK,
            )  # fmt: skip
            by = tl.load(k_scale + head) if SCALED else 1.0
            tl.store(k_pages + to + head * DIM, stored(turned, by, KIND, k_pages.dtype.element_ty), mask=mask)
        else:
            index = head - KV
            column = HEADS * Q_STEP + (index if K_EQ_V else KV + index) * DIM
            x = tl.load(
                qkv + token[:, None] * stride + column + at[None], mask=live[:, None] & (at < DIM)[None], other=0.0
            )
            if V_NORM:
                wide = x.to(tl.float32)
                x = (wide * inverse_rms(wide, eps, DIM)).to(x.dtype)
            by = tl.load(v_scale + index) if SCALED else 1.0
            tl.store(v_pages + to + index * DIM, stored(x, by, KIND, v_pages.dtype.element_ty), mask=mask)


def rope_attention(qkv: torch.Tensor, rows: Rows, layer: LayerOps) -> torch.Tensor:
    """The contract of `ops.blocks.rope_attention`; steps with chunks are done by the parts."""
    if rows.verify < len(rows.slot) or not len(rows.slot):
        return blocks.rope_attention(qkv, rows, layer)
    return layer.attention(rope_store(qkv, rows, layer), None, None, rows)


def rope_store(qkv: torch.Tensor, rows: Rows, layer: LayerOps) -> torch.Tensor:
    """q [tokens, heads, dim] of the projection qkv [tokens, n]; the rows' keys and values are put into pages."""
    spec, view = layer.mixer, layer.view
    assert view.writable, "a reader of another layer's pages has no rows of its own"
    qkv = qkv if qkv.stride(1) == 1 else qkv.contiguous()
    positions = layer.positions(rows)
    positions = positions if positions.stride(-1) == 1 else positions.contiguous()
    tokens, heads, kv_heads, dim = qkv.shape[0], spec.heads, spec.kv_heads, spec.head_dim
    q = torch.empty((tokens, heads, dim), dtype=qkv.dtype, device=qkv.device)
    q_norm, k_norm = layer.tensors.get("q_norm"), layer.tensors.get("k_norm")
    scales = (rows.start_t if x is None else x for x in (view.k_scale, view.v_scale))
    height, width = spec.rope.sections or (0, 0)
    tiles, row_tiles = -(-tokens // TOKENS), -(-int(rows.width.max()) // TOKENS)
    rope_store_kernel[(tiles * heads + len(rows.slot) * row_tiles * 2 * kv_heads,)](
        qkv, positions, layer.rope, q_norm, k_norm, q, *paged.pages_of(view), view.table,
        rows.slot_t, rows.start_t, rows.width_t, rows.offset_t, *scales,
        tokens, qkv.stride(0), positions.stride(0), view.table.stride(0), layer.eps, tiles, row_tiles,
        HEADS=heads, KV=kv_heads, DIM=dim, Q_STEP=spec.q_width // heads, ROPE=spec.rope.dim,
        Q_NORM=q_norm is not None, K_NORM=k_norm is not None, V_NORM=spec.v_norm, K_EQ_V=spec.k_eq_v,
        STREAMS=spec.rope.sections is not None, HEIGHT=height, WIDTH=width, TOKENS=TOKENS,
        BLOCK=triton.next_power_of_2(dim), PAGE=view.block, KIND=paged.kind_of(view),
        SCALED=view.k_scale is not None, num_warps=TOKENS, **launching(tokens),
    )  # fmt: skip
    return q


def variants() -> Iterator[Variant]:
    """Qwen3.5-27B (three streams, a quarter turned), and Gemma-4-31B's global layers with pages in e5m2."""
    kinds = {
        "qkv": "*bf16",
        "q": "*bf16",
        "positions": "*i64",
        "table": "*fp32",
        "k_scale": "*fp32",
        "v_scale": "*fp32",
    }
    kinds |= {name: "*i32" for name in ("block_table", "slots", "starts", "widths", "offsets")}
    kinds |= {name: "i32" for name in ("tokens", "stride", "position_stride", "table_stride", "tiles", "row_tiles")}
    kinds |= {"q_weight": "*fp32", "k_weight": "*fp32", "eps": "fp32"}
    common = {"Q_NORM": True, "K_NORM": True, "TOKENS": TOKENS, "PAGE": 64, "SCALED": False}
    qwen = {"HEADS": 24, "KV": 4, "DIM": 256, "Q_STEP": 512, "ROPE": 64, "V_NORM": False, "K_EQ_V": False}
    qwen |= {"BLOCK": 256, "STREAMS": True, "HEIGHT": 11, "WIDTH": 10, "KIND": 0}
    yield Variant("rope_store 27B", rope_store_kernel, kinds | {"k_pages": "*bf16", "v_pages": "*bf16"}, common | qwen)
    gemma = {"HEADS": 32, "KV": 4, "DIM": 512, "Q_STEP": 512, "ROPE": 512, "V_NORM": True, "K_EQ_V": True}
    gemma |= {"BLOCK": 512, "STREAMS": False, "HEIGHT": 0, "WIDTH": 0, "KIND": 1}
    yield Variant(
        "rope_store 31B global, e5m2", rope_store_kernel, kinds | {"k_pages": "*u8", "v_pages": "*u8"}, common | gemma
    )
