"""W8A8 linears on a GPU with products of e4m3: operands bit for bit, products against fp64 of the same operands, by
cuBLASLt where it has them and by Triton's kernel, graphs, the probe."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)
if torch.cuda.get_device_capability() < (8, 9):
    pytest.skip("GPUs have products of e4m3 from compute capability 8.9 on", allow_module_level=True)
pytest.importorskip("triton")
sys.path.append(str(Path(__file__).parents[1] / "cpu" / "triton_kernels"))

from fp8_cases import E4M3, activations, block_weight, plain_product  # noqa: E402

from offroad.device.probe import probe_cuda  # noqa: E402
from offroad.ops.linear import linear, linear_a8, round_activations  # noqa: E402
from offroad.ops.registry import default_registry  # noqa: E402
from offroad.ops.spec import Problem  # noqa: E402
from offroad.quant.packed import FP8_BLOCKS, Packed  # noqa: E402
from offroad.triton_kernels import linear_fp8, linear_run  # noqa: E402
from offroad.triton_kernels.linear import W8A8, by_library, too_old  # noqa: E402
from offroad.triton_kernels.linear_pack import Records, pack  # noqa: E402
from offroad.triton_kernels.memory import MEMORY  # noqa: E402

DEVICE = torch.device("cuda", torch.cuda.current_device())
REAL = [(34816, 5120), (5120, 17408), (16384, 5120), (5120, 6144)]  # Qwen3.5-27B: gate_up, down, qkvz, out
ROWS = (513, 1000, 4096)
HERE = probe_cuda()
LIBRARY = by_library(HERE) and not too_old(HERE)
whose = pytest.mark.parametrize("library", [True, False] if LIBRARY else [False])


def made(n: int, k: int) -> Packed:
    return block_weight(n, k, device=DEVICE)


def near(found: torch.Tensor, expected: torch.Tensor, most: float = 0.01, rms: float = 0.004) -> None:
    """What roundings to 16 bits and the fp32 sums of fp8 units lose is a small part of a row's usual output."""
    assert found.shape == expected.shape
    assert bool(found.isfinite().all())
    size = expected.double().square().mean(dim=1, keepdim=True).sqrt()
    apart = (found.double() - expected.double()).abs()
    assert float((apart / (size + expected.abs())).max()) < most
    assert float((apart.square().mean(dim=1).sqrt() / size[:, 0]).max()) < rms


@pytest.fixture(scope="module", params=REAL, ids=lambda size: f"{size[0]}x{size[1]}")
def real(request) -> tuple[Packed, Records]:
    weight = made(*request.param)
    return weight, pack(weight)


def poison() -> None:
    """Codes of NaN in all memory that kernels share, and NaN where results will most likely lie."""
    MEMORY.get(DEVICE, "poison", 1 << 28, torch.uint8).fill_(0xFF)
    blocks = [torch.full((1 << 27,), torch.nan, dtype=torch.bfloat16, device=DEVICE) for _ in range(2)]
    del blocks


def wanted(x: torch.Tensor, weight: Packed) -> torch.Tensor:
    """The product in fp64, of operands that `quantise` and `unpack` need not have made."""
    q, s = round_activations(x.float()).double(), weight.tensors["s"].double().repeat_interleave(128, dim=1)
    out = torch.empty(x.shape[0], weight.n, dtype=torch.float64, device=DEVICE)
    codes = weight.tensors["q"]
    for first in range(0, weight.n, 4096):
        part = slice(first, first + 4096)
        out[:, part] = q @ (codes[part].float().double() * s[part]).T
    return out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 17, 513, 1000])
def test_codes_and_scales_are_the_references(rows: int, dtype: torch.dtype):
    """Bit for bit, with zeros past the last row, also where memory held something else."""
    x = activations(rows, 17408, dtype).to(DEVICE)
    padded = rows + -rows % 16
    q = torch.full((padded, 17408), 0xFF, dtype=torch.uint8, device=DEVICE)
    s = torch.full((136, padded), torch.nan, device=DEVICE)
    linear_fp8.quantise(x, q, s)
    found = q.view(E4M3).float() * s.T.repeat_interleave(128, dim=1)
    assert torch.equal(found[:rows], round_activations(x.float()))
    assert bool((q[rows:] == 0).all())


