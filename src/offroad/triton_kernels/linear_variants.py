"""Specialisations of the linear kernels that are compiled for every GPU named, without one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from offroad.triton_kernels.compile import Variant
from offroad.triton_kernels.linear_jit import dequantise, linear


def _variant(label: str, kind: str, bm: int = 16, bn: int = 128, dtype: str = "bf16", **options: Any) -> Variant:
    """One specialisation, with the flags of `options` (others are off)."""
    stored = dtype if kind == "dense" else "i32"
    scale = "u8" if options.get("E4M3_SCALES") else options.pop("scale", "bf16")
    pointers = {"x": dtype, "w": stored, "y": dtype, "partial": "fp32", "arrived": "i32"}
    pointers |= {} if kind == "dense" else {"s": scale}
    pointers |= {"m": "i16"} if options.get("HAS_M") else {}
    pointers |= {"row_scale": "fp32"} if options.get("HAS_ROW_SCALE") else {}
    pointers |= {"ids": "i64", "owner": "i64"} if options.get("GROUPED") else {}
    sizes = ("rows", "n", "k", "units", "tiles", "s_group", "per_token")
    constants = {
        "KIND": kind,
        "FOLD": 1,
        "GROUP_UNITS": 1,
        "BN": bn,
        "BM": bm,
        "SPLIT": 4,
        "STAGES": 4,
        "EVEN": True,
        "GATE": "",
    }
    constants |= {"ASM": dtype != "fp32"} | dict.fromkeys(_FLAGS, False)
    warps, archs = options.pop("warps", 4), options.pop("archs")
    registers = options.pop("registers", None)
    constants |= options
    constants |= {name: None for name in ("s", "m", "row_scale", "bias", "ids", "owner") if name not in pointers}
    signature = {name: f"*{kind}" for name, kind in pointers.items()} | dict.fromkeys(sizes, "i32")
    aligned = (*pointers, "n", "k", "s_group")
    stages = constants["STAGES"]
    return Variant(label, linear, signature, constants, warps, stages, archs, aligned=aligned, registers=registers)


_FLAGS = ("E4M3_SCALES", "HAS_M", "HAS_ROW_SCALE", "HAS_BIAS", "GROUPED")


def _dequantise(label: str, kind: str, **options: Any) -> Variant:
    pointers = {"w": "*i32", "s": "*bf16", "out": "*bf16"}
    sizes = dict.fromkeys(("first", "last", "k", "units", "s_group"), "i32")
    constants = {
        "KIND": kind,
        "FOLD": 1,
        "GROUP_UNITS": 1,
        "E4M3_SCALES": False,
        "HAS_M": False,
        "HAS_ROW_SCALE": False,
        "ASM": True,
    }
    archs = options.pop("archs")
    constants |= {"m": None, "row_scale": None} | options
    aligned = (*pointers, "k", "s_group")
    return Variant(label, dequantise, pointers | sizes, constants, archs=archs, aligned=aligned)


def variants() -> Iterator[Variant]:
    """What the models of the plans use, on the GPUs where it differs."""
    fast, both, hopper = (80, 90, 100, 120), (90, 120), (90,)
    few = dict(STAGES=3)
    yield _variant("linear int4 g128, 16 rows", "int4", 16, 64, archs=fast, **few)
    yield _variant("linear int4 g128, 32 rows", "int4", 32, 64, STAGES=3, registers=96, archs=hopper)
    yield _variant("linear int4 g128, 64 rows", "int4", 64, 64, STAGES=3, archs=fast)
    wide = dict(warps=8, registers=128)
    yield _variant("linear int4 g128, more rows", "int4", 64, 128, STAGES=3, SPLIT=1, archs=hopper, **wide)
    yield _variant("linear int4 g32, more rows", "int4", 64, 128, FOLD=4, STAGES=3, SPLIT=1, archs=hopper, **wide)
    yield _variant("linear int4 g128 asymmetric, 16 rows", "int4", 16, 64, HAS_M=True, archs=both, **few)
    yield _variant("linear int4 g128 asymmetric, 32 rows", "int4", 32, 64, HAS_M=True, archs=hopper, **few)
    yield _variant("linear int4 g128 asymmetric, 64 rows", "int4", 64, 64, HAS_M=True, archs=hopper, **few)
    yield _variant("linear int4 g32, 16 rows", "int4", 16, 64, FOLD=4, archs=both, **few)
    nvfp4 = dict(FOLD=8, E4M3_SCALES=True, HAS_ROW_SCALE=True)
    yield _variant("linear nvfp4, 16 rows", "e2m1", 16, 64, archs=both, **few | nvfp4)
    yield _variant("linear fp8, 16 rows", "e4m3", 16, 64, scale="fp32", STAGES=3, archs=fast)
    yield _variant("linear fp8, 16 rows, shares", "e4m3", 16, 64, scale="fp32", SPLIT=0, archs=hopper)
    yield _variant("linear fp8, 32 rows, shares", "e4m3", 32, 64, scale="fp32", SPLIT=0, archs=hopper)
    yield _variant("linear fp8, 64 rows", "e4m3", 64, 64, scale="fp32", STAGES=3, archs=fast)
    yield _variant("linear int8, 16 rows", "int8", 16, 64, scale="fp32", STAGES=3, archs=both)
    yield _variant("grouped linear int4 g128, 16 rows", "int4", 16, 64, GROUPED=True, archs=both, **few)
    yield _variant("grouped linear fp8, 32 rows", "e4m3", 32, scale="fp32", GROUPED=True, STAGES=3, archs=both)
    yield _variant("grouped linear bf16, 64 rows", "dense", 64, 64, GROUPED=True, STAGES=3, archs=(80, 90, 120))
    yield _variant("linear int4 g128, 32 rows, fp32", "int4", 32, 64, dtype="fp32", STAGES=2, archs=(86, 90))
    behind = dict(GATE="silu", STAGES=3, SPLIT=1)
    yield _variant("gated linear int4 g128, 16 rows", "int4", 16, 64, archs=fast, **behind | {"SPLIT": 2})
    yield _variant("gated linear int4 g128, 64 rows", "int4", 64, 64, archs=fast, **behind)
    yield _variant("gated linear nvfp4, 16 rows", "e2m1", 16, 64, archs=hopper, **behind | nvfp4)
    shares = dict(GATE="silu", SPLIT=0)
    yield _variant("gated linear fp8, 16 rows, shares", "e4m3", 16, 64, scale="fp32", archs=hopper, **shares)
    yield _variant("gated linear fp8, 16 rows", "e4m3", 16, 64, scale="fp32", archs=(80, 100, 120), **behind)
    yield _variant("gated linear fp8, 64 rows", "e4m3", 64, 64, scale="fp32", archs=fast, **behind)
    yield _variant("gated linear bf16, 16 rows", "dense", 16, 64, archs=both, **behind | {"GATE": "gelu_tanh"})
    few = dict(GROUPED=True, archs=fast)
    yield _variant("gated grouped linear int4 g128, 16 rows", "int4", 16, 64, **few, **behind | {"SPLIT": 4})
    yield _variant("gated grouped linear int4 g128, 64 rows", "int4", 64, 64, **few, **behind)
    yield _variant("gated grouped linear nvfp4, 16 rows", "e2m1", 16, 64, **few, **behind | nvfp4)
    yield _variant("gated grouped linear fp8, 16 rows", "e4m3", 16, scale="fp32", **few, **behind)
    yield _variant("gated grouped linear fp8, 64 rows", "e4m3", 64, 64, scale="fp32", **few, **behind)
    yield _variant("gated grouped linear bf16, 64 rows", "dense", 64, 64, **few, **behind)
    yield _dequantise("dequantise int4 g128", "int4", archs=hopper)
