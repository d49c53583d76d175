"""gate_up and its activation in one kernel on a CUDA device: the reference's numbers, and the bits of the two kernels
where no program has a share of several tiles."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)
pytest.importorskip("triton")
sys.path.append(str(Path(__file__).parents[1] / "cpu"))
sys.path.append(str(Path(__file__).parents[1] / "cpu" / "triton_kernels"))

from linear_cases import FORMATS, random_weight  # noqa: E402
from tiny_models import write_tiny  # noqa: E402

from offroad import LLM, SamplingParams  # noqa: E402
from offroad.ops.activation import TOLERANCE  # noqa: E402
from offroad.ops.activation import gated_activation as reference  # noqa: E402
from offroad.ops.linear import linear  # noqa: E402
from offroad.quant.packed import Packed  # noqa: E402
from offroad.triton_kernels.elementwise_jit import gated_activation  # noqa: E402
from offroad.triton_kernels.linear_gated import fused  # noqa: E402
from offroad.triton_kernels.linear_pack import pack  # noqa: E402
from offroad.triton_kernels.linear_run import card, launch, run, stored, tile  # noqa: E402

DEVICE = torch.device("cuda")


def made(layout: str, size: int, k: int, group: int, sym: bool) -> tuple[Packed, Packed]:
    """A weight of gate and up of `size` each: (canonical, as the kernel reads it)."""
    if layout == "dense":
        weight = Packed("dense", 2 * size, k, {"w": torch.randn(2 * size, k, device=DEVICE).bfloat16() / k**0.5})
        return weight, weight
    weight = random_weight(layout, 2 * size, k, group or k, sym=sym)
    weight = replace(weight, tensors={name: tensor.to(DEVICE) for name, tensor in weight.tensors.items()})
    return weight, pack(weight)


def poisoned(x: torch.Tensor, mine: Packed, kind: str) -> torch.Tensor:
    """What `fused` launches, into memory full of NaN."""
    rows, it = x.shape[0], stored(mine)
    y = torch.full((rows, mine.n // 2), torch.nan, dtype=x.dtype, device=DEVICE)
    at = tile(it.kind, mine.n, mine.k, rows, 1, card(x.device), x.dtype)
    launch(x, it, y, mine, at, -(-rows // at.m), mine.n, gate=kind)
    return y


def check(x: torch.Tensor, weight: Packed, mine: Packed, kind: str) -> None:
    found = poisoned(x, mine, kind)
    assert torch.equal(found, fused(x, mine, kind))
    if not tile(stored(mine).kind, mine.n, mine.k, x.shape[0], 1, card(x.device), x.dtype).programs:
        assert torch.equal(found, gated_activation(run(x, mine), kind)), "bits of the two kernels"
    bias = None if weight.bias is None else weight.bias.float()
    wide = replace(weight, tensors={"w": weight.tensors["w"].float()}) if weight.layout == "dense" else weight
    expected = reference(linear(x.float(), replace(wide, bias=bias)), kind)
    allowed = TOLERANCE[str(x.dtype).removeprefix("torch.")]
    torch.testing.assert_close(found.float(), expected, atol=4 * allowed.absolute, rtol=2 * allowed.relative)


@pytest.mark.parametrize(("size", "k", "kind"), [(17408, 5120, "silu"), (21504, 5376, "gelu_tanh")])
@pytest.mark.parametrize(("layout", "group", "sym"), [("affine4", 128, True), ("fp8", 128, True), ("dense", 0, True)])
def test_real_sizes(layout: str, group: int, sym: bool, size: int, k: int, kind: str):
    """Qwen3.5-27B's gate_up and Gemma-4-31B's."""
    weight, mine = made(layout, size, k, group, sym)
    for rows in (1, 8, 16) if layout == "dense" else (1, 8, 16, 32, 64):
        check(torch.randn(rows, k, device=DEVICE).bfloat16(), weight, mine, kind)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("layout", "group", "sym"), FORMATS)
def test_odd_sizes_a_bias_and_parts_of_k(layout: str, group: int, sym: bool, dtype: torch.dtype):
    """Few programs, so that k is in many parts, whose last program applies the activation; halves of records."""
    for size, k in ((96, 2016), (320, 5120)):
        weight, mine = made(layout, size, k, group, sym)
        bias = torch.randn(2 * size, device=DEVICE).to(dtype)
        weight, mine = replace(weight, bias=bias), replace(mine, bias=bias)
        for rows in (1, 3, 16, 17, 33, 64):
            check((0.5 * torch.randn(rows, k, device=DEVICE)).to(dtype), weight, mine, "silu")


@pytest.mark.parametrize("rows", [1, 40])
def test_captured_in_a_graph(rows: int):
    """Replays give what eager calls give, with kernels before and behind that may overlap."""
    _, mine = made("affine4", 1024, 1024, 128, True)
    _, down = made("affine4", 512, 1024, 128, True)
    x = torch.randn(rows, 1024, device=DEVICE).bfloat16()

    def step() -> torch.Tensor:
        h = x
        for _ in range(4):
            h = run(fused(h, mine, "silu"), down)
        return h

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    for _ in range(20):
        x.normal_()
        graph.replay()
        assert torch.equal(found, step())


@pytest.mark.parametrize("family", ["llama", "qwen3_5", "gemma3"])
def test_an_engine_gives_the_tokens_of_two_kernels(family: str, tmp_path: Path):
    write_tiny(family, tmp_path)
    settings = dict(device="cuda", dtype="bfloat16", max_num_seqs=5, max_num_batched_tokens=64, allow_reference=True)
    settings |= dict(memory_utilization=0.06)
    prompts = [{"prompt_token_ids": [3 + i * j % 290 for j in range(1, 9 + 20 * i)]} for i in range(1, 6)]
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    one, two = (
        LLM(str(tmp_path), **settings, **more) for more in ({}, {"kernel": ["gated_linear=parts.gated_linear"]})
    )
    assert "triton.gated_linear" in one.engine.plan.kernels()
    assert "triton.gated_linear" not in two.engine.plan.kernels()
    expected, found = ([r.outputs[0].token_ids for r in llm.generate(prompts, params)] for llm in (two, one))
    assert found == expected
