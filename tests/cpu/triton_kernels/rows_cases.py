"""Cases of the row kernels for a device: each compares a kernel of the registry with its op's reference."""

from __future__ import annotations

from dataclasses import replace

import torch

from offroad.models.spec import AttentionSpec, RopeSpec
from offroad.ops.registry import default_registry
from offroad.ops.rope import rope_table
from offroad.ops.spec import Problem
from offroad.quant.packed import Packed

EPS = 1e-6
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
PLAIN = AttentionSpec(heads=6, kv_heads=2, head_dim=64, scale=1.0, rope=RopeSpec(64, 1e4))
SMALL = ((1, 96), (3, 576), (2, 1000), (5, 64))  # (tokens, hidden)
ROPES = {
    "plain": PLAIN,
    "qk_norm": replace(PLAIN, qk_norm=True),
    "partial, three streams, gates": replace(
        PLAIN, heads=4, head_dim=32, rope=RopeSpec(16, 1e4, sections=(3, 2)), output_gate=True, qk_norm=True
    ),
    "values are keys": replace(PLAIN, v_norm=True, k_eq_v=True, qk_norm=True, head_dim=128, rope=RopeSpec(128, 1e6)),
    "values normed": replace(PLAIN, v_norm=True, head_dim=16, rope=RopeSpec(16, 1e4)),
    "values are raw keys": replace(PLAIN, k_eq_v=True),
    "queries only": replace(PLAIN, own_kv=False, qk_norm=True, heads=3, head_dim=80, rope=RopeSpec(40, 1e4)),
}


class Check:
    """Runs kernels on `device` in a dtype against references."""

    def __init__(self, dtype: str, device: str = "cpu", seed: int = 0) -> None:
        self.name, self.dtype, self.device = dtype, DTYPES[dtype], device
        self.random = torch.Generator(device).manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype | None = None, scale: float = 1.0) -> torch.Tensor:
        wide = torch.randn(shape, generator=self.random, device=self.device) * scale
        return wide.to(self.dtype if dtype is None else dtype)

    def weight(self, size: int) -> torch.Tensor:
        return self.normal(size, dtype=torch.float32) * 0.3 + 1

    def op(self, op: str, *arguments) -> None:
        registry = default_registry()
        kernel = registry.kernels[f"triton.{op}"].prepare(None, Problem(op, "decode", self.name))
        expected, found = registry.ops[op].reference(*arguments), kernel(*arguments)
        limit = registry.ops[op].tolerance[self.name]
        several = (found, expected) if isinstance(found, tuple) else ((found,), (expected,))
        for a, b in zip(*several, strict=True):
            if b is None:
                assert a is None
                continue
            assert (a.dtype, a.shape) == (b.dtype, b.shape)
            torch.testing.assert_close(a, b, atol=limit.absolute, rtol=limit.relative)

    def norms(self, tokens: int, hidden: int) -> None:
        x, residual = self.normal(tokens, hidden, scale=3.0), self.normal(tokens, hidden)
        self.op("norm", x, self.weight(hidden), EPS)
        self.op("norm", x, None, EPS)
        wider = self.normal(tokens, 2 * hidden)
        self.op("norm", wider[:, hidden:], self.weight(hidden), EPS)
        self.op("add_norm", x, residual, self.weight(hidden), EPS)
        self.op("add_norm", x, wider[:, :hidden], self.weight(hidden), EPS)
        self.op("sandwich_norm", x, residual, self.weight(hidden), self.weight(hidden), EPS)

    def activations(self, tokens: int, size: int) -> None:
        for kind in ("silu", "gelu_tanh"):
            self.op("gated_activation", self.normal(tokens, 2 * size, scale=3.0), kind)

    def rope(self, spec: AttentionSpec, tokens: int, far: int = 500) -> None:
        width = spec.q_width + (spec.kv_heads * spec.head_dim * (1 if spec.k_eq_v else 2) if spec.own_kv else 0)
        shape = (tokens,) if spec.rope.sections is None else (3, tokens)
        positions = torch.randint(far, (*shape[:-1], 2 * tokens), generator=self.random, device=self.device)
        norms = [self.weight(spec.head_dim) if spec.qk_norm else None for _ in range(2)]
        norms[1] = norms[1] if spec.own_kv else None
        table = rope_table(spec.rope, far, self.device)
        qkv = self.normal(tokens, width)
        self.op("qkv_rope", qkv, positions[..., :tokens], table, spec, *norms, EPS)
        if spec.output_gate:
            self.op("output_gate", self.normal(tokens, spec.heads * spec.head_dim), qkv, spec)

    def embed(self, tokens: int, vocab: int, hidden: int, scale: float, stored: torch.dtype) -> None:
        table = self.normal(vocab, hidden, dtype=stored)
        ids = torch.randint(vocab, (tokens,), generator=self.random, device=self.device)
        self.op("embed", ids, Packed("dense", vocab, hidden, {"w": table}), scale, self.dtype)

    def combine(self, tokens: int, top_k: int, hidden: int) -> None:
        parts, weights = self.normal(tokens, top_k, hidden), self.normal(tokens, top_k, dtype=torch.float32).softmax(-1)
        wider = self.normal(tokens, hidden + 8)  # rows that do not follow one another
        self.op("moe_combine", parts, weights, None, None)
        self.op("moe_combine", parts, weights, wider[:, :hidden], wider[:, hidden : hidden + 1])

    def route(self, tokens: int, experts: int, top_k: int) -> None:
        logits = self.normal(tokens, experts, dtype=torch.float32).to(self.dtype)
        # Equal logits have no order that the reference keeps: made distinct in every dtype.
        order = torch.argsort(logits.float(), dim=-1).argsort(dim=-1).float()
        logits = ((order - experts / 2) / 16).to(self.dtype) if experts <= 256 else order.sub(experts / 2).div(16)
        self.op("route", logits, top_k, None)
        self.op("route", logits, top_k, self.weight(experts))
