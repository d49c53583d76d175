"""`offroad doctor`: this machine as offroad sees it, for users and for bug reports."""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from offroad import __version__
from offroad.cli.environment import VARIABLES, in_force
from offroad.cli.options import Json
from offroad.cli.table import size, table
from offroad.errors import SettingsError

if TYPE_CHECKING:
    from offroad.device.profile import DeviceProfile
    from offroad.evidence.kernel_check import Result
    from offroad.ops.plan import Plan
    from offroad.ops.spec import Problem, Registry

PACKAGES = ("torch", "triton", "numpy", "safetensors", "gguf", "tokenizers", "huggingface_hub", "fastapi", "uvicorn")


Kernels = Annotated[
    bool, typer.Option("--kernels", help="Run kernels on this device against their references, and time them.")
]
Tried = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL", show_default=False, help="With --kernels: those of this model's plan, at its shapes."
    ),
]
Device = Annotated[
    str, typer.Option("--device", metavar="DEVICE", help="With --kernels: auto, cpu, cuda, or a profile to run by.")
]


def doctor(model: Tried = None, kernels: Kernels = False, device: Device = "auto", json_output: Json = False) -> None:
    """Report what this machine can do.

    Device, driver, toolchain, kernels that can be built, environment; add the --json form to bug reports. With
    --kernels, every kernel of MODEL's plan, or of a usual set, on random numbers: exit code 1 if one differs from its
    reference by more than its op allows.
    """
    if kernels:
        if not try_kernels(model, device, json_output):
            raise typer.Exit(1)
        return
    if model is not None:
        raise SettingsError("MODEL", found=model, accepted="none without --kernels", next=f"offroad plan {model}")
    facts = examine()
    if json_output:
        json.dump(facts, sys.stdout, indent=2)
        print()
    else:
        print(render(facts))


def try_kernels(model: str | None, device: str, json_output: bool) -> bool:
    """Whether all kernels pass, having printed how each did."""
    from offroad.device.probe import resolve_device, runnable
    from offroad.evidence import kernel_check
    from offroad.ops.registry import default_registry
    from offroad.settings import Settings

    registry = default_registry()
    if model is None:
        here = runnable(resolve_device(Settings.of(model="none", device=device)))
        subjects = kernel_check.standard(registry, here)
    else:
        made = _plan_here(model, device)
        here, subjects = made.device, kernel_check.of_plan(made)
    if not json_output:
        print(f"{len(subjects)} kernels and problems on {here.name}; {driver() or 'no NVIDIA driver'}\n", flush=True)
    results = kernel_check.check(subjects, registry, here, (lambda _: None) if json_output else _print_result)
    failed = [result for result in results if result.passed is False]
    tried = [result for result in results if result.passed is not None]
    if json_output:
        facts = {
            "offroad": __version__,
            "device": device_facts(here),
            "driver": driver(),
            "toolchain": dict(here.toolchain),
            "model": model,
            "passed": not failed,
            "results": [result.to_json() for result in results],
        }
        json.dump(facts, sys.stdout, indent=2)
        print()
    else:
        print(f"\n{len(tried) - len(failed)} of {len(tried)} pass" + "".join(f"\nFAIL {_name(r)}" for r in failed))
    return not failed


def _plan_here(model: str, device: str) -> Plan:
    """The plan of a model on the device that is here."""
    from offroad.device.probe import resolve_device, runnable
    from offroad.engine import make_plan
    from offroad.settings import Settings
    from offroad.weights.locate import open_source

    settings = Settings.resolve({"model": model, "device": device})
    here = runnable(resolve_device(settings))
    return make_plan(settings, open_source(settings), here)


def _name(result: Result) -> str:
    return f"{result.kernel} ({result.op}.{result.phase}) {result.shape} {result.problem}"


def _print_result(result: Result) -> None:
    """One line: how it went, median time, the largest difference as a part of what is allowed, on what."""
    word = {True: "pass", False: "FAIL", None: "-"}[result.passed]
    time = f"{result.milliseconds:9.3f} ms" if result.milliseconds is not None else f"{'':12}"
    error = f"{result.error:8.3f}" if result.error is not None else f"{'':8}"
    said = " ".join(part for part in (result.shape, result.problem) if part)
    said += "; NOT the same bits twice" if result.repeats is False else ""
    print(f"{word:5}{result.kernel:28} {result.op + '.' + result.phase:26}{time} {error}  {said}", flush=True)


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
        made.append(Problem("moe_combine", phase, dtype, dtype, (("hidden", 2048), ("top_k", 8))))
        made += [Problem(op, phase, dtype, dtype) for op in ("attention_block", "mlp_block")]
        parts = (("linear:gate_up", "triton.linear_dense"), ("gated_activation", "triton.gated_activation"))
        gated = Problem("gated_linear", phase, dtype, dtype, linear, frozenset({"silu"}), ("bf16",), parts)
        made.append(gated)
        parts = (
            ("grouped_linear:experts_gate_up", "triton.grouped_dense"),
            ("gated_activation:experts", "triton.gated_activation"),
            ("grouped_linear:experts_down", "triton.grouped_dense"),
            ("moe_combine", "triton.moe_combine"),
        )
        sizes = (*linear, ("experts", 8), ("hidden", 2048), ("top_k", 2))
        made.append(Problem("experts", phase, dtype, dtype, sizes, frozenset({"silu"}), ("bf16",), parts))
        parts = (("qkv_rope", "triton.qkv_rope"), ("attention", "triton.paged_decode"))
        sizes = (*attention, ("rope_dim", 64))
        made.append(Problem("rope_attention", phase, dtype, dtype, sizes, parts=parts))
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
