"""The C kernels against the plain-PyTorch references, over odd shapes; and that results depend on nothing else."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from offroad.device.profile import DeviceProfile
from offroad.models.spec import AttentionSpec, RopeSpec
from offroad.native.library import set_threads
from offroad.native.pack import LAYOUT, PACKERS, unfit
from offroad.ops import activation, attention, linear, norm, rope
from offroad.ops.cpu_kernels import KERNELS
from offroad.ops.spec import Problem
from offroad.quant.packed import Packed, dequantise
from offroad.run.rows import PagedView, Rows

DEVICE = DeviceProfile("cpu", "cpu", 1 << 30, frozenset(), toolchain=(("cc", "any"),))
OPS = {op.name: op for module in (activation, attention, linear, norm, rope) for op in module.OPS}


def bound(op: str):
    kernel = next(kernel for kernel in KERNELS if kernel.op == op)
    problem = Problem(op, "decode", "float32", "float32")
    assert kernel.check(DEVICE, problem).ok
    return kernel.prepare(DEVICE, problem)


def close(op: str, found: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = OPS[op].tolerance["float32"]
    torch.testing.assert_close(found, expected, atol=tolerance.absolute, rtol=tolerance.relative)


@pytest.fixture(params=[1, 2], autouse=True)
def threads(request):
    assert set_threads(request.param) == request.param
    return request.param


def weight(kind: str, n: int, k: int, group: int = 32, bias: bool = False, seed: int = 0) -> Packed:
    random = torch.Generator().manual_seed(seed)
    b = torch.randn(n, generator=random) if bias else None
    if kind in ("float32", "bfloat16"):
        return Packed("dense", n, k, {"w": (torch.randn(n, k, generator=random) * 0.1).to(getattr(torch, kind))}, 0, b)
    scale, low = torch.rand(n, k // group, generator=random) * 0.02, torch.randn(n, k // group, generator=random) * 0.1
    if "exact" not in kind:
        scale, low = scale.half().float(), low.half().float()
    if kind.startswith("affine4"):
        q = torch.randint(0, 256, (n, k // 2), generator=random, dtype=torch.uint8)
        return Packed("affine4", n, k, {"q": q, "s": scale, "m": low}, group, b)
    q = torch.randint(-128, 128, (n, k), generator=random, dtype=torch.int8)
    tensors = {"q": q, "s": scale * 0.1} | ({"m": low} if kind.endswith("m") else {})
    return Packed("affine8", n, k, tensors, group, b)


WEIGHTS = [
    ("float32", 1, 5, 0),
    ("float32", 50, 37, 0),
    ("bfloat16", 33, 130, 0),
    ("affine4", 203, 160, 32),
    ("affine4", 16, 32, 32),
    ("affine4 exact", 40, 256, 32),
    ("affine4", 24, 512, 128),
    ("affine8", 31, 96, 32),
    ("affine8 m", 64, 272, 16),
    ("affine8 exact m", 17, 64, 32),
]


@pytest.mark.parametrize(("kind", "n", "k", "group"), WEIGHTS)
@pytest.mark.parametrize("bias", [False, True])
def test_linear_is_the_reference(kind, n, k, group, bias):
    plain = weight(kind, n, k, group, bias)
    packed, call = PACKERS[LAYOUT](plain), bound("linear")
    wide = plain if plain.layout != "dense" else dataclasses.replace(plain, tensors={"w": dequantise(plain)})
    for rows in (1, 2, 3, 6, 7, 13, 70, 97, 200):
        x = torch.randn(rows, k, generator=torch.Generator().manual_seed(rows))
        close("linear", call(x, packed), linear.linear(x, wide))


@pytest.mark.parametrize(("kind", "n", "k", "group"), WEIGHTS)
def test_linear_does_not_depend_on_the_batch_or_the_threads(kind, n, k, group, threads):
    packed, call = PACKERS[LAYOUT](weight(kind, n, k, group)), bound("linear")
    x = torch.randn(230, k, generator=torch.Generator().manual_seed(1))
    whole = call(x, packed)
    for rows in range(1, 30):
        assert torch.equal(call(x[rows : 2 * rows], packed), whole[rows : 2 * rows])
    set_threads(3 - threads)
    assert torch.equal(call(x, packed), whole)


def test_linear_takes_strided_input_and_no_rows():
    packed, call = PACKERS[LAYOUT](weight("affine4", 32, 64)), bound("linear")
    x = torch.randn(5, 128)
    assert torch.equal(call(x[:, ::2], packed), call(x[:, ::2].contiguous(), packed))
    assert call(torch.empty(0, 64), packed).shape == (0, 32)


@pytest.mark.parametrize(("kind", "n", "k", "group"), WEIGHTS)
@pytest.mark.parametrize("scale", [1.0, 25.3])
def test_embed_is_the_reference(kind, n, k, group, scale):
    plain = weight(kind, n, k, group)
    ids = torch.randint(0, n, (23,))
    found = bound("embed")(ids, PACKERS[LAYOUT](plain), scale, torch.float32)
    close("embed", found, linear.embed(ids, plain, scale, torch.float32))


def test_half_scales_only_where_exact():
    assert PACKERS[LAYOUT](weight("affine4", 16, 64)).tensors["s"].dtype == torch.float16
    assert PACKERS[LAYOUT](weight("affine4 exact", 16, 64)).tensors["s"].dtype == torch.float32


def test_what_cannot_be_packed_is_said():
    assert unfit("affine4", 64, 32) is None
    assert "multiple of 32" in unfit("affine4", 64, 16)
    assert "whole groups" in unfit("affine8", 40, 16)
    assert "no packer" in unfit("ternary", 32, 32)


@pytest.mark.parametrize("rows", [1, 7, 200])
@pytest.mark.parametrize("n", [1, 31, 64, 576])
def test_norms_are_the_references(rows, n):
    x, residual, w, post = torch.randn(rows, n) * 3, torch.randn(rows, n), torch.rand(n) + 0.5, torch.rand(n)
    close("norm", bound("norm")(x, w, 1e-5), norm.norm(x, w, 1e-5))
    for found, expected in zip(
        bound("add_norm")(x, residual, w, 1e-6), norm.add_norm(x, residual, w, 1e-6), strict=True
    ):
        close("add_norm", found, expected)
    pair = bound("sandwich_norm")(x, residual, post, w, 1e-6), norm.sandwich_norm(x, residual, post, w, 1e-6)
    for found, expected in zip(*pair, strict=True):
        close("sandwich_norm", found, expected)


@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
@pytest.mark.parametrize(("rows", "size"), [(1, 3), (5, 33), (130, 1536)])
def test_gated_activation_is_the_reference(kind, rows, size):
    x = torch.randn(rows, 2 * size) * 6
    x[0, 0], x[-1, 1] = 120.0, -120.0
    close("gated_activation", bound("gated_activation")(x, kind), activation.gated_activation(x, kind))


def test_gated_activation_keeps_nan():
    x = torch.ones(1, 16)
    x[0, 2] = float("nan")
    assert bound("gated_activation")(x, "silu").isnan().nonzero().tolist() == [[0, 2]]


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "turned"), [(9, 3, 64, 64), (4, 1, 256, 256), (2, 2, 96, 24)])
@pytest.mark.parametrize("tokens", [1, 5, 70])
def test_qkv_rope_is_the_reference(qk_norm, heads, kv_heads, dim, turned, tokens):
    spec = AttentionSpec(heads, kv_heads, dim, 0.1, RopeSpec(turned, 10000.0), qk_norm=qk_norm)
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim)
    norms = (torch.rand(dim), torch.rand(dim)) if qk_norm else (None, None)
    arguments = (qkv, torch.randint(0, 300, (tokens,)), rope.rope_table(spec.rope, 300), spec, *norms, 1e-6)
    for found, expected in zip(bound("qkv_rope")(*arguments), rope.qkv_rope(*arguments), strict=True):
        close("qkv_rope", found, expected)


def rows_of(starts: list[int], widths: list[int]) -> Rows:
    arrays = [np.array(a, dtype=np.int32) for a in (range(len(starts)), starts, widths, np.cumsum([0, *widths[:-1]]))]
    positions = torch.cat([torch.arange(s, s + w) for s, w in zip(starts, widths, strict=True)])
    return Rows(
        torch.zeros_like(positions), positions, *arrays, *map(torch.from_numpy, arrays), 0, positions, arrays[2]
    )


def paged(spec: AttentionSpec, rows: Rows, block: int, seed: int = 0) -> PagedView:
    """Pages with random content; columns that no query of this step can see hold 0, as does every last fresh one's."""
    random = torch.Generator().manual_seed(seed)
    columns = int((rows.start + rows.width).max()) // block + 2
    table = torch.zeros(len(rows.slot), columns, dtype=torch.int32)
    order = torch.randperm(table.numel(), generator=random).int() + 1
    for r, (start, width) in enumerate(zip(rows.start, rows.width, strict=True)):
        first = max(0, int(start) - (spec.window or 1 << 30) + 1) // block
        last = (int(start + width) - 1) // block
        table[r, first : last + 1] = order[r * columns + first : r * columns + last + 1]
        if spec.window and width > spec.window:
            table[r, int(start) // block + 1 : last] = 0
    shape = (table.numel() + 1, block, spec.kv_heads, spec.head_dim)
    return PagedView(
        torch.randn(shape, generator=random), torch.randn(shape, generator=random), table, block, spec.window
    )


ATTENTION = [
    # heads, kv heads, dim, window, softcap, block, starts, widths
    (9, 3, 64, None, None, 16, [0, 5, 130], [1, 7, 1]),
    (9, 3, 64, None, None, 16, [0, 63, 64, 65, 511, 512, 513, 1500], [1] * 8),
    (3, 3, 32, None, None, 8, [0, 100], [70, 131]),
    (9, 1, 128, None, 20.0, 32, [17, 600], [33, 2]),
    (4, 1, 256, 40, None, 16, [0, 3, 39, 40, 200], [5, 60, 1, 1, 90]),
    (4, 2, 64, 512, None, 16, [1300, 700], [1, 65]),
    (2, 1, 64, 16, 5.0, 4, [1000], [3]),
    (6, 2, 64, None, None, 16, [2900], [1]),
]


@pytest.mark.parametrize(("heads", "kv_heads", "dim", "window", "softcap", "block", "starts", "widths"), ATTENTION)
@pytest.mark.parametrize("writable", [True, False])
def test_attention_is_the_reference(heads, kv_heads, dim, window, softcap, block, starts, widths, writable):
    spec = AttentionSpec(heads, kv_heads, dim, dim**-0.5, RopeSpec(dim, 1e4), window=window, softcap=softcap)
    rows = rows_of(starts, widths)
    view = dataclasses.replace(paged(spec, rows, block), writable=writable)
    other = dataclasses.replace(view, k=view.k.clone(), v=view.v.clone())
    q, k, v = (torch.randn(rows.tokens, h, dim) for h in (heads, kv_heads, kv_heads))
    close("attention", bound("attention")(q, k, v, view, rows, spec), attention.attention(q, k, v, other, rows, spec))
    assert torch.equal(view.k, other.k)
    assert torch.equal(view.v, other.v)


@pytest.mark.parametrize("window", [None, 50, 600])
def test_attention_does_not_depend_on_chunks_or_threads(window, threads):
    spec, call = AttentionSpec(6, 2, 64, 0.125, RopeSpec(64, 1e4), window=window), bound("attention")
    length = 1200
    q, k, v = (torch.randn(length, h, 64, generator=torch.Generator().manual_seed(h)) for h in (6, 2, 2))

    def run(cuts: list[int]) -> torch.Tensor:
        view = PagedView(
            torch.zeros(length // 16 + 2, 16, 2, 64),
            torch.zeros(length // 16 + 2, 16, 2, 64),
            torch.arange(1, length // 16 + 2, dtype=torch.int32)[None],
            16,
            window,
        )
        out = []
        for start, end in zip([0, *cuts], [*cuts, length], strict=True):
            out.append(call(q[start:end], k[start:end], v[start:end], view, rows_of([start], [end - start]), spec))
        return torch.cat(out)

    whole = run([])
    assert torch.equal(run([1, 2, 60, 64, 513, 777, 1199]), whole)
    assert torch.equal(run([16 * i for i in range(1, 75)]), whole)
    set_threads(3 - threads)
    assert torch.equal(run([100, 1100, 1101, 1102]), whole)


def test_refusals_say_why():
    by_op = {kernel.op: kernel for kernel in KERNELS}
    bare = dataclasses.replace(DEVICE, toolchain=())
    ask = by_op["linear"].check(bare, Problem("linear", "decode", "float32"))
    assert not ask.ok
    assert "apt install gcc" in ask.reason
    assert "pip install offroad[cc]" in ask.reason
    assert "bfloat16" in by_op["norm"].check(DEVICE, Problem("norm", "decode", "bfloat16")).reason
    gpu = dataclasses.replace(DEVICE, kind="cuda")
    assert "cuda" in by_op["norm"].check(gpu, Problem("norm", "decode", "float32")).reason
    for sizes, word in (
        ((("head_dim", 80),), "80"),
        ((("head_dim", 512),), "512"),
        ((("heads", 64), ("kv_heads", 1)), "64"),
    ):
        assert (
            word in by_op["attention"].check(DEVICE, Problem("attention", "decode", "float32", "float32", sizes)).reason
        )
    assert "float16" in by_op["attention"].check(DEVICE, Problem("attention", "decode", "float32", "float16")).reason
