"""`offroad doctor`: this machine as offroad sees it, for users and for bug reports."""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from offroad import __version__
from offroad.cli.environment import VARIABLES, in_force
from offroad.cli.options import Json
from offroad.cli.table import size, table

if TYPE_CHECKING:
    from offroad.device.profile import DeviceProfile
    from offroad.ops.spec import Problem, Registry

PACKAGES = ("torch", "triton", "numpy", "safetensors", "gguf", "tokenizers", "huggingface_hub", "fastapi", "uvicorn")


def doctor(json_output: Json = False) -> None:
    """Report what this machine can do.

    Device, driver, toolchain, kernels that can be built, environment; add the --json form to bug reports.
    """
    facts = examine()
    if json_output:
        json.dump(facts, sys.stdout, indent=2)
        print()
    else:
        print(render(facts))


def examine() -> dict[str, Any]:
    """Everything that `doctor` reports, as plain data."""
    import torch

    from offroad.device.probe import cuda_missing, package_version, probe
    from offroad.device.profile import profile_names
    from offroad.errors import OffroadError
    from offroad.native.compile import build, find_compiler
    from offroad.ops.registry import default_registry

    problems: list[str] = []
    compiler = None
    library = None
    try:
        compiler = find_compiler()
        if compiler is None:
            problems.append("no C compiler (cc, gcc, clang or the ziglang package): native CPU kernels cannot be built")
        else:
            library = str(build(compiler))
    except OffroadError as error:
        problems.append(str(error))
    try:
        device = probe("auto")
    except OffroadError as error:
        problems.append(str(error))
        device = None
    return {
        "offroad": __version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "device": device_facts(device) if device else None,
        "driver": driver(),
        "cuda": torch.version.cuda,
        "cuda_missing": cuda_missing(),
        "compiler": {"command": " ".join(compiler.command), "version": compiler.version} if compiler else None,
        "native_library": library,
        "triton_cache": triton_cache(device),
        "packages": {name: package_version(name) for name in PACKAGES},
        "kernels": kernel_facts(default_registry(), device) if device else [],
        "environment": in_force(),
        "profiles": profile_names(),
        "problems": list(dict.fromkeys(problems)),
    }


def device_facts(device: DeviceProfile) -> dict[str, Any]:
    """A profile for a program."""
    capability = device.compute_capability
    return {
        "name": device.name,
        "kind": device.kind,
        "memory": device.memory,
        "units": device.units,
        "capabilities": sorted(device.capabilities),
        "compute_capability": f"{capability[0]}.{capability[1]}" if capability else None,
        "shared_per_block": device.shared_per_block,
        "l2": device.l2,
    }


