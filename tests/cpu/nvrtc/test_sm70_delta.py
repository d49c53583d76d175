"""Gated DeltaNet for SM70, emulated: chunks and verify rows over rings give the reference's outputs and states."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from sm70_emulated import ORDER, load, needs_compiler

sys.path.append(str(Path(__file__).parents[1] / "ops"))
from delta_cases import EPS, SPEC, Part, inputs_of, rows_of, weights_of  # noqa: E402

from offroad.device.profile import load_profile  # noqa: E402
from offroad.models.spec import GatedDeltaSpec  # noqa: E402
from offroad.nvrtc import delta, launch  # noqa: E402
from offroad.ops.gated_delta import TOLERANCE, gated_delta  # noqa: E402
from offroad.ops.spec import Problem  # noqa: E402
from offroad.run.rows import RingView  # noqa: E402

pytestmark = needs_compiler
V100 = load_profile("v100-32gb")
LIMIT = TOLERANCE["float16"]
# The first takes chunks token after token, the others in parts: columns that are no whole tiles, slices, words of 8.
SPECS = (
    SPEC,
    GatedDeltaSpec(1, 2, 32, 48, 4, gate="sigmoid"),
    GatedDeltaSpec(1, 2, 20, 72, 3),
    GatedDeltaSpec(2, 2, 16, 20, 4),
)


def rings(spec: GatedDeltaSpec, drafts: int) -> tuple[RingView, RingView]:
    conv = torch.full((5, spec.kernel - 1 + drafts, spec.channels), float("nan"), dtype=torch.float16)
    state = torch.full((5, 1 + drafts, spec.value_heads, spec.key_dim, spec.value_dim), float("nan"))
    return RingView(conv), RingView(state)


def bind(spec: GatedDeltaSpec, phase: str):
    names = ("key_heads", "value_heads", "key_dim", "value_dim", "kernel")
    sizes = tuple(sorted((name, getattr(spec, name)) for name in names))
    return delta.bind(V100, Problem("gated_delta", phase, "float16", sizes=sizes))


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_steps_as_the_reference(spec: GatedDeltaSpec, monkeypatch):
    monkeypatch.setattr(launch, "load", load)
    bounds = {phase: bind(spec, phase) for phase in ("prefill", "decode")}
    weights, drafts = weights_of(spec), 2
    plain = rings(spec, drafts)
    copies = [rings(spec, drafts) for _ in range(2)]
    qkvz, ba = (x.half() for x in inputs_of(spec, 160))

    def part(slot: int, start: int, width: int) -> Part:
        at = 7 * slot + start
        return Part(slot, start, qkvz[at : at + width], ba[at : at + width])

    steps = (
        ([], [part(1, 0, 37), part(2, 0, 1), part(4, 0, 2)]),
        ([part(2, 1, 3), part(4, 2, 1)], [part(1, 37, 70)]),
        ([part(1, 107, 3), part(2, 2, 2), part(4, 3, 3)], []),
        ([part(2, 4, 1)], [part(4, 4, 5)]),
    )
    for verify, chunks in steps:
        parts = [*verify, *chunks]
        rows = rows_of(parts, len(verify))
        x, gates = torch.cat([p.qkvz for p in parts]), torch.cat([p.ba for p in parts])
        wanted = gated_delta(x, gates, *plain, rows, spec, weights, EPS)
        for seed, mine in enumerate(copies):
            ORDER.seed = seed
            out = bounds["prefill" if chunks else "decode"](x, gates, *mine, rows, spec, weights, EPS)
            torch.testing.assert_close(out.float(), wanted.float(), atol=LIMIT.absolute, rtol=LIMIT.relative)
            assert torch.equal(mine[0].data.isnan(), plain[0].data.isnan())
            assert torch.equal(mine[0].data.nan_to_num(), plain[0].data.nan_to_num())
            torch.testing.assert_close(mine[1].data, plain[1].data, atol=2e-3, rtol=2e-3, equal_nan=True)
        assert torch.equal(copies[0][1].data.nan_to_num(), copies[1][1].data.nan_to_num())


def run(bound, spec: GatedDeltaSpec, cuts: tuple[int, ...], seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """(outputs, last state) of one sequence of 140 tokens whose prompt is cut at `cuts`."""
    ORDER.seed = seed
    qkvz, ba = (x.half() for x in inputs_of(spec, 140))
    mine, out = rings(spec, 0), []
    for begin, end in pairwise((0, *cuts, 140)):
        rows = rows_of([Part(3, begin, qkvz[begin:end], ba[begin:end])], 0)
        out.append(bound(qkvz[begin:end], ba[begin:end], *mine, rows, spec, weights_of(spec), EPS))
    return torch.cat(out), mine[1].data[3]


def test_a_chunk_s_bits_are_the_same_wherever_it_is_cut_between_parts(monkeypatch):
    monkeypatch.setattr(launch, "load", load)
    spec = SPECS[1]
    bound = bind(spec, "prefill")
    whole = run(bound, spec, ())
    for cuts, seed in (((32,), 1), ((64, 96), 2), ((128,), 3)):
        assert all(torch.equal(a, b) for a, b in zip(whole, run(bound, spec, cuts, seed), strict=True))
    other = run(bound, spec, (17, 90))
    torch.testing.assert_close(other[0].float(), whole[0].float(), atol=2 * LIMIT.absolute, rtol=2 * LIMIT.relative)
    torch.testing.assert_close(other[1], whole[1], atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("barrier", [1, 4])  # each of the five is missed when it is left out; a build takes a while
def test_a_barrier_of_the_chunk_is_missed(barrier: int, monkeypatch):
    monkeypatch.setattr(launch, "load", load)
    spec = SPECS[1]
    bound = bind(spec, "prefill")
    right = run(bound, spec, ())
    monkeypatch.setattr(ORDER, "without", barrier)
    outcomes = [run(bound, spec, (), seed) for seed in (0, 1, 2)]
    assert not all(
        torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for found in outcomes for a, b in zip(found, right, strict=True)
    )


def test_other_dtypes_and_shapes_are_refused(monkeypatch):
    monkeypatch.setattr(launch, "load", load)
    names = ("key_heads", "value_heads", "key_dim", "value_dim", "kernel")
    sizes = tuple(sorted((name, getattr(SPEC, name)) for name in names))
    bound = delta.bind(V100, Problem("gated_delta", "decode", "float16", sizes=sizes))
    qkvz, ba = (x.half() for x in inputs_of(SPEC, 1))
    rows = rows_of([Part(1, 0, qkvz, ba)], 1)
    conv, state = rings(SPEC, 0)
    with pytest.raises(launch.LaunchError, match="ba"):
        bound(qkvz, ba[:, 1:], conv, state, rows, SPEC, weights_of(SPEC), EPS)
    with pytest.raises(launch.LaunchError, match="fp32"):
        bound(qkvz, ba, conv, RingView(state.data.half()), rows, SPEC, weights_of(SPEC), EPS)
    with pytest.raises(launch.LaunchError, match="conv"):
        bound(qkvz, ba, replace(conv, data=conv.data[..., 1:]), state, rows, SPEC, weights_of(SPEC), EPS)
