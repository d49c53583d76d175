"""Canonical packing against the gguf library's dequantisation, for every block kind."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from offroad.quant.packed import dequantise
from offroad.quant.scheme import canonical, fuse, layout_of, to_dense, widen
from offroad.weights.source import Stored, TensorHeader

AFFINE = {
    "Q4_0": "affine4",
    "Q4_1": "affine4",
    "Q4_K": "affine4",
    "Q5_0": "affine8",
    "Q5_1": "affine8",
    "Q8_0": "affine8",
    "Q5_K": "affine8",
    "Q6_K": "affine8",
}
OTHERS = ("Q2_K", "Q3_K", "IQ4_NL", "IQ4_XS", "TQ1_0", "MXFP4")
HALVES = {
    "Q4_0": [0],
    "Q4_1": [0, 2],
    "Q5_0": [0],
    "Q5_1": [0, 2],
    "Q8_0": [0],
    "Q4_K": [0, 2],
    "Q5_K": [0, 2],
    "Q6_K": [208],
    "Q2_K": [80, 82],
    "Q3_K": [108],
    "IQ4_NL": [0],
    "IQ4_XS": [0],
    "TQ1_0": [52],
    "MXFP4": [],
}


def blocks(kind: str, n: int, k: int, seed: int = 0) -> Stored:
    """Random bytes for every field, and fp16 scales that are finite and of both signs."""
    rng = np.random.default_rng(seed)
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    raw = rng.integers(0, 256, (n, k // block, size), np.uint8)
    for at in HALVES[kind]:
        scales = rng.normal(0.0, 0.05, (n, k // block, 1)).astype(np.float16)
        raw[..., at : at + 2] = scales.view(np.uint8)
    if kind == "MXFP4":
        raw[..., 0] = rng.integers(110, 130, (n, k // block))
    raw = raw.reshape(n, -1)
    header = TensorHeader("w", (n, k), f"gguf.{kind.lower()}", raw.nbytes)
    return Stored(header, torch.from_numpy(raw))


def by_library(stored: Stored) -> torch.Tensor:
    kind = GGMLQuantizationType[stored.header.kind.removeprefix("gguf.").upper()]
    return torch.from_numpy(dequantize(stored.data.numpy(), kind)).reshape(stored.header.shape)


def dense(n: int, k: int, dtype: torch.dtype = torch.bfloat16) -> Stored:
    kind = {torch.bfloat16: "bf16", torch.float32: "f32", torch.float16: "f16"}[dtype]
    w = torch.randn(n, k, generator=torch.Generator().manual_seed(n)).to(dtype)
    return Stored(TensorHeader("w", (n, k), kind, w.nbytes), w)


@pytest.mark.parametrize(("n", "k"), [(1, 256), (7, 512), (33, 768)])
@pytest.mark.parametrize("kind", AFFINE)
def test_affine_kinds_have_the_library_s_values_exactly(kind, n, k):
    stored = blocks(kind, n, k, seed=n)
    packed = canonical(stored)
    assert packed.layout == AFFINE[kind] == layout_of((stored.header.kind,))
    assert packed.group == (16 if kind == "Q6_K" else 32)
    assert packed.tensors["q"].dtype == (torch.uint8 if packed.layout == "affine4" else torch.int8)
    assert all(t.is_contiguous() for t in packed.tensors.values())
    assert ("m" in packed.tensors) == (kind not in ("Q5_0", "Q8_0", "Q6_K"))
    assert torch.equal(dequantise(packed), by_library(stored))


@pytest.mark.parametrize("kind", OTHERS)
def test_other_kinds_become_dense_with_the_library_s_values(kind):
    stored = blocks(kind, 5, 512)
    packed = canonical(stored)
    assert packed.layout == "dense" == layout_of((stored.header.kind,))
    assert torch.equal(packed.tensors["w"], by_library(stored))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_float_kinds_stay_as_they_are(dtype):
    stored = dense(4, 32, dtype)
    assert torch.equal(canonical(stored).tensors["w"], stored.data)
    assert to_dense(canonical(stored), dtype).tensors["w"].data_ptr() != stored.data.data_ptr()


MIXES = [
    (("Q4_0", "Q4_K", "Q4_1"), "affine4", 32),
    (("Q5_0", "Q5_0", "Q8_0"), "affine8", 32),
    (("Q4_1", "Q8_0"), "affine8", 32),
    (("Q6_K", "Q4_K"), "affine8", 16),
    (("Q5_K", "Q6_K", "Q5_0"), "affine8", 16),
    (("Q4_0", "F"), "dense", 0),
    (("F", "F"), "dense", 0),
    (("Q8_0", "Q2_K"), "dense", 0),
]


@pytest.mark.parametrize(("kinds", "layout", "group"), MIXES)
def test_fusing_keeps_every_value_and_the_layout_is_foretold(kinds, layout, group):
    parts = [dense(3 + i, 512) if kind == "F" else blocks(kind, 3 + i, 512, seed=i) for i, kind in enumerate(kinds)]
    fused = fuse([canonical(part) for part in parts])
    assert fused.layout == layout == layout_of(tuple(part.header.kind for part in parts))
    assert (fused.n, fused.k, fused.group) == (sum(part.header.shape[0] for part in parts), 512, group)
    expected = torch.cat([part.data.float() if "gguf" not in part.header.kind else by_library(part) for part in parts])
    assert torch.equal(dequantise(fused), expected)


def test_dense_parts_of_one_dtype_keep_it():
    assert fuse([canonical(dense(2, 8)), canonical(dense(3, 8))]).tensors["w"].dtype == torch.bfloat16


@pytest.mark.parametrize("kind", AFFINE)
def test_to_dense_and_widening_keep_the_values(kind):
    stored = blocks(kind, 6, 256)
    expected, packed = by_library(stored), canonical(stored)
    assert torch.equal(to_dense(packed, torch.float32).tensors["w"], expected)
    assert torch.equal(to_dense(packed, torch.bfloat16).tensors["w"], expected.bfloat16())
    assert torch.equal(dequantise(widen(packed, 16)), expected)


def test_large_scales_do_not_lose_bits():
    """-8 * d of q4_0 is exact for any finite fp16 scale."""
    stored = blocks("Q4_0", 1, 64)
    stored.data.view(1, 2, 18)[:, :, :2] = torch.from_numpy(
        np.array([60000.0, 6e-8], np.float16).view(np.uint8).reshape(1, 2, 2)
    )
    assert torch.equal(dequantise(canonical(stored)), by_library(stored))