def driver() -> str | None:
    """The NVIDIA driver's version, or None without nvidia-smi or without an answer from it."""
    path = shutil.which("nvidia-smi")
    if path is None:
        return None
    command = [path, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"nvidia-smi failed: {error}"
    lines = done.stdout.strip().splitlines()
    return (
        lines[0]
        if done.returncode == 0 and lines
        else f"nvidia-smi failed: {(done.stderr or done.stdout).strip()[:200]}"
    )


def triton_cache(device: DeviceProfile | None) -> str | None:
    """Where compiled Triton kernels are kept; None where no kernel is Triton's."""
    if device is None or device.kind != "cuda" or device.tool("triton") is None:
        return None
    from offroad.triton_kernels.warm import folder

    return folder()


def sample_problems(dtype: str) -> list[Problem]:
    """One problem of usual sizes for each op and way of storing weights; kernels are asked whether they take any."""
    from offroad.ops.spec import Problem

    stored = (
        "f32",
        "f16",
        "bf16",
        "gguf.q4_0",
        "gguf.q4_1",
        "gguf.q5_0",
        "gguf.q8_0",
        "gguf.q4_k",
        "gguf.q5_k",
        "gguf.q6_k",
    )
    linear = (("k", 2048), ("n", 2048))
    attention = (("block", 64), ("head_dim", 64), ("heads", 8), ("kv_heads", 2))
    made = []
    for phase in ("prefill", "decode"):
        made += [
            Problem(op, phase, dtype, dtype, linear, frozenset(), (kind,))
            for op in ("linear", "embed", "grouped_linear")
            for kind in stored
        ]
        made.append(Problem("attention", phase, dtype, dtype, attention))
        made.append(Problem("attention", phase, dtype, dtype, (*attention, ("window", 512)), frozenset({"window"})))
        made.append(Problem("qkv_rope", phase, dtype, dtype, (*attention, ("rope_dim", 64))))
        made += [
            Problem("gated_activation", phase, dtype, dtype, (("size", 4096),), frozenset({kind}))
            for kind in ("silu", "gelu_tanh")
        ]
        made += [Problem(op, phase, dtype, dtype, (("hidden", 2048),)) for op in ("norm", "add_norm", "sandwich_norm")]
        made += [Problem(op, phase, dtype, dtype) for op in ("gated_delta", "output_gate", "route")]
        made += [Problem(op, phase, dtype, dtype) for op in ("attention_block", "mlp_block")]
    return made


def kernel_facts(registry: Registry, device: DeviceProfile) -> list[dict[str, Any]]:
    """For each kernel, whether it takes some usual problem on this device, and its reason."""
    dtype = "float32" if device.kind == "cpu" else "bfloat16" if device.has("mma_bf16") else "float16"
    problems = sample_problems(dtype)
    facts = []
    for kernel in registry.kernels.values():
        verdicts = [kernel.check(device, problem) for problem in problems if problem.op == kernel.op]
        assert verdicts, f"no sample problem for op {kernel.op}"
        best = next((verdict for verdict in verdicts if verdict.ok), verdicts[0])
        facts.append(
            {
                "kernel": kernel.name,
                "op": kernel.op,
                "ok": best.ok,
                "reason": best.reason,
                "reference": kernel.reference,
            }
        )
    return sorted(facts, key=lambda fact: (fact["op"], not fact["ok"], fact["kernel"]))


def render(facts: dict[str, Any]) -> str:
    """The report as text."""
    device, compiler = facts["device"], facts["compiler"]
    lines = [f"offroad {facts['offroad']}, Python {facts['python']}, {facts['system']}", ""]
    if device:
        kind = f"compute capability {device['compute_capability']}" if device["compute_capability"] else device["kind"]
        units = f"{device['units']} {'SMs' if device['kind'] == 'cuda' else 'cores'}"
        lines.append(f"device       {device['name']} ({kind}), {units}, {size(device['memory'])} usable")
        lines.append(f"             {' '.join(device['capabilities']) or 'no special capabilities'}")
    lines.append(f"driver       {facts['driver'] or 'no nvidia-smi'}")
    lines.append(f"cuda         {facts['cuda_missing'] or facts['cuda']}")
    lines.append("compiler     " + (f"{compiler['version']} ({compiler['command']})" if compiler else "none"))
    lines.append("C kernels    " + (facts["native_library"] or "not built"))
    if facts["triton_cache"]:
        lines.append(f"Triton cache {facts['triton_cache']}")
    lines.append(
        "packages     "
        + ", ".join(f"{name} {version or 'not installed'}" for name, version in facts["packages"].items())
    )
    lines.append("profiles     " + ", ".join(facts["profiles"]) + " (for `offroad plan --device`)")
    if facts["kernels"]:
        lines += [
            "",
            table(
                ("KERNEL", "OP", "HERE", "REASON"),
                [(k["kernel"], k["op"], "yes" if k["ok"] else "no", k["reason"]) for k in facts["kernels"]],
            ),
        ]
    meanings = {variable.name: variable.meaning for variable in VARIABLES}
    lines += [
        "",
        table(("VARIABLE", "VALUE", "MEANING"), [(n, v or "-", meanings[n]) for n, v in facts["environment"].items()]),
    ]
    lines += ["", *(f"problem: {problem}" for problem in facts["problems"])] if facts["problems"] else []
    return "\n".join(lines)
