"""Hopper's Gated DeltaNet of rows of one token on the CPU: compiled as C++ against emulator/, all blocks at once."""

from __future__ import annotations

import ctypes
import struct
from dataclasses import dataclass, replace

import delta_pair
import pytest
import torch
from hopper_emulated import NAN, Changes, Fault, library_of

from offroad.nvrtc import delta_token, launch
from offroad.nvrtc.compile import Source

_ENTRY = """
#include "emulator.h"
{text}
extern "C" unsigned size_of_args() {{ return sizeof(Args); }}
extern "C" const char* launch(const void* given, unsigned blocks, unsigned threads, unsigned bytes, unsigned order,
                              const u64* readable, void* x, const void* fresh, unsigned size) {{
    Args args;
    memcpy(&args, given, sizeof args);
    emulator::readable = readable, emulator::turn = false;
    auto call = [=] {{ token(args); }};
    return emulator::run_together(call, blocks, threads, bytes, order, [=] {{
        memcpy(x, fresh, size);
        emulator::turn = true;
    }});
}}
"""


class Emulated:
    """Makes launches of delta_token emulated, by `blocks` at most. `seed`: the order of warps and copies. `changes`:
    parts of the kernel's text and what stands for them. Projections are NaN until the kernel before has ended."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, blocks: int) -> None:
        self.seed, self.changes = 0, ()
        self._given: tuple[torch.Tensor, ...] = ()
        monkeypatch.setattr(delta_pair, "H100", replace(delta_pair.H100, units=blocks))
        monkeypatch.setattr(delta_pair.Pair, "_checkpoints", lambda *_: None)  # another kernel's
        monkeypatch.setattr(launch, "load", self._load)
        single = delta_token.single

        def given(qkvz: torch.Tensor, ba: torch.Tensor, conv, view, *rest, **named) -> None:
            self._given = (qkvz, conv.data, view.state, view.key, view.delta, rest[2].conv)
            single(qkvz, ba, conv, view, *rest, **named)

        monkeypatch.setattr(delta_token, "single", given)

    def _load(self, source: Source, _: str, layout: str) -> Function:
        return Function(struct.Struct(layout), source, self._given, self.seed, self.changes)


@dataclass(frozen=True)
class Function:
    """As `offroad.nvrtc.launch.Function`. `readable`: tensors that copies may read, projections first."""

    layout: struct.Struct
    source: Source
    readable: tuple[torch.Tensor, ...]
    seed: int
    changes: Changes

    def launch(self, grid: tuple[int, int, int], threads: int, *values: float, early: bool = False) -> None:
        """Raises Fault."""
        library = library_of(_ENTRY, self.source, self.changes)
        assert self.layout.size == library.size_of_args(), (self.layout.size, library.size_of_args())
        at, size = self.readable[0].data_ptr(), self.readable[0].nbytes
        fresh = ctypes.string_at(at, size)
        ctypes.memmove(at, NAN * size, size)
        ranges = [number for tensor in self.readable for number in (tensor.data_ptr(), tensor.nbytes)]
        readable = (ctypes.c_uint64 * (len(ranges) + 2))(*ranges, 0, 0)
        said = library.launch(
            self.layout.pack(*values), grid[0], threads, self.source.shared, self.seed, readable,
            ctypes.c_void_p(at), fresh, size,
        )  # fmt: skip
        if said:
            raise Fault(said.decode())
