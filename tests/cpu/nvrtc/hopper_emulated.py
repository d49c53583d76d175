"""Hopper's linears on the CPU: compiled as C++ against emulator/, all blocks of a grid at once."""

from __future__ import annotations

import ctypes
import struct
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from sm70_emulated import built

from offroad.nvrtc import launch, linear_by_rows, linear_few, linear_hopper
from offroad.nvrtc.compile import FOLDER, Source
from offroad.triton_kernels.linear_pack import Records
from offroad.triton_kernels.linear_run import Card
from offroad.triton_kernels.memory import COUNTERS, Memory

SHARED = "extern __shared__ __align__(16) unsigned char shared[];"
_ENTRY = """
#include "emulator.h"
{text}
extern "C" unsigned size_of_args() {{ return sizeof(Args); }}
extern "C" const char* launch(const void* given, unsigned blocks, unsigned threads, unsigned bytes, unsigned order,
                              const u64* readable, const u64* before) {{
    Args args;
    memcpy(&args, given, sizeof args);
    emulator::readable = readable, emulator::turn = false;
    emulator::products.clear();
    auto call = [=] {{
        linear(args);
        emulator::nothing_is_left();
    }};
    return emulator::run_together(call, blocks, threads, bytes, order, [=] {{
        for (const u64* to = before; *to; to += 3) memcpy((void*)to[0], (const void*)to[1], to[2]);
        emulator::turn = true;
    }});
}}
"""
NAN, GUARD = b"\xff", 4096
Changes = tuple[tuple[str, str], ...]


class Fault(Exception):
    """What the emulator noticed: a hang, or something that a GPU does not allow."""


@dataclass(frozen=True)
class Function:
    """As `offroad.nvrtc.launch.Function`, for a linear's arguments, of which the first is a map of x by `map_of`.

    `seed`: the order of warps, copies and products. `readable`: tensors that copies may read. `changes`: parts of the
    kernel's text and what stands for them, to see that it is missed.
    """

    layout: struct.Struct
    source: Source
    readable: tuple[torch.Tensor, ...]
    seed: int = 0
    changes: Changes = ()

    def launch(self, grid: tuple[int, int, int], threads: int, *values: int, early: bool = False) -> None:
        """The kernel before writes x, y, sums and counts when it ends: what this one writes earlier is lost, and x is
        NaN until then. Raises Fault."""
        library = library_of(_ENTRY, self.source, self.changes)
        assert self.layout.size == library.size_of_args(), (self.layout.size, library.size_of_args())
        (x, _, rows, pitch), y, rest = values[:4], values[20], values[21:]
        few = self.source.file == "linear_few.cu"
        n = rest[1] if few else rest[3]
        size = rows * n * 2 // (2 if dict(self.source.defines)["GATE"] else 1)
        fresh = ctypes.string_at(x, rows * pitch)
        ctypes.memset(x, 0xFF, rows * pitch)
        room = ctypes.create_string_buffer(NAN * (GUARD + size + GUARD))
        ends = {x: fresh}
        if few:  # may be the second launch for one y
            ends[ctypes.addressof(room) + GUARD] = ctypes.string_at(y, size) if rest[3] else NAN * size
        else:
            ends |= {ctypes.addressof(room) + GUARD: NAN * size} | self._shared_by_blocks(grid[0], rest)
        kept = {to: ctypes.create_string_buffer(data, len(data)) for to, data in ends.items()}
        before = [number for to, data in kept.items() for number in (to, ctypes.addressof(data), len(data))]
        ranges = [number for tensor in self.readable for number in (tensor.data_ptr(), tensor.nbytes)]
        packed = self.layout.pack(*values[:20], ctypes.addressof(room) + GUARD, *values[21:])
        shared = self.source.shared
        said = library.launch(packed, grid[0], threads, shared, self.seed, _words(ranges), _words(before))
        ctypes.memmove(x, fresh, rows * pitch)
        if said:
            raise Fault(said.decode())
        written = room.raw[: GUARD + size + GUARD]
        if written[:GUARD] + written[GUARD + size :] != NAN * (2 * GUARD):
            raise Fault("a number written outside of y")
        ctypes.memmove(y, written[GUARD : GUARD + size], size)

    def _shared_by_blocks(self, blocks: int, rest: tuple[int, ...]) -> dict[int, bytes]:
        partial, arrived, tiles, sizes = rest[0], rest[1], rest[6], dict(self.source.defines)
        warps = 4 * sizes["WARPGROUPS"]
        return {
            partial: NAN * (blocks * 2 * warps * 32 * sizes["TOKENS"] * 4),
            arrived: ctypes.string_at(arrived, tiles * warps * 4),
        }


def _words(numbers: list[int]) -> ctypes.Array:
    return (ctypes.c_uint64 * (len(numbers) + 3))(*numbers, 0, 0, 0)


def map_of(address: int, rows: int, columns: int, high: int, itemsize: int = 2, chunks: int = 0) -> tuple[int, ...]:
    """The words of the emulator's tensor map, of what `offroad.nvrtc.tensor_map.map_of` says."""
    return (address, columns, rows, itemsize * columns, 128 // itemsize, high, itemsize, chunks, *[0] * 8)


class Emulated:
    """`linear_by_rows.product` on the CPU, with counters of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch, self.memory = monkeypatch, Memory()
        monkeypatch.setattr(linear_hopper, "MEMORY", self.memory)
        for module in (linear_few, linear_hopper):
            monkeypatch.setattr(module, "map_of", map_of)

    def __call__(
        self, x: torch.Tensor, weight: Records, blocks: int, gate: str = "", seed: int = 0, changes: Changes = ()
    ) -> torch.Tensor:
        """By so many blocks at once. Raises Fault."""
        readable = tuple(weight.tensors.values())
        self.monkeypatch.setattr(
            launch, "load", lambda source, _, layout: Function(struct.Struct(layout), source, readable, seed, changes)
        )
        for module in (linear_few, linear_hopper):
            self.monkeypatch.setattr(module, "card", lambda _: Card(blocks, wgmma=True))
        y = linear_by_rows.product(x, weight, gate)
        if self.memory.get(x.device, COUNTERS, 1, torch.int32).any():
            raise Fault("counters that the next launch does not find at 0")
        return y


@cache
def library_of(entry: str, source: Source, changes: Changes) -> ctypes.CDLL:
    """A kernel's text as `entry` has it, with changes, compiled."""
    text = (FOLDER / "kernels" / source.file).read_text()
    for old, new in ((SHARED, "#define shared OWN_SHARED"), *changes):
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    library = built(entry.format(text=text), (*source.options, "-O2"))
    library.launch.restype = ctypes.c_char_p
    return library
