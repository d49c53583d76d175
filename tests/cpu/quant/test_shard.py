"""Parts of weights: put together again they are the whole, whatever the group, the layout and the order of columns."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offroad.quant.packed import Packed, dequantise
from offroad.quant.shard import shard


def weight(layout: str, n: int, k: int, group: int, ordered: bool, seed: int) -> Packed:
    draw = torch.Generator().manual_seed(seed)
    groups = -(-k // group)
    if layout == "dense":
        return Packed("dense", n, k, {"w": torch.randn(n, k, generator=draw)}, bias=torch.randn(n, generator=draw))
    if layout in ("affine4", "fp4"):
        q = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, generator=draw)
    elif layout == "fp8":
        q = torch.randn(n, k, generator=draw).to(torch.float8_e4m3fn)
    else:
        q = torch.randint(-128, 128, (n, k), dtype=torch.int8, generator=draw)
    tensors = {"q": q, "s": torch.rand(n, groups, generator=draw)}
    if layout == "affine4":
        tensors["m"] = torch.randn(n, groups, generator=draw)
    perm = torch.randperm(k, generator=draw) if ordered else None
    return Packed(layout, n, k, tensors, group, torch.randn(n, generator=draw), perm)


@pytest.mark.parametrize("axis", ["rows", "columns"])
@given(
    st.sampled_from(["dense", "affine4", "affine8", "fp8", "fp4"]),
    st.sampled_from([16, 32, 48, 96, 128, 192]),
    st.sampled_from([1, 2, 3, 4]),
    st.booleans(),
    st.integers(0, 5),
)
@settings(max_examples=80, deadline=None)
def test_parts_are_the_whole(axis: str, layout: str, group: int, ranks: int, ordered: bool, seed: int):
    n, k = 12, 192
    whole = weight(layout, n, k, group, ordered and layout != "dense", seed)
    parts = [shard(whole, axis, rank, ranks) for rank in range(ranks)]
    assert all((part.n, part.k) == ((n // ranks, k) if axis == "rows" else (n, k // ranks)) for part in parts)
    together = torch.cat([dequantise(part) for part in parts], dim=0 if axis == "rows" else 1)
    assert torch.equal(together, dequantise(whole))
    x = torch.randn(3, k)
    expected = x @ dequantise(whole).T + whole.bias
    if axis == "rows":
        got = torch.cat([x @ dequantise(part).T + part.bias for part in parts], dim=1)
    else:
        widths = x.split(k // ranks, dim=1)
        got = sum(
            y @ dequantise(part).T + (0 if part.bias is None else part.bias)
            for y, part in zip(widths, parts, strict=True)
        )
    torch.testing.assert_close(got, expected, atol=2e-3, rtol=1e-4)


def test_a_part_keeps_its_layout_and_whole_groups():
    whole = weight("affine4", 8, 384, 128, False, 0)
    part = shard(whole, "columns", 1, 2)  # 192 columns: a group and a half
    assert (part.layout, part.group, part.tensors["s"].shape) == ("affine4", 64, (8, 3))
    assert shard(whole, "columns", 2, 3).group == 128
    channel = weight("fp8", 8, 384, 384, False, 0)
    assert torch.equal(shard(channel, "columns", 1, 2).tensors["s"], channel.tensors["s"])
