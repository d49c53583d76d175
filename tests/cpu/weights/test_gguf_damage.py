"""A damaged GGUF gives a ModelError that says what is wrong, never another exception."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from gguf_files import write_gguf
from hypothesis import example, given, settings
from hypothesis import strategies as st

from offroad.errors import ModelError
from offroad.weights.gguf_file import GgufFile
from offroad.weights.gguf_source import GgufSource

_WRITTEN: dict[str, bytes] = {}


def whole(folder: Path) -> bytes:
    if not _WRITTEN:
        write_gguf(folder / "whole.gguf")
        _WRITTEN["bytes"] = (folder / "whole.gguf").read_bytes()
    return _WRITTEN["bytes"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("gguf")


def reads_or_refuses(path: Path) -> bool:
    """Opens, reads every tensor and makes the tokenizer; False if that raised ModelError."""
    try:
        source = GgufSource(path)
        for name in source.headers:
            source.read(name)
        source.tokenizer()
    except ModelError as error:
        told = error.found is not None and bool(error.accepted)
    else:
        return True
    assert told, "an error without the value found or what would be accepted"
    return False


@settings(max_examples=150, deadline=None)
@given(st.floats(0.0, 1.0, exclude_max=True))
@example(0.0)
@example(0.999999)
def test_a_truncated_file_is_refused(folder, fraction):
    data = whole(folder)
    path = folder / "cut.gguf"
    path.write_bytes(data[: int(len(data) * fraction)])
    assert not reads_or_refuses(path)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 9000), st.binary(min_size=1, max_size=8))
def test_overwritten_bytes_never_crash(folder, at, junk):
    data = bytearray(whole(folder))
    data[at : at + len(junk)] = junk
    path = folder / "junk.gguf"
    path.write_bytes(data)
    reads_or_refuses(path)


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (0, b"GGML", "first bytes.*GGML.*b'GGUF'"),
        (4, struct.pack("<I", 1), "version.*1"),
        (4, struct.pack(">I", 3), "big-endian"),
        (8, struct.pack("<Q", 2**60), "counts"),
        (16, struct.pack("<Q", 2**60), "counts"),
    ],
)
def test_head(folder, at, value, message):
    data = bytearray(whole(folder))
    data[at : at + len(value)] = value
    path = folder / "head.gguf"
    path.write_bytes(data)
    with pytest.raises(ModelError, match=message):
        GgufFile(path)


def entry(name: bytes, dims: tuple[int, ...], kind: int, offset: int) -> bytes:
    shape = struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
    return struct.pack("<Q", len(name)) + name + shape + struct.pack("<IQ", kind, offset)


def by_hand(path: Path, entries: list[bytes], data: int) -> GgufFile:
    head = struct.pack("<4sIQQ", b"GGUF", 3, len(entries), 0) + b"".join(entries)
    path.write_bytes(head + bytes(-len(head) % 32) + bytes(data))
    return GgufFile(path)


@pytest.mark.parametrize(
    ("entries", "data", "message"),
    [
        ([entry(b"a", (4,), 99, 0)], 16, "tensor a.*type 99.*Q4_K"),
        ([entry(b"a", (4,), 0, 32)], 32, "tensor a.*of 96"),
        ([entry(b"a", (4,), 0, 2)], 64, "aligned"),
        ([entry(b"a", (33,), 8, 0)], 64, "multiple of 32"),
        ([entry(b"a", (4,), 0, 0), entry(b"a", (4,), 0, 0)], 64, "tensor a.*twice"),
        ([entry(b"a", (1, 1, 1, 1, 1), 0, 0)], 64, "5 dimensions"),
        ([entry(b"a", (0,), 0, 0)], 64, "shape"),
        ([entry(b"a", (2**40, 2**40), 0, 0)], 64, "data at bytes"),
    ],
)
def test_directory(tmp_path, entries, data, message):
    with pytest.raises(ModelError, match=message):
        by_hand(tmp_path / "m.gguf", entries, data)


def test_a_whole_directory_by_hand(tmp_path):
    file = by_hand(tmp_path / "m.gguf", [entry(b"a", (4, 2), 0, 0), entry(b"b", (3,), 1, 32)], 64)
    assert file.tensors["a"].shape == (2, 4)
    assert (file.tensors["b"].kind, file.tensors["b"].nbytes) == ("f16", 6)
    assert file.raw(file.tensors["a"]).dtype == np.uint8


def test_metadata_equals_the_gguf_library_s(folder):
    from gguf import GGUFReader

    (folder / "again.gguf").write_bytes(whole(folder))
    ours, theirs = GgufFile(folder / "again.gguf"), GGUFReader(folder / "again.gguf")
    fields = {key: field.contents() for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    assert ours.metadata == fields
    for tensor in theirs.tensors:
        assert bytes(ours.raw(ours.tensors[tensor.name])) == tensor.data.tobytes()
