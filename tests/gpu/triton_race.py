"""One small launch of each Triton kernel that shares memory between threads or writes beside others, to run under
compute-sanitizer:

    PYTHONPATH=src compute-sanitizer --tool memcheck --error-exitcode 9 python tests/gpu/triton_race.py
    PYTHONPATH=src compute-sanitizer --tool racecheck --error-exitcode 9 python tests/gpu/triton_race.py

Attention of every head size, with a window, verify rows and 8-bit rows, over split partitions and over chunks; Gated
DeltaNet in steps and in chunks; linears with splits of k, and those of experts. Run it once without the tool, so that
kernels are compiled before. Each tensor is memory of its own (no caching allocator), so that memcheck sees accesses
beside it. Arguments name kernels: decode, prefill, delta, linear, fp8 (products of e4m3), experts. What has e4m3 on its
way is left out before compute capability 8.9.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")

import torch  # noqa: E402

sys.path.append(str(Path(__file__).parents[1] / "cpu" / "triton_kernels"))
from attention_cases import Case, make, problem  # noqa: E402
from delta_pair import EPS, Pair, rows_of, spec_of  # noqa: E402
from fp8_cases import activations, block_weight  # noqa: E402
from linear_cases import random_weight  # noqa: E402

from offroad.device.probe import probe_cuda  # noqa: E402
from offroad.quant.packed import Packed  # noqa: E402
from offroad.triton_kernels import attention as kernels  # noqa: E402
from offroad.triton_kernels import linear_fp8  # noqa: E402
from offroad.triton_kernels.linear_grouped import grouped  # noqa: E402
from offroad.triton_kernels.linear_pack import pack  # noqa: E402
from offroad.triton_kernels.linear_run import DENSE_TOKENS, Tile, run  # noqa: E402

BEGAN = time.perf_counter()
FP8_UNITS = torch.cuda.get_device_capability() >= (8, 9)
BF16, E5M2, E4M3 = torch.bfloat16, torch.float8_e5m2, torch.float8_e4m3fn
KERNELS = {"decode": kernels.bind_decode, "prefill": kernels.bind_prefill}
# KV heads, queries of each, head size, window, type of stored rows, whether they have scales
HEADS = [
    (1, 4, 64, None, BF16, False),
    (1, 4, 128, None, BF16, False),
    (2, 6, 256, None, BF16, False),
    (1, 8, 512, None, BF16, False),
    (1, 2, 80, None, BF16, False),
    (1, 2, 256, 100, BF16, False),
    (1, 4, 128, None, E5M2, False),
    (2, 6, 256, None, E5M2, False),
    (1, 4, 128, None, E4M3, True),
    (1, 8, 512, 70, E5M2, True),
]


def said(what: str, *outs: torch.Tensor) -> None:
    """Waits for what a launch gives."""
    assert all(torch.isfinite(out.float().cpu()).all() for out in outs), what
    print(f"{time.perf_counter() - BEGAN:7.1f} s  {what}", flush=True)


def run_attention(phase: str) -> int:
    starts, widths = ((0, 61, 700, 130), (1, 4, 2, 1)) if phase == "decode" else ((0, 70), (70, 20))
    heads = [shape for shape in HEADS if shape[4] != E4M3 or FP8_UNITS]
    for kv_heads, group, dim, window, kv, scaled in heads:
        case = Case(starts, widths, kv_heads, group, dim, window, dtype=BF16, kv=kv, scaled=scaled, device="cuda")
        q, k, v, view, rows, spec = make(case)
        out = KERNELS[phase](probe_cuda(), problem(case, phase))(q, k, v, view, rows, spec)
        stored = str(kv).removeprefix("torch.")
        said(f"attention, {phase}, heads of {dim}, window {window}, {stored}{' scaled' * scaled}", out)
    return len(heads)


def run_delta() -> int:
    """A prompt, a step with drafts and a second chunk, of heads of real sizes and of odd ones, over rows of states and
    over records."""
    launches = 0
    for spec in (spec_of(1, 3, 128, 128), spec_of(2, 2, 32, 64), spec_of(1, 1, 6, 40)):
        for k, lag in ((0, 0), (3, 0), (0, 8), (3, 8)):
            pair = Pair(spec, "bfloat16", k, "cuda", lag=lag)
            steps = [([], [(1, 0, 70), (3, 0, 5)]), ([(1, 70, k + 1), (3, 5, 1)], [(2, 0, 66)])]
            if lag:  # tokens until states are folded, and a chunk behind records
                steps += [([(1, 71 + i, 1), (2, 66 + i, 1)], []) for i in range(lag + 1)] + [([], [(2, 75, 3)])]
            for verify, chunks in steps:
                rows = rows_of([*verify, *chunks], len(verify), "cuda")
                out = pair.kernel(*pair.inputs(rows.tokens), *pair.rings, rows, spec, pair.weights, EPS)
                if lag:
                    pair.settle(rows)
                said(f"gated_delta, {spec.key_dim} x {spec.value_dim}, {k} drafts, {len(verify)} verify rows", out)
                launches += 1
    return launches


def moved(weight: Packed) -> Packed:
    return replace(weight, tensors={name: tensor.cuda() for name, tensor in weight.tensors.items()})


def run_linear() -> int:
    """Odd sizes and even ones; few tokens are split over k or shared out, 130 through several tiles. Not torch's GEMM,
    which takes more than 16 tokens of dense weights: racecheck tells of hazards in cuBLAS's own kernels."""
    shapes = [("affine4", 32, False), ("affine4", 128, True), ("affine8", 32, False), ("fp8", 128, True)]
    shapes += [("fp4", 16, True), ("dense", 0, True)]
    for layout, group, sym in shapes:
        for n, k in ((192, 2048), (210, 1056)):
            weight = dense(n, k) if layout == "dense" else pack(moved(random_weight(layout, n, k, group, sym=sym)))
            for tokens, invariant in ((1, False), (9, False), (30, False), (130, False), (9, True)):
                if layout == "dense" and tokens > DENSE_TOKENS and not invariant:
                    continue
                x = torch.randn(tokens, k).bfloat16().cuda()
                out = run(x, weight, invariant=invariant)
            if layout != "dense":
                for programs in (2, 5):
                    out = run(x, weight, choice=Tile(64, 16, 1, programs=programs))
            said(f"linear, {layout} in groups of {group}, {n} x {k}", out)
    return 2 * len(shapes)


