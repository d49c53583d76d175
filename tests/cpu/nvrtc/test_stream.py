"""Linears whose weights stream, emulated: the reference's numbers over odd shapes, whatever the order of threads."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from linear_cases import check, random_weight
from sm70_emulated import ORDER, load, needs_compiler

from offroad.nvrtc import compile, launch, stream
from offroad.nvrtc.stream import Streamer, cut
from offroad.ops.linear import linear
from offroad.triton_kernels.linear_pack import pack

# Layout, group (0: all of k), symmetric, n, k: slices of k that are no multiple of the warps, tiles that are not full.
CASES = (
    ("affine4", 128, True, 40, 1160),
    ("affine4", 128, False, 130, 2048),
    ("affine4", 128, False, 16, 1032),
    ("affine4", 0, True, 70, 1152),
    ("affine4", 256, True, 24, 2304),
    ("fp8", 128, True, 70, 1288),
    ("fp8", 0, True, 64, 2048),
)


@pytest.fixture(autouse=True)
def _emulated(monkeypatch):
    monkeypatch.setattr(launch, "load", load)
    stream.cut.cache_clear()


def run(case: tuple, rows: int, dtype: torch.dtype = torch.bfloat16) -> None:
    layout, group, symmetric, n, k = case
    weight = random_weight(layout, n, k, group or k, sym=symmetric)
    weight = replace(weight, bias=torch.randn(n).to(dtype))
    x = (0.5 * torch.randn(rows, k)).to(dtype)
    expected = linear(x.float(), replace(weight, bias=weight.bias.float()))
    found = Streamer(4).run(x, pack(weight))
    check(found, expected, str(dtype).removeprefix("torch."))


@needs_compiler
@pytest.mark.parametrize("case", CASES, ids=str)
def test_numbers(case: tuple, monkeypatch):
    torch.manual_seed(0)
    run(case, 1)
    run(case, 5, torch.float16)
    monkeypatch.setattr(ORDER, "seed", 1)
    run(case, 8)


@needs_compiler
def test_a_row_has_the_same_bits_in_every_batch():
    torch.manual_seed(0)
    weight, x = pack(random_weight("affine4", 48, 2048, 128)), torch.randn(8, 2048).bfloat16()
    streamer = Streamer(4)
    together = streamer.run(x, weight)
    for row in (0, 3, 7):
        assert torch.equal(streamer.run(x[row : row + 1], weight), together[row : row + 1])


@needs_compiler
@pytest.mark.parametrize("without", range(2))
def test_a_missing_barrier_is_noticed(without: int, monkeypatch):
    monkeypatch.setattr(ORDER, "without", without)
    with pytest.raises(AssertionError):
        for seed in range(1, 6):
            monkeypatch.setattr(ORDER, "seed", seed)
            torch.manual_seed(seed)
            run(CASES[1], 3)


def test_cuts_divide_evenly_and_depend_on_no_number_of_tokens():
    """Real shapes on 132 SMs: no block has more than 15 % over the mean."""
    for n, k in ((34816, 5120), (5120, 17408), (16384, 5120), (5120, 6144), (43008, 5376), (5376, 21504)):
        units, tiles = -(-k // 128), -(-n // 16)
        at = cut(n, units, stream.ring_bytes("int4"), 264)
        assert at.slices * at.ranges <= 264
        assert at.shared <= stream.ROOM
        most = -(-tiles // at.ranges) * -(-units // at.slices)
        assert most <= 1.15 * tiles * units / 264


@pytest.mark.skipif(compile.toolchain() is None, reason="no NVRTC")
@pytest.mark.parametrize("arch", [80, 86, 89, 90, 100, 120, 121])
def test_it_compiles_without_spills(arch: int):
    for kind, minima in (("int4", 0), ("e4m3", 0), *((("int4", 1),) if arch in (90, 120) else ())):
        image = compile.compile_source(stream.source(kind, True, torch.bfloat16, minima), f"sm_{arch}")
        [resources] = image.resources()
        assert resources.spilled == 0, (kind, minima)
