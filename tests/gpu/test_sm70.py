"""The SM70 kernels on a GPU: their cubins on a V100, elsewhere PTX for compute_70 through the driver.

A machine without NVRTC 12 needs the PTX that `python -m offroad.nvrtc.report --export build/nvrtc` writes elsewhere;
the tests take it from build/nvrtc or from the usual cache. Every kernel: the reference's numbers over the shapes of the
CPU suite and larger ones, the same bits in 100 runs, outputs and workspaces full of NaN before.
"""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests/cpu/nvrtc"), str(ROOT / "tests/cpu/ops")]
import delta_cases  # noqa: E402
import sm70_attention_cases as attention_cases  # noqa: E402
import sm70_weight_cases as weight_cases  # noqa: E402

from offroad.device.profile import load_profile  # noqa: E402
from offroad.models.spec import AttentionSpec, GatedDeltaSpec, RopeSpec  # noqa: E402
from offroad.nvrtc import attention, compile, delta, linear, rows, workspace  # noqa: E402
from offroad.nvrtc.pack import pack  # noqa: E402
from offroad.ops import activation, norm, rope  # noqa: E402
from offroad.ops.attention import TOLERANCE as ATTENTION  # noqa: E402
from offroad.ops.gated_delta import TOLERANCE as DELTA  # noqa: E402
from offroad.ops.gated_delta import gated_delta  # noqa: E402
from offroad.ops.linear import TOLERANCE as LINEAR  # noqa: E402
from offroad.ops.spec import Problem, Tolerance  # noqa: E402
from offroad.quant.packed import dequantise  # noqa: E402
from offroad.run.rows import RingView  # noqa: E402

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
V100, RUNS = load_profile("v100-32gb"), 100
PHASES = ("prefill", "decode")
PROBLEM = Problem("", "decode", "float16")
ATTENTION_CASES = (
    *attention_cases.CASES,
    attention_cases.Case(64, 9, 3, ((0, 1), (1, 1), (300, 3), (128, 1))),
    attention_cases.Case(128, 32, 8, ((4095, 1), (70, 1), (0, 1), (1023, 4)), block=64, columns=80),
    attention_cases.Case(256, 24, 4, ((6000, 1), (333, 2)), block=64, e5m2=True, columns=100),
    attention_cases.Case(256, 16, 4, ((5000, 5),), block=64, window=1024),
    attention_cases.Case(512, 32, 4, ((2500, 1),), block=64, e5m2=True),
    attention_cases.Case(64, 14, 2, ((1000, 512), (0, 130)), block=64, phase="prefill"),
    attention_cases.Case(256, 24, 4, ((700, 300),), block=64, phase="prefill"),
    attention_cases.Case(512, 32, 4, ((700, 200),), block=64, phase="prefill", window=256),
)
WEIGHT_CASES = (
    *weight_cases.CASES,
    weight_cases.Case("affine4", 5120, 17408, 128, 1),
    weight_cases.Case("affine4", 2048, 5120, 128, 300, bias=True),
    weight_cases.Case("fp8", 5120, 6144, 128, 4),
    weight_cases.Case("fp4", 1024, 5120, 16, 20),
)
MANY_CASES = (
    weight_cases.Case("affine4", 5000, 5120, 128, 600, bias=True),
    weight_cases.Case("fp8", 2048, 1168, 128, 513),
    weight_cases.Case("fp4", 3000, 544, 16, 700),
    weight_cases.Case("affine8", 1500, 2048, 128, 1024, whole=False),
)


@pytest.fixture(scope="module", autouse=True)
def _precompiled():
    """PTX that came with the checkout joins the cache."""
    brought = ROOT / "build" / "nvrtc"
    if brought.is_dir():
        compile.cache_folder().mkdir(parents=True, exist_ok=True)
        for path in brought.iterdir():
            shutil.copy(path, compile.cache_folder() / path.name)


def poison() -> None:
    """Fills memory that the allocator will hand out next with NaN."""
    blocks = [torch.full((1 << size,), float("nan"), device="cuda") for size in (8, 12, 16, 20, 23) for _ in range(4)]
    del blocks


def close(found: torch.Tensor, wanted: torch.Tensor, limit: Tolerance) -> None:
    torch.testing.assert_close(
        found.float().cpu(), wanted.float().cpu(), atol=limit.absolute, rtol=limit.relative, equal_nan=False
    )


def same_bits(call) -> torch.Tensor:
    """The output of `call`, which gives the same one every time."""
    poison()
    first = call()
    for _ in range(RUNS - 1):
        poison()
        assert torch.equal(call(), first)
    return first


