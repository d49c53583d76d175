"""Loads compiled kernels into torch's CUDA context and launches them on its current stream.

A kernel takes one argument, a struct by value, which is packed here: no argument is boxed on its own.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

from offroad.errors import OffroadError
from offroad.nvrtc.compile import PTX, Source, compiled

STATIC_SHARED = 49_152  # bytes a block may take without asking for more
NATIVE = ((7, 0), (7, 5))  # compute capabilities that get a cubin; others the driver's translation of PTX


class LaunchError(OffroadError):
    """The driver refused a kernel, or a tensor does not have the shape that the kernel is for."""


@dataclass(frozen=True)
class Function:
    """A kernel that is loaded: `launch(grid, threads, *values)` packs values by `layout` and starts it."""

    name: str
    layout: struct.Struct
    shared: int
    handle: Any

    def launch(self, grid: tuple[int, int, int], threads: int, *values: float, early: bool = False) -> None:
        """Starts the kernel on torch's current stream; an empty grid has nothing to do. `early`: it may start while the
        one before runs, and waits for its turn itself. Raises LaunchError with the driver's name of the failure."""
        if 0 in grid:
            return
        from cuda.bindings import driver

        arguments = ctypes.create_string_buffer(self.layout.pack(*values), self.layout.size)
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
        stream = driver.CUstream(torch.cuda.current_stream().cuda_stream)
        if early:
            config = driver.CUlaunchConfig()
            config.gridDimX, config.gridDimY, config.gridDimZ = grid
            config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
            config.sharedMemBytes, config.hStream = self.shared, stream
            config.attrs, config.numAttrs = [_early()], 1
            status = driver.cuLaunchKernelEx(config, self.handle, ctypes.addressof(pointers), 0)[0]
        else:
            status = driver.cuLaunchKernel(
                self.handle, *grid, threads, 1, 1, self.shared, stream, ctypes.addressof(pointers), 0
            )[0]
        if status.value:
            raise LaunchError(f"kernel {self.name}", found=f"{status.name} for grid {grid}, {threads} threads")


@cache
def _early() -> Any:
    """The attribute of a programmatic dependent launch."""
    from cuda.bindings import driver

    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    return attribute


def load(source: Source, name: str, layout: str, shares: bool = True) -> Function:
    """The kernel `name` of a source, for torch's current device; compiled and loaded once. `layout` is that of its
    argument struct, as in `struct`; `shares`: it uses the source's shared memory, which else would keep blocks off an
    SM. Raises KernelCompileError and LaunchError."""
    return _load(source, name, layout, shares, torch.cuda.current_device())


def rehearse(source: Source, name: str, layout: str) -> None:
    """`load` for a launch on tensors without memory, of which steps' launches are collected before there are any; also
    on a machine without a GPU, where there is nothing to load."""
    if torch.cuda.is_available():
        load(source, name, layout)


@cache
def _load(source: Source, name: str, layout: str, shares: bool, device: int) -> Function:
    from cuda.bindings import driver

    module = _module(source, device)
    handle = _checked(driver.cuModuleGetFunction(module, name.encode()), source)
    if shares and source.shared > STATIC_SHARED:
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _checked(driver.cuFuncSetAttribute(handle, attribute, source.shared), source)
    return Function(name, struct.Struct(layout), source.shared if shares else 0, handle)


@cache
def _module(source: Source, device: int):
    """The module in torch's own context of the device, which torch makes with its first tensor there."""
    from cuda.bindings import driver

    torch.empty(1, device=f"cuda:{device}")
    capability = torch.cuda.get_device_capability(device)
    target = source.target or (f"sm_{capability[0]}{capability[1]}" if capability in NATIVE else PTX)
    return _checked(driver.cuModuleLoadData(compiled(source, target).code), source)


def _checked(answer: tuple, source: Source):
    status, *rest = answer
    if status.value:
        raise LaunchError(f"loading {source.label}", found=status.name, next="see `offroad doctor`")
    return rest[0] if rest else None


@dataclass(frozen=True)
class Shapes:
    """Checks tensors against symbolic shapes: `Shapes("norm", x="tokens hidden", weight="hidden")`.

    A word is a size that must be the same wherever it stands; a number must be met; `_` is any size.
    """

    kernel: str
    shapes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, kernel: str, **shapes: str) -> Shapes:
        return cls(kernel, {name: tuple(text.split()) for name, text in shapes.items()})

    def check(self, known: dict[str, int] | None = None, **tensors: torch.Tensor | None) -> dict[str, int]:
        """The sizes by name; tensors that are None are left out. Raises LaunchError naming the tensor."""
        sizes = dict(known or {})
        for name, tensor in tensors.items():
            if tensor is None:
                continue
            wanted, found = self.shapes[name], tensor.shape
            if len(found) != len(wanted):
                raise LaunchError(f"{self.kernel}: {name}", found=tuple(found), accepted=f"[{', '.join(wanted)}]")
            for word, size in zip(wanted, found, strict=True):
                if word == "_":
                    continue
                expected = int(word) if word.isdigit() else sizes.setdefault(word, size)
                if size != expected:
                    raise LaunchError(
                        f"{self.kernel}: {name}",
                        found=tuple(found),
                        accepted=f"[{', '.join(wanted)}], {word} {expected}",
                    )
        return sizes
