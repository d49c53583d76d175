"""Hopper's kernels compile without a GPU, within its registers and shared memory; the linears' products are wgmma.

--thorough compiles the linears for every number of scales to a step and every gate, not only those that time goes to.
"""

from __future__ import annotations

import re
from itertools import product

import pytest

from offroad.nvrtc import compile
from offroad.nvrtc.compile import FOLDER, Resources, Source, compile_source
from offroad.nvrtc.hopper import SHARED
from offroad.nvrtc.report import tensor_instructions

pytest.importorskip("triton")  # has the disassembler; linears read the records of its kernels

from offroad.nvrtc import attention_few, delta_token, linear_few, linear_hopper  # noqa: E402
from offroad.nvrtc.linear_args import GATES, TARGET  # noqa: E402
from offroad.nvrtc.linear_few import Kind  # noqa: E402
from offroad.nvrtc.linear_hopper import STAGES, WARPGROUPS, threads  # noqa: E402

needs_nvrtc = pytest.mark.skipif(
    compile.toolchain() is None or not compile.supports(TARGET), reason="no NVRTC: pip install 'offroad[sm70]'"
)
FOLDS, MINIMA = (1, 2, 4, 8), (False, True)
HOT = [*product((1,), (0,), MINIMA, ("", "silu"))]  # fold, scales, minima, gate
KINDS = [kind for kind in product(FOLDS, range(3), MINIMA, GATES) if kind[0] == 1 or kind[1] == 0]
HOT += product((1,), (0, 2), (False,), ("", "silu"), (8,))  # and bits of codes
KINDS += product((1,), range(3), (False,), GATES, (8,))


def image_of(source: Source, kernel: str) -> tuple[Resources, int]:
    """What ptxas says of it, and its tensor-core instructions."""
    image = compile_source(source, TARGET)
    return image.resources()[0], tensor_instructions(image.code)[kernel]


def registers_moved(file: str) -> tuple[int, int]:
    """What a thread that starts copies keeps, and what one that multiplies has."""
    text = (FOLDER / "kernels" / file).read_text()
    give, take = (int(re.search(rf"{which}_registers<(\d+)>", text)[1]) for which in ("give", "take"))
    return give, take


# Tokens, strips of a block, and how weights are stored: as of Qwen3.5-27B and Gemma-4-31B on 132 SMs.
FEW = [(8, 3, Kind()), (8, 8, Kind(4)), (8, 18, Kind(gate="silu")), (8, 22, Kind(4, gate="gelu_tanh"))]
FEW += [(16, 3, Kind()), (16, 18, Kind(gate="silu")), (8, 20, Kind(minima=True)), (16, 20, Kind(minima=True))]
FEW += [(tokens, *of) for tokens in (8, 16) for of in ((3, Kind(bits=8)), (18, Kind(gate="silu", bits=8)))]
FEW_MORE = [
    (tokens, strips, Kind(fold, scales, minima, gate))
    for tokens, strips, fold, scales, minima, gate in product(
        (8, 16), (1, 5, 18, 20, 32), (1, 2, 4), range(3), MINIMA, GATES
    )
    if not (tokens == 16 and minima and fold > 1) and not (gate and strips % 2)
]
FEW_MORE += [
    (tokens, strips, Kind(1, scales, False, gate, 8))
    for tokens, strips, scales, gate in product((8, 16), (1, 3, 5, 8, 10, 18, 22, 24), range(3), GATES)
    if not (gate and strips % 2)
]


@needs_nvrtc
def test_linears_of_few_tokens_fit_and_do_not_spill(request: pytest.FixtureRequest):
    give, take = registers_moved("linear_few.cu")
    for tokens, strips, kind in FEW_MORE if request.config.getoption("--thorough") else FEW:
        source = linear_few.source(tokens, strips, kind)
        resources, instructions = image_of(source, "linear")
        assert (resources.spilled, resources.stack) == (0, 0), source.label
        assert instructions >= tokens, source.label
        there = resources.registers * linear_few.THREADS
        assert there <= 65_536, source.label
        assert 32 * linear_few.WARPS * take + 256 * give <= there, source.label


def test_linears_of_few_tokens_have_slots_for_every_warp():
    for tokens, strips, kind in FEW_MORE:
        source = linear_few.source(tokens, strips, kind)
        sizes = dict(source.defines)
        assert SHARED // 2 < source.shared <= SHARED, source.label
        assert sizes["SLOTS"] >= max(3, linear_few.WARPS // sizes["GROUPS"]), source.label


@needs_nvrtc
@pytest.mark.parametrize("tokens", STAGES)
def test_linears_fit_and_do_not_spill(tokens: int, request: pytest.FixtureRequest):
    give, take = registers_moved("linear_hopper.cu")
    for kind in KINDS if request.config.getoption("--thorough") else HOT:
        source = linear_hopper.source(tokens, *kind)
        resources, instructions = image_of(source, "linear")
        assert (resources.spilled, resources.stack) == (0, 0), source.label
        # A step of two tiles, 16 of its 128 k's at a time.
        assert instructions == 16, source.label
        there = resources.registers * threads(tokens)
        assert there <= 65_536, source.label
        # Else those that take registers would wait for ever.
        assert 128 * (give + WARPGROUPS[tokens] * take) <= there, source.label


# Dims, KV heads and their queries, blocks: of Qwen3-8B, Qwen3.5-27B, Gemma-4's two, and others.
HEADS = [(128, 8, 4, 64), (256, 4, 6, 64), (512, 4, 8, 64), (256, 16, 2, 64), (64, 3, 3, 16), (128, 4, 16, 16)]


@needs_nvrtc
@pytest.mark.parametrize(("dim", "kv_heads", "group", "block"), HEADS)
def test_attention_of_few_queries_fits_and_does_not_spill(dim: int, kv_heads: int, group: int, block: int, request):
    """Of one token and of four, of bf16 and of e5m2, which e4m3 is like."""
    every = request.config.getoption("--thorough")
    for stored, tokens in product((0, 1, 2) if every else (0, 1), (1, 2, 4, 8) if every else (1, 4)):
        if stored and dim == 64:
            continue
        for window, softcap in product((False, True), repeat=2) if every else [(kv_heads == 16, False)]:
            kind = attention_few.Kind(dim, kv_heads, group, stored, block, window, softcap)
            source = attention_few.source(kind, group * tokens)
            resources, instructions = image_of(source, "attend")
            assert (resources.spilled, resources.stack) == (0, 0), source.label
            assert instructions >= 32, source.label
            assert source.shared <= SHARED, source.label


@needs_nvrtc
@pytest.mark.parametrize("lag", [1, 4, delta_token.WARPS])
def test_gated_delta_fits_and_does_not_spill(lag: int):
    source = delta_token.source(lag, silu=True)
    resources, _ = image_of(source, "token")
    assert (resources.spilled, resources.stack) == (0, 0)
    assert source.shared <= SHARED


def test_linears_take_no_more_shared_memory_than_a_block_has_and_three_steps_at_least():
    stored = [(fold, minima, 4) for fold in FOLDS for minima in MINIMA] + [(1, False, 8)]
    for tokens, scales, (fold, minima, bits) in product(STAGES, range(3), stored):
        source = linear_hopper.source(tokens, fold, scales, minima, bits=bits)
        assert source.shared <= SHARED, source.label
        assert dict(source.defines)["STAGES"] >= 3, source.label