@pytest.mark.parametrize("case", ATTENTION_CASES, ids=str)
def test_attention(case: attention_cases.Case):
    q, k, v, view, step = attention_cases.inputs(case, device="cuda")
    wanted, after = attention_cases.expected(case, q, k, v, view, step)
    bound = attention.bind(V100, case.problem)
    mine = replace(view, k=view.k.clone(), v=view.v.clone())
    close(same_bits(lambda: bound(q, k, v, mine, step, case.spec)), wanted, ATTENTION["float16"])
    for ours, theirs in ((mine.k, after.k), (mine.v, after.v)):
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


def test_attention_reads_live_lengths():
    """A long sequence after a short one through the same pages, as a captured graph would run it."""
    long = attention_cases.Case(128, 8, 2, ((3000, 1),), block=64, columns=64)
    q, k, v, view, step = attention_cases.inputs(long, device="cuda")
    bound = attention.bind(V100, long.problem)
    for start in (3, 64, 2999, 3000, 500):
        now = attention_cases.rows_of(((start, 1),), 1, "cuda")
        copy = replace(view, k=view.k.clone(), v=view.v.clone())
        wanted, _ = attention_cases.expected(long, q, k, v, copy, now)
        close(bound(q, k, v, copy, now, long.spec), wanted, ATTENTION["float16"])


