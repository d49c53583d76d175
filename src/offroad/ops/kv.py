"""Rows of keys and values as they are stored: in the model's dtype, or in 8 bits, with scales or without.

What is read back is what a query of a later step sees, so the rows of the running step take the same way: a token's
answer does not depend on where a prompt was cut.
"""

from __future__ import annotations

import torch

from offroad.run.rows import PagedView


def encode(x: torch.Tensor, dtype: torch.dtype, scale: torch.Tensor | None) -> torch.Tensor:
    """x [.., kv_heads, dim] as it is stored; 8-bit kinds hold x / scale, limited to their largest number (torch's own
    conversion gives NaN, or infinity, beyond it)."""
    if dtype.itemsize > 1:
        return x.to(dtype)
    wide = x.float() if scale is None else x.float() / scale[:, None]
    largest = torch.finfo(dtype).max
    return wide.clamp(-largest, largest).to(dtype)


def decode(stored: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """What stored rows stand for: 8-bit kinds in fp32, others as they are."""
    if stored.dtype.itemsize > 1:
        return stored
    wide = stored.float()
    return wide if scale is None else wide * scale[:, None]


def read(view: PagedView, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of whole blocks [n * block, kv_heads, dim], decoded."""
    k, v = (_bytes(pages)[blocks].view(pages.dtype).flatten(0, 1) for pages in (view.k, view.v))
    return decode(k, view.k_scale), decode(v, view.v_scale)


def write(view: PagedView, blocks: torch.Tensor, rows: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Stores k and v [n, kv_heads, dim] at rows of blocks, int64 [n] each."""
    for pages, x, scale in ((view.k, k, view.k_scale), (view.v, v, view.v_scale)):
        _bytes(pages)[blocks, rows] = _bytes(encode(x, pages.dtype, scale))


def as_stored(view: PagedView, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """k and v as a later step would read them."""
    return (
        decode(encode(k, view.k.dtype, view.k_scale), view.k_scale),
        decode(encode(v, view.v.dtype, view.v_scale), view.v_scale),
    )


def _bytes(x: torch.Tensor) -> torch.Tensor:
    """8-bit floats as bytes: torch cannot index them on every device."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x
