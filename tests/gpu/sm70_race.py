"""One small launch of each SM70 kernel that shares memory between threads, to run under a race detector:

    PYTHONPATH=src compute-sanitizer --tool racecheck --error-exitcode 9 python tests/gpu/sm70_race.py

Every attention head size over verify rows and over a chunk, Gated DeltaNet both ways, linears with splits of k, and
what fills their workspace. Inputs are made on the CPU, so that few other kernels are watched. Arguments name kernels:
attention, delta, linear.
"""

from __future__ import annotations

import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests/cpu/nvrtc"), str(ROOT / "tests/cpu/ops")]
import delta_cases  # noqa: E402
import sm70_attention_cases as attention_cases  # noqa: E402
import sm70_weight_cases as weight_cases  # noqa: E402

from offroad.device.profile import load_profile  # noqa: E402
from offroad.models.spec import GatedDeltaSpec  # noqa: E402
from offroad.nvrtc import attention, compile, delta, linear, workspace  # noqa: E402
from offroad.nvrtc.pack import pack  # noqa: E402
from offroad.ops.spec import Problem  # noqa: E402
from offroad.run.rows import RingView  # noqa: E402

V100, BEGAN = load_profile("v100-32gb"), time.perf_counter()


def run_attention() -> None:
    for dim, heads, kv_heads in ((64, 4, 1), (128, 4, 1), (256, 4, 1), (512, 4, 1)):
        for phase, rows in (("decode", ((270, 1), (33, 3))), ("prefill", ((70, 20),))):
            case = attention_cases.Case(dim, heads, kv_heads, rows, phase=phase)
            q, k, v, view, step = attention_cases.inputs(case, device="cuda")
            said(
                f"attention, heads of {dim}, {phase}",
                attention.bind(V100, case.problem)(q, k, v, view, step, case.spec),
            )


def run_delta() -> None:
    spec = GatedDeltaSpec(1, 2, 128, 128, 4)
    names = ("key_heads", "value_heads", "key_dim", "value_dim", "kernel")
    sizes = tuple(sorted((name, getattr(spec, name)) for name in names))
    weights = delta_cases.weights_of(spec)
    weights = replace(weights, **{name: getattr(weights, name).cuda() for name in ("conv", "a_log", "dt_bias", "norm")})
    qkvz, ba = (x.half() for x in delta_cases.inputs_of(spec, 70))
    conv = RingView(torch.zeros(2, spec.kernel - 1, spec.channels, dtype=torch.float16).cuda())
    state = RingView(torch.zeros(2, 1, spec.value_heads, spec.key_dim, spec.value_dim).cuda())
    for phase, start, width in (("prefill", 0, 66), ("decode", 66, 1)):
        host = delta_cases.rows_of(
            [delta_cases.Part(1, start, qkvz[start : start + width], ba[start : start + width])], int(phase == "decode")
        )
        moved = ("ids", "positions", "slot_t", "start_t", "width_t", "offset_t")
        rows = replace(host, **{name: getattr(host, name).cuda() for name in moved})
        bound = delta.bind(V100, Problem("gated_delta", phase, "float16", sizes=sizes))
        part = slice(start, start + width)
        said(f"gated_delta, {phase}", bound(qkvz[part].cuda(), ba[part].cuda(), conv, state, rows, spec, weights, 1e-6))


def run_linear() -> None:
    workspace.CROSSOVER = 64
    for tokens in (1, 9, 30, 60, 64):
        case = weight_cases.Case("affine4", 64, 2048, 128, tokens)
        packed = pack(weight_cases.weight(case))
        packed = replace(packed, tensors={name: tensor.cuda() for name, tensor in packed.tensors.items()})
        bound = linear.bind(V100, replace(case.problem, phase="prefill"))
        said(f"linear, {tokens} tokens", bound(weight_cases.tokens(case).contiguous().cuda(), packed))


def said(what: str, out: torch.Tensor) -> None:
    assert torch.isfinite(out.cpu()).all(), what
    print(f"{time.perf_counter() - BEGAN:7.1f} s  {what}", flush=True)


if __name__ == "__main__":
    if (ROOT / "build" / "nvrtc").is_dir():
        compile.cache_folder().mkdir(parents=True, exist_ok=True)
        for path in (ROOT / "build" / "nvrtc").iterdir():
            shutil.copy(path, compile.cache_folder() / path.name)
    for name in sys.argv[1:] or ("attention", "delta", "linear"):
        {"attention": run_attention, "delta": run_delta, "linear": run_linear}[name]()
