"""Hopper's Gated DeltaNet of rows of one token, emulated, beside the reference: folds, both gates, any number of blocks
in any order; and what must not lack is missed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from sm70_emulated import needs_compiler

pytest.importorskip("triton")  # of which the kernel's entry is made too
sys.path.append(str(Path(__file__).parents[1] / "triton_kernels"))
from delta_pair import EPS, Pair, copied, rows_of, spec_of, tensors_of  # noqa: E402
from hopper_delta_emulated import Emulated, Fault  # noqa: E402

pytestmark = needs_compiler
KERNEL = "hopper.gated_delta"


@pytest.mark.parametrize(("lag", "blocks"), [(1, 1), (3, 2), (8, 2), (8, 100)])
@pytest.mark.parametrize("gate", ["silu", "sigmoid"])
def test_rounds_of_some_rows(gate: str, lag: int, blocks: int, monkeypatch):
    """From the first token on, through more than one fold; two and three heads have a key. A block has up to six items,
    or one."""
    emulated = Emulated(monkeypatch, blocks)
    emulated.seed = lag
    pair = Pair(spec_of(1, 2 + lag % 2, 128, 128, gate=gate), "bfloat16", slots=3, lag=lag, kernel=KERNEL)
    pair.rounds((1,), (0, 0, 0), 2 * lag + 3)


@pytest.mark.parametrize("blocks", [1, 100])
def test_rows_that_sit_out(blocks: int, monkeypatch):
    emulated = Emulated(monkeypatch, blocks)
    pair = Pair(spec_of(2, 1, 128, 128), "bfloat16", lag=3, kernel=KERNEL)
    for start in range(5):
        emulated.seed = start
        pair.step(verify=[(4, start, 1), (0, 0, 0), (2, 0, 0), (1, start, 1)])


def runs(emulated: Emulated, seeds: int) -> list[list[torch.Tensor] | None]:
    """What a step gives in so many orders, of a row that folds and another, with states both; None: a fault."""
    pair = Pair(spec_of(1, 4, 128, 128), "bfloat16", slots=2, lag=3, kernel=KERNEL)
    changes, emulated.changes = emulated.changes, ()
    for start in range(6):
        pair.step(verify=[(0, start, 1)] + [(1, start - 1, 1)] * (start > 0))
    emulated.changes = changes
    rows, (qkvz, ba) = rows_of([(1, 5, 1), (0, 6, 1)], 2, "cpu"), pair.inputs(2)
    assert pair.rings[1].base[:2].tolist() == [3, 3]
    found: list[list[torch.Tensor] | None] = []
    for emulated.seed in range(seeds):
        rings = [copied(ring) for ring in pair.rings]
        try:
            out = pair.kernel(qkvz.clone(), ba, *rings, rows, pair.spec, pair.weights, EPS)
        except Fault:
            found.append(None)
        else:
            found.append([tensor.nan_to_num(-77) for tensor in (out, *tensors_of(rings[1]))])
    return found


def alike(one: list[torch.Tensor] | None, other: list[torch.Tensor] | None) -> bool:
    return one is not None and other is not None and all(map(torch.equal, one, other))


def test_the_same_by_any_blocks_in_any_order(monkeypatch):
    found = []
    for blocks in (1, 3, 8):
        with monkeypatch.context() as patched:
            found += runs(Emulated(patched, blocks), 3)
    assert all(alike(one, found[0]) for one in found)


# Parts of the kernel, and what stands for them.
MISSED = {
    "the projections' turn": ("    wait_turn();\n", ""),
    "what an item has beside its state": ("    items.smalls.wait_for(item);\n    const", "    const"),
    "what all warps have of a token": ("all.squares[warp] = square;\n    meet();\n", "all.squares[warp] = square;\n"),
    "a state that has come": ("    items.states.wait_for(item);\n    const", "    const"),
    "sums of all keys": (
        "    multiply(all, state, warp, lane);\n    meet();\n",
        "    multiply(all, state, warp, lane);\n",
    ),
    "squares of all values": ("        sync_some(2, D);\n", ""),
    "the end of an item": (
        "    meet();\n    if (leaves) items.smalls.leave(item);\n",
        "    if (leaves) items.smalls.leave(item);\n",
    ),
    "a state that has been folded": ("if (!folds && leaves)", "if (leaves)"),
    "room for a state": ("            items.states.wait_for_room(item);\n", ""),
    "room for what is small": ("        items.smalls.wait_for_room(item);\n", ""),
    "records that there are": ("if (r < count) by_k", "by_k"),
}


@pytest.mark.parametrize("change", MISSED.values(), ids=MISSED)
def test_what_must_not_lack_is_missed(change: tuple[str, str], monkeypatch):
    with monkeypatch.context() as patched:
        wanted = runs(Emulated(patched, 1), 1)[0]
    assert wanted is not None
    emulated = Emulated(monkeypatch, 1)
    emulated.changes = (change,)
    assert not all(alike(one, wanted) for one in runs(emulated, 6))
