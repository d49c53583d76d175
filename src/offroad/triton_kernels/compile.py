"""Compiles Triton kernels for GPUs that are not here, and reads what the result needs.

`python -m offroad.triton_kernels.compile` prints the table of docs/perf/compile.md.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

ARCHS = (80, 86, 89, 90, 100, 120, 121)
# Shared memory of one block by compute capability, in bytes: CUDA C++ programming guide, table of technical
# specifications, less the 1 KiB that the system takes of each block.
SHARED = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 120: 101376, 121: 101376}
# Modules of this package whose `variants()` are compiled.
MODULES: tuple[str, ...] = (
    "attention_variants",
    "rope_store_jit",
    "linear_variants",
    "linear_fp8_jit",
    "norms_jit",
    "elementwise_jit",
    "rope_jit",
    "route_jit",
    "delta_jit",
    "delta_replay_jit",
    "delta_chunk_jit",
    "sample_jit",
)


@dataclass(frozen=True)
class Variant:
    """One specialisation of a kernel, as some model of the plans uses it.

    `signature` maps each argument to its Triton type ("*bf16", "i32", "i64", "fp32"; constants are in `constants`).
    `declared`: bytes of shared memory that the kernel's entry says it needs. `archs`:
    compute capabilities that it is for, where `check` refuses the others. `registers`: the most a thread may take.
    """

    label: str
    function: Any
    signature: Mapping[str, str]
    constants: Mapping[str, Any]
    warps: int = 4
    stages: int = 2
    archs: tuple[int, ...] = ARCHS
    declared: int | None = None
    aligned: tuple[str, ...] = field(default=())  # pointers and sizes that are multiples of 16
    registers: int | None = None


@dataclass(frozen=True)
class Report:
    """What a compiled kernel needs: bytes of shared memory a block, registers a thread, bytes of stack (spills); and
    what it was assembled from."""

    shared: int
    registers: int
    spilled: int
    ptx: str = field(repr=False)


def compile_variant(variant: Variant, arch: int) -> Report:
    """Compiles for compute capability `arch` (e.g. 90 for 9.0); needs no GPU. Raises what Triton raises."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = variant.function.arg_names
    constants = dict(variant.constants)
    if "PDL" in names:  # as `dependent.launching` has it on such a GPU
        constants["PDL"] = arch >= 90
    constants = {(names.index(name),): value for name, value in constants.items()}
    signature = {name: variant.signature.get(name, "constexpr") for name in names}
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in variant.aligned}
    source = ASTSource(fn=variant.function, signature=signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": variant.warps, "num_stages": variant.stages, "maxnreg": variant.registers}
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    registers, spilled = _resources(compiled.asm["cubin"])
    return Report(compiled.metadata.shared, registers, spilled, compiled.asm["ptx"])


def _resources(cubin: bytes) -> tuple[int, int]:
    """(registers a thread, bytes of stack) of a cubin's kernel, as `cuobjdump` reads them."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = re.search(r"REG:(\d+)", text), re.search(r"STACK:(\d+)", text)
    assert registers is not None, text
    assert stack is not None, text
    return int(registers.group(1)), int(stack.group(1))


def variants() -> Iterator[Variant]:
    """Those of every module."""
    for name in MODULES:
        yield from import_module(f"offroad.triton_kernels.{name}").variants()


def table() -> Iterator[tuple[Variant, int, Report]]:
    for variant in variants():
        for arch in variant.archs:
            yield variant, arch, compile_variant(variant, arch)


def main() -> None:
    """Prints a Markdown page with a table: kernel, compute capability, shared memory, registers, spills."""
    import triton

    print("# What the Triton kernels take\n")
    print(
        f"Triton {triton.__version__}, compiled offline; `python -m offroad.triton_kernels.compile` prints this page."
    )
    print("Bytes of shared memory a block (of those that the GPU has), registers a thread, bytes of stack (spills).\n")
    print("| kernel | sm | shared B | of | registers | spilled B |")
    print("|---|---|---|---|---|---|")
    for variant, arch, report in table():
        print(
            f"| {variant.label} | {arch} | {report.shared:,} | {SHARED[arch]:,} | {report.registers} "
            f"| {report.spilled} |"
        )


if __name__ == "__main__":
    main()
