"""Hopper's Gated DeltaNet of rows of one token beside the reference: rounds of many rows, folds, both gates, graphs."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("no Hopper GPU", allow_module_level=True)
pytest.importorskip("triton")
pytest.importorskip("cuda.bindings")
sys.path.append(str(Path(__file__).parents[1] / "cpu" / "triton_kernels"))
from delta_pair import EPS, Pair, rows_of, spec_of, tensors_of  # noqa: E402

from offroad.nvrtc import delta_token  # noqa: E402

KERNEL = "hopper.gated_delta"
QWEN_27B, QWEN_35B, EVEN = spec_of(16, 3, 128, 128), spec_of(16, 2, 128, 128), spec_of(2, 1, 128, 128)


def counted(monkeypatch) -> list[int]:
    """Rows of each launch of the kernel."""
    found, single = [], delta_token.single

    def count(*args, **named) -> None:
        found.append(args[4].verify)
        single(*args, **named)

    monkeypatch.setattr(delta_token, "single", count)
    return found


@pytest.mark.parametrize("lag", [1, 3, 8])
@pytest.mark.parametrize("gate", ["silu", "sigmoid"])
@pytest.mark.parametrize("spec", [QWEN_27B, QWEN_35B, EVEN], ids=str)
def test_rounds_of_many_rows(spec, gate: str, lag: int, monkeypatch):
    rows = counted(monkeypatch)
    pair = Pair(replace(spec, gate=gate), "bfloat16", device="cuda", slots=36, lag=lag, kernel=KERNEL)
    pair.step(chunks=[(slot, 0, 3 + slot) for slot in range(35)])
    pair.rounds((1,), [3 + slot for slot in range(35)] + [0], 2 * lag + 4)
    assert rows == [36] * (2 * lag + 4)


def test_rows_beside_chunks_and_rows_that_sit_out():
    pair = Pair(QWEN_27B, "bfloat16", device="cuda", lag=8, kernel=KERNEL)
    pair.step(chunks=[(1, 0, 70), (4, 0, 3)])
    pair.step(verify=[(4, 3, 1), (0, 0, 1)], chunks=[(1, 70, 129), (3, 0, 2), (2, 0, 64)])
    pair.step(verify=[(1, 199, 1), (4, 4, 0)], chunks=[(3, 2, 1), (2, 64, 200)])


def test_keys_that_repeat_and_do_not_decay():
    pair = Pair(QWEN_27B, "bfloat16", device="cuda", lag=8, kernel=KERNEL)
    pair.step(chunks=[(0, 0, 1000)], repeat=True)
    for token in range(12):
        pair.step(verify=[(0, 1000 + token, 1)], repeat=True)


def test_rows_of_several_tokens_go_to_the_other_kernel(monkeypatch):
    rows = counted(monkeypatch)
    pair = Pair(QWEN_27B, "bfloat16", 3, "cuda", lag=8, kernel=KERNEL)
    pair.step(chunks=[(0, 0, 1), (2, 0, 2), (3, 0, 70)])
    pair.rounds(range(1, 5), (1, 0, 2, 70), 6)
    assert not rows


def test_a_row_has_the_same_bits_alone_and_among_others():
    pair = Pair(QWEN_27B, "bfloat16", device="cuda", slots=40, lag=8, kernel=KERNEL)
    pair.step(chunks=[(slot, 0, 3 + slot) for slot in range(32)])
    pair.alone([(slot, 3 + slot, 1) for slot in reversed(range(32))])


def test_a_captured_step_reads_its_rows_anew():
    pair = Pair(QWEN_27B, "bfloat16", device="cuda", lag=8, kernel=KERNEL)
    pair.step(chunks=[(1, 0, 70), (3, 0, 5)])
    rows, other = rows_of([(3, 5, 1), (1, 70, 1)], 2, "cuda"), rows_of([(1, 70, 1), (3, 5, 1)], 2, "cuda")
    qkvz, ba = pair.inputs(2)
    tensors = [tensor for ring in pair.rings for tensor in tensors_of(ring)]
    before = [tensor.clone() for tensor in tensors]
    expected = pair.kernel(qkvz, ba, *pair.rings, other, pair.spec, pair.weights, EPS)
    after = [tensor.clone() for tensor in tensors]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = pair.kernel(qkvz, ba, *pair.rings, rows, pair.spec, pair.weights, EPS)
    for tensor, data in zip(tensors, before, strict=True):
        tensor.copy_(data)
    for tensor, fresh in zip((rows.slot_t, rows.start_t), (other.slot_t, other.start_t), strict=True):
        tensor.copy_(fresh)
    graph.replay()
    assert torch.equal(out, expected)
    for tensor, data in zip(tensors, after, strict=True):
        assert torch.equal(tensor.nan_to_num(-77), data.nan_to_num(-77))
