"""Which sizes become graphs, and why there are none."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from real_specs import headers_of, real_spec

from offroad.device.profile import load_profile
from offroad.ops.budget import block_of
from offroad.ops.capture import plan_graphs, row_sizes
from offroad.ops.cells import Resolver, groups
from offroad.ops.plan import plan
from offroad.ops.registry import default_registry
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


def test_a_plan_says_why_there_are_none():
    assert make(True, enforce_eager=True).graphs.reason == "--enforce-eager"
    device = load_profile("h100-80gb")
    settings = Settings.of(model="m", allow_reference=True, kernel=["attention=torch.reference_attention"])
    resolver, cells = Resolver(default_registry(), device, settings), {}
    for group in groups(SPEC, headers_of(SPEC), "bfloat16", "bfloat16", block_of(SPEC)):
        cells |= resolver.resolve(group)
    found = plan_graphs(SPEC, cells, default_registry(), device, settings, 0)
    assert found.rows == ()
    assert found.reason == "torch.reference_attention (attention) cannot be captured"
    assert plan_graphs(SPEC, cells, default_registry(), replace(device, kind="cpu"), settings, 0).rows == ()
