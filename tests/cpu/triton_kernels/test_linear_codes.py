"""The PTX that widens codes, run here instruction by instruction over every code: there is no GPU to run it on."""

from __future__ import annotations

import re
import struct

import pytest
import torch

pytest.importorskip("triton")

from offroad.quant.packed import E2M1  # noqa: E402
from offroad.triton_kernels import linear_codes  # noqa: E402

HALVES = {"bf16": torch.bfloat16, "f16": torch.float16}


def as_float(bits: int, dtype: torch.dtype) -> float:
    return float(torch.tensor([bits], dtype=torch.uint16).view(dtype))


def as_bits(value: float, dtype: torch.dtype) -> int:
    return int(torch.tensor([value], dtype=torch.float64).to(dtype).view(torch.uint16))


def f32(bits: int) -> float:
    return struct.unpack("<f", struct.pack("<I", bits))[0]


def bits32(value: float) -> int:
    return struct.unpack("<I", struct.pack("<f", value))[0]


def step(name: str, a: list[int]) -> int:
    """One instruction on 32-bit registers."""
    if name == "mov.b32":
        return a[0]
    if name in ("shr.u32", "shl.b32"):
        return a[0] >> a[1] if name == "shr.u32" else a[0] << a[1] & 0xFFFFFFFF
    if name in ("and.b32", "xor.b32"):
        return a[0] & a[1] if name == "and.b32" else a[0] ^ a[1]
    if name == "lop3.b32":
        assert a[3] == 0xEA
        return a[0] & a[1] | a[2]
    if name == "prmt.b32":
        there = a[0] | a[1] << 32
        return sum((there >> 8 * (a[2] >> 4 * i & 7) & 255) << 8 * i for i in range(4))
    if name == "add.f32":
        return bits32(f32(a[0]) + f32(a[1]))
    if name == "cvt.rn.bf16x2.f32":
        return as_bits(f32(a[0]), torch.bfloat16) << 16 | as_bits(f32(a[1]), torch.bfloat16)
    dtype = HALVES[re.fullmatch(r"fma\.rn\.(bf16|f16)x2", name).group(1)]
    low, high = (
        as_bits(x * y + z, dtype)
        for x, y, z in ((as_float(v >> shift & 0xFFFF, dtype) for v in a) for shift in (0, 16))
    )
    return high << 16 | low


def run(text: str, word: int, outputs: int, dtype: torch.dtype) -> list[float]:
    registers = {f"${outputs}": word}
    for line in text.strip().strip("{}").split(";"):
        line = line.strip()
        if not line or line.startswith(".reg"):
            continue
        name, _, rest = line.partition(" ")
        if pair := re.fullmatch(r"\{(\$\d+),(\$\d+)\}, (\w+)", rest):
            low, high, source = pair.groups()
            registers[low], registers[high] = registers[source] & 0xFFFF, registers[source] >> 16
            continue
        target, *sources = (part.strip() for part in rest.split(","))
        values = [registers[s] if s in registers else int(re.sub("^0f", "0x", s), 0) for s in sources]
        registers[target] = step(name, values)
    return [as_float(registers[f"${i}"], dtype) for i in range(outputs)]


@pytest.mark.parametrize("half", HALVES)
def test_nibbles(half: str):
    """Words with every code at every place, and others beside it."""
    for shift in range(16):
        codes = [(7 * i + shift) % 16 for i in range(8)]
        word = sum(code << 4 * i for i, code in enumerate(codes))
        order = [codes[i] for i in (0, 4, 1, 5, 2, 6, 3, 7)]
        name = half.upper()
        integers = run(getattr(linear_codes, f"_INT4_{name}").value, word, 8, HALVES[half])
        assert integers == [code - 8 for code in order]
        assert run(getattr(linear_codes, f"_E2M1_{name}").value, word, 8, HALVES[half]) == [E2M1[c] for c in order]


@pytest.mark.parametrize("half", HALVES)
def test_bytes(half: str):
    for first in range(256):
        codes = [(first + 67 * i) % 256 for i in range(4)]
        word = sum(code << 8 * i for i, code in enumerate(codes))
        raw = torch.tensor(codes, dtype=torch.uint8)
        name = half.upper()
        integers = run(getattr(linear_codes, f"_INT8_{name}").value, word, 4, HALVES[half])
        assert integers == raw.view(torch.int8).tolist()
        found = run(getattr(linear_codes, f"_E4M3_{name}").value, word, 4, HALVES[half])
        expected = raw.view(torch.float8_e4m3fn).float().tolist()
        assert all(a == b for a, b, code in zip(found, expected, codes, strict=True) if code & 127 != 127)
