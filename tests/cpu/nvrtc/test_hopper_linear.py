"""Hopper's linear over weights of 4 bits or in e4m3, emulated: x W^T for odd shapes, the same in any order of warps,
copies and products, by any blocks that wait for one another; and what the kernel must not lack is missed."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from sm70_emulated import needs_compiler

pytest.importorskip("triton")  # whose records the kernel reads

from hopper_emulated import Emulated, Fault, map_of  # noqa: E402

from offroad.nvrtc import linear_hopper  # noqa: E402
from offroad.ops import activation, linear  # noqa: E402
from offroad.quant.packed import Packed  # noqa: E402
from offroad.triton_kernels.linear_pack import Records, dequantised_rows, pack  # noqa: E402

pytestmark = needs_compiler
GRIDS = (1, 3, 5, 7)  # blocks: a tile has one, two or more of them


FINITE = torch.tensor([byte for byte in range(256) if byte % 128 != 127], dtype=torch.uint8)  # of e4m3


@dataclass(frozen=True)
class Case:
    rows: int
    n: int
    k: int
    group: int  # 0: all of k; of e4m3, else scales are of 128 outputs too
    scales: torch.dtype = torch.bfloat16
    minima: int = 0  # zero points are up to that far from 8
    bias: bool = False
    gate: str = ""
    e4m3: bool = False

    def weight(self) -> Records:
        random = torch.Generator().manual_seed(self.n)
        group = self.group or self.k
        s = self._scales(random, -(-self.k // group))
        bias = torch.randn(self.n, generator=random).bfloat16() if self.bias else None
        if self.e4m3:
            q = FINITE[torch.randint(0, len(FINITE), (self.n, self.k), generator=random)].view(torch.float8_e4m3fn)
            made = pack(Packed("fp8", self.n, self.k, {"q": q, "s": s}, group, bias))
        else:
            q = torch.randint(0, 256, (self.n, self.k // 2), generator=random, dtype=torch.uint8)
            zero = torch.randint(8 - self.minima, 8 + self.minima, s.shape, generator=random) if self.minima else 8
            made = pack(Packed("affine4", self.n, self.k, {"q": q, "s": s, "m": -s * zero}, group, bias))
        assert made.tensors["s"].dtype == self.scales
        assert ("m" in made.tensors) == (self.minima > 0)
        return made

    def _scales(self, random: torch.Generator, groups: int) -> torch.Tensor:
        """By which sums are near 1."""
        bits = {torch.bfloat16: 8, torch.float16: 11, torch.float32: 14}[self.scales]  # and 4 of a zero point
        largest = 128 if self.e4m3 else max(8, self.minima)
        one = 2.0 ** (-bits - (largest**2 * self.k).bit_length() // 2 + 1)
        rows = -(-self.n // 128) if self.e4m3 and self.group else self.n
        s = one * torch.randint(2 ** (bits - 1), 2**bits, (rows, groups), generator=random)
        return s if rows == self.n else s.repeat_interleave(128, dim=0)[: self.n]

    def x(self) -> torch.Tensor:
        """In memory that goes on behind its last row."""
        random = torch.Generator().manual_seed(1)
        return torch.randn(self.rows + 1, self.k, generator=random).bfloat16()[: self.rows]

    def check(self, found: torch.Tensor) -> None:
        weight = self.weight()
        wanted = self.x().float() @ dequantised_rows(weight, torch.arange(self.n)).T
        if weight.bias is not None:
            wanted = wanted + weight.bias.float()
        allowed = linear.TOLERANCE["bfloat16"]
        if self.gate:
            wanted = activation.gated_activation(wanted.bfloat16().float(), self.gate)
            allowed = activation.TOLERANCE["bfloat16"]
        torch.testing.assert_close(found.float(), wanted, atol=allowed.absolute, rtol=allowed.relative)


CASES = (
    Case(1, 64, 128, 128),
    Case(8, 700, 1160, 128, bias=True),
    Case(3, 1024, 648, 32, minima=8, gate="silu"),
    Case(16, 1100, 904, 64, torch.float16),
    Case(12, 384, 776, 128, gate="gelu_tanh"),
    Case(17, 257, 648, 32, torch.float16, minima=8),
    Case(20, 200, 336, 16, minima=300, bias=True),
    Case(31, 40, 1288, 0, torch.float16),
    Case(32, 640, 1024, 256, torch.float32, minima=8),
    Case(50, 300, 1160, 128, minima=8, bias=True),
    Case(64, 700, 904, 64, torch.float32, bias=True),
    Case(32, 384, 776, 32, minima=8, gate="gelu_tanh"),
    Case(33, 640, 648, 128, bias=True, gate="silu"),
    Case(1, 64, 128, 128, e4m3=True),
    Case(5, 257, 904, 0, torch.float32, e4m3=True),
    Case(8, 700, 1160, 128, bias=True, e4m3=True),
    Case(7, 1024, 648, 128, torch.float32, gate="silu", e4m3=True),
    Case(16, 1100, 904, 128, torch.float16, bias=True, e4m3=True),
    Case(12, 384, 776, 256, gate="gelu_tanh", e4m3=True),
    Case(17, 257, 648, 128, e4m3=True),
    Case(20, 200, 1288, 256, torch.float16, e4m3=True),
    Case(32, 384, 776, 0, bias=True, gate="gelu_tanh", e4m3=True),
    Case(33, 640, 648, 128, torch.float32, gate="silu", e4m3=True),
    Case(50, 300, 1160, 128, torch.float32, bias=True, e4m3=True),
    Case(64, 700, 904, 0, torch.float32, bias=True, e4m3=True),
)
LONG = CASES[9]  # two tiles of 10 steps, the second of a few outputs: 7 blocks have three or four of a tile


@pytest.mark.parametrize("case", CASES, ids=str)
def test_as_the_reference_and_the_same_in_any_order(case: Case, monkeypatch):
    """Also on counters that the launches before have left."""
    emulated, x, weight = Emulated(monkeypatch), case.x(), case.weight()
    for blocks in GRIDS:
        found = [emulated(x, weight, blocks, case.gate, seed) for seed in (0, blocks, blocks + 10)]
        case.check(found[0])
        assert all(torch.equal(y, found[0]) for y in found), blocks


@pytest.mark.parametrize("rows", [8, 16, 32, 64])
def test_numbers_in_e4m3_are_exact_with_scales_of_any_size(rows: int, monkeypatch):
    """All of them, those below 2^-6 too: each column of the weight has all codes, and each row of x is one of its
    columns, so that nothing is added, and y is rounded once."""
    n, k = 256, 128
    random = torch.Generator().manual_seed(0)
    codes = FINITE[(torch.arange(n)[:, None] + 5 * torch.arange(k)) % len(FINITE)].view(torch.float8_e4m3fn)
    s = (1 + torch.arange(n) % 128 / 128) * 2.0 ** torch.randint(-117, 118, (n,), generator=random)
    weight = pack(Packed("fp8", n, k, {"q": codes, "s": s[:, None]}, k))
    columns = torch.randperm(k, generator=random)[:rows]
    x = torch.eye(k)[columns].bfloat16()
    wanted = dequantised_rows(weight, torch.arange(n)).T[columns].bfloat16()
    assert wanted.isfinite().all()
    assert torch.equal(Emulated(monkeypatch)(x, weight, 3), wanted)


def test_a_map_that_has_more_columns_than_x_is_noticed(monkeypatch):
    """Codes behind the last column are 0, which is no weight of 0: x is 0 there."""
    emulated, x, weight = Emulated(monkeypatch), LONG.x(), LONG.weight()
    words = map_of(x.data_ptr(), LONG.rows, LONG.k, 64)
    monkeypatch.setattr(linear_hopper, "map_of", lambda *_: (words[0], 1280, *words[2:]))
    with pytest.raises(AssertionError, match="not close"):
        LONG.check(emulated(x, weight, 1))


# What is left out: by how many blocks, the kernel's text, what stands for it, and what comes of it.
MISSED = {
    "waiting before sums of a step are read": (1, "wait_groups<0>();  // of", "// of", "wrong"),
    "waiting before sums are read": (1, "    wait_groups<0>();\n", "", "products were on their way"),
    "a fence": (1, "            products_may_start();\n", "", "no fence"),
    "a group's end": (1, "            end_group();\n", "", "products were on their way"),
    "waiting for copies": (3, "        wait(&ring.full[ring.stage], ring.parity);\n", "", "wrong"),
    "waiting for room": (1, "            wait(&ring.empty[ring.stage], ring.parity ^ 1);\n", "", "more arrivals"),
    "an arrival": (1, "if (t == 0 && step > 0 && lane == 0)", "if (t == 2)", "wait for each other"),
    "products that still read x": (
        1,
        "                wait_groups<0>();  // of the other tile's: their sums are read next\n"
        "                if (t == 0 && step > 0 && lane == 0) arrive(&ring.empty[before]);\n",
        "                if (t == 0 && step > 0 && lane == 0) arrive(&ring.empty[before]);\n"
        "                wait_groups<0>();\n",
        "wrong",
    ),
    "scales of the other tile": (
        1,
        "                low = scale_at(",
        "                if (step + t == 0) low = scale_at(",
        "wrong",
    ),
    "sums of a step": (1, "                add_scaled(sums[1 - t], found, low, high);\n", "", "wrong"),
    "x of the kernel before": (3, "                wait_turn();\n", "", "wrong"),
    "bytes of x": (1, "(has_x ? 2 * HALF_X : 0) + ", "", "wait for each other"),
    "rows at whole 1,024 bytes": (1, "(1024 - shared_address(shared) % 1024) % 1024", "0", "a box"),
    "barriers that all know": (1, "    __syncthreads();\n", "", "not been initialised"),
    "the other block": (3, "    await(arrived, 1);\n", "", "counters"),
    "the last of more blocks": (7, "await(arrived, count);", "await(arrived, count - 1);", "counters"),
    "two blocks' counter": (3, "    if (threadIdx.x % 32 == 0) *arrived = 0;", "", "counters"),
    "more blocks' counter": (7, "== 2 * count - 2) *arrived = 0", "== 2 * count) *arrived = 0", "counters"),
    "lanes that wait for one": (7, "wait_a_little();\n    __syncwarp();", "wait_a_little();", "wrong"),
    "lanes that one waits for": (7, "    __syncwarp();\n    if (threadIdx.x", "    if (threadIdx.x", "wrong"),
    "the last outputs": (1, "output + 8 <= width && width % 8 == 0", "true", "outside of y"),
}

# Of groups within a step, whose scales are multiplied into weights.
SMALL = Case(50, 300, 1152, 64, minima=8, bias=True)
MISSED_OF_SMALL = {
    "waiting before operands change": (1, "wait_groups<1>();  // of", "// of", "wrong"),
    "an arrival": (1, "!SUMS_SCALED && t == 1 && step > 0 && lane == 0", "false", "wait for each other"),
    "products that still read x": (
        1,
        "!SUMS_SCALED && t == 1 && step > 0",
        "!SUMS_SCALED && t == 0 && step > 0",
        "wrong",
    ),
    "scales": (1, "i < 4 && !SUMS_SCALED", "i < 0", "wrong"),
}

FEW = Case(3, 1500, 1800, 32, minima=8)  # three blocks have 32 strips each, of 15 units in 5 slots
MISSED_OF_FEW = {
    "waiting for copies": (3, "        wait(full + number, parity);\n", "", "more arrivals"),
    "waiting for room": (3, "            wait(empty + slot, parity);\n", "", "more arrivals"),
    "leaving a slot": (3, "        if (lane == 0) arrive(empty + number);\n", "", "wait for each other"),
    "x of the kernel before": (3, "        wait_turn();\n", "", "wrong"),
    "rows at whole 1,024 bytes": (3, "(1024 - shared_address(shared) % 1024) % 1024", "0", "a box"),
    "barriers that all know": (3, "    __syncthreads();\n", "", "not been initialised"),
    "chunks in their order": (3, "(chunk ^ lane % 8)", "chunk", "wrong"),
    "slots that are free": (3, "    sync_some(1, 32 * WARPS);  // slots are free\n", "", "wrong"),
    "sums of all warps": (3, "    sync_some(1, 32 * WARPS);\n", "", "wrong"),
    "zero points": (3, "            if (MINIMA && last) {", "            if (false) {", "wrong"),
    "the last outputs": (3, "        if (output >= width(p)) continue;\n", "", "outside of y"),
}


EIGHT_BITS = Case(3, 1500, 776, 128, e4m3=True)
MISSED_OF_8_BITS = {
    "the upper outputs": (3, "words[i % WORDS]", "words[0]", "wrong"),
    "k's that are 8 further": (3, "i >= 2", "false", "wrong"),
}


@pytest.mark.parametrize("missed", MISSED_OF_8_BITS)
def test_what_is_left_out_of_8_bits_is_missed(missed: str, monkeypatch):
    left_out(EIGHT_BITS, MISSED_OF_8_BITS[missed], monkeypatch)


@pytest.mark.parametrize("missed", MISSED_OF_FEW)
def test_what_is_left_out_of_few_tokens_is_missed(missed: str, monkeypatch):
    left_out(FEW, MISSED_OF_FEW[missed], monkeypatch)


@pytest.mark.parametrize("missed", MISSED_OF_SMALL)
def test_what_is_left_out_of_small_groups_is_missed(missed: str, monkeypatch):
    left_out(SMALL, MISSED_OF_SMALL[missed], monkeypatch)


@pytest.mark.parametrize("missed", MISSED)
def test_what_is_left_out_is_missed(missed: str, monkeypatch):
    left_out(LONG, MISSED[missed], monkeypatch)


def left_out(case: Case, what: tuple[int, str, str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """For one of some orders at least."""
    blocks, old, new, expected = what
    x, weight, found = case.x(), case.weight(), []
    right = Emulated(monkeypatch)(x, weight, blocks)
    for seed in range(1, 7):
        try:
            y = Emulated(monkeypatch)(x, weight, blocks, seed=seed, changes=((old, new),))
            found.append("right" if torch.equal(y, right) else "wrong")
        except Fault as fault:
            found.append(str(fault))
    assert any(expected in said for said in found), found
