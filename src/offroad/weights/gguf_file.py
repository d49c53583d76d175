"""The GGUF container: metadata and tensor directory, every length checked against the file before it is used.

The `gguf` library's reader makes a Python object per array element (many seconds for a vocabulary of 262,144 tokens),
so the container is read here; block sizes and the less usual formats still come from the library.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import _type_traits

from offroad.errors import ModelError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
_FLOATS = {"F32": "f32", "F16": "f16", "BF16": "bf16"}
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_REPAIR = "download the file again"


@dataclass(frozen=True)
class GgufTensor:
    """A tensor of the directory. `shape` has rows first (the file has them last); `offset` counts from the file's
    start; `kind` is as in `TensorHeader`."""

    name: str
    shape: tuple[int, ...]
    kind: str
    offset: int
    nbytes: int


class _Cursor:
    """Reads forward through the file's bytes; a read past the end is a ModelError."""

    def __init__(self, data: np.ndarray, where: str) -> None:
        self.view, self.where, self.at = memoryview(data), where, 0
        self.size = len(self.view)

    def need(self, count: int, what: str) -> None:
        if count > self.size - self.at:
            raise ModelError(
                f"{self.where}: {what}",
                found=f"{self.size - self.at} bytes left of {count}",
                accepted="a whole GGUF file",
                next=_REPAIR,
            )

    def scalar(self, code: str, what: str) -> Any:
        size = struct.calcsize("<" + code)
        self.need(size, what)
        value = struct.unpack_from("<" + code, self.view, self.at)[0]
        self.at += size
        return value

    def text(self, what: str) -> str:
        length = self.scalar("Q", what)
        self.need(length, what)
        raw = bytes(self.view[self.at : self.at + length])
        self.at += length
        return self.decode(raw, what)

    def decode(self, raw: bytes, what: str) -> str:
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise ModelError(
                f"{self.where}: {what}", found="bytes that are not UTF-8", accepted="UTF-8 text", next=_REPAIR
            ) from error

    def texts(self, count: int, what: str) -> list[str]:
        self.need(8 * count, what)
        unpack, view, at, size = struct.Struct("<Q").unpack_from, self.view, self.at, self.size
        found = []
        for _ in range(count):
            if at + 8 > size:
                break
            end = at + 8 + unpack(view, at)[0]
            if end > size:
                break
            found.append(bytes(view[at + 8 : end]))
            at = end
        self.at = at
        if len(found) < count:
            raise ModelError(
                f"{self.where}: {what}",
                found=f"{len(found)} strings, then the end of the file",
                accepted=f"{count} strings",
                next=_REPAIR,
            )
        try:
            return [raw.decode() for raw in found]
        except UnicodeDecodeError:
            return [self.decode(raw, what) for raw in found]

    def value(self, kind: int, what: str, depth: int = 0) -> Any:
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind], what)
        if kind == _STRING:
            return self.text(what)
        if kind != _ARRAY or depth > 3:
            raise ModelError(
                f"{self.where}: {what}", found=f"value type {kind}", accepted="types 0 to 12", next=_REPAIR
            )
        inner, count = self.scalar("I", what), self.scalar("Q", what)
        if inner == _STRING:
            return self.texts(count, what)
        if inner in _SCALARS:
            dtype = np.dtype("<" + _SCALARS[inner] if inner != 7 else "?")
            self.need(count * dtype.itemsize, what)
            values = np.frombuffer(self.view, dtype, count, self.at).tolist()
            self.at += count * dtype.itemsize
            return values
        self.need(count * 12, what)
        return [self.value(inner, what, depth + 1) for _ in range(count)]


