"""Gated DeltaNet for SM70, emulated: chunks and verify rows over rings give the reference's outputs and states."""

from __future__ import annotations

import sys
from dataclasses import replace
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
SPECS = (SPEC, GatedDeltaSpec(1, 2, 32, 48, 4, gate="sigmoid"))


def rings(spec: GatedDeltaSpec, drafts: int) -> tuple[RingView, RingView]:
    conv = torch.full((5, spec.kernel - 1 + drafts, spec.channels), float("nan"), dtype=torch.float16)
    state = torch.full((5, 1 + drafts, spec.value_heads, spec.key_dim, spec.value_dim), float("nan"))
    return RingView(conv), RingView(state)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_steps_as_the_reference(spec: GatedDeltaSpec, monkeypatch):
    monkeypatch.setattr(launch, "load", load)
    names = ("key_heads", "value_heads", "key_dim", "value_dim", "kernel")
    sizes = tuple(sorted((name, getattr(spec, name)) for name in names))
    bound = delta.bind(V100, Problem("gated_delta", "decode", "float16", sizes=sizes))
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
            out = bound(x, gates, *mine, rows, spec, weights, EPS)
            torch.testing.assert_close(out.float(), wanted.float(), atol=LIMIT.absolute, rtol=LIMIT.relative)
            assert torch.equal(mine[0].data.isnan(), plain[0].data.isnan())
            assert torch.equal(mine[0].data.nan_to_num(), plain[0].data.nan_to_num())
            torch.testing.assert_close(mine[1].data, plain[1].data, atol=2e-3, rtol=2e-3, equal_nan=True)
        assert torch.equal(copies[0][1].data.nan_to_num(), copies[1][1].data.nan_to_num())


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