def run_fp8() -> int:
    """All of a product, whose operands share memory, and products of operands that do not, with rows for no whole
    tile."""
    sizes = ((150, 384, 640), (16, 128, 128))
    for rows, n, k in sizes:
        weight, x = pack(block_weight(n, k, device="cuda")), activations(rows, k, BF16).cuda()
        said(f"e4m3, {rows} x {k} by {n}", linear_fp8.run(x, weight, from_rows=1, library=False))
        codes, many = [torch.randn(size, k).to(E4M3).view(torch.uint8).cuda() for size in (rows, n)], k // 128
        scales = [torch.rand(many, rows).cuda(), torch.rand(n // 128, many + -many % 4).cuda()]
        out = linear_fp8.tiled_product(codes[0], scales[0], codes[1], scales[1], BF16)
        said(f"product of e4m3, {rows} x {k} by {n}", out)
    return 2 * len(sizes)


def run_experts() -> int:
    count, n, k = 8, 128, 1024
    for layout, weight in (
        ("affine4", pack(moved(random_weight("affine4", count * n, k, 128)))),
        ("dense", dense(count * n, k)),
    ):
        for tokens in (1, 5, 60):
            x, chosen = torch.randn(tokens, k).bfloat16().cuda(), torch.rand(tokens, count).topk(2, dim=-1).indices
            for gate in ("", "silu"):
                said(f"experts, {layout}, {tokens} tokens {gate}", grouped(x, chosen.cuda(), weight, count, gate=gate))
    return 12


def dense(n: int, k: int) -> Packed:
    return Packed("dense", n, k, {"w": (torch.randn(n, k) / k**0.5).bfloat16().cuda()})


RUNS: dict[str, Callable[[], int]] = {
    "decode": lambda: run_attention("decode"),
    "prefill": lambda: run_attention("prefill"),
    "delta": run_delta,
    "linear": run_linear,
    "fp8": run_fp8,
    "experts": run_experts,
}

if __name__ == "__main__":
    names = sys.argv[1:] or [name for name in RUNS if name != "fp8" or FP8_UNITS]
    launched = {name: RUNS[name]() for name in names}
    said(f"ran: {', '.join(f'{name} in {count} cases' for name, count in launched.items())}")
