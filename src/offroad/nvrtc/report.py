"""What the SM70 kernels need, and what a V100 can do at best: `python -m offroad.nvrtc.report` prints the table,
and fails if a kernel has a fault.

`--export FOLDER` compiles every kernel into a folder that stands in for the cache on a machine without NVRTC 12.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from offroad.nvrtc.compile import PTX, Image, KernelCompileError, Source, compile_source, compiled
from offroad.nvrtc.variants import Variant, sources, variants

SHARED = {"sm_70": 98_304, "sm_75": 65_536}  # bytes of shared memory that a block may have
_SM_REGISTERS, _SM_SHARED, _SM_THREADS = 65_536, {"sm_70": 98_304, "sm_75": 65_536}, {"sm_70": 2048, "sm_75": 1024}
_THREADS = {"attention": 256, "linear": 256, "rule": 128}  # a block; others have 256
BANDWIDTH, TENSOR_RATE, RATE = 900e9, 125e12, 15.7e12  # of V100 SXM2: bytes, fp16 and fp32 operations a second


@dataclass(frozen=True)
class Report:
    """A kernel compiled for one target: registers a thread, bytes spilled, tensor-core instructions in its SASS."""

    variant: Variant
    target: str
    registers: int
    spilled: int
    tensor_instructions: int

    @property
    def blocks(self) -> int:
        """Blocks that an SM holds at once."""
        threads = _THREADS.get(self.variant.kernel, 256)
        taken = -(-self.registers // 8) * 8 * threads
        by_shared = _SM_SHARED[self.target] // self.variant.shared if self.variant.shared else 32
        return min(_SM_REGISTERS // taken, by_shared, _SM_THREADS[self.target] // threads)

    @property
    def fault(self) -> str | None:
        """What a V100 owner would notice: spills, or scalar code where tensor cores should work; None: nothing."""
        if self.spilled and self.target == "sm_70":
            return f"{self.variant.label} spills {self.spilled} bytes"
        if self.variant.tensor and not self.tensor_instructions:
            return f"{self.variant.label} has no tensor-core instruction for {self.target}"
        return None

    @property
    def milliseconds(self) -> float:
        """The least time on a V100: memory or arithmetic, whichever is longer."""
        rate = TENSOR_RATE if self.variant.tensor else RATE
        return 1e3 * max(self.variant.bytes / BANDWIDTH, self.variant.operations / rate)


def reports(target: str, chosen: list[Variant] | None = None) -> Iterator[Report]:
    """Compiles every variant that fits the target, each source once. Raises KernelCompileError."""
    kept: dict[Source, tuple[Image, dict[str, int]]] = {}
    for variant in chosen or variants():
        if variant.source.shared > SHARED[target]:
            continue
        if variant.source not in kept:
            image = compile_source(variant.source, target)
            kept[variant.source] = image, tensor_instructions(image.code)
        image, counts = kept[variant.source]
        found = next(r for r in image.resources() if r.kernel == variant.kernel)
        yield Report(variant, target, found.registers, found.spilled, counts.get(variant.kernel, 0))


def tensor_instructions(cubin: bytes) -> dict[str, int]:
    """HMMA and HGMMA instructions by kernel, as a disassembler has them. Raises KernelCompileError if there is none."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(disassembler()), "-sass", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    parts = re.split(r"Function : (\w+)", text)
    return {name: len(re.findall(r"\bHG?MMA\.", body)) for name, body in zip(parts[1::2], parts[2::2], strict=True)}


def disassembler() -> Path:
    """cuobjdump out of Triton's package. CUDA 13's own no longer reads sm_70."""
    spec = find_spec("triton")
    folders = (spec.submodule_search_locations or ()) if spec else ()
    tool = next((p for f in folders if (p := Path(f) / "backends/nvidia/bin/cuobjdump").is_file()), None)
    if tool is None:
        raise KernelCompileError(
            "a disassembler for sm_70", found="none", accepted="Triton's package", next="pip install triton"
        )
    return tool


def table(found: list[Report]) -> str:
    """The table of docs/perf/volta.md."""
    lines = [
        "| kernel | arch | shared B | registers | spilled B | HMMA | blocks an SM | launch | MB | GFLOP "
        "| V100 ms at best |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for report in found:
        variant = report.variant
        lines.append(
            f"| {variant.label} | {report.target} | {variant.shared:,} | {report.registers} | {report.spilled} "
            f"| {report.tensor_instructions} | {report.blocks} | {variant.launch} | {variant.bytes / 1e6:,.2f} "
            f"| {variant.operations / 1e9:,.3f} | {report.milliseconds:.4f} |"
        )
    return "\n".join(lines)


def export(folder: Path) -> int:
    """Compiles every source to PTX into `folder`; gives the number of files that are there."""
    for source in sources():
        compiled(source, PTX, folder)
    return len(list(folder.glob("*.bin")))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m offroad.nvrtc.report", description=__doc__.splitlines()[0])
    parser.add_argument("--export", type=Path, metavar="FOLDER", help="compile to PTX into a folder instead")
    folder = parser.parse_args().export
    if folder is not None:
        print(f"{export(folder)} files in {folder}")
        return
    found = [report for target in SHARED for report in reports(target)]
    print(table(found))
    if faults := [report.fault for report in found if report.fault]:
        raise SystemExit("\n".join(faults))


if __name__ == "__main__":
    main()
