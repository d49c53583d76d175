"""Kernels of offroad.nvrtc on the CPU: compiled as C++ against emulator/, launched as on a GPU, arguments and all."""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import struct
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from offroad.nvrtc.compile import FOLDER, Source

EMULATOR = Path(__file__).parent / "emulator"
COMPILER = shutil.which("g++") or shutil.which("clang++")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler (g++ or clang++)")
_ENTRY = """
#include "emulator.h"
{text}
__attribute__((aligned(16))) unsigned char shared[SHARED_ROOM];
{launches}
"""
BARRIER = "__syncthreads();"
_SIZE = """
extern "C" unsigned size_of_args() { return sizeof(Args); }
"""
_LAUNCH = """
extern "C" void launch_{name}(
    const Args* args, const unsigned* grid, unsigned threads, unsigned bytes, unsigned order
) {{
    emulator::run([=] {{ {name}(*args); }}, grid, threads, bytes, order);
}}
"""


@dataclass
class Order:
    """The order in which warps and blocks run: 0 ascending, others shuffled. `without`: the number of a barrier of the
    source that is left out, to see that it is missed."""

    seed: int = 0
    without: int | None = None


ORDER = Order()


@dataclass(frozen=True)
class Function:
    """As `offroad.nvrtc.launch.Function`."""

    name: str
    layout: struct.Struct
    shared: int
    source: Source

    def launch(self, grid: tuple[int, int, int], threads: int, *values: float, early: bool = False) -> None:
        if 0 in grid:
            return
        assert min(grid) > 0, grid
        assert max(grid[1:]) < 65_536, grid
        assert 0 < threads <= 1024
        library = _library(self.source, ORDER.without)
        assert -(-self.layout.size // 8) * 8 == library.size_of_args(), (self.layout.size, library.size_of_args())
        packed = ctypes.create_string_buffer(self.layout.pack(*values), self.layout.size)
        sizes = (ctypes.c_uint * 3)(*grid)
        getattr(library, f"launch_{self.name}")(packed, sizes, threads, self.shared, ORDER.seed)


def load(source: Source, name: str, layout: str, shares: bool = True) -> Function:
    """As `offroad.nvrtc.launch.load`; compiles when the function is first launched."""
    return Function(name, struct.Struct(layout), source.shared if shares else 0, source)


@cache
def _library(source: Source, without: int | None) -> ctypes.CDLL:
    text = (FOLDER / "kernels" / source.file).read_text()
    if without is not None:
        parts = text.split(BARRIER)
        text = BARRIER.join(parts[: without + 1]) + ";" + BARRIER.join(parts[without + 1 :])
    names = [line.split("(")[-2].split()[-1] for line in text.splitlines() if line.startswith('extern "C" __global__')]
    launches = _SIZE + "".join(_LAUNCH.format(name=name) for name in names)
    return built(_ENTRY.format(text=text, launches=launches), source.options)


def built(text: str, options: tuple[str, ...]) -> ctypes.CDLL:
    """A text of C++ that includes what it needs of emulator/, compiled and loaded."""
    folder = Path(tempfile.mkdtemp(prefix="offroad-emulated-"))
    made = folder / f"{hashlib.blake2b(repr((text, options)).encode(), digest_size=8).hexdigest()}.so"
    entry = folder / "entry.cpp"
    entry.write_text(text)
    includes = [f"-I{place}" for place in (EMULATOR, FOLDER / "include")]
    command = [COMPILER, "-std=c++17", "-O1", "-w", "-shared", "-fPIC", "-fno-strict-aliasing", "-ffp-contract=off"]
    done = subprocess.run([*command, *includes, *options, str(entry), "-o", str(made)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    library = ctypes.CDLL(str(made))
    shutil.rmtree(folder)
    return library
