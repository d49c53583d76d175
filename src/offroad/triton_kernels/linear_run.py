"""Launches the linear kernels: which regime a number of rows gets, which tile, and the memory in between.

Everything is decided on the host from shapes alone, so that a step can be captured in a CUDA graph; memory is made on
the first call of a size (a warm-up before capture) and kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton

from offroad.device.profile import DeviceProfile
from offroad.quant.packed import Packed
from offroad.triton_kernels import linear_jit
from offroad.triton_kernels.dependent import launching
from offroad.triton_kernels.linear import DENSE_FROM, DENSE_OUTPUTS
from offroad.triton_kernels.linear_pack import BLOCK_K, BLOCK_N, Records
from offroad.triton_kernels.memory import DENSE_BYTES, MEMORY, dense_bytes, dense_outputs

INTERPRETED = triton.knobs.runtime.interpret
# Programs for each SM that keep enough loads in flight, measured on an H100 at the shapes of Qwen3.5-27B: of packed
# weights by the width of a tile (those of 64 tokens are bound by products, and parts of sums cost them more), of dense
# ones and of fp32 activations.
ENOUGH = {16: 3.7, 32: 3.35, 64: 1.65}
ENOUGH_DENSE = 1.9
ENOUGH_FP32 = ENOUGH_GROUPED_8_BIT = 1.6
SHARES = 3  # programs for each SM where they have equal shares
DENSE_TOKENS = 16  # up to which dense weights are read by the kernel, not by torch's GEMM
MOST_SPLITS = 16
INVARIANT_ROWS = 64  # rows whose tile a batch-invariant call has, however many there are
WHOLE = 1 << 30  # steps of a group that is all of k


@dataclass(frozen=True)
class Card:
    """Streaming multiprocessors, whether matrix instructions take an operand of 64 rows from registers (wgmma), and
    bytes of dequantised weights at a time."""

    sms: int
    wgmma: bool
    dense: int = DENSE_BYTES


@dataclass(frozen=True)
class Tile:
    """Outputs and tokens of a tile, and how a program is compiled: `registers` are the most that a thread may take,
    None as many as it wants. `split` programs have a tile each, or, where `programs` are named, as many have equal
    shares of all tiles of a block of tokens."""

    n: int
    m: int
    split: int
    warps: int = 4
    stages: int = 4
    registers: int | None = None
    programs: int = 0

    def grid(self, n: int, k: int) -> tuple[int, int, int]:
        """Tiles of a block of tokens, programs that have them, and how many a tile has; 0: shares."""
        tiles, units = -(-n // self.n), -(-k // BLOCK_K)
        if not self.programs or self.programs * tiles * units >= 2**31:
            split = min(self.split, units)
            return tiles, tiles * split, split
        return tiles, min(self.programs, tiles * units), 0

    def sums(self, n: int, k: int) -> int:
        """Numbers that programs of a block of tokens leave in memory for the one that adds them."""
        _, programs, split = self.grid(n, k)
        return 0 if split == 1 else programs * (1 if split else 2) * self.n * self.m


@dataclass(frozen=True)
class Stored:
    """A packed weight as the kernel's arguments."""

    kind: str
    q: torch.Tensor
    s: torch.Tensor | None = None
    m: torch.Tensor | None = None
    r: torch.Tensor | None = None
    fold: int = 1
    group_units: int = 1
    s_group: int = 0

    @property
    def summed(self) -> bool:
        """Whether minima are multiplied by sums of x, which takes registers beside the product's."""
        return self.m is not None and self.fold == 1

    @property
    def flags(self) -> dict[str, Any]:
        return {
            "KIND": self.kind,
            "FOLD": self.fold,
            "GROUP_UNITS": self.group_units,
            "E4M3_SCALES": self.s is not None and self.s.dtype == torch.uint8,
            "HAS_M": self.m is not None,
            "HAS_ROW_SCALE": self.r is not None,
        }


