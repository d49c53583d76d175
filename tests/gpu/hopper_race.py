"""Small launches of Hopper's kernels in CUDA C++, to run under compute-sanitizer:

    export PYTHONPATH=src  # cuda-bindings asks the driver for functions that it may lack: no errors of the API
    compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 9 python tests/gpu/hopper_race.py
    compute-sanitizer --tool racecheck --error-exitcode 9 python tests/gpu/hopper_race.py

Linears of up to 16 tokens, and of 17 to 64, whose blocks share tiles, by two and by many, in 4 bits with groups, zero
points and gates, and in e4m3; Gated DeltaNet of rows of one token until records are folded; attention of one and of
several tokens, with windows and rows of 8 bits, over one and more partitions. Run it once without the tool, so that
kernels are compiled before. Each tensor is memory of its own (no caching allocator), so that memcheck sees accesses
beside it. Arguments name kernels: linear, delta, attention.
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
from attention_cases import Case, make  # noqa: E402
from delta_pair import EPS, Pair, rows_of, spec_of  # noqa: E402
from linear_cases import random_weight  # noqa: E402

from offroad.nvrtc import attention_few  # noqa: E402
from offroad.nvrtc.linear_by_rows import product  # noqa: E402
from offroad.triton_kernels.linear_pack import pack  # noqa: E402

BEGAN = time.perf_counter()
SHAPES = [(200, 2016), (1090, 2048), (8448, 1024), (40064, 256)]  # outputs, k
# How codes are stored, a group's k's, whether there are no zero points.
FORMATS = [("affine4", 128, True), ("affine4", 32, True), ("affine4", 128, False), ("fp8", 128, True)]


def said(what: str, *outs: torch.Tensor) -> None:
    """Waits for what a launch gives."""
    assert all(torch.isfinite(out.float().cpu()).all() for out in outs), what
    print(f"{time.perf_counter() - BEGAN:7.1f} s  {what}", flush=True)


def run_linear() -> int:
    launches = 0
    for n, k in SHAPES:
        for layout, group, sym in FORMATS:
            if k % group:
                continue
            weight = random_weight(layout, n, k, group, sym=sym)
            mine = pack(replace(weight, tensors={name: tensor.cuda() for name, tensor in weight.tensors.items()}))
            for tokens in (1, 9, 17, 64):
                for gate in ("", "silu") if n % 128 == 0 else ("",):
                    out = product(torch.randn(tokens, k).bfloat16().cuda(), mine, gate=gate)
                    what = f"linear, {n} x {k}, {layout}, groups of {group}, {tokens} tokens{' gated' if gate else ''}"
                    said(what, out)
                    launches += 1
    return launches


def run_delta() -> int:
    launches = 0
    for key_heads, per_key in ((1, 3), (2, 1)):
        for lag in (2, 8):
            pair = Pair(
                spec_of(key_heads, per_key, 128, 128), "bfloat16", device="cuda", lag=lag, kernel="hopper.gated_delta"
            )
            steps = [([], [(1, 0, 70), (3, 0, 5)])]
            steps += [([(1, 70 + i, 1), (3, 5 + i, 1), (0, i, 1)], []) for i in range(lag + 2)]
            for verify, chunks in steps:
                rows = rows_of([*verify, *chunks], len(verify), "cuda")
                out = pair.kernel(*pair.inputs(rows.tokens), *pair.rings, rows, pair.spec, pair.weights, EPS)
                pair.settle(rows)
                said(f"gated_delta, {key_heads * per_key} heads, records of {lag}, {len(verify)} rows", out)
                launches += 1
    return launches


def run_attention() -> int:
    launches = 0
    kinds = [(torch.bfloat16, None), (torch.bfloat16, 100), (torch.float8_e5m2, None), (torch.float8_e4m3fn, 300)]
    for dim, kv_heads, group in ((128, 2, 4), (256, 1, 6), (512, 1, 8)):
        for kv, window in kinds:
            for widths in ((1, 1, 1), (4, 1, 3)):
                case = Case(
                    (700, 0, 61), widths, kv_heads, group, dim, window, dtype=torch.bfloat16, kv=kv, device="cuda"
                )
                q, k, v, view, rows, spec = make(case)
                out = attention_few.attention(q, k, v, view, rows, spec, other=None, most=1 << 27)
                said(f"attention, heads of {dim}, {kv}, window {window}, {widths} tokens", out)
                launches += 1
    return launches


RUNS: dict[str, Callable[[], int]] = {"linear": run_linear, "delta": run_delta, "attention": run_attention}

if __name__ == "__main__":
    attention_few.LEAST_STREAMS = 0
    launched = {name: RUNS[name]() for name in sys.argv[1:] or list(RUNS)}
    said(f"ran: {', '.join(f'{name} in {count} launches' for name, count in launched.items())}")
