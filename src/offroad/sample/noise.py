"""Gumbel noise as a function of (seed, position, token): the same whatever else is asked for, in any batch.

Philox4x32-10 is keyed by the seed and counts (token // 4, position); a token takes the lane token % 4. Being a function
rather than a stream, it makes a draw independent of batch mates, of drafts and of filters, and a preempted request
draws the same tokens again.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

# No noise value is above it: -log(-log(1 - x)) is 22.87 at the smallest x, and -3.13 at the largest.
GUMBEL_MAX = 22.9

_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_LOW = 0xFFFFFFFF
# Blocks of four tokens worked on at once by `bits_row`: its arrays stay in the cache.
_CHUNK = 4096
_ROUNDS = 10

Ints = TypeVar("Ints", Tensor, np.ndarray)


def philox(counter: tuple[Ints, Ints, Ints, Ints], key: tuple[Ints | int, Ints | int]) -> tuple[Ints, ...]:
    """Four 32-bit words (in int64, 0 to 2**32 - 1) for a counter of four and a key of two; shapes broadcast."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # The product wraps as int64, but its bits are those of the unsigned one; masks undo the sign of the shift.
        p0, p1 = c0 * _M0, c2 * _M1
        c0, c2 = ((p1 >> 32) ^ c1 ^ k0) & _LOW, ((p0 >> 32) ^ c3 ^ k1) & _LOW
        c1, c3 = p1, p0
        k0, k1 = (k0 + _W0) & _LOW, (k1 + _W1) & _LOW
    return c0, c1 & _LOW, c2, c3 & _LOW


def _words(seed: Ints | int, position: Ints, blocks: Ints) -> tuple[Ints, ...]:
    key = (seed & _LOW, (seed >> 32) & _LOW)
    return philox((blocks, position & _LOW, (position >> 32) & _LOW, blocks & 0), key)


def gumbel(seed: Tensor, position: Tensor, tokens: Tensor | int) -> Tensor:
    """Standard Gumbel noise, fp32 `[rows, m]`, for int64 `seed` and `position` `[rows]` and token ids `[rows, m]` (or
    `[m]`); an int means all tokens of a vocabulary of that size."""
    seed, position = seed[:, None], position[:, None]
    if isinstance(tokens, int):
        blocks = torch.arange((tokens + 3) // 4, device=seed.device)[None]
        words = torch.broadcast_tensors(*_words(seed, position, blocks))
        bits = torch.stack(words, dim=-1).flatten(1)[:, :tokens]
    else:
        words = _words(seed, position, tokens >> 2)
        lane = tokens & 3
        bits = torch.where(lane < 2, torch.where(lane == 0, *words[:2]), torch.where(lane == 2, *words[2:]))
    # Small x are the large values that decide draws, and there fp64 keeps all 32 bits. Rounding to fp32 at the end
    # hides the last bit of a device's own `log`.
    x = (bits.double() + 0.5) * 2.0**-32
    return x.neg_().log1p_().neg_().log_().neg_().float()


def gumbel_row(seed: int, position: int, tokens: np.ndarray) -> np.ndarray:
    """`gumbel` of one row for token ids int64 `[m]`, in NumPy, whose calls cost a fraction of torch's on short rows."""
    words = _words(seed, np.array([position], np.int64), tokens >> 2)
    bits = np.choose(tokens & 3, words)
    return -np.log(-np.log1p(-((bits + 0.5) * 2.0**-32))).astype(np.float32)


def bits_row(seed: int, position: int, vocab: int) -> np.ndarray:
    """uint32 `[vocab]`: the random bits behind the noise of every token. Noise is at most -log(bits / 2**32), so a
    comparison tells which few tokens need their logarithms."""
    place = np.array([position], np.int64)
    blocks = np.arange((vocab + 3) // 4)
    bits = np.empty((len(blocks), 4), np.uint32)
    for i in range(0, len(blocks), _CHUNK):
        for lane, word in enumerate(_words(seed, place, blocks[i : i + _CHUNK])):
            bits[i : i + _CHUNK, lane] = word
    return bits.reshape(-1)[:vocab]