def stored(weight: Packed) -> Stored:
    """The weight's tensors and strides. Its group is a power of two below 128, a multiple of 128, or all of k."""
    if "w" in weight.tensors:
        return Stored("dense", weight.tensors["w"])
    assert isinstance(weight, Records), weight.layout
    group, tensors = weight.group, weight.tensors
    whole = group >= weight.k
    fold = BLOCK_K // group if group < BLOCK_K and not whole else 1
    group_units = WHOLE if whole else max(1, group // BLOCK_K)
    s = tensors["s"]
    return Stored(weight.kind, tensors["q"], s, tensors.get("m"), tensors.get("r"), fold, group_units, s.shape[1])


def splits(programs: int, units: int, wanted: float) -> int:
    """Parts of k so that there are as many programs as `wanted`: the least number that divides k nearly evenly, or one
    more, if that divides it wholly and there are not many more for it."""
    best = 1
    for parts in range(1, min(MOST_SPLITS, max(1, units // 2)) + 1):
        if -(-units // parts) * parts > 1.1 * units:
            continue
        best = parts
        if programs * parts >= wanted:
            break
    whole = units % best and best < MOST_SPLITS and units % (best + 1) == 0
    return best + 1 if whole and programs * (best + 1) <= 1.4 * wanted else best


def width(rows: int, dtype: torch.dtype) -> int:
    """Tokens that a program owns when a block has `rows`."""
    return 16 if rows <= 16 else 32 if rows <= 32 or dtype == torch.float32 else 64


def tile(
    kind: str,
    n: int,
    k: int,
    rows: int,
    blocks: int,
    card: Card,
    dtype: torch.dtype,
    grouped: bool = False,
    summed: bool = False,
) -> Tile:
    """The tile for `rows` tokens a block, `blocks` of which run beside each other; `grouped`: of experts; `summed`: as
    `Stored` says, which leaves no room for a limit of registers."""
    m, units = width(rows, dtype), -(-k // BLOCK_K)
    four, eight, pairs = kind in ("int4", "e2m1"), kind in ("int8", "e4m3"), -(-n // BLOCK_N) % 2 == 0
    if dtype == torch.float32:
        return Tile(64, m, splits(-(-n // 64) * blocks, units, ENOUGH_FP32 * card.sms), stages=2)
    if kind == "dense":
        return Tile(64, m, splits(-(-n // 64) * blocks, units, ENOUGH_DENSE * card.sms), stages=3)
    if eight and grouped:
        wide = 128 if pairs and m < 64 else 64
        return Tile(wide, m, splits(-(-n // wide) * blocks, units, ENOUGH_GROUPED_8_BIT * card.sms), stages=3)
    wanted = ENOUGH[m] * card.sms
    limited = four and card.wgmma and not summed
    if limited and pairs and m == 64 and blocks > 1 and not grouped:  # x is read half as often
        return Tile(128, m, splits(-(-n // 128) * blocks, units, wanted), warps=8, stages=3, registers=128)
    split = splits(-(-n // 64) * blocks, units, wanted)
    if eight and split == 1 and m < 64 and blocks == 1 and card.wgmma:  # else an SM with a program more ends late
        return Tile(64, m, 1, stages=4, programs=SHARES * card.sms)
    # With more registers an SM has one program less of 32 tokens, and the last ones start when others end.
    return Tile(64, m, split, stages=3, registers=96 if limited and m == 32 else None)


def card_of(profile: DeviceProfile) -> Card:
    """The card that a plan is for: which tile a launch takes is known without it."""
    wgmma = profile.compute_capability is not None and profile.compute_capability[0] == 9
    return Card(profile.units, wgmma, dense_bytes(profile.memory))


@cache
def card(device: torch.device) -> Card:
    """The device that tensors on `device` are on; a small one for the interpreter."""
    if device.type != "cuda":
        return Card(4, True)
    found = torch.cuda.get_device_properties(device)
    return Card(found.multi_processor_count, found.major == 9, dense_bytes(found.total_memory))


def run(
    x: torch.Tensor,
    weight: Packed,
    *,
    invariant: bool = False,
    dense_from: int = DENSE_FROM,
    choice: Tile | None = None,
    on: Card | None = None,
) -> torch.Tensor:
    """`x w^T + bias`; x [tokens, k] -> [tokens, n].

    By the number of rows: few have a tile as narrow as they are, more several tiles of 64 beside each other, and from
    `dense_from` on the weight is dequantised into memory for torch's GEMM. `invariant` pins one tile and one split of k
    for a shape, so that a row's result is bit for bit the same in every batch; it costs bandwidth at few rows and
    operations at many. `choice` is a tile to measure, `on` the card (None: that of x).
    """
    if "w" in weight.tensors and not invariant:
        return dense(x, weight, on=on)
    if weight.perm is not None:
        x = x.index_select(1, weight.perm)
    rows = x.shape[0]
    if rows >= dense_from and not invariant and choice is None:
        return through_dense(x, weight, on or card(x.device))
    x = x.contiguous()
    y = torch.empty(rows, weight.n, dtype=x.dtype, device=x.device)
    if rows:
        it = stored(weight)
        assumed = INVARIANT_ROWS if invariant else rows
        blocks = -(-assumed // 64)
        at = choice or tile(
            it.kind, weight.n, weight.k, assumed, blocks, on or card(x.device), x.dtype, summed=it.summed
        )
        sums = at.sums(weight.n, weight.k)
        piece = max(1, DENSE_BYTES // (4 * sums)) * at.m if invariant and sums else rows  # whose sums have room
        for first in range(0, rows, piece):
            part = slice(first, first + piece)
            launch(x[part], it, y[part], weight, at, -(-len(y[part]) // at.m), weight.n)
    return y


def dense(x: torch.Tensor, weight: Packed, *, on: Card | None = None) -> torch.Tensor:
    """`run` of a dense weight in x's type: few tokens by the kernel, more by torch's GEMM."""
    rows, w = x.shape[0], weight.tensors["w"]
    if not 0 < rows <= DENSE_TOKENS or weight.n > DENSE_OUTPUTS or x.dtype == torch.float32 or not w.is_contiguous():
        return torch.nn.functional.linear(x, w, weight.bias)
    x, it = x.contiguous(), Stored("dense", w)
    y = torch.empty(rows, weight.n, dtype=x.dtype, device=x.device)
    at = tile("dense", weight.n, weight.k, rows, 1, on or card(x.device), x.dtype)
    launch(x, it, y, weight, at, 1, weight.n)
    return y


def launch(
    x: torch.Tensor,
    it: Stored,
    y: torch.Tensor,
    weight: Packed,
    at: Tile,
    blocks: int,
    n: int,
    ids: torch.Tensor | None = None,
    owner: torch.Tensor | None = None,
    per_token: int = 1,
    gate: str = "",
) -> None:
    """One launch: y [rows, n] of `blocks` blocks of tokens, or [rows, n / 2] with the gated activation `gate`."""
    rows = y.shape[0]
    tiles, programs, split = at.grid(n, weight.k)
    partial = arrived = y
    if split != 1:
        partial = MEMORY.get(x.device, "partial", blocks * at.sums(n, weight.k), torch.float32)
        arrived = MEMORY.get(x.device, "arrived", tiles * blocks, torch.int32)
    whole = it.kind != "dense" or n % at.n == 0
    linear_jit.linear[(programs, blocks)](
        x,
        it.q,
        it.s,
        it.m,
        it.r,
        weight.bias,
        y,
        partial,
        arrived,
        ids,
        owner,
        rows,
        n,
        weight.k,
        -(-weight.k // BLOCK_K),
        tiles,
        it.s_group,
        per_token,
        **it.flags,
        HAS_BIAS=weight.bias is not None,
        GROUPED=owner is not None,
        GATE=gate,
        EVEN=whole and weight.k % BLOCK_K == 0,
        SPLIT=split,
        BN=at.n,
        BM=at.m,
        STAGES=at.stages,
        ASM=not INTERPRETED and x.dtype != torch.float32,
        num_warps=at.warps,
        maxnreg=at.registers,
        **launching(x.shape[0]),
    )


def through_dense(x: torch.Tensor, weight: Packed, on: Card) -> torch.Tensor:
    """Dequantises a piece of the weight in x's dtype, multiplies by torch's GEMM, and so on; x is in its order."""
    it, n, k = stored(weight), weight.n, weight.k
    units = -(-k // BLOCK_K)
    y = torch.empty(x.shape[0], n, dtype=x.dtype, device=x.device)
    step = dense_outputs(n, k, x.element_size(), on.dense)
    buffer = MEMORY.get(x.device, f"dense {x.dtype}", step * k, x.dtype)
    for first in range(0, n, step):
        last = min(n, first + step)
        piece = buffer[: (last - first) * k].view(last - first, k)
        linear_jit.dequantise[(-(-(last - first) // BLOCK_N), units)](
            it.q,
            it.s,
            it.m,
            it.r,
            piece,
            first,
            last,
            k,
            units,
            it.s_group,
            **it.flags,
            ASM=not INTERPRETED and x.dtype != torch.float32,
            **launching(x.shape[0]),
        )
        torch.mm(x, piece.T, out=y[:, first:last])
    return y if weight.bias is None else y.add_(weight.bias)
