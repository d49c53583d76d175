"""Triton's and Hopper's attention on a GPU: against the reference at real head sizes, batch invariance, graphs."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "cpu/triton_kernels"))
from attention_cases import Case, make, problem, rows_of, tolerance  # noqa: E402
from rope_store_cases import SPECS  # noqa: E402
from rope_store_cases import same as same_stored  # noqa: E402

from offroad.device.probe import probe_cuda  # noqa: E402
from offroad.nvrtc import attention_few, hopper  # noqa: E402
from offroad.ops.attention import attention  # noqa: E402
from offroad.ops.registry import default_registry  # noqa: E402

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

F16, F32, BF16 = torch.float16, torch.float32, torch.bfloat16
E5M2, E4M3 = torch.float8_e5m2, torch.float8_e4m3fn
KERNELS = {"decode": "triton.paged_decode", "prefill": "triton.paged_prefill", "hopper": hopper.ATTENTION}
DECODE = ["decode", "hopper"]


@pytest.fixture(autouse=True)
def _few_rows_too(monkeypatch):
    monkeypatch.setattr(attention_few, "LEAST_STREAMS", 0)


def bound(case: Case, phase: str):
    """A kernel for a case; "hopper" is one of decode's, for its cards, bf16 and some heads."""
    device, asked = probe_cuda(), problem(case, "prefill" if phase == "prefill" else "decode")
    kernel = default_registry().kernels[KERNELS[phase]]
    verdict = kernel.check(device, asked)
    if phase == "hopper":
        other = device.compute_capability != hopper.HOPPER or case.dtype != BF16 or case.dim not in attention_few.DIMS
        if other:
            assert not verdict.ok
            pytest.skip(verdict.reason)
    if case.kv == E4M3 and not device.has("cvt_e4m3"):
        assert not verdict.ok
        pytest.skip(verdict.reason)
    if (case.dim, case.dtype) == (512, F32) and phase == "decode" and device.shared_per_block < 128 << 10:
        assert "bytes of shared memory" in verdict.reason
        pytest.skip(verdict.reason)
    assert verdict.ok, verdict.reason
    return kernel.prepare(device, asked)


def same(case: Case, phase: str) -> None:
    case = replace(case, device="cuda")
    q, k, v, view, rows, spec = make(case)
    ours = replace(view, k=view.k.clone(), v=view.v.clone())
    found = bound(case, phase)(q, k, v, ours, rows, spec)
    expected = attention(q, k, v, view, rows, spec)
    torch.testing.assert_close(found.float(), expected.float(), **tolerance(case))
    for mine, theirs in ((ours.k, view.k), (ours.v, view.v)):
        assert torch.equal(mine[1:].view(torch.uint8), theirs[1:].view(torch.uint8))


@pytest.mark.parametrize(("kv_heads", "group", "dim"), [(8, 4, 128), (4, 6, 256), (4, 8, 512), (2, 1, 64), (2, 2, 80)])
@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize("phase", [*DECODE, "prefill"])
def test_heads(phase: str, dtype: torch.dtype, kv_heads: int, group: int, dim: int):
    widths = (1, 4, 2, 8, 1) if phase != "prefill" else (1, 300, 63, 129, 700)
    same(Case((0, 61, 4100, 1030, 63), widths, kv_heads, group, dim, dtype=dtype, kv=dtype), phase)


@pytest.mark.parametrize("kind", [E5M2, E4M3])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("phase", [*DECODE, "prefill"])
def test_8_bit_rows(phase: str, dtype: torch.dtype, scaled: bool, kind: torch.dtype):
    widths = (1, 4) if phase != "prefill" else (130, 70)
    for dim, window in ((128, None), (256, 300), (256, None), (512, None)):
        same(Case((700, 61), widths, 2, 4, dim, window, dtype=dtype, kv=kind, scaled=scaled), phase)


@pytest.mark.parametrize(
    ("window", "softcap", "pages_only"), [(1024, None, False), (100, 30.0, False), (512, None, True)]
)
@pytest.mark.parametrize("phase", [*DECODE, "prefill"])
def test_features(phase: str, window: int, softcap: float | None, pages_only: bool):
    widths = (3, 1, 2) if phase != "prefill" else (1500, 1, 200)
    case = Case((2000, 0, 1023), widths, 4, 2, 256, window, softcap, BF16, BF16, pages_only=pages_only)
    same(case, phase)


