"""Gated DeltaNet kernels in Triton's interpreter against the reference: chunks, verify rows, mixed and dirty slots."""

from __future__ import annotations

import pytest
import torch
from delta_pair import EPS, Pair, rows_of, spec_of

pytest.importorskip("triton")

from offroad.device.profile import load_profile  # noqa: E402
from offroad.ops.registry import default_registry  # noqa: E402
from offroad.ops.spec import Problem  # noqa: E402
from offroad.triton_kernels.delta import HOPPER  # noqa: E402

SPEC, ONE_HEAD = spec_of(1, 2, 16, 16), spec_of(1, 1, 16, 16)


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 63, 64, 130])
def test_a_prompt_in_one_chunk(length: int):
    Pair(ONE_HEAD).step(chunks=[(2, 0, length)])


@pytest.mark.parametrize("lag", [0, 8])
@pytest.mark.parametrize(("start", "k"), [(1, 0), (2, 3), (3, 0), (70, 3)])
def test_a_prompt_cut_in_two_then_tokens(start: int, k: int, lag: int):
    pair = Pair(ONE_HEAD, k=k, lag=lag)
    pair.step(chunks=[(1, 0, start)])
    pair.step(chunks=[(1, start, 2), (3, 0, 66)])
    pair.step(chunks=[(1, start + 2, 1)], verify=[(3, 66, k + 1)])
    pair.step(verify=[(1, start + 3, 1)])


@pytest.mark.parametrize(("k", "lag", "count"), [(1, 0, 4), (3, 0, 4), (0, 3, 9), (1, 3, 6), (3, 4, 5), (3, 8, 9)])
def test_rounds_of_verification_with_rejected_tokens(k: int, lag: int, count: int):
    pair = Pair(spec_of(1, 1, 16, 16), k=k, lag=lag)
    pair.step(chunks=[(0, 0, 1), (2, 0, 70)])
    pair.rounds(range(1, k + 2), (1, 0, 70), count)


@pytest.mark.parametrize(("group", "count"), [(1, 5), (3, 5)])
def test_many_rows_of_one_token(group: int, count: int):
    """Value heads share the records of their key head: one of them stores those."""
    pair = Pair(spec_of(1, group, 16, 8), "bfloat16", lag=3)
    pair.step(chunks=[(slot, 0, 3 + slot) for slot in range(3)])
    pair.rounds((1,), (3, 4, 5, 0), count)


def test_a_chunk_begins_behind_records():
    pair = Pair(spec_of(1, 2, 16, 16), k=1, lag=8)
    pair.step(chunks=[(1, 0, 5)])
    pair.step(verify=[(1, 5, 2), (3, 0, 1)])
    pair.step(verify=[(1, 7, 1)], chunks=[(3, 1, 66)])
    pair.step(chunks=[(1, 8, 3)])


@pytest.mark.parametrize("lag", [0, 8])
@pytest.mark.parametrize("sizes", [(2, 1, 32, 64), (1, 2, 64, 32), (1, 1, 128, 128), (1, 3, 8, 4), (2, 1, 6, 40)])
def test_head_sizes(sizes: tuple[int, int, int, int], lag: int):
    pair = Pair(spec_of(*sizes), k=1, lag=lag)
    pair.step(chunks=[(1, 0, 67)])
    pair.step(verify=[(1, 67, 1)])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_other_types(dtype: str):
    pair = Pair(ONE_HEAD, dtype, k=1)
    pair.step(chunks=[(1, 0, 70), (2, 0, 3)])
    pair.step(verify=[(1, 70, 2)], chunks=[(2, 3, 65)])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_keys_that_repeat_and_do_not_decay(dtype: str):
    """Powers of the system of such a chunk grow beyond 1e15; what solves it must not form them."""
    Pair(ONE_HEAD, dtype).step(chunks=[(0, 0, 128)], repeat=True)


@pytest.mark.parametrize("changes", [{"kernel": 2}, {"kernel": 3}, {"gate": "sigmoid"}])
def test_other_convolutions_and_gates(changes: dict):
    pair = Pair(spec_of(1, 1, 16, 16, **changes))
    pair.step(chunks=[(0, 0, 5)])
    pair.step(chunks=[(0, 5, 1), (1, 0, 1)])
    pair.step(verify=[(0, 6, 1)], chunks=[(1, 1, 3)])


@pytest.mark.parametrize("lag", [0, 8])
def test_a_row_has_the_same_bits_alone_and_among_others(lag: int):
    pair = Pair(SPEC, "bfloat16", k=2, lag=lag)
    pair.step(chunks=[(1, 0, 3), (4, 0, 7)])
    pair.alone([(4, 7, 3), (0, 0, 1), (1, 3, 2)])


def test_rows_without_tokens_change_nothing():
    pair = Pair(SPEC, k=1)
    pair.step(chunks=[(1, 0, 3)])
    before = [ring.data.clone() for ring in pair.rings]
    rows = rows_of([(1, 3, 0)], 1, "cpu")
    pair.kernel(*pair.inputs(0), *pair.rings, rows, pair.spec, pair.weights, EPS)
    for ring, data in zip(pair.rings, before, strict=True):
        assert torch.equal(ring.data.nan_to_num(-77), data.nan_to_num(-77))


def test_states_behind_every_chunk():
    from offroad.triton_kernels.delta_chunk_jit import gated_delta as chunks  # with the interpreter chosen

    pair = Pair(ONE_HEAD)
    qkvz, ba = pair.inputs(5 + 70)
    boundaries, out = torch.zeros(2, 2, 1, 16, 16), torch.empty(75, ONE_HEAD.value_width)
    rows = rows_of([(1, 0, 5), (0, 0, 70)], 0, "cpu")
    chunks(qkvz, ba, *pair.rings, rows, ONE_HEAD, pair.weights, EPS, out, HOPPER, boundaries)
    for row, index, first, length in ((0, 0, 0, 5), (1, 0, 5, 64), (1, 1, 5, 70)):
        again, span = Pair(ONE_HEAD), slice(first, first + length)
        rows = rows_of([(1, 0, length)], 0, "cpu")
        again.kernel(qkvz[span], ba[span], *again.rings, rows, ONE_HEAD, pair.weights, EPS)
        assert torch.equal(boundaries[row, index], again.rings[1].data[1, 0])


def test_what_it_refuses():
    kernel, h100 = default_registry().kernels["triton.gated_delta"], load_profile("h100-80gb")
    sizes = {"key_heads": 16, "value_heads": 48, "key_dim": 128, "value_dim": 128, "kernel": 4}

    def problem(**changes: int) -> Problem:
        return Problem("gated_delta", "decode", "bfloat16", "", tuple((sizes | changes).items()), frozenset({"silu"}))

    assert kernel.check(h100, problem()).ok
    assert "256" in kernel.check(h100, problem(key_dim=256)).reason