@pytest.mark.parametrize("case", WEIGHT_CASES, ids=str)
def test_linear(case: weight_cases.Case):
    weight = weight_cases.weight(case)
    packed, x = pack(weight), weight_cases.tokens(case)
    wanted = x.cuda().double() @ dequantise(weight).cuda().double().T
    wanted = wanted if packed.bias is None else wanted + packed.bias.cuda().double()
    tensors = {name: tensor.cuda() for name, tensor in packed.tensors.items()}
    packed = replace(packed, tensors=tensors, bias=None if packed.bias is None else packed.bias.cuda())
    bound, x = linear.bind(V100, case.problem), x.cuda()
    close(same_bits(lambda: bound(x, packed)), wanted, LINEAR["float16"])


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("rows", [3, 40, 600])
def test_experts(rows: int, phase: str):
    """Chunks sort their rows by expert; most experts have few, and one most."""
    case = weight_cases.Case("affine4", 16 * 256, 1024, 128, rows)
    problem = replace(case.problem, op="grouped_linear", phase=phase, sizes=(("experts", 16), ("k", 1024), ("n", 4096)))
    experts = torch.stack((torch.arange(rows) % 15, torch.full((rows,), 15)), dim=1).cuda()
    experts[: rows // 2, 0] = 3
    packed, x = pack(weight_cases.weight(case)), weight_cases.tokens(case).cuda()
    packed = replace(packed, tensors={name: tensor.cuda() for name, tensor in packed.tensors.items()})
    w = dequantise(weight_cases.weight(case)).view(16, 256, 1024).cuda().double()
    wanted = torch.stack(
        [torch.stack([w[e] @ row.double() for e in pair]) for pair, row in zip(experts, x, strict=True)]
    )
    bound = linear.bind_grouped(V100, problem)
    close(same_bits(lambda: bound(x, experts, packed, 16)), wanted, LINEAR["float16"])


@pytest.mark.parametrize("case", MANY_CASES, ids=str)
def test_linear_through_a_workspace(case: weight_cases.Case, monkeypatch):
    """Slabs of columns that do not divide the weight."""
    weight = weight_cases.weight(case)
    packed, x = pack(weight), weight_cases.tokens(case).cuda()
    assert case.tokens >= workspace.CROSSOVER
    monkeypatch.setattr(workspace, "WORKSPACE", 2 * case.k * 32 * 37)
    wanted = x.double() @ dequantise(weight).cuda().double().T
    wanted = wanted if packed.bias is None else wanted + packed.bias.cuda().double()
    tensors = {name: tensor.cuda() for name, tensor in packed.tensors.items()}
    packed = replace(packed, tensors=tensors, bias=None if packed.bias is None else packed.bias.cuda())
    bound = linear.bind(V100, replace(case.problem, phase="prefill"))
    close(same_bits(lambda: bound(x, packed)), wanted, LINEAR["float16"])


@pytest.mark.parametrize(
    "spec",
    [
        GatedDeltaSpec(2, 6, 16, 16, 4, "sigmoid"),
        GatedDeltaSpec(16, 48, 128, 128, 4),
    ],
    ids=str,
)
def test_gated_delta(spec: GatedDeltaSpec):
    names = ("key_heads", "value_heads", "key_dim", "value_dim", "kernel")
    sizes = tuple(sorted((name, getattr(spec, name)) for name in names))
    bounds = {phase: delta.bind(V100, Problem("gated_delta", phase, "float16", sizes=sizes)) for phase in PHASES}
    weights = delta_cases.weights_of(spec)
    weights = replace(weights, **{name: getattr(weights, name).cuda() for name in ("conv", "a_log", "dt_bias", "norm")})
    qkvz, ba = (x.half().cuda() for x in delta_cases.inputs_of(spec, 900))
    conv = torch.full((5, spec.kernel + 1, spec.channels), float("nan"), dtype=torch.float16)
    state = torch.full((5, 3, spec.value_heads, spec.key_dim, spec.value_dim), float("nan"))
    plain, mine = ([RingView(conv.cuda()), RingView(state.cuda())] for _ in range(2))

    def part(slot: int, start: int, width: int) -> delta_cases.Part:
        at = 11 * slot + start
        return delta_cases.Part(slot, start, qkvz[at : at + width], ba[at : at + width])

    steps = (
        ([], [part(1, 0, 37), part(2, 0, 1), part(4, 0, 200)]),
        ([part(2, 1, 3), part(4, 200, 1)], [part(1, 37, 512)]),
        ([part(1, 549, 3), part(2, 2, 2), part(4, 201, 3)], []),
    )
    for verify, chunks in steps:
        parts = [*verify, *chunks]
        host = delta_cases.rows_of([replace(p, qkvz=p.qkvz.cpu(), ba=p.ba.cpu()) for p in parts], len(verify))
        moved = ("ids", "positions", "slot_t", "start_t", "width_t", "offset_t")
        step = replace(host, **{name: getattr(host, name).cuda() for name in moved})
        x, gates = torch.cat([p.qkvz for p in parts]), torch.cat([p.ba for p in parts])
        before = [ring.data.clone() for ring in mine]

        def again(x=x, gates=gates, step=step, before=before, bound=bounds[PHASES[not chunks]]) -> torch.Tensor:
            for ring, kept in zip(mine, before, strict=True):
                ring.data.copy_(kept)
            return bound(x, gates, *mine, step, spec, weights, 1e-6)

        out = same_bits(again)
        close(out, gated_delta(x, gates, *plain, step, spec, weights, 1e-6), DELTA["float16"])
        assert torch.equal(mine[0].data.nan_to_num(), plain[0].data.nan_to_num())
        torch.testing.assert_close(mine[1].data, plain[1].data, atol=2e-3, rtol=2e-3, equal_nan=True)


@pytest.mark.parametrize("hidden", [8, 576, 2056, 5120])
def test_norms(hidden: int):
    x, residual = (torch.randn(2, 37, hidden + 8, device="cuda").half() * 3)[..., :hidden]
    post, weight = torch.rand(2, hidden, device="cuda") + 0.5
    limit = norm.TOLERANCE["float16"]
    close(same_bits(lambda: rows.bind_norm(V100, PROBLEM)(x, weight, 1e-6)), norm.norm(x.float(), weight, 1e-6), limit)
    wanted = norm.sandwich_norm(x, residual, post, weight, 1e-6)
    for number in range(2):
        found = same_bits(lambda n=number: rows.bind_sandwich_norm(V100, PROBLEM)(x, residual, post, weight, 1e-6)[n])
        close(found, wanted[number], limit)
    wanted = norm.add_norm(x, residual, weight, 1e-6)
    for number in range(2):
        found = same_bits(lambda n=number: rows.bind_add_norm(V100, PROBLEM)(x, residual, weight, 1e-6)[n])
        close(found, wanted[number], limit)


@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
def test_gated_activation(kind: str):
    x = torch.randn(33, 2 * 17408, device="cuda").half() * 4
    found = same_bits(lambda: rows.bind_gated_activation(V100, PROBLEM)(x, kind))
    close(found, activation.gated_activation(x.float(), kind), activation.TOLERANCE["float16"])


def test_qkv_rope_and_gate():
    turn = RopeSpec(64, 1e7, sections=(11, 10))
    spec = AttentionSpec(24, 4, 256, 0.0625, turn, qk_norm=True, output_gate=True)
    qkv = torch.randn(41, spec.q_width + 2 * 4 * 256, device="cuda").half()
    positions = torch.randint(0, 3000, (3, 41), device="cuda")
    weights = torch.rand(2, 256, device="cuda") + 0.5
    table = rope.rope_table(turn, 3000, "cuda")
    wanted = rope.qkv_rope(qkv, positions, table, spec, *weights, 1e-6)
    for number in range(3):
        found = same_bits(
            lambda n=number: rows.bind_qkv_rope(V100, PROBLEM)(qkv, positions, table, spec, *weights, 1e-6)[n]
        )
        close(found, wanted[number], rope.TOLERANCE["float16"])
    x = torch.randn(41, 24 * 256, device="cuda").half()
    found = same_bits(lambda: rows.bind_output_gate(V100, PROBLEM)(x, qkv, spec))
    close(found, activation.output_gate(x.float(), qkv.float(), spec), activation.TOLERANCE["float16"])
