"""Rounding to nearest: codes are the nearest ones, scales cover the weights, and public layouts hold them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offroad.quant.encode import ENCODERS, e2m1
from offroad.quant.packed import E2M1

TABLE = torch.tensor(E2M1)


def unpack(codes: torch.Tensor) -> torch.Tensor:
    return TABLE[torch.stack((codes & 15, codes >> 4), -1).flatten(1).long()]


@given(st.lists(st.floats(-7, 7, width=32), min_size=2, max_size=2))
@settings(deadline=None)
def test_e2m1_is_the_nearest_number(values: list[float]):
    x = torch.tensor([values])
    nearest = (TABLE.double()[:, None] - x.double()).abs().min(0).values
    assert torch.equal((unpack(e2m1(x)).double() - x.double()).abs()[0], nearest)


def test_e2m1_ties_go_to_the_even_code():
    ties = torch.tensor([[0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25, -0.75, -5.0]])
    assert unpack(e2m1(ties))[0].tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 0.0, -1.0, -4.0]


@pytest.mark.parametrize(
    ("scheme", "n", "k", "bound"),
    [("w4a16-g128", 6, 256, 0.08), ("fp8-block", 130, 200, 0.0626), ("nvfp4", 5, 64, 0.2), ("mxfp4", 5, 96, 0.3)],
)
@pytest.mark.parametrize("spread", [1e-4, 1.0, 300.0])
def test_errors_are_those_of_the_scheme(scheme: str, n: int, k: int, bound: float, spread: float):
    """The largest error of a weight, as part of the largest weight of its group (of the format's own definition)."""
    encoder = ENCODERS[scheme]
    weight = torch.randn(n, k, generator=torch.Generator().manual_seed(1)) * spread
    made = encoder.encode(weight, encoder.group(k))
    if scheme == "w4a16-g128":
        words = made[".weight_packed"].to(torch.int64)[..., None] >> torch.arange(0, 32, 4) & 15
        back = (words.flatten(1) - 8).unflatten(1, (-1, 128)) * made[".weight_scale"].float()[..., None]
        assert made[".weight_shape"].tolist() == [n, k]
    elif scheme == "fp8-block":
        scale = made[".weight_scale_inv"].repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
        back = made[".weight"].float() * scale
    elif scheme == "nvfp4":
        scale = made[".weight_scale"].float() / made[".weight_global_scale"]
        back = unpack(made[".weight_packed"]).unflatten(1, (-1, 16)) * scale[..., None]
    else:
        scale = torch.exp2(made[".weight_scale"].float() - 127)
        back = unpack(made[".weight_packed"]).unflatten(1, (-1, 32)) * scale[..., None]
    group = {"w4a16-g128": 128, "fp8-block": k, "nvfp4": 16, "mxfp4": 32}[scheme]
    largest = weight.unflatten(1, (-1, group)).abs().amax(-1, keepdim=True)
    error = (back.reshape(n, k) - weight).unflatten(1, (-1, group)).abs() / largest
    assert error.max() < bound


def test_zeros_stay_zeros():
    for encoder in ENCODERS.values():
        made = encoder.encode(torch.zeros(128, 128), encoder.group(128))
        assert all(torch.isfinite(tensor.float()).all() for tensor in made.values())


def test_groups_that_fit():
    assert [ENCODERS["w4a16-g128"].group(k) for k in (1536, 576, 96, 100)] == [128, 64, 32, None]
    assert ENCODERS["mxfp4"].group(48) is None
