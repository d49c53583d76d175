"""Rotation with the store of keys and values, by Triton's interpreter: the bits of the two one after the other."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from rope_store_cases import SPECS, same

from offroad.ops import blocks

F32, BF16 = torch.float32, torch.bfloat16


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_the_bits_of_both_one_after_the_other(spec):
    same(spec, F32, F32, "cpu")


@pytest.mark.parametrize("kv", [torch.float8_e5m2, torch.float8_e4m3fn])
def test_rows_of_8_bits_with_scales(kv: torch.dtype):
    same(SPECS["values are keys"], kv, F32, "cpu", scaled=True)


def test_one_row_of_one_token():
    same(SPECS["qk_norm"], F32, F32, "cpu", starts=(64,), widths=(1,))


@pytest.mark.parametrize(("verify", "count"), [(1, 2), (0, 1), (0, 0)])
def test_steps_with_chunks_are_done_by_the_parts(verify: int, count: int, monkeypatch):
    from offroad.triton_kernels import rope_store_jit

    monkeypatch.setattr(blocks, "rope_attention", lambda *given: given)
    rows = SimpleNamespace(verify=verify, slot=[0] * count)
    assert rope_store_jit.rope_attention("qkv", rows, "layer") == ("qkv", rows, "layer")