class GgufFile:
    """An open GGUF file: `metadata` by key, `tensors` by name, and their bytes through a memory map."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.where = f"GGUF file {path.name}"
        self.data = self._map()
        cursor = _Cursor(self.data, self.where)
        tensor_count, key_count = self._head(cursor)
        self.metadata: dict[str, Any] = {}
        for _ in range(key_count):
            key = cursor.text("metadata key")
            if key in self.metadata:
                raise ModelError(
                    f"{self.where}: metadata", found=f"key {key!r} twice", accepted="each key once", next=_REPAIR
                )
            self.metadata[key] = cursor.value(cursor.scalar("I", key), f"metadata {key!r}")
        self.tensors = self._directory(cursor, tensor_count)

    def _map(self) -> np.ndarray:
        try:
            if self.path.stat().st_size < 24:
                raise ModelError(
                    self.where, found=f"{self.path.stat().st_size} bytes", accepted="a whole GGUF file", next=_REPAIR
                )
            # Copy on write: torch wants writable memory, and nothing here writes.
            return np.memmap(self.path, np.uint8, "c")
        except OSError as error:
            raise ModelError(self.where, found=str(error), accepted="a readable file") from error

    def _head(self, cursor: _Cursor) -> tuple[int, int]:
        magic = bytes(cursor.view[:4])
        cursor.at = 4
        if magic != MAGIC:
            raise ModelError(
                f"{self.where}: first bytes", found=repr(magic), accepted=repr(MAGIC), next="give a GGUF file"
            )
        version = cursor.scalar("I", "version")
        if version not in VERSIONS:
            swapped = struct.unpack(">I", struct.pack("<I", version))[0] in VERSIONS
            raise ModelError(
                f"{self.where}: version",
                found=f"{version}" + (" (big-endian file)" if swapped else ""),
                accepted="2 or 3, little-endian",
                next="convert it with a current llama.cpp",
            )
        counts = cursor.scalar("Q", "tensor count"), cursor.scalar("Q", "key count")
        cursor.need(24 * counts[0] + 12 * counts[1], "counts of tensors and keys")
        return counts

    def _directory(self, cursor: _Cursor, count: int) -> dict[str, GgufTensor]:
        align = self.metadata.get("general.alignment", 32)
        if not isinstance(align, int) or align < 8 or align & (align - 1):
            raise ModelError(
                f"{self.where}: general.alignment", found=align, accepted="a power of two, 8 or more", next=_REPAIR
            )
        entries = [self._entry(cursor) for _ in range(count)]
        start = (cursor.at + align - 1) // align * align
        tensors: dict[str, GgufTensor] = {}
        for name, shape, kind, offset in entries:
            if name in tensors:
                raise ModelError(
                    f"{self.where}: tensor {name}", found="twice", accepted="each tensor once", next=_REPAIR
                )
            block, size = GGML_QUANT_SIZES[kind]
            if not shape or min(shape) < 1 or shape[-1] % block:
                raise ModelError(
                    f"{self.where}: tensor {name}",
                    found=f"shape {shape} as {kind.name}",
                    accepted=f"rows of a multiple of {block} weights",
                    next=_REPAIR,
                )
            nbytes = prod(shape) // block * size
            if offset % align or start + offset + nbytes > cursor.size:
                raise ModelError(
                    f"{self.where}: tensor {name}",
                    found=f"data at bytes {start + offset} to {start + offset + nbytes} of {cursor.size}",
                    accepted=f"data inside the file, aligned to {align}",
                    next=_REPAIR,
                )
            stored = _FLOATS.get(kind.name, f"gguf.{kind.name.lower()}")
            tensors[name] = GgufTensor(name, shape, stored, start + offset, nbytes)
        return tensors

    def _entry(self, cursor: _Cursor) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
        name = cursor.text("tensor name")
        dims = cursor.scalar("I", f"tensor {name}")
        if not 1 <= dims <= 4:
            raise ModelError(
                f"{self.where}: tensor {name}", found=f"{dims} dimensions", accepted="1 to 4", next=_REPAIR
            )
        shape = tuple(cursor.scalar("Q", f"tensor {name}") for _ in range(dims))[::-1]
        number = cursor.scalar("I", f"tensor {name}")
        known = {kind.value: kind for kind in GGMLQuantizationType if kind.name in _FLOATS or kind in _type_traits}
        if number not in known:
            raise ModelError(
                f"{self.where}: tensor {name}",
                found=f"type {number}",
                accepted=", ".join(sorted(kind.name for kind in known.values())),
                next="quantise the model to one of these types",
            )
        return name, shape, known[number], cursor.scalar("Q", f"tensor {name}")

    def raw(self, tensor: GgufTensor) -> np.ndarray:
        """The tensor's bytes, uint8 [nbytes], in the file's memory."""
        return self.data[tensor.offset : tensor.offset + tensor.nbytes]
