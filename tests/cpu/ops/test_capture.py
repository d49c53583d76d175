"""Which sizes become graphs, and why there are none."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from real_specs import headers_of, real_spec

from offroad.device.profile import load_profile
from offroad.errors import PlanError
from offroad.ops.budget import Budget, block_of
from offroad.ops.capture import GraphPlan, chunk_sizes, fitted, in_turns, plan_graphs, row_sizes
from offroad.ops.cells import Resolver, groups
from offroad.ops.plan import plan
from offroad.ops.registry import default_registry
from offroad.ops.roofline import Costs, Reads
from offroad.ops.spec import Registry
from offroad.settings import Settings

SPEC = real_spec("qwen3-8b")


@dataclass(frozen=True)
class Capturable:
    """A kernel as it is, but that a graph can hold it."""

    base: object
    capturable: bool = True

    def __getattr__(self, name: str):
        return getattr(self.base, name)


def registry(capturable: bool) -> Registry:
    known = default_registry()
    kernels = {name: Capturable(kernel) if capturable else kernel for name, kernel in known.kernels.items()}
    return Registry(known.ops, kernels)


@pytest.mark.parametrize(
    ("most", "sizes"), [(1, (1,)), (3, (1, 2, 3)), (64, (1, 2, 4, 8, 16, 24, 32, 48, 64)), (100, None)]
)
def test_sizes_end_with_the_most(most: int, sizes: tuple | None):
    assert row_sizes(most) == (sizes or (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 100))


def make(capturable: bool, **settings):
    wanted = Settings.of(model="m", device="h100-80gb", allow_reference=True, max_num_seqs=8, **settings)
    return plan("m", SPEC, headers_of(SPEC), load_profile("h100-80gb"), wanted, registry(capturable))


def test_a_plan_has_graphs_if_every_decode_kernel_can_be_captured():
    made, without = make(True), make(False, enforce_eager=True)
    assert (made.graphs.rows, made.graphs.widths) == ((1, 2, 4, 8), (1,))
    assert made.memory.graphs == made.graphs.nbytes > 0
    assert made.memory.used <= made.memory.budget
    assert made.memory.history_blocks <= without.memory.history_blocks
    assert "graphs          steps of up to 1, 2, 4, 8 rows" in made.explain()
    drafts = make(True, speculative_config='{"method": "ngram", "num_speculative_tokens": 3}')
    assert drafts.graphs.widths == (1, 4)
    assert drafts.graphs.nbytes > made.graphs.nbytes


@pytest.mark.parametrize(
    ("most", "sizes"),
    [(1, (1,)), (16, (16,)), (40, (16, 32, 40)), (512, (16, 32, 64, 128, 256, 384, 512)), (8192, None)],
)
def test_sizes_of_chunks_are_no_longer_than_a_step_s(most: int, sizes: tuple | None):
    assert chunk_sizes(most) == (sizes or (16, 32, 64, 128, 256, 384, 512))


def test_a_plan_has_graphs_of_a_chunk_if_every_prefill_kernel_can_be_captured():
    made, few = make(True), make(True, max_num_batched_tokens=100)
    assert made.graphs.chunks == (16, 32, 64, 128, 256, 384, 512)
    assert few.graphs.chunks == (16, 32, 64, 100)
    assert few.graphs.nbytes < made.graphs.nbytes
    assert 0 < made.graphs.chunk_bytes < made.graphs.nbytes
    assert "rows of 1 tokens, a chunk of up to 16, 32, 64, 128, 256, 384, 512 tokens (up to" in made.explain()


def test_steps_of_a_chunk_are_eager_for_a_reason():
    device, settings = load_profile("h100-80gb"), Settings.of(model="m", allow_reference=True, max_num_seqs=8)
    resolver, cells = Resolver(registry(True), device, settings), {}
    for group in groups(SPEC, headers_of(SPEC), "bfloat16", "bfloat16", block_of(SPEC)):
        cells |= resolver.resolve(group)
    host = {
        cell: replace(choice, kernel="torch.reference_attention")
        if (cell.op, cell.phase) == ("attention", "prefill")
        else choice
        for cell, choice in cells.items()
    }
    found = plan_graphs(SPEC, host, default_registry(), device, settings, 0, "bfloat16")
    assert found.rows == plan_graphs(SPEC, cells, registry(True), device, settings, 0, "bfloat16").rows
    assert (found.chunks, found.eager) == ((), "torch.reference_attention (attention) cannot be captured")
    assert "of a chunk none: torch.reference_attention (attention) cannot be captured; about" in found.describe()


def costs_of(gigabytes: float, teraflops: float) -> Costs:
    """Of a dense model of 27e9 weights in 14 GB, without attention."""
    reads = Reads(14 * 10**9, 0, 0.0)
    return Costs(reads, 54e9, 2.5e9, 0, 0, 0, (0.0, 0.0), 0, gigabytes * 1e9, teraflops * 1e12)


@pytest.mark.parametrize(
    ("gigabytes", "teraflops", "layers", "most"),
    [
        (4800, 989, 64, 512),  # 2.9 ms of reading, 27 ms of operations for 512 tokens; the host takes 64 ms
        (4800, 989, 48, 384),
        (1800, 210, 64, 64),
        (270, 59, 64, 0),  # 52 ms of reading
    ],
)
def test_chunks_take_turns_where_the_device_is_faster_than_the_host(gigabytes, teraflops, layers: int, most: int):
    graphs = GraphPlan((1,), (1,), "", chunks=chunk_sizes(8192))
    found = in_turns(graphs, costs_of(gigabytes, teraflops), layers, 16, 512)
    assert found == replace(graphs, turn_tokens=most)
    assert f"tokens ({f'up to {most}' if most else 'none'} in turn with rows that decode); about" in found.describe()


def test_no_chunk_takes_turns_without_rates_or_graphs():
    graphs = GraphPlan((1,), (1,), "", chunks=(16,))
    assert in_turns(graphs, None, 64, 16, 8192) == graphs
    assert in_turns(GraphPlan(), costs_of(4800, 989), 64, 16, 8192) == GraphPlan()
    assert in_turns(GraphPlan((1,), (1,)), costs_of(4800, 989), 64, 16, 512).turn_tokens == 0


@pytest.mark.parametrize(
    ("gigabytes", "teraflops", "budget", "least"),
    [
        (4800, 989, 8192, 2048),  # 2.92 ms of reading, 52.1 us of operations a token: as long 32 times by 1,793
        (4800, 989, 1536, 0),
        (270, 59, 8192, 2048),  # 51.9 ms and 873 us: 1,901
    ],
)
def test_chunks_of_large_steps_take_turns_that_cost_them_little(gigabytes, teraflops, budget: int, least: int):
    found = in_turns(GraphPlan((1,), (1,), ""), costs_of(gigabytes, teraflops), 64, 16, budget)
    assert found.turn_from == least
    assert ("2,048 tokens and more in turn" in found.describe()) == (least == 2048)


@pytest.mark.parametrize(("with_chunks", "kept"), [(1000, True), (900, True), (899, False), (0, False)])
def test_graphs_of_chunks_give_way_to_the_context(with_chunks: int, kept: bool):
    graphs = GraphPlan((1,), (1,), "", 300, (16,), chunk_bytes=200)

    def divide(taken: int) -> Budget:
        if taken == 300 and not with_chunks:
            raise PlanError("memory", found="none")
        return Budget(None, with_chunks if taken == 300 else 1000, ())

    found, budget = fitted(graphs, divide)
    assert found == (graphs if kept else graphs.without_chunks("their memory goes to the context"))
    assert found.nbytes == (300 if kept else 100)
    assert budget.max_len == (with_chunks if kept else 1000)
    assert fitted(found.without_chunks("x"), divide)[1].max_len == 1000


def test_a_plan_says_why_there_are_none():
    assert make(True, enforce_eager=True).graphs.reason == "--enforce-eager"
    device = load_profile("h100-80gb")
    settings = Settings.of(model="m", allow_reference=True, kernel=["attention=torch.reference_attention"])
    resolver, cells = Resolver(default_registry(), device, settings), {}
    for group in groups(SPEC, headers_of(SPEC), "bfloat16", "bfloat16", block_of(SPEC)):
        cells |= resolver.resolve(group)
    found = plan_graphs(SPEC, cells, default_registry(), device, settings, 0, "bfloat16")
    assert found.rows == ()
    assert found.reason == "torch.reference_attention (attention) cannot be captured"
    assert plan_graphs(SPEC, cells, default_registry(), replace(device, kind="cpu"), settings, 0, "bfloat16").rows == ()
