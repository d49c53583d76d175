"""The draw of unfiltered rows on a GPU: `sample.choose.choose_dense` without top_k and top_p, in two launches.

The noise is that of `sample.noise.gumbel`, bit by bit where a device's fp64 logarithm is as good as its last bit but
one; scores are rounded as there, so that a token is the same whichever way it is drawn.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from offroad.sample.choose import Filters
from offroad.triton_kernels.compile import Variant
from offroad.triton_kernels.dependent import launching, take_turn

BLOCK = 512  # counters of four tokens of a program


@triton.jit
def _words(block, position, seed):
    """Philox4x32-10 of counters (block, position, 0) with a 64-bit position and key: four uint32 vectors."""
    c0 = block.to(tl.uint32)
    c1 = tl.full(block.shape, 0, tl.uint32) + position.to(tl.uint32)
    c2 = tl.full(block.shape, 0, tl.uint32) + (position >> 32).to(tl.uint32)
    c3 = tl.full(block.shape, 0, tl.uint32)
    k0, k1 = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    m0 = tl.full(block.shape, 0xD2511F53, tl.uint32)
    m1 = tl.full(block.shape, 0xCD9E8D57, tl.uint32)
    step0 = tl.full((), 0x9E3779B9, tl.uint32)
    step1 = tl.full((), 0xBB67AE85, tl.uint32)
    for _ in tl.static_range(10):
        old0, old2 = c0, c2
        c0 = tl.umulhi(old2, m1) ^ c1 ^ k0
        c2 = tl.umulhi(old0, m0) ^ c3 ^ k1
        c1 = old2 * m1
        c3 = old0 * m0
        k0, k1 = k0 + step0, k1 + step1
    return c0, c1, c2, c3


@triton.jit
def _score(logits, token, vocab, bits, top, temperature, low):
    """logits / temperature + noise where that is not below `low`, else -inf; as choose_dense rounds it."""
    live = token < vocab
    x = tl.load(logits + token, mask=live, other=float("-inf")).to(tl.float32)
    x = tl.div_rn(x - top, tl.zeros(token.shape, tl.float32) + temperature)
    # 1 - u is exact, so its logarithm is as good as log1p's.
    u = (bits.to(tl.float64) + 0.5) * 2.3283064365386963e-10
    noise = (-tl.log(-tl.log(1.0 - u))).to(tl.float32)
    return tl.where(live & (x >= low), x + noise, float("-inf"))


@triton.jit
def _first_best(scores, tokens):
    """The largest score, and the least token that has it."""
    best = tl.max(scores, axis=0)
    return best, tl.min(tl.where(scores == best, tokens, 2147483647), axis=0)


@triton.jit
def draw_kernel(
    logits,
    top,
    temperature,
    low,
    seed,
    position,
    scores,
    tokens,
    stride,
    vocab,
    parts,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (r, p): the best of tokens [4 p BLOCK, 4 (p + 1) BLOCK) of row r."""
    take_turn(PDL)
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    words = _words(block, tl.load(position + row), tl.load(seed + row))
    highest = tl.load(top + row).to(tl.float32)
    degrees = tl.maximum(tl.load(temperature + row), 1e-30).to(tl.float32)
    least = tl.load(low + row).to(tl.float32)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    token = block * 4
    for lane in tl.static_range(4):
        score = _score(logits + row * stride, block * 4 + lane, vocab, words[lane], highest, degrees, least)
        token = tl.where(score > best, block * 4 + lane, token)
        best = tl.maximum(score, best)
    best_of_all, first = _first_best(best, token)
    tl.store(scores + row * parts + tl.program_id(1), best_of_all)
    tl.store(tokens + row * parts + tl.program_id(1), first)


@triton.jit
def choose_kernel(scores, tokens, out, parts, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """out [rows]: the best of each row's parts."""
    take_turn(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    score = tl.load(scores + row * parts + at, mask=at < parts, other=float("-inf"))
    token = tl.load(tokens + row * parts + at, mask=at < parts, other=2147483647)
    _, first = _first_best(score, token)
    tl.store(out + row, first.to(tl.int64))


def draw(logits: torch.Tensor, filters: Filters) -> torch.Tensor:
    """Token ids int64 [rows] of fp32 logits [rows, vocab]: `choose_dense` of rows without top_k and top_p."""
    rows, vocab = logits.shape
    parts = triton.cdiv(vocab, 4 * BLOCK)
    scores = torch.empty((rows, parts), dtype=torch.float32, device=logits.device)
    tokens = torch.empty((rows, parts), dtype=torch.int32, device=logits.device)
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        numbers = (filters.temperature, filters.low, filters.seed, filters.position)
        draw_kernel[(rows, parts)](
            logits,
            logits.amax(-1),
            *numbers,
            scores,
            tokens,
            logits.stride(0),
            vocab,
            parts,
            BLOCK,
            **launching(rows),
        )
        choose_kernel[(rows,)](
            scores, tokens, out, parts, triton.next_power_of_2(parts), num_warps=1, **launching(rows)
        )
    return out


def variants() -> Iterator[Variant]:
    """Any vocabulary."""
    kinds = {"logits": "*fp32", "top": "*fp32", "temperature": "*fp64", "low": "*fp64", "seed": "*i64"}
    kinds |= {"position": "*i64", "scores": "*fp32", "tokens": "*i32", "stride": "i32", "vocab": "i32", "parts": "i32"}
    yield Variant("draw", draw_kernel, kinds, {"BLOCK": BLOCK}, archs=(80, 90, 120))
