"""The attention kernels as models of the plans use them, for offline compilation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from offroad.triton_kernels.attention import (
    KINDS,
    SMALLEST,
    STORE_WARPS,
    Tile,
    decode_tile,
    padded,
    precision_of,
    prefill_form,
    prefill_tile,
    step_of,
    wide,
)
from offroad.triton_kernels.compile import SHARED, Variant
from offroad.triton_kernels.kv_rows import LISTS, store_rows
from offroad.triton_kernels.paged_decode import paged_decode, sum_partitions
from offroad.triton_kernels.paged_prefill import paged_prefill

_POINTERS = {
    "float32": "*fp32", "bfloat16": "*bf16", "float16": "*fp16", "float8_e5m2": "*u8", "float8_e4m3fn": "*u8"
}  # fmt: skip
_TYPES = (
    {name: "*i32" for name in ("table", "slots", "starts", "widths", "offsets")}
    | {name: "*fp32" for name in ("k_scale", "v_scale", "part", "part_max", "part_sum")}
    | {name: "i32" for name in ("q_stride", "table_stride", "k_stride", "v_stride", "partitions", "first_token")}
)
_TYPES |= {"scale": "fp32", "softcap": "fp32", "positions": "*i64", "tiles": "i32"}
_EVERY, _SOME, _NEW = (80, 86, 89, 90, 100, 120, 121), (80, 89, 90, 100, 120), (90, 100, 120)  # compute capabilities
# (label, heads, kv_heads, head_dim, window, dtype, kv dtype, for): the shapes of the plans' models that differ most.
_SHAPES = (
    ("Qwen3-8B", 32, 8, 128, 0, "bfloat16", "bfloat16", _EVERY),
    ("Qwen3.5-27B", 24, 4, 256, 0, "bfloat16", "bfloat16", _SOME),
    ("Gemma-4-31B full", 32, 4, 512, 0, "bfloat16", "bfloat16", _SOME),
    ("Gemma-4-31B full, e5m2", 32, 4, 512, 0, "bfloat16", "float8_e5m2", _NEW),
    ("Gemma-4-31B sliding", 32, 16, 256, 1024, "bfloat16", "bfloat16", _NEW),
    ("Gemma-4-31B sliding, e5m2", 32, 16, 256, 1024, "bfloat16", "float8_e5m2", (86, *_NEW)),
    ("Qwen3.5-27B, e5m2", 24, 4, 256, 0, "bfloat16", "float8_e5m2", _NEW),
    ("Qwen3.5-27B, e4m3", 24, 4, 256, 0, "bfloat16", "float8_e4m3fn", _NEW),
    ("Qwen3.5-27B, fp16 and e4m3", 24, 4, 256, 0, "float16", "float8_e4m3fn", (89, 90)),
    ("heads of 80 in fp32", 8, 8, 80, 0, "float32", "float32", (86, 90)),
)


def _variant(
    label: str, function: Any, types: dict[str, str], constants: dict[str, Any], tile: Tile, **more: Any
) -> Variant:
    names = [name for name in function.arg_names if name not in constants and name != "PDL"]
    signature = {name: _TYPES.get(name) or types[name] for name in names}
    pointers = {name for name in names if signature[name] in _POINTERS.values() and name not in LISTS}
    aligned = tuple(name for name in names if name in pointers or name == "q_stride")
    return Variant(
        label,
        function,
        signature,
        constants,
        tile.warps,
        tile.stages,
        declared=tile.shared or None,
        aligned=aligned,
        **more,
    )


def variants() -> Iterator[Variant]:
    """What the kernels compile to for the models of the plans, for each size of shared memory."""
    for label, heads, kv_heads, dim, window, dtype, kv_dtype, archs in _SHAPES:
        act, rows = _POINTERS[dtype], _POINTERS[kv_dtype]
        types = {"q": act, "out": act, "k": act, "v": act}
        types |= {name: rows for name in ("k_pages", "v_pages", "k_fresh", "v_fresh")}
        kind = KINDS.get(kv_dtype, 0)
        sizes = {"KV_HEADS": kv_heads, "GROUP": heads // kv_heads, "DIM": dim, "BLOCK_D": padded(dim), "BLOCK": 64}
        modes = {
            "KIND": kind,
            "SCALED": kind == 2,
            "SOFTCAP": False,
            "PRECISION": precision_of(dtype),
            "WINDOW": window,
        }
        size = wide(dtype, kv_dtype)
        for room, hopper in sorted({(SHARED[arch], arch == 90) for arch in archs}):
            alike = tuple(arch for arch in archs if (SHARED[arch], arch == 90) == (room, hopper))
            tile = decode_tile(dim, size, room)
            constants = sizes | modes | {"BLOCK_M": tile.queries, "TILE": tile.keys, "BASE": SMALLEST}
            yield _variant(f"paged_decode, {label}", paged_decode, types, constants, tile, archs=alike)
            tile = prefill_tile(dim, size, room, kind > 0, hopper)
            constants = sizes | modes | {"BLOCK_M": tile.queries, "TILE": tile.keys, "OWN": True}
            constants |= prefill_form(dim, kind > 0, window, hopper)
            yield _variant(f"paged_prefill, {label}", paged_prefill, types, constants, tile, archs=alike)
        small = Tile(0, 0, STORE_WARPS[8], 3, 0)
        constants = {name: sizes[name] for name in ("KV_HEADS", "DIM", "BLOCK_D", "BLOCK")}
        constants |= {"TOKENS": 8, "KIND": kind, "SCALED": kind == 2, "PAGES": True, "FRESH": kind > 0}
        yield _variant(f"store_rows, {label}", store_rows, types, constants, small, archs=archs[-1:])
    constants = {"HEADS": 32, "GROUP": 8, "DIM": 512, "BLOCK_D": 512, "BLOCK_P": 512, "STEP": step_of(512)}
    constants |= {"WINDOW": 0, "BASE": SMALLEST, "SCALED": False}
    sums = Tile(0, 0, 4, 3, 0)
    yield _variant("sum_partitions, Gemma-4-31B full", sum_partitions, {"out": "*bf16"}, constants, sums, archs=(90,))
