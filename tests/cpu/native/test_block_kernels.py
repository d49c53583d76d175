"""Fused blocks equal their parts bit for bit: families, odd shapes, mixed rows, no rows; and any number of threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch

from offroad.device.profile import DeviceProfile
from offroad.models.spec import AttentionSpec, FfnSpec, RopeSpec
from offroad.native.library import set_threads
from offroad.native.pack import LAYOUT, PACKERS
from offroad.ops.block_kernels import FusedCpuKernel
from offroad.ops.bound import LayerOps
from offroad.ops.registry import default_registry
from offroad.ops.rope import rope_table
from offroad.ops.spec import Problem
from offroad.quant.packed import Packed
from offroad.run.rows import PagedView, Rows

DEVICE = DeviceProfile("cpu", "cpu", 1 << 30, frozenset(), toolchain=(("cc", "any"),))
BLOCK, COLUMNS, SLOTS = 64, 12, 4
PARTS = ("linear", "add_norm", "sandwich_norm", "qkv_rope", "attention", "gated_activation")
# (hidden, mlp size, heads, KV heads, head size, window, family)
SHAPES = [
    (96, 160, 3, 1, 32, None, "llama"),
    (64, 33, 4, 4, 32, None, "qwen2"),
    (160, 224, 6, 2, 64, None, "qwen3"),
    (37, 50, 2, 1, 96, 100, "gemma3"),
]
# (start, width) by row; the number of verify rows
STEPS = [
    ([(5, 1)], 1),
    ([(0, 1), (63, 1), (700, 1)], 3),
    ([(70, 1), (640, 1), (0, 90), (64, 13)], 2),
    ([(0, 200)], 0),
]


@pytest.fixture(params=[1, 2], autouse=True)
def threads(request):
    assert set_threads(request.param) == request.param


def kernel(name: str, problem: Problem):
    made = default_registry().kernels[name]
    assert made.check(DEVICE, problem).ok
    return made.prepare(DEVICE, problem)


def weight(n: int, k: int, random: torch.Generator, bias: bool = False) -> Packed:
    b = torch.randn(n, generator=random) if bias else None
    if k % 32:
        return PACKERS[LAYOUT](Packed("dense", n, k, {"w": torch.randn(n, k, generator=random) * 0.1}, 0, b))
    q = torch.randint(0, 256, (n, k // 2), generator=random, dtype=torch.uint8)
    scale, low = (torch.rand(n, k // 32, generator=random) * f for f in (0.02, -0.15))
    return PACKERS[LAYOUT](Packed("affine4", n, k, {"q": q, "s": scale, "m": low}, 32, b))


def make_layer(hidden, size, heads, kv_heads, dim, window, family) -> LayerOps:
    random = torch.Generator().manual_seed(hidden)

    def tensor(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random)

    spec = AttentionSpec(
        heads, kv_heads, dim, dim**-0.5, RopeSpec(dim, 10000.0), window, softcap=30.0 if window else None
    )
    names = {"qwen3": ["q_norm", "k_norm"], "gemma3": ["q_norm", "k_norm", "post_attention_norm", "post_mlp_norm"]}
    tensors = {"mlp_norm": tensor(hidden)}
    tensors |= {name: tensor(dim if name[1] == "_" else hidden) for name in names.get(family, [])}
    table = torch.randperm(SLOTS * COLUMNS, generator=random).to(torch.int32).view(SLOTS, COLUMNS) + 1
    pages = (SLOTS * COLUMNS + 1, BLOCK, kv_heads, dim)
    bounds = {op: kernel(f"cpu.{op}", Problem(op, "decode", "float32", "float32")) for op in PARTS}
    linears = {
        "qkv": weight((heads + 2 * kv_heads) * dim, hidden, random, bias=family == "qwen2"),
        "o": weight(hidden, heads * dim, random),
        "gate_up": weight(2 * size, hidden, random),
        "down": weight(hidden, size, random),
    }
    return LayerOps(
        bounds | {f"linear:{name}": bounds["linear"] for name in linears},
        linears,
        tensors,
        1e-6,
        spec,
        FfnSpec(size, "gelu_tanh" if family == "gemma3" else "silu"),
        rope=rope_table(spec.rope, BLOCK * COLUMNS),
        views={"kv": PagedView(tensor(*pages), tensor(*pages), table, BLOCK, window)},
        attention_verify=bounds["attention"],
        attention_chunk=bounds["attention"],
        following=tensor(hidden),
    )


def make_rows(listed: list[tuple[int, int]], verify: int) -> Rows:
    start, width = (np.array(column, np.int32) for column in zip(*listed, strict=True))
    slot, offset = np.arange(len(listed), dtype=np.int32), (width.cumsum() - width).astype(np.int32)
    positions = torch.cat([torch.arange(s, s + w) for s, w in listed])
    tensors = [torch.from_numpy(array) for array in (slot, start, width, offset)]
    wanted = torch.from_numpy((offset + width - 1).astype(np.int64))
    return Rows(positions, positions, slot, start, width, offset, *tensors, verify, wanted, np.ones_like(width))


def with_blocks(layer: LayerOps, kind: str) -> LayerOps:
    """The layer with its own copy of the pages and with blocks of one kind."""
    view = replace(layer.view, k=layer.view.k.clone(), v=layer.view.v.clone())
    blocks = {op: kernel(f"{kind}.{op}", Problem(op, "decode", "float32")) for op in ("attention_block", "mlp_block")}
    return replace(layer, bounds=layer.bounds | blocks, views={"kv": view}, described={})


@pytest.mark.parametrize("shape", SHAPES, ids=[shape[-1] for shape in SHAPES])
def test_fused_blocks_equal_their_parts_bit_for_bit(shape):
    layer = make_layer(*shape)
    fused, parts = with_blocks(layer, "cpu"), with_blocks(layer, "parts")
    for listed, verify in STEPS:
        rows = make_rows(listed, verify)
        random = torch.Generator().manual_seed(rows.tokens)
        h, residual = (torch.randn(rows.tokens, shape[0], generator=random) for _ in range(2))
        found, expected = fused.attention_block(h, rows), parts.attention_block(h, rows)
        assert torch.equal(found, expected)
        assert found.isfinite().all()
        assert torch.equal(fused.view.k, parts.view.k)
        assert torch.equal(fused.view.v, parts.view.v)
        for picked in (slice(None), rows.wanted, rows.wanted[:0]):  # the last layer goes on with the wanted tokens
            for one, other in zip(
                fused.mlp_block(found[picked], residual[picked]),
                parts.mlp_block(expected[picked], residual[picked]),
                strict=True,
            ):
                assert torch.equal(one, other)
    assert not torch.equal(fused.view.k, layer.view.k), "keys were stored"


def test_no_rows_give_no_rows_also_on_a_thread_that_has_no_scratch_memory_yet():
    layer, nothing = with_blocks(make_layer(*SHAPES[0]), "cpu"), torch.empty(0, SHAPES[0][0])
    with ThreadPoolExecutor(1) as pool:
        out, total = pool.submit(layer.mlp_block, nothing, nothing).result()
    assert out.shape == total.shape == nothing.shape


@pytest.mark.parametrize("op", ["attention_block", "mlp_block"])
def test_a_part_that_is_no_c_kernel_refuses_the_fused_block(op: str):
    fused = default_registry().kernels[f"cpu.{op}"]
    assert isinstance(fused, FusedCpuKernel)
    for found in ("torch.linear", ""):
        problem = Problem(op, "decode", "float32", parts=(("qkv_rope", "cpu.qkv_rope"), ("linear:o", found)))
        verdict = fused.check(DEVICE, problem)
        assert not verdict.ok
        assert verdict.reason == f"needs cpu.linear for linear:o; the plan has {found or 'no kernel'}"
