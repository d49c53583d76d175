"""CUDA C++ to a cubin or PTX through NVRTC, with what ptxas says of it; kept on disk by what it was made from.

NVRTC 12 is the last that knows sm_70. Where it is missing (a machine with CUDA 13 only), PTX that another machine put
into the cache folder is used: see `python -m offroad.nvrtc.report --export`.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from offroad.errors import PlanError

FOLDER = Path(__file__).parent
OPTIONS = ("--std=c++17", "--ptxas-options=-v")
INSTALL = "pip install 'offroad[sm70]'"
PTX = "compute_70"


class KernelCompileError(PlanError):
    """NVRTC is missing or cannot compile for the target, or it refused a source; the text holds its log."""


@dataclass(frozen=True)
class Source:
    """A file of kernels/ with the constants that specialise it, and the bytes of shared memory that a block takes.

    The kernel is compiled with `SHARED_BYTES` and asserts that its own layout has this size. `target` is the only one
    that it is for ("": any); such a source includes no header of CUDA's.
    """

    file: str
    defines: tuple[tuple[str, int], ...] = ()
    shared: int = 0
    target: str = ""

    @property
    def options(self) -> tuple[str, ...]:
        return tuple(f"-D{name}={value}" for name, value in (*self.defines, ("SHARED_BYTES", self.shared)))

    @property
    def label(self) -> str:
        return " ".join((self.file.removesuffix(".cu"), *(f"{name.lower()}={value}" for name, value in self.defines)))

    def digest(self) -> str:
        """Of the text, of every header, and of the options."""
        return _digest(self, _texts(self.file))


@dataclass(frozen=True)
class Resources:
    """What ptxas reports of one kernel: registers a thread, bytes of stack and of spills."""

    kernel: str
    registers: int
    stack: int
    spilled: int


@dataclass(frozen=True)
class Image:
    """Compiled code: a cubin or PTX of `target`, the NVRTC version that made it, and its log."""

    target: str
    code: bytes
    toolchain: str
    log: str

    def resources(self) -> list[Resources]:
        """One for each kernel; empty for PTX, of which ptxas has not seen anything."""
        found = re.findall(
            r"Compiling entry function '(\w+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill"
            r" loads.*?Used (\d+) registers",
            self.log,
            re.DOTALL,
        )
        return [Resources(n, int(regs), int(stack), int(out) + int(back)) for n, stack, out, back, regs in found]


def cache_folder() -> Path:
    """Where compiled kernels are kept: $OFFROAD_HOME/nvrtc, or ~/.cache/offroad/nvrtc."""
    home = os.environ.get("OFFROAD_HOME")
    return (Path(home) if home else Path.home() / ".cache" / "offroad") / "nvrtc"


def compiled(source: Source, target: str, folder: Path | None = None) -> Image:
    """The image of a source for `target` ("sm_70", or "compute_70" for PTX), out of the cache or compiled now.

    Where NVRTC here cannot compile for the target, an image of the same source and options that another version made
    is taken (the newest). Raises KernelCompileError.
    """
    folder = folder or cache_folder()
    version = toolchain()
    usable = version is not None and supports(target)
    stem = f"{source.file.removesuffix('.cu')}-{target}-{source.digest()}"
    kept = sorted(folder.glob(f"{stem}-{version if usable else '*'}.bin"))
    if kept:
        path = kept[-1]
        return Image(target, path.read_bytes(), path.stem.rpartition("-")[2], path.with_suffix(".log").read_text())
    if not usable:
        raise KernelCompileError(
            f"{source.label} for {target}",
            found=f"NVRTC {version}, which cannot compile for it" if version else "no NVRTC",
            accepted="NVRTC that does (12 for sm_70), or a cache folder that another machine filled",
            next=f"{INSTALL}, or copy the output of `python -m offroad.nvrtc.report --export` to {folder}",
        )
    image = compile_source(source, target)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{stem}-{image.toolchain}.bin"
    for place, data in ((path.with_suffix(".log"), image.log.encode()), (path, image.code)):
        partial = place.with_name(f"{place.name}.{os.getpid()}")
        partial.write_bytes(data)
        partial.replace(place)
    return image


def compile_source(source: Source, target: str) -> Image:
    """Compiles now, without the cache. Raises KernelCompileError with NVRTC's log."""
    from cuda.bindings import nvrtc

    text = (FOLDER / "kernels" / source.file).read_bytes()
    program = _checked(nvrtc.nvrtcCreateProgram(text, source.file.encode(), 0, [], []), source)
    includes = [f"-I{folder}" for folder in (FOLDER / "include", *(() if source.target else include_folders()))]
    options = [o.encode() for o in (f"--gpu-architecture={target}", *OPTIONS, *source.options, *includes)]
    result = nvrtc.nvrtcCompileProgram(program, len(options), options)[0]
    log = b" " * _checked(nvrtc.nvrtcGetProgramLogSize(program), source)
    nvrtc.nvrtcGetProgramLog(program, log)
    said = log.rstrip(b"\0 \n").decode(errors="replace")
    if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise KernelCompileError(f"{source.label} for {target}", found=f"{result.name}: {said}")
    size, get = (
        (nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN)
        if target.startswith("sm_")
        else (nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX)
    )
    code = b" " * _checked(size(program), source)
    get(program, code)
    nvrtc.nvrtcDestroyProgram(program)
    return Image(target, code, toolchain() or "", said)


def _checked(answer: tuple, source: Source):
    status, *rest = answer
    if status.value:
        raise KernelCompileError(source.label, found=status.name)
    return rest[0]


@cache
def toolchain() -> str | None:
    """The version of NVRTC as "12.9"; None if there is none."""
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None:
        return None
    from cuda.bindings import nvrtc

    try:
        _, major, minor = nvrtc.nvrtcVersion()
    except RuntimeError:  # what cuda-bindings raises if it finds no library
        return None
    return f"{major}.{minor}"


@cache
def supports(target: str) -> bool:
    """Whether the NVRTC that is here compiles for "sm_70", "compute_70" or "sm_90a"."""
    from cuda.bindings import nvrtc

    _, archs = nvrtc.nvrtcGetSupportedArchs()
    return int(target.rpartition("_")[2].rstrip("a")) in archs


@cache
def include_folders() -> tuple[Path, ...]:
    """Folders of the CUDA headers that PyPI's wheels bring. Raises KernelCompileError if one is missing."""
    found = []
    for package, header, wheel in (
        ("cuda_runtime", "cuda_fp16.h", "nvidia-cuda-runtime-cu12"),
        ("cuda_nvcc", "crt/mma.h", "nvidia-cuda-nvcc-cu12"),
    ):
        spec = importlib.util.find_spec("nvidia")
        places = [Path(p) / package / "include" for p in (spec.submodule_search_locations or ())] if spec else []
        place = next((p for p in places if (p / header).is_file()), None)
        if place is None:
            raise KernelCompileError("CUDA headers", found=f"no {header}", accepted=wheel, next=INSTALL)
        found.append(place)
    return tuple(found)


@cache
def _texts(file: str) -> tuple[tuple[str, bytes], ...]:
    paths = [FOLDER / "kernels" / file, *sorted((FOLDER / "include").glob("*.cuh"))]
    return tuple((path.name, path.read_bytes()) for path in paths)


@cache
def _digest(source: Source, texts: tuple[tuple[str, bytes], ...]) -> str:
    digest = hashlib.blake2b(digest_size=12)
    for part in (*OPTIONS, *source.options):
        digest.update(part.encode() + b"\0")
    for name, text in texts:
        digest.update(name.encode() + b"\0" + text + b"\0")
    return digest.hexdigest()
