"""What plans say of the kernels' memory is what launches ask for."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

from attention_cases import rows_of  # noqa: E402
from delta_pair import EPS, Pair  # noqa: E402
from delta_pair import rows_of as delta_rows  # noqa: E402

from offroad.device.profile import load_profile  # noqa: E402
from offroad.models.spec import AttentionSpec, GatedDeltaSpec, RopeSpec  # noqa: E402
from offroad.ops.registry import default_registry  # noqa: E402
from offroad.ops.spec import Load, Problem  # noqa: E402
from offroad.run.rows import PagedView  # noqa: E402
from offroad.triton_kernels import attention, linear_run  # noqa: E402
from offroad.triton_kernels.linear import workspace  # noqa: E402
from offroad.triton_kernels.linear_grouped import PAIRS, blocks_of  # noqa: E402
from offroad.triton_kernels.memory import MEMORY, Memory, dense_outputs, split_bytes  # noqa: E402

H100 = load_profile("h100-80gb")


class Counted(TorchDispatchMode):
    """Bytes of tensors that are made empty."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.nbytes += out.nbytes if func is torch.ops.aten.empty.memory_format else 0
        return out


@pytest.mark.parametrize("window", [0, 200])
def test_partial_results_of_attention(window: int):
    load = Load(rows=3, width=2, tokens=64, length=300)
    sizes = (("block", 64), ("head_dim", 16), ("heads", 4), ("kv_heads", 2)) + ((("window", window),) if window else ())
    features = frozenset({"window"} if window else ())
    problem = Problem("attention", "decode", "float32", "float32", sizes, features, load=load)
    kernel = default_registry().kernels["triton.paged_decode"]
    columns = -(-302 // 64) + 1  # as run/arrays.py makes them
    pages = torch.zeros(20, 64, 2, 16)
    view = PagedView(pages, pages.clone(), torch.ones((4, columns), dtype=torch.int32), 64, window or None)
    rows = rows_of(np.array([0, 5, 90]), np.array([2, 2, 2]), np.array([1, 2, 3]), "cpu")
    spec = AttentionSpec(4, 2, 16, 0.25, RopeSpec(16, 1e4), window or None)
    MEMORY.most.clear()
    kernel.prepare(H100, problem)(torch.zeros(6, 4, 16), *torch.zeros(2, 6, 2, 16), view, rows, spec)
    assert MEMORY.most[torch.device("cpu")] == kernel.check(H100, problem).workspace > 0


def test_many_rows_go_in_several_launches_and_a_row_is_the_least():
    def planned(rows: int, length: int) -> int:
        sizes = (("block", 64), ("head_dim", 256), ("heads", 64), ("kv_heads", 8))
        problem = Problem("attention", "decode", "bfloat16", "bfloat16", sizes, load=Load(rows, 1, 512, length))
        return default_registry().kernels["triton.paged_decode"].check(H100, problem).workspace

    one = planned(1, 100_000)
    assert planned(2, 100_000) == 2 * one
    assert attention.room(H100.memory) - one < planned(256, 100_000) <= attention.room(H100.memory)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_chunks_of_recurrent_layers_hand_on(dtype: str):
    spec, tokens = GatedDeltaSpec(1, 2, 16, 16, 4), 70
    pair = Pair(spec, dtype)
    qkvz, ba = pair.inputs(tokens)
    rows = delta_rows([(1, 0, tokens)], 0, "cpu")
    with Counted() as counted:
        out = pair.kernel(qkvz, ba, *pair.rings, rows, spec, pair.weights, EPS)
    sizes = tuple((name, getattr(spec, name)) for name in ("key_heads", "value_heads", "key_dim", "value_dim"))
    problem = Problem("gated_delta", "prefill", dtype, sizes=sizes, load=Load(1, 1, tokens, tokens))
    verdict = default_registry().kernels["triton.gated_delta"].check(H100, problem)
    assert counted.nbytes - out.nbytes == verdict.temporary > 0


@pytest.mark.parametrize(
    ("n", "k"), [(34816, 5120), (5120, 17408), (4096, 4096), (256, 2560), (5376, 21504), (13824, 1152)]
)
@pytest.mark.parametrize("kind", ["int4", "e4m3"])
def test_parts_of_sums_take_no_more_than_planned(kind: str, n: int, k: int):
    on = linear_run.Card(H100.units, True)
    for rows in range(1, linear_run.DENSE_FROM):
        at = linear_run.tile(kind, n, k, rows, -(-rows // 64), on, torch.bfloat16)
        assert 4 * -(-rows // at.m) * at.sums(n, k) <= split_bytes(H100.units)


@pytest.mark.parametrize(("n", "k"), [(34816, 5120), (5120, 17408), (248320, 5120), (256, 2560)])
@pytest.mark.parametrize("gib", [16, 80])
def test_dequantised_weights_take_what_is_planned(n: int, k: int, gib: int):
    """The largest step's pieces are what the kernel asks for, and a card's size bounds them."""
    device = replace(H100, memory=gib << 30)
    problem = Problem("linear", "prefill", "bfloat16", sizes=(("k", k), ("n", n)), load=Load(1, 1, 8192, 8192))
    planned, most = workspace(device, problem), linear_run.card_of(device).dense
    asked = 2 * k * dense_outputs(n, k, 2, most)
    assert planned == max(asked, split_bytes(device.units))
    assert asked <= most == max(64 << 20, (gib << 30) // 256)


def test_parts_of_sums_of_experts_take_no_more_than_planned():
    on, count, top_k = linear_run.Card(H100.units, True), 256, 8
    for n, k in ((1024, 2048), (2048, 512)):
        for pairs in range(top_k, 4096, top_k):
            rows = 1 if pairs <= PAIRS else -(-pairs // count)
            blocks = pairs if pairs <= PAIRS else blocks_of(pairs, count, linear_run.width(rows, torch.bfloat16))
            at = linear_run.tile("int4", n, k, rows, blocks, on, torch.bfloat16, grouped=True)
            assert 4 * blocks * at.sums(n, k) <= split_bytes(H100.units)


def test_one_piece_is_shared_and_counters_stay_zeros():
    memory, here = Memory(), torch.device("cpu")
    memory.reserve(here, 1000)
    first = memory.get(here, "partial", 100, torch.float32)
    second = memory.get(here, "dense", 200, torch.bfloat16)
    assert first.data_ptr() == second.data_ptr()
    assert len(memory.shared[here]) == 1
    first.fill_(1.0)
    assert not memory.get(here, "arrived", 8, torch.int32).any()
    assert memory.get(here, "partial", 4000, torch.float32).numel() >= 4000
    assert len(memory.shared[here]) == 2  # the smaller one is kept, where graphs may have captured it
    assert memory.most[here] == 16000
