"""Triton attention against the reference, in the interpreter."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from attention_cases import Case, make, problem, rows_of, tolerance
from hypothesis import given
from hypothesis import strategies as st

from offroad.device.profile import load_profile
from offroad.ops.attention import OPS, attention
from offroad.ops.spec import Registry

pytest.importorskip("triton")


def bound(case: Case, phase: str, units: int = 2):
    """The kernel for a device with few SMs: each of its programs takes several partitions."""
    from offroad.triton_kernels import attention as kernels

    bind = kernels.bind_decode if phase == "decode" else kernels.bind_prefill
    return bind(replace(load_profile("h100-80gb"), units=units), problem(case, phase))


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
    "one token": Case(starts=(0,), widths=(1,), kv_heads=1),
    "ends of blocks": Case(starts=(62, 63, 64, 127), widths=(1, 1, 1, 1), kv_heads=1, group=4),
    "verify widths": Case(starts=(129, 61, 0, 63), widths=(1, 4, 2, 3), kv_heads=1, group=6),
    "two tiles of queries": Case(starts=(70, 5), widths=(3, 2), kv_heads=1, group=8),
    "several partitions": Case(starts=(400, 127, 257), widths=(2, 1, 1), kv_heads=1),
    "window": Case(starts=(300, 0, 40, 128), widths=(2, 1, 3, 1), window=70, kv_heads=1, group=2),
    "narrow window": Case(starts=(130, 64), widths=(3, 1), window=5),
    "softcap": Case(starts=(66,), widths=(2,), softcap=3.0),
    "odd head": Case(starts=(66, 3), widths=(2, 1), dim=80),
    "fp16": Case(starts=(66, 140), widths=(2, 1), dtype=F16, kv=F16),
    "bf16 pages": Case(starts=(66, 140), widths=(2, 1), dtype=F16, kv=BF16, pages_only=True),
    "e5m2": Case(starts=(66, 3), widths=(2, 1), kv=E5M2, kv_heads=1, group=4),
    "e4m3": Case(starts=(66, 3), widths=(2, 1), kv=E4M3, kv_heads=1, group=2),
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
    "one key of a tile is beyond": Case(starts=(31, 30), widths=(2, 2), window=32, kv_heads=1, group=8),
    "early tokens have no block": Case(starts=(0,), widths=(150,), window=20, retired=True, kv_heads=1),
    "softcap": Case(starts=(30,), widths=(40,), softcap=3.0, kv_heads=1),
    "odd head": Case(starts=(66, 3), widths=(20, 10), dim=80, kv_heads=1),
    "fp16": Case(starts=(66, 3), widths=(20, 10), dtype=F16, kv=F16),
    "pages in fp16": Case(starts=(66, 3), widths=(20, 10), kv=F16),
    "e5m2": Case(starts=(66, 3), widths=(20, 10), kv=E5M2, kv_heads=1),
    "e4m3 with scales": Case(starts=(66, 3), widths=(20, 10), kv=E4M3, scaled=True),
    "pages only": Case(starts=(66, 3), widths=(20, 10), pages_only=True, window=40),
    "heads of 256": Case(starts=(66, 30), widths=(20, 10), dim=256, kv_heads=1, group=2, dtype=BF16, kv=BF16),
    "heads of 256, e5m2": Case(starts=(66, 30), widths=(20, 10), dim=256, kv_heads=1, dtype=BF16, kv=E5M2),
    "heads of 512": Case(starts=(66, 30), widths=(20, 10), dim=512, kv_heads=1, group=2, dtype=BF16, kv=BF16),
    "heads of 512, e5m2": Case(starts=(31, 3), widths=(34, 10), dim=512, kv_heads=1, dtype=BF16, kv=E5M2),
}


@pytest.mark.parametrize("name", PREFILL)
def test_prefill(name: str):
    same(PREFILL[name], "prefill")


def part_of(values: tuple, row: int) -> tuple:
    """The step of one row of a case alone."""
    q, k, v, view, rows, spec = values
    span = slice(int(rows.offset[row]), int(rows.offset[row] + rows.width[row]))
    one = slice(row, row + 1)
    alone = rows_of(rows.start[one], rows.width[one], rows.slot[one], str(q.device))
    return q[span], k[span], v[span], view, alone, spec


@pytest.mark.parametrize("window", [None, 150])
@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_a_row_alone_gives_the_bits_that_it_gives_among_others(phase: str, window: int | None):
    case = Case(starts=(290, 0, 130), widths=(2, 3, 1), window=window, kv_heads=1, group=2)
    values = make(case)
    together = bound(case, phase)(*values)
    for row, span in enumerate((slice(0, 2), slice(2, 5), slice(5, 6))):
        alone = bound(case, phase, units=132)(*part_of(values, row))
        assert torch.equal(alone, together[span])


def test_a_prompt_cut_anywhere_gives_the_same_bits(exact_products):
    case = Case(starts=(0,), widths=(150,), kv_heads=1)
    q, k, v, view, rows, spec = make(case)
    whole = bound(case, "prefill")(q, k, v, view, rows, spec)
    first = 0
    for end in (50, 64, 150):
        part = rows_of(np.array([first]), np.array([end - first]), rows.slot, "cpu")
        cut = slice(first, end)
        assert torch.equal(bound(case, "prefill")(q[cut], k[cut], v[cut], view, part, spec), whole[cut])
        first = end


def test_a_verify_row_gives_the_bits_of_single_tokens(exact_products):
    case = Case(starts=(125,), widths=(4,), window=90, kv_heads=1, group=3)
    q, k, v, view, rows, spec = make(case)
    together = bound(case, "decode")(q, k, v, view, rows, spec)
    for token in range(4):
        one = slice(token, token + 1)
        part = rows_of(np.array([125 + token]), np.array([1]), rows.slot, "cpu")
        assert torch.equal(bound(case, "decode")(q[one], k[one], v[one], view, part, spec), together[one])


def test_rows_go_in_several_launches_where_partial_results_would_take_too_much(monkeypatch):
    from offroad.triton_kernels import attention as kernels

    monkeypatch.setattr(kernels, "room", lambda memory: 1)
    same(Case(starts=(70, 3, 129), widths=(2, 1, 1), kv_heads=1), "decode")


@given(st.integers(0, 1 << 20), st.sampled_from([128, 256]), st.booleans())
def test_partitions_on_the_host_follow_one_another(position: int, base: int, grows: bool):
    from offroad.triton_kernels.attention import partition_of

    step = partition_of(position + 1, base, grows) - partition_of(position, base, grows)
    assert step in (0, 1)
    assert step == 0 or (position + 1) % base == 0


def test_what_is_refused():
    from offroad.triton_kernels.attention import register

    registry = Registry()
    registry.add_op(OPS[0])
    register(registry)
    decode, prefill = registry.candidates("attention")

    def reason(kernel, case: Case, phase: str, profile: str = "h100-80gb") -> str:
        return kernel.check(load_profile(profile), problem(case, phase)).reason

    case = Case(starts=(0,), widths=(1,), dtype=BF16, kv=BF16, dim=128)
    assert reason(decode, case, "decode") == reason(prefill, case, "prefill") == "Triton kernel"
    assert "is for decode" in reason(decode, case, "prefill")
    assert "is for prefill" in reason(prefill, case, "decode")
    assert "up to 512" in reason(decode, replace(case, dim=576), "decode")
    assert "multiples of 16" in reason(prefill, replace(case, dim=100), "prefill")
    assert "runs on CUDA" in reason(decode, case, "decode", "cpu-avx2")
    assert "compute capability 8.0" in reason(decode, case, "decode", "v100-32gb")
    assert "bytes of shared memory" in reason(decode, replace(case, dim=512, dtype=F32, kv=F32), "decode", "rtx5090")
    assert "bytes of shared memory" in reason(prefill, replace(case, dim=512, dtype=F32, kv=E5M2), "prefill", "rtx5090")


@pytest.mark.parametrize(("kind", "largest"), [(E5M2, 57344.0), (E4M3, 448.0)])
def test_rows_are_rounded_and_limited_as_the_reference_does(kind, largest: float):
    """Every code, the halves between codes, what is beyond the largest, and NaN."""
    case = Case(starts=(0,), widths=(32,), kv=kind, kv_heads=1)
    q, k, v, view, rows, spec = make(case)
    codes = torch.arange(256, dtype=torch.uint8).view(kind).float()
    codes = codes[torch.isfinite(codes)].sort().values
    halves = (codes[1:] + codes[:-1]) / 2
    beyond = torch.tensor([largest * 1.01, -largest * 2, 1e30, -1e30, float("nan")])
    nearly = torch.cat((halves * (1 + 2**-22), halves * (1 - 2**-22)))
    numbers = torch.cat((codes, halves, beyond, nearly, codes))[: 2 * k.numel()]
    k = numbers[: k.numel()].view_as(k)
    v = torch.nn.functional.pad(numbers[k.numel() :], (0, 2 * k.numel() - len(numbers))).view_as(k)
    ours = replace(view, k=view.k.clone(), v=view.v.clone())
    attention(q, k, v, view, rows, spec)
    bound(case, "decode")(q, k, v, ours, rows, spec)
    assert torch.equal(ours.k.view(torch.uint8), view.k.view(torch.uint8))
    assert torch.equal(ours.v.view(torch.uint8), view.v.view(torch.uint8))
