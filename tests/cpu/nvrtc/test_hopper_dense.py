"""Hopper's linear over weights in bf16, emulated: x W^T for odd shapes, the same in any order of warps, copies and
products; and what the kernel must not lack is missed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sm70_emulated import needs_compiler

pytest.importorskip("triton")  # whose helpers size the launch

from hopper_emulated import Emulated, left_out  # noqa: E402

from offroad.nvrtc import linear_by_rows, linear_hopper  # noqa: E402
from offroad.ops import activation  # noqa: E402
from offroad.ops.linear import TOLERANCE  # noqa: E402
from offroad.quant.packed import Packed  # noqa: E402
from offroad.triton_kernels import linear_gated, linear_run  # noqa: E402
from offroad.triton_kernels.linear_run import Card  # noqa: E402

pytestmark = needs_compiler
GRIDS = (1, 3, 5, 7)  # blocks: a tile has one, two or more of them
SHAPES = ((17, 64, 128), (20, 200, 328), (32, 640, 512), (31, 257, 648), (33, 640, 648), (50, 300, 712), (64, 700, 904))
CASES = [(*shape, "") for shape in SHAPES] + [(20, 384, 776, "gelu_tanh"), (33, 640, 648, "silu")]


def made(rows: int, n: int, k: int, bias: bool = True) -> tuple[torch.Tensor, Packed]:
    """x in memory that goes on behind its last row, and a weight."""
    random = torch.Generator().manual_seed(n + k)
    w = (torch.randn(n, k, generator=random) / k**0.5).bfloat16()
    weight = Packed("dense", n, k, {"w": w}, bias=torch.randn(n, generator=random).bfloat16() if bias else None)
    return torch.randn(rows + 1, k, generator=random).bfloat16()[:rows], weight


def check(found: torch.Tensor, x: torch.Tensor, weight: Packed, gate: str) -> None:
    wanted = x.float() @ weight.tensors["w"].float().T
    wanted = wanted if weight.bias is None else wanted + weight.bias.float()
    allowed = TOLERANCE["bfloat16"]
    if gate:
        wanted = activation.gated_activation(wanted.bfloat16().float(), gate)
        allowed = activation.TOLERANCE["bfloat16"]
    torch.testing.assert_close(found.float(), wanted, atol=allowed.absolute, rtol=allowed.relative)


@pytest.mark.parametrize(("rows", "n", "k", "gate"), CASES)
def test_as_the_reference_and_the_same_in_any_order(rows: int, n: int, k: int, gate: str, monkeypatch):
    """Also on counters that the launches before have left."""
    emulated, (x, weight) = Emulated(monkeypatch), made(rows, n, k, bias=n % 3 > 0)
    for blocks in GRIDS:
        found = [emulated(x, weight, blocks, gate, seed) for seed in (0, blocks, blocks + 10)]
        check(found[0], x, weight, gate)
        assert all(torch.equal(y, found[0]) for y in found), blocks


WAITS = "        wait(&ring.full[ring.stage], ring.parity);\n"
PLACE = (
    "        const unsigned char* place = ring.base + same(ring.stage * STAGE);\n"
    "        const u32 x = described(place + X_AT);\n        products"
)
# What is left out: by how many blocks, the kernel's text, what stands for it, and what comes of it.
MISSED = {
    "waiting for copies": (3, WAITS + PLACE, PLACE, "wrong"),
    "waiting for products of the step before": (1, "        wait_groups<1>();\n", "", "wrong"),
    "waiting before sums are read": (1, "wait_groups<0>();  // sums", "// sums", "products were on their way"),
    "leaving a stage": (
        1,
        "if (step > 0 && threadIdx.x % 32 == 0) arrive(",
        "if (step < 0) arrive(",
        "wait for each other",
    ),
    "the other tile": (1, "(2 * warpgroup + t) * RECORD)", "(2 * warpgroup) * RECORD)", "wrong"),
    "the other warpgroup's": (1, "place + (2 * warpgroup + t)", "place + (t)", "wrong"),
    "k's of a step": (1, "rows + j * 2, x + j * 2", "rows, x + j * 2", "wrong"),
    "sums of the step before": (3, "x + j * 2, step + j == 0", "x + j * 2, j == 0", "wrong"),
    "a step's k's": (1, "unit * STEP, record", "unit * 128, record", "wrong"),
}


@pytest.mark.parametrize("missed", MISSED)
def test_what_is_left_out_is_missed(missed: str, monkeypatch):
    left_out(*made(50, 600, 904), MISSED[missed], monkeypatch)


def test_which_rows_and_weights_it_takes(monkeypatch):
    """Others go to Triton's and torch's, as without it."""
    taken, on = [], Card(4, wgmma=True)
    monkeypatch.setattr(linear_hopper, "product", lambda x, weight, gate: taken.append("own" + gate))
    monkeypatch.setattr(linear_run, "run", lambda x, weight, on: taken.append("other"))
    monkeypatch.setattr(linear_gated, "gated_linear", lambda x, layer, on: taken.append("other gated"))
    for rows in (1, 16, 17, 64, 65):
        linear_by_rows.linear(*made(rows, 2048, 128), on=on)
    for n, k in ((2047, 128), (2048, 132)):
        linear_by_rows.linear(*made(17, n, k), on=on)
    x, weight = made(17, 2048, 128)
    weight.tensors["w"] = weight.tensors["w"].half()
    linear_by_rows.linear(x.half(), weight, on=on)
    assert taken == ["other", "other", "own", "own", "other", "other", "other", "other"]
    taken.clear()
    for rows in (16, 17):
        x, weight = made(rows, 2048, 128)
        layer = SimpleNamespace(linears={"gate_up": weight}, ffn=SimpleNamespace(activation="silu"))
        linear_by_rows.gated_linear(x, layer, on=on)
    assert taken == ["other gated", "ownsilu"]
