"""W8A8 linears in the interpreter: how operands are made, both regimes of rows, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from math import inf, nan

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from fp8_cases import E4M3, activations, block_weight, plain_product  # noqa: E402
from linear_cases import check  # noqa: E402
from triton.runtime.errors import PTXASError  # noqa: E402

from offroad.errors import PlanError  # noqa: E402
from offroad.ops.linear import linear_a8, round_activations  # noqa: E402
from offroad.triton_kernels import linear_fp8, linear_run  # noqa: E402
from offroad.triton_kernels.linear_pack import pack  # noqa: E402
from offroad.triton_kernels.memory import MEMORY  # noqa: E402


@pytest.fixture
def emulated(monkeypatch):
    """cuBLASLt's product, which CPUs do not have, by fp64; shared memory full of codes of NaN before it is used."""
    monkeypatch.setattr(linear_fp8, "scaled_product", plain_product)
    MEMORY.get(torch.device("cpu"), "poison", 1 << 22, torch.uint8).fill_(0xFF)


def quantised(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows, k = x.shape
    padded = rows + -rows % 16
    q, s = torch.full((padded, k), 0xFF, dtype=torch.uint8), torch.full((k // 128, padded), nan)
    linear_fp8.quantise(x, q, s)
    return q, s


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("rows", [1, 16, 33])
def test_codes_are_the_nearest_and_rows_past_the_last_are_zero(rows: int, dtype: torch.dtype):
    x = activations(rows, 384, dtype)
    q, s = quantised(x)
    found = q.view(E4M3).float() * s.T.repeat_interleave(128, dim=1)
    assert torch.equal(found[:rows], round_activations(x.float()))
    assert bool((q[rows:] == 0).all())
    assert bool(s.isfinite().all())
    wide = x.float()
    most = wide.abs().unflatten(1, (-1, 128)).amax(-1).repeat_interleave(128, dim=1)
    assert bool(((found[:rows] - wide).abs() <= wide.abs() / 16 * 1.0001 + most / 448 * 2.0**-10).all())


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=128, max_size=128))
def test_any_finite_numbers(values: list[float]):
    """From the smallest to the largest that fp32 has: nothing overflows, and the reference gives the same bits."""
    x = torch.tensor([values])
    q, s = quantised(x)
    found = q[:1].view(E4M3).float() * s.T[:1]
    assert torch.equal(found, round_activations(x))
    assert bool(found.isfinite().all())


@pytest.mark.parametrize("library", [True, False], ids=["cuBLASLt's", "Triton's"])
@pytest.mark.parametrize("bad", [nan, inf, -inf])
def test_what_is_not_finite_stays_visible(bad: float, library: bool, emulated):
    """In its token's outputs, all of them, and in no other's."""
    weight, x = pack(block_weight(128, 256)), activations(18, 256, torch.bfloat16)
    x[3, 130] = bad
    y = linear_fp8.run(x, weight, from_rows=1, library=library)
    assert bool(y[3].isnan().all())
    assert bool(y[[0, 1, 2, *range(4, 18)]].isfinite().all())


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("n", "k"), [(128, 128), (256, 640), (384, 512)])
def test_weights_come_out_of_records_by_rows(n: int, k: int, scale_dtype: torch.dtype):
    weight = block_weight(n, k, scale_dtype=scale_dtype)
    mine, units = pack(weight), k // 128
    assert mine.tensors["s"].dtype == scale_dtype
    q = torch.full((n, k), 0xFF, dtype=torch.uint8)
    s = torch.full((n // 128, units + -units % 4), nan)
    linear_fp8.unpack(mine, q, s)
    assert torch.equal(q, weight.tensors["q"].view(torch.uint8))
    assert torch.equal(s[:, :units], weight.tensors["s"][::128])
    assert bool((s[:, units:] == 0).all())


@pytest.mark.parametrize("library", [True, False], ids=["cuBLASLt's", "Triton's"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("rows", [1, 17, 40, 150])
def test_products_and_where_they_begin(rows: int, dtype: str, library: bool, emulated):
    """Many rows through the product of codes, with a bias; fewer as without it, bit for bit."""
    plain = replace(block_weight(256, 640), bias=torch.randn(256).to(getattr(torch, dtype)))
    x, wide, mine = activations(rows, 640, getattr(torch, dtype)), replace(plain, bias=plain.bias.float()), pack(plain)
    found = linear_fp8.run(x, mine, from_rows=rows, library=library)
    assert found.shape == (rows, 256)
    check(found, linear_a8(x.float(), wide), dtype)
    assert torch.equal(linear_fp8.run(x, mine, from_rows=rows + 1, library=library), linear_run.run(x, mine))


@pytest.mark.parametrize(("rows", "n", "k"), [(16, 128, 128), (144, 384, 640), (272, 256, 384), (1168, 256, 128)])
def test_tiles_of_products(rows: int, n: int, k: int, monkeypatch):
    """Each scale another; rows that fill no tile, more bands than run together; nothing is written but the product."""
    random = torch.Generator().manual_seed(rows)
    x, w = (torch.randn(many, k, generator=random).to(E4M3).view(torch.uint8) for many in (rows, n))
    units = k // 128
    x_scales = torch.rand(units, rows, generator=random) + 0.01
    w_scales = torch.full((n // 128, units + -units % 4), nan)
    w_scales[:, :units] = torch.rand(n // 128, units, generator=random) + 0.01
    expected = plain_product(x, x_scales, w, w_scales, torch.float64)
    room = torch.full((rows + 300, n), nan, dtype=torch.float16)
    monkeypatch.setattr(torch, "empty", lambda *size, **_: room[150 : 150 + rows])
    found = linear_fp8.tiled_product(x, x_scales, w, w_scales, torch.float16).double()
    torch.testing.assert_close(found, expected, rtol=2e-3, atol=2e-3 * float(expected.abs().max()))
    assert bool(room[:150].isnan().all() & room[150 + rows :].isnan().all())


def test_products_that_are_others_are_refused(monkeypatch):
    """Before requests, by a small product, whether it raises or gives other values."""
    linear_fp8.probe.cache_clear()
    cpu = torch.device("cpu")
    monkeypatch.setattr(linear_fp8, "scaled_product", plain_product)
    linear_fp8.probe(cpu, torch.bfloat16)

    def swapped(x, x_scales, w, w_scales, dtype):
        return plain_product(x, x_scales.reshape(x_scales.shape[::-1]).T.contiguous(), w, w_scales, dtype)

    def lacking(*args):
        raise NotImplementedError("DeepSeek style scaling requires cublasLt >= 12.9")

    def refused(*args):
        raise PTXASError("no such instruction")

    linear_fp8.probe(cpu, torch.bfloat16, library=False)
    for product, broken, whose, said in (
        ("scaled_product", swapped, "by torch", "largest value away"),
        ("scaled_product", lacking, "by torch", "cublasLt"),
        ("tiled_product", swapped, "by Triton", "largest value away"),
        ("tiled_product", refused, "by Triton", "no such instruction"),
    ):
        linear_fp8.probe.cache_clear()
        monkeypatch.setattr(linear_fp8, product, broken)
        with pytest.raises(PlanError, match=f"{whose}(.|\n)*{said}"):
            linear_fp8.probe(cpu, torch.bfloat16, library=product == "scaled_product")
    linear_fp8.probe.cache_clear()
