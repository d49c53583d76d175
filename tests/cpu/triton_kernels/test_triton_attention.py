"""Triton attention against the reference, in the interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attention_cases import Case, make, problem, tolerance

from offroad.device.profile import load_profile
from offroad.ops.attention import attention

pytest.importorskip("triton")


def bound(case: Case, phase: str):
    from offroad.triton_kernels import attention as kernels

    bind = kernels.bind_decode if phase == "decode" else kernels.bind_prefill
    return bind(load_profile("h100-80gb"), problem(case, phase))


def same(case: Case, phase: str) -> None:
    """The kernel's answer and its pages are the reference's."""
    q, k, v, view, rows, spec = make(case)
    ours = replace(view, k=view.k.clone(), v=view.v.clone())
    expected = attention(q, k, v, view, rows, spec)
    found = bound(case, phase)(q, k, v, ours, rows, spec)
    torch.testing.assert_close(found.float(), expected.float(), **tolerance(case))
    for mine, theirs in ((ours.k, view.k), (ours.v, view.v)):
        assert torch.equal(mine[1:].view(torch.uint8), theirs[1:].view(torch.uint8))


F16, F32, BF16 = torch.float16, torch.float32, torch.bfloat16
E5M2, E4M3 = torch.float8_e5m2, torch.float8_e4m3fn

DECODE = {
    "one token": Case(starts=(0,), widths=(1,)),
    "ends of blocks": Case(starts=(62, 63, 64, 127), widths=(1, 1, 1, 1), group=4),
    "verify widths": Case(starts=(129, 61, 0, 63), widths=(1, 4, 2, 3), group=6),
    "two tiles of queries": Case(starts=(70, 5), widths=(3, 2), group=8),
    "several partitions": Case(starts=(400, 127, 257), widths=(2, 1, 1), group=1),
    "window": Case(starts=(300, 0, 40, 128), widths=(2, 1, 3, 1), window=70, group=2),
    "narrow window": Case(starts=(130, 64), widths=(3, 1), window=5),
    "softcap": Case(starts=(66,), widths=(2,), softcap=3.0),
    "odd head": Case(starts=(66, 3), widths=(2, 1), dim=80),
    "fp16": Case(starts=(66, 140), widths=(2, 1), dtype=F16, kv=F16),
    "bf16 pages": Case(starts=(66, 140), widths=(2, 1), dtype=F16, kv=BF16, pages_only=True),
    "e5m2": Case(starts=(66, 3), widths=(2, 1), kv=E5M2, group=4),
    "e4m3": Case(starts=(66, 3), widths=(2, 1), kv=E4M3, group=4),
    "e4m3 with scales": Case(starts=(66, 3), widths=(2, 1), kv=E4M3, scaled=True, window=30),
    "pages only": Case(starts=(66, 3), widths=(2, 1), pages_only=True, window=40),
}


@pytest.mark.parametrize("name", DECODE)
def test_decode(name: str):
    same(DECODE[name], "decode")


PREFILL = {
    "a prompt": Case(starts=(0,), widths=(70,)),
    "chunks at odd starts": Case(starts=(65, 0, 130), widths=(40, 3, 66), kv_heads=1, group=4),
    "one token": Case(starts=(64, 0), widths=(1, 1), kv_heads=1, group=6),
    "window": Case(starts=(100, 0), widths=(90, 20), window=33, kv_heads=1, group=2),
    "early tokens have no block": Case(starts=(0,), widths=(150,), window=20, retired=True, kv_heads=1),
    "softcap": Case(starts=(30,), widths=(40,), softcap=3.0, kv_heads=1),
    "odd head": Case(starts=(66, 3), widths=(20, 10), dim=80, kv_heads=1),
    "fp16": Case(starts=(66, 3), widths=(20, 10), dtype=F16, kv=F16),
    "pages in fp16": Case(starts=(66, 3), widths=(20, 10), kv=F16),
    "e5m2": Case(starts=(66, 3), widths=(20, 10), kv=E5M2, kv_heads=1),
    "e4m3 with scales": Case(starts=(66, 3), widths=(20, 70), kv=E4M3, scaled=True),
    "pages only": Case(starts=(66, 3), widths=(20, 70), pages_only=True, window=40),
}


@pytest.mark.parametrize("name", PREFILL)
def test_prefill(name: str):
    same(PREFILL[name], "prefill")