def test_weights_come_out_of_records_by_rows(real):
    weight, mine = real
    units = weight.k // 128
    q = torch.full((weight.n, weight.k), 0xFF, dtype=torch.uint8, device=DEVICE)
    s = torch.full((weight.n // 128, units + -units % 4), torch.nan, device=DEVICE)
    linear_fp8.unpack(mine, q, s)
    assert torch.equal(q, weight.tensors["q"].view(torch.uint8))
    assert torch.equal(s[:, :units], weight.tensors["s"][::128])
    assert bool((s[:, units:] == 0).all())


@whose
@pytest.mark.parametrize("rows", ROWS)
def test_products_of_real_shapes(real, rows: int, library: bool):
    """Against fp64 of operands that plain PyTorch has rounded."""
    weight, mine = real
    x = activations(rows, weight.k, torch.bfloat16, seed=rows).to(DEVICE)
    poison()
    near(linear_fp8.run(x, mine, library=library), wanted(x, weight))


@whose
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("n", "k"), [(128, 128), (128, 640), (384, 896), (1152, 5120)])
def test_odd_numbers_of_blocks(n: int, k: int, dtype: str, library: bool):
    """Groups that are no multiple of 4, one block of rows, a bias, and every regime of rows."""
    plain = made(n, k)
    plain = replace(plain, bias=torch.randn(n, device=DEVICE).to(getattr(torch, dtype)))
    mine, wide = pack(plain), replace(plain, bias=plain.bias.float())
    for rows in (1, 2, 16, 17, 64, 65, 130, 511, 512, 513, 1000):
        x = activations(rows, k, getattr(torch, dtype), seed=rows).to(DEVICE)
        poison()
        near(linear_fp8.run(x, mine, from_rows=1, library=library), linear_a8(x.float(), wide))
        near(linear_fp8.run(x, mine, library=library), (linear_a8 if rows >= 512 else linear)(x.float(), wide))


def test_rounding_activations_moves_outputs_by_a_few_percent(real):
    """What it costs against weights that are widened (W8A16), and that few rows do not pay it."""
    weight, mine = real
    x = activations(600, weight.k, torch.bfloat16).to(DEVICE)
    many, widened = linear_fp8.run(x, mine, library=LIBRARY).double(), linear_run.run(x, mine).double()
    apart = ((many - widened).square().mean(dim=1) / widened.square().mean(dim=1)).sqrt()
    print(f"{weight.n} x {weight.k}: {float(apart.mean()):.4f} of an output's usual size")
    assert 0.01 < float(apart.mean()) < 0.05
    assert torch.equal(linear_fp8.run(x[:511], mine), linear_run.run(x[:511], mine))


@whose
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("rows", [5, 1000])
def test_what_is_not_finite_stays_visible(rows: int, bad: float, library: bool):
    mine = pack(made(1152, 5120))
    x = activations(rows, 5120, torch.bfloat16).to(DEVICE)
    x[3, 4000] = bad
    y = linear_fp8.run(x, mine, library=library)
    others = torch.arange(rows, device=DEVICE) != 3
    assert bool((~y[3].isfinite()).all())
    assert bool(y[others].isfinite().all())


@pytest.mark.skipif(bool(too_old(HERE)), reason=str(too_old(HERE)))
def test_the_registry_s_kernel_passes_its_probe():
    sizes = (("k", 5120), ("n", 1152))
    for dtype in ("bfloat16", "float16"):
        problem = Problem("linear", "prefill", dtype, sizes=sizes, stored=(FP8_BLOCKS,))
        linear_fp8.probe.cache_clear()
        bound = default_registry().kernels[W8A8].prepare(probe_cuda(), problem)
        x = activations(700, 5120, getattr(torch, dtype)).to(DEVICE)
        plain = made(1152, 5120)
        near(bound(x, pack(plain)), linear_a8(x.float(), plain))


@whose
@pytest.mark.parametrize("rows", [4, 600])
def test_replays_of_a_graph(rows: int, library: bool):
    """A step in a CUDA graph gives what it gives without, for new numbers in the same places."""
    mine = pack(made(1152, 5120))
    x = activations(rows, 5120, torch.bfloat16).to(DEVICE)
    linear_fp8.run(x, mine, library=library)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = linear_fp8.run(x, mine, library=library)
    for seed in range(3):
        x.copy_(activations(rows, 5120, torch.bfloat16, seed=seed))
        graph.replay()
        kept = found.clone()
        assert torch.equal(kept, linear_fp8.run(x, mine, library=library))


@whose
def test_products_against_plain_arithmetic(library: bool):
    """The reading of both scales, each different for every group and block."""
    x, w = (torch.randn(rows, 640, device=DEVICE).to(E4M3).view(torch.uint8) for rows in (48, 256))
    x_scales, w_scales = (torch.rand(shape, device=DEVICE) + 0.01 for shape in ((5, 48), (2, 8)))
    expected = plain_product(x, x_scales, w, w_scales, torch.float64)
    for dtype in (torch.bfloat16, torch.float16):
        multiply = linear_fp8.scaled_product if library else linear_fp8.tiled_product
        found = multiply(x, x_scales, w, w_scales, dtype).double()
        assert float((found - expected).abs().max() / expected.abs().max()) < 0.005
