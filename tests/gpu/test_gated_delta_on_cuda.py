"""Gated DeltaNet kernels on a CUDA device: odd and real shapes, long prompts, rounds of verification, graphs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "cpu" / "triton_kernels"))
from delta_pair import EPS, Pair, rows_of, spec_of, tensors_of  # noqa: E402

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

QWEN_27B, QWEN_35B = spec_of(16, 3, 128, 128), spec_of(16, 2, 128, 128)
ODD = [spec_of(*sizes) for sizes in ((1, 1, 16, 16), (2, 2, 32, 64), (1, 3, 64, 32), (2, 3, 8, 4), (3, 1, 6, 40))]
DTYPES = ("float32", "bfloat16", "float16")


@pytest.fixture(autouse=True)
def _exact_reference():
    """The reference multiplies fp32 as fp32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spec", [*ODD, QWEN_27B, QWEN_35B], ids=str)
def test_prompts_of_every_length(spec, dtype: str):
    for length in (1, 2, 3, 4, 5, 63, 64, 65, 130):
        Pair(spec, dtype, device="cuda").step(chunks=[(2, 0, length)])


@pytest.mark.parametrize("lag", [0, 8])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spec", [*ODD, QWEN_27B, QWEN_35B], ids=str)
def test_cuts_rounds_and_mixed_steps(spec, dtype: str, lag: int):
    for k in (0, 1, 3):
        pair = Pair(spec, dtype, k, "cuda", lag=lag)
        pair.step(chunks=[(0, 0, 1), (2, 0, 2), (3, 0, 70)])
        pair.rounds(range(1, k + 2), (1, 0, 2, 70), 12)
        pair = Pair(spec, dtype, k, "cuda", lag=lag)
        pair.step(chunks=[(1, 0, 70), (4, 0, 3)])
        pair.step(verify=[(4, 3, k + 1), (0, 0, 1)], chunks=[(1, 70, 129), (3, 0, 2), (2, 0, 64)])
        pair.step(verify=[(1, 199, 1)], chunks=[(3, 2, 1), (2, 64, 200)])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spec", [*ODD, QWEN_27B, QWEN_35B], ids=str)
def test_many_rows_of_one_token(spec, dtype: str):
    pair = Pair(spec, dtype, device="cuda", slots=36, lag=8)
    pair.step(chunks=[(slot, 0, 3 + slot) for slot in range(35)])
    pair.rounds((1,), [3 + slot for slot in range(35)] + [0], 10)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("spec", [QWEN_27B, QWEN_35B], ids=str)
def test_a_long_prompt(spec, dtype: str):
    pair = Pair(spec, dtype, device="cuda")
    pair.step(chunks=[(1, 0, 9000)])
    pair.step(chunks=[(1, 9000, 1000), (0, 0, 500)])
    pair.step(verify=[(1, 10000, 1), (0, 500, 1)])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_keys_that_repeat_and_do_not_decay(dtype: str):
    pair = Pair(QWEN_27B, dtype, device="cuda")
    pair.step(chunks=[(0, 0, 1000)], repeat=True)
    pair.step(verify=[(0, 1000, 1)], repeat=True)


@pytest.mark.parametrize("lag", [0, 8])
@pytest.mark.parametrize("spec", [QWEN_27B, QWEN_35B], ids=str)
def test_a_row_has_the_same_bits_alone_and_among_others(spec, lag: int):
    pair = Pair(spec, "bfloat16", k=3, device="cuda", slots=40, lag=lag)
    pair.step(chunks=[(slot, 0, 3 + slot) for slot in range(32)])
    pair.alone([(slot, 3 + slot, 1 + slot % 4) for slot in reversed(range(32))])


@pytest.mark.parametrize("lag", [0, 8])
def test_a_captured_step_reads_its_rows_anew(lag: int):
    """One graph serves other slots and starts: nothing of the rows' numbers is baked in."""
    pair = Pair(QWEN_27B, "bfloat16", k=1, device="cuda", lag=lag)
    pair.step(chunks=[(1, 0, 70), (3, 0, 5)])
    rows, other = rows_of([(3, 5, 2), (1, 70, 2)], 2, "cuda"), rows_of([(1, 70, 2), (3, 5, 2)], 2, "cuda")
    qkvz, ba = pair.inputs(4)
    arguments = (*pair.rings, rows, pair.spec, pair.weights, EPS)
    tensors = [tensor for ring in pair.rings for tensor in tensors_of(ring)]
    before = [tensor.clone() for tensor in tensors]
    expected = pair.kernel(qkvz, ba, *pair.rings, other, pair.spec, pair.weights, EPS)
    after = [tensor.clone() for tensor in tensors]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = pair.kernel(qkvz, ba, *arguments)
    for tensor, data in zip(tensors, before, strict=True):
        tensor.copy_(data)
    for tensor, fresh in zip((rows.slot_t, rows.start_t), (other.slot_t, other.start_t), strict=True):
        tensor.copy_(fresh)
    graph.replay()
    assert torch.equal(out, expected)
    for tensor, data in zip(tensors, after, strict=True):
        assert torch.equal(tensor.nan_to_num(-77), data.nan_to_num(-77))