def test_early_tokens_of_a_chunk_have_no_block():
    same(Case((0,), (1500,), 2, 2, 256, 512, dtype=BF16, kv=BF16, retired=True), "prefill")


@pytest.mark.parametrize("phase", [*DECODE, "prefill"])
def test_long_contexts_and_pages_beyond_2_gib(phase: str):
    width = 2 if phase != "prefill" else 100
    blocks = 2**31 // (64 * 4 * 256 * 2) + 1200
    same(Case((70_000, 33_000), (width, 1), 4, 6, 256, dtype=BF16, kv=BF16, blocks=blocks), phase)


@pytest.mark.parametrize(
    ("kv_heads", "group", "dim", "window"), [(8, 4, 128, None), (4, 6, 256, None), (4, 2, 256, 700), (4, 8, 512, None)]
)
@pytest.mark.parametrize("phase", [*DECODE, "prefill"])
def test_a_row_alone_gives_the_bits_that_it_gives_among_others(phase: str, kv_heads, group, dim, window):
    widths = (1, 4, 2, 1) if phase != "prefill" else (300, 70, 129, 1)
    case = Case((5000, 61, 1030, 9000), widths, kv_heads, group, dim, window, dtype=BF16, kv=BF16, device="cuda")
    q, k, v, view, rows, spec = make(case)
    kernel = bound(case, phase)
    together = kernel(q, k, v, view, rows, spec)
    for row in range(4):
        span = slice(int(rows.offset[row]), int(rows.offset[row] + rows.width[row]))
        one = slice(row, row + 1)
        alone = rows_of(rows.start[one], rows.width[one], rows.slot[one], "cuda")
        assert torch.equal(kernel(q[span], k[span], v[span], view, alone, spec), together[span])


@pytest.mark.parametrize("phase", DECODE)
def test_a_verify_row_gives_the_bits_of_single_tokens(phase: str):
    case = Case((4090,), (8,), 4, 6, 256, dtype=BF16, kv=BF16, device="cuda")
    q, k, v, view, rows, spec = make(case)
    kernel = bound(case, phase)
    together = kernel(q, k, v, view, rows, spec)
    for token in range(8):
        one = slice(token, token + 1)
        part = rows_of(np.array([4090 + token]), np.array([1]), rows.slot, "cuda")
        assert torch.equal(kernel(q[one], k[one], v[one], view, part, spec), together[one])


def test_a_prompt_cut_anywhere_gives_the_same_bits():
    case = Case((0,), (700,), 4, 6, 256, dtype=BF16, kv=BF16, device="cuda")
    q, k, v, view, rows, spec = make(case)
    kernel = bound(case, "prefill")
    whole = kernel(q, k, v, view, rows, spec)
    first = 0
    for end in (50, 64, 512, 577, 700):
        part = rows_of(np.array([first]), np.array([end - first]), rows.slot, "cuda")
        cut = slice(first, end)
        assert torch.equal(kernel(q[cut], k[cut], v[cut], view, part, spec), whole[cut])
        first = end


@pytest.mark.parametrize("phase", DECODE)
def test_decode_in_a_graph_follows_lengths_on_the_device(phase: str):
    """A graph that is captured at one length answers at another: nothing is sized by what the host knows of them."""
    case = Case((600, 900), (1, 1), 4, 6, 256, dtype=BF16, kv=BF16, device="cuda")
    q, k, v, view, rows, spec = make(case)
    kernel = bound(case, phase)
    kernel(q, k, v, view, rows, spec)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = kernel(q, k, v, view, rows, spec)
    rows.start_t.copy_(torch.tensor([300, 70]))
    rows.positions.copy_(torch.tensor([300, 70]))
    graph.replay()
    shorter = rows_of(np.array([300, 70]), np.array([1, 1]), rows.slot, "cuda")
    expected = attention(q, k, v, view, shorter, spec)
    torch.testing.assert_close(out.float(), expected.float(), **tolerance(case))


def test_many_rows_of_very_different_lengths():
    lengths = (70_000, 1, 0, *range(64, 64 * 95, 64))
    same(Case(lengths, (1,) * len(lengths), 2, 4, 128, dtype=BF16, kv=BF16), "hopper")


@pytest.mark.parametrize("kv", [BF16, E5M2, E4M3])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_keys_and_values_rotated_into_their_pages(spec, kv: torch.dtype):
    """The bits of rotation and store one after the other."""
    same_stored(spec, kv, BF16, "cuda", scaled=kv != BF16)
