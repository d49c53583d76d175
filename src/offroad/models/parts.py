"""Parts that the specs of several families are made of."""

from __future__ import annotations

from offroad.models.spec import AttentionSpec, LinearSpec, MoeSpec, TensorSpec


def attention(at: str, mixer: AttentionSpec, hidden: int, bias: bool = False) -> tuple[LinearSpec, ...]:
    """The fused projection of what the layer has of queries, keys and values, and the one behind attention."""
    rows = mixer.kv_heads * mixer.head_dim
    names = "kv" if mixer.own_kv and not mixer.k_eq_v else "k" if mixer.own_kv else ""
    parts = ((f"{at}.q_proj", mixer.q_width), *((f"{at}.{name}_proj", rows) for name in names))
    out = LinearSpec("o", ((f"{at}.o_proj", hidden),), mixer.heads * mixer.head_dim, split="columns")
    return LinearSpec("qkv", parts, hidden, bias, split="rows"), out


def qk_norms(at: str, mixer: AttentionSpec, transform: str = "") -> tuple[TensorSpec, ...]:
    """Norms of each head's queries and, if the layer has them, keys."""
    names = "qk" if mixer.own_kv else "q"
    return tuple(TensorSpec(f"{at}.{n}_norm.weight", f"{n}_norm", (mixer.head_dim,), transform) for n in names)


def norms(at: str, targets: dict[str, str], hidden: int, transform: str = "") -> tuple[TensorSpec, ...]:
    """Norms over the hidden size; `targets` by the checkpoint's name."""
    return tuple(TensorSpec(f"{at}.{name}.weight", to, (hidden,), transform) for name, to in targets.items())


def mlp(at: str, size: int, hidden: int) -> tuple[LinearSpec, ...]:
    """The linears of a gated mlp."""
    gate_up = ((f"{at}.gate_proj", size), (f"{at}.up_proj", size))
    down = LinearSpec("down", ((f"{at}.down_proj", hidden),), size, split="columns")
    return LinearSpec("gate_up", gate_up, hidden, split="rows"), down


def experts(at: str, moe: MoeSpec, hidden: int) -> tuple[LinearSpec, ...]:
    """The linears of all experts, stored as a tensor each or by expert."""
    each = [f"{at}.{e}" for e in range(moe.experts)]
    gate_up = tuple((f"{e}.{name}_proj", moe.size) for e in each for name in ("gate", "up"))
    down = tuple((f"{e}.down_proj", hidden) for e in each)
    grouped = dict(op="grouped_linear", experts=moe.experts)
    return (
        LinearSpec("experts_gate_up", gate_up, hidden, fused=f"{at}.gate_up_proj", split="rows", **grouped),
        LinearSpec("experts_down", down, moe.size, fused=f"{at}.down_proj", split="columns", **grouped),
    )
