"""Hopper's attention of few queries on the CPU: compiled as C++ against emulator/, all blocks of a grid at once."""

from __future__ import annotations

import ctypes
import struct
from dataclasses import dataclass

import pytest
import torch
from hopper_emulated import GUARD, NAN, Changes, Fault, library_of, map_of

from offroad.models.spec import AttentionSpec
from offroad.nvrtc import attention_few, launch
from offroad.nvrtc.compile import Source
from offroad.run.rows import PagedView, Rows
from offroad.triton_kernels import linear_run
from offroad.triton_kernels.linear_run import Card
from offroad.triton_kernels.memory import COUNTERS, Memory

_ENTRY = """
#include "emulator.h"
{text}
extern "C" unsigned size_of_args() {{ return sizeof(Args); }}
extern "C" const char* launch(const void* given, unsigned blocks, unsigned threads, unsigned bytes, unsigned order,
                              void* q, const void* fresh, unsigned size) {{
    Args args;
    memcpy(&args, given, sizeof args);
    emulator::turn = false;
    auto call = [=] {{ attend(args); }};
    return emulator::run_together(call, blocks, threads, bytes, order, [=] {{
        memcpy(q, fresh, size);
        emulator::turn = true;
    }});
}}
"""


@dataclass(frozen=True)
class Function:
    """As `offroad.nvrtc.launch.Function`. `seed`: the order of warps and copies. `q` is NaN until the kernel before has
    ended. `changes`: parts of the kernel's text and what stands for them."""

    layout: struct.Struct
    source: Source
    q: torch.Tensor
    blocks: int
    seed: int = 0
    changes: Changes = ()

    def launch(self, grid: tuple[int, int, int], threads: int, *values: float, early: bool = False) -> None:
        library = library_of(_ENTRY, self.source, self.changes)
        assert self.layout.size == library.size_of_args(), (self.layout.size, library.size_of_args())
        assert grid[0] <= self.blocks
        fresh = ctypes.string_at(self.q.data_ptr(), self.q.nbytes)
        ctypes.memmove(self.q.data_ptr(), NAN * self.q.nbytes, self.q.nbytes)
        packed, size = self.layout.pack(*values), self.q.nbytes
        said = library.launch(
            packed, grid[0], threads, self.source.shared, self.seed, ctypes.c_void_p(self.q.data_ptr()), fresh, size
        )
        if said:
            raise Fault(said.decode())


class Emulated:
    """`attention_few.attend` on the CPU, by so many blocks at once, with counters of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch, self.memory = monkeypatch, Memory()
        monkeypatch.setattr(attention_few, "MEMORY", self.memory)
        monkeypatch.setattr(attention_few, "map_of", map_of)

    def __call__(
        self,
        q: torch.Tensor,
        view: PagedView,
        rows: Rows,
        spec: AttentionSpec,
        blocks: int = 3,
        seed: int = 0,
        changes: Changes = (),
        most: int = 1 << 24,
    ) -> torch.Tensor:
        """[tokens, heads * dim], of rows that are in pages already. Raises Fault, also for what is written behind the
        memory that was asked for."""

        def load(source: Source, _: str, layout: str) -> Function:
            return Function(struct.Struct(layout), source, q, blocks, seed, changes)

        self.monkeypatch.setattr(launch, "load", load)
        self.monkeypatch.setattr(linear_run, "card", lambda _: Card(blocks, wgmma=True))
        out = torch.full(q.shape, float("nan"), dtype=q.dtype)
        self.memory.reserve(q.device, most + GUARD)
        space = self.memory.shared[q.device][-1].fill_(0xFF)
        self.memory.most.clear()
        attention_few.attend(q, view, rows, spec, out, most)
        if (space[self.memory.most[q.device] :] != 0xFF).any():
            raise Fault("sums written behind their memory")
        if self.memory.get(q.device, COUNTERS, 1, torch.int32).any():
            raise Fault("counters that the next launch does not find at 0")
        return out.flatten(1)
