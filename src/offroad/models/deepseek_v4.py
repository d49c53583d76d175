"""DeepSeek-V4 (Flash, Pro) as a spec: planned, not run yet.

A residual of 4 streams (mHC). Every layer attends to a window of rows that are keys and values in one, and most to
compressed rows too: of 4 tokens, picked by an indexer (C4), or of 128, all of them (C128). The first layers choose
experts by token id. A one-layer drafter (`mtp.0`) eats the streams.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from offroad.errors import ModelError
from offroad.models.config import Config
from offroad.models.spec import (
    DraftSpec,
    FfnSpec,
    HyperLayerSpec,
    HyperSpec,
    IndexSpec,
    Item,
    LinearSpec,
    ModelSpec,
    Plane,
    Ring,
    RopeSpec,
    ScalePlane,
    ScoredMoeSpec,
    SparseMlaSpec,
    SparsePaged,
    TensorSpec,
)

ARCHITECTURES = {"DeepseekV4ForCausalLM": "deepseek_v4"}
_PAGE = 64  # rows that kernels of sparse attention and of the indexer take at a time
_SCALED = 64  # channels of an 8-bit row that share a scale
_KINDS = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}
_YARN = ("factor", "beta_fast", "beta_slow", "original_max_position_embeddings")

# What transformers writes, beside "norm" for "kv_norm", where the release has the right.
_PREFIXES = (("model.embed_tokens.", "embed."), ("model.hc_head.hc_", "hc_head_"), ("model.", ""))


def model_spec(values: dict[str, Any]) -> ModelSpec:
    """The spec of a DeepSeek-V4 checkpoint, its config as released or as transformers writes it. Raises ModelError for
    variants that are not known."""
    config = Config(values, "deepseek_v4")
    hidden, count = config.get("hidden_size", int), config.get("num_hidden_layers", int)
    config.only(hidden_act="silu", attention_bias=False, mlp_bias=False, tie_word_embeddings=False)
    config.only(num_key_value_heads=1, n_shared_experts=1)
    mixers, moes = _mixers(config, count), _moes(config, count)
    config.expect("expert_dtype", "fp4", "fp8")  # the tensors say which it is
    hyper = HyperSpec(config.get("hc_mult", int), config.get("hc_sinkhorn_iters", int), config.get("hc_eps", float))
    made = _Layers(hidden, hyper)
    vocab = config.get("vocab_size", int)
    config.expect("num_nextn_predict_layers", 1, 0)
    spec = ModelSpec(
        family="deepseek_v4",
        hidden=hidden,
        vocab=vocab,
        max_len=config.get("max_position_embeddings", int),
        norm_eps=config.get("rms_norm_eps", float, 1e-6),
        layers=tuple(made.layer(f"layers.{i}", mixers[i], moes[i], vocab) for i in range(count)),
        embed="embed",
        tensors=(TensorSpec("norm.weight", "norm", (hidden,)), *made.head("")),
        head=LinearSpec("head", (("head", vocab),), hidden),
        draft=made.draft(mixers[-1], moes[-1], vocab) if values.get("num_nextn_predict_layers", 1) else None,
        prefixes=(*((f"model.layers.{i}.attn.norm.", f"layers.{i}.attn.kv_norm.") for i in range(count)), *_PREFIXES),
    )
    config.done()
    return spec


def _mixers(config: Config, count: int) -> list[SparseMlaSpec]:
    """The mixers of all layers, and behind them the drafter's."""
    heads, dim, window = (config.get(n, int) for n in ("num_attention_heads", "head_dim", "sliding_window"))
    plain, compressed = _ropes(config, dim)
    index = IndexSpec(*(config.get(f"index_{name}", int) for name in ("n_heads", "head_dim", "topk")))
    ranks = [config.get(name, int) for name in ("q_lora_rank", "o_groups", "o_lora_rank")]
    if heads % ranks[1]:
        raise ModelError("config.json: field 'o_groups'", found=ranks[1], accepted=f"a divisor of {heads} heads")
    made = []
    for kind, rate in [*_kinds(config, count), (_KINDS[0], 0)]:
        picks = kind == _KINDS[4]
        rope = compressed if rate else plain
        mixer = SparseMlaSpec(heads, dim, dim**-0.5, rope, window, *ranks, rate, picks, index if picks else None)
        made.append(mixer)
    return made


def _kinds(config: Config, count: int) -> list[tuple[str, int]]:
    """(kind of attention, tokens in a compressed row) of each layer, from either spelling."""
    rates = {_KINDS[4]: 4, _KINDS[128]: 128, **config.get("compress_rates", dict, {})}
    ratios = config.get("compress_ratios", list, None)
    if ratios is None:
        kinds = config.get("layer_types", list)
    else:
        config.read.add("layer_types")
        if unknown := [ratio for ratio in ratios if ratio not in _KINDS]:
            raise ModelError("config.json: compress_ratios", found=unknown[0], accepted=", ".join(map(str, _KINDS)))
        kinds = [_KINDS[ratio] for ratio in ratios[:count]]  # one more is the drafter's
    if len(kinds) != count or set(kinds) - set(_KINDS.values()):
        raise ModelError(
            "config.json: compress_ratios or layer_types",
            found=f"{len(kinds)} of {', '.join(sorted(map(str, set(kinds))))}",
            accepted=f"{count}, one a layer, of {', '.join(_KINDS.values())}",
        )
    return [(kind, rates.get(kind, 0)) for kind in kinds]


def _ropes(config: Config, head_dim: int) -> tuple[RopeSpec, RopeSpec]:
    """RoPE of layers without compressed rows, and of those with them, which alone have YaRN (without its mscale)."""
    part = config.get("partial_rotary_factor", float, None)
    dim = config.get("qk_rope_head_dim", int, int(head_dim * (part or 64 / 512)))
    theta, base = config.get("rope_theta", float, 1e4), config.get("compress_rope_theta", float, 1.6e5)
    given = config.get("rope_parameters", dict, {})
    values = {**given.get("compress", given), **config.get("rope_scaling", dict, {})}
    main = given.get("main", {})
    kind = values.pop("rope_type", values.pop("type", "default"))
    values.pop("type", None)
    base, theta = float(values.pop("rope_theta", base)), float(main.get("rope_theta", theta))
    dim = int(head_dim * (values.pop("partial_rotary_factor", None) or dim / head_dim))
    config.expect_in("rope_scaling", values, "attention_factor", 1.0)
    wanted = _YARN if kind == "yarn" else ()
    if kind not in ("yarn", "default") or set(values) != set(wanted) or main.get("rope_type", "default") != "default":
        found = f"{kind} with {', '.join(sorted(values)) or 'nothing'}"
        raise ModelError("config.json: rope_scaling", found=found, accepted=f"yarn with {', '.join(_YARN)}; default")
    scaling = sorted([("rope_type", kind), *((name, float(values[name])) for name in wanted)]) if wanted else []
    return RopeSpec(dim, theta), RopeSpec(dim, base, tuple(scaling))


def _moes(config: Config, count: int) -> list[ScoredMoeSpec]:
    """The experts of all layers, and behind them the drafter's."""
    config.only(scoring_func="sqrtsoftplus", topk_method="noaux_tc", norm_topk_prob=True)
    for name in ("output_router_logits", "router_aux_loss_coef", "router_jitter_noise"):
        config.read.add(name)  # training
    hashes = config.get("num_hash_layers", int, 3)
    kinds = config.get("mlp_layer_types", list, ["hash_moe"] * min(hashes, count) + ["moe"] * max(0, count - hashes))
    if len(kinds) != count or set(kinds) - {"hash_moe", "moe"}:
        found = f"{len(kinds)} of {', '.join(sorted(map(str, set(kinds))))}"
        raise ModelError("config.json: mlp_layer_types", found=found, accepted=f"{count} of hash_moe, moe")
    sizes = [config.get(n, int) for n in ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size")]
    scale, limit = config.get("routed_scaling_factor", float), config.get("swiglu_limit", float)
    return [ScoredMoeSpec(*sizes, "silu", scale, limit, kind == "hash_moe") for kind in [*kinds, "moe"]]


@dataclass(frozen=True)
class _Layers:
    """Makes layers."""

    hidden: int
    hyper: HyperSpec

    def layer(self, at: str, mixer: SparseMlaSpec, moe: ScoredMoeSpec, vocab: int) -> HyperLayerSpec:
        attn, ffn = f"{at}.attn", f"{at}.ffn"
        linears = self._attention(attn, mixer) + self._compressors(attn, mixer) + self._experts(ffn, moe)
        tensors = [
            TensorSpec(f"{at}.attn_norm.weight", "input_norm", (self.hidden,)),
            TensorSpec(f"{at}.ffn_norm.weight", "mlp_norm", (self.hidden,)),
            TensorSpec(f"{attn}.q_norm.weight", "q_norm", (mixer.q_rank,)),
            TensorSpec(f"{attn}.kv_norm.weight", "kv_norm", (mixer.head_dim,)),
            TensorSpec(f"{attn}.attn_sink", "sink", (mixer.heads,)),
        ]
        streams = self.hyper.streams
        for block in ("attn", "ffn"):
            tensors += self._hyper(f"{at}.hc_{block}", f"hyper_{block}", (2 + streams) * streams, 3)
        for name, stem, width in _compressors(mixer):
            rows = (2 if mixer.overlap else 1) * width
            tensors.append(TensorSpec(f"{attn}.{stem}.ape", f"{name}_ape", (mixer.rate, rows)))
            tensors.append(TensorSpec(f"{attn}.{stem}.norm.weight", f"{name}_norm", (width,)))
        if moe.hashed:
            tensors.append(TensorSpec(f"{ffn}.gate.tid2eid", "route_ids", (vocab, moe.top_k), "index"))
        else:
            tensors.append(TensorSpec(f"{ffn}.gate.bias", "route_bias", (moe.experts,)))
        shared = FfnSpec(moe.size, "silu")
        return HyperLayerSpec(mixer, shared, _items(mixer), linears, tuple(tensors), moe, (), self.hyper)

    def _attention(self, at: str, mixer: SparseMlaSpec) -> tuple[LinearSpec, ...]:
        heads, inner = mixer.heads * mixer.head_dim, mixer.out_groups * mixer.out_rank
        down = ((f"{at}.wq_a", mixer.q_rank), (f"{at}.wkv", mixer.head_dim))
        return (
            LinearSpec("qkv_a", down, self.hidden),
            LinearSpec("q_b", ((f"{at}.wq_b", heads),), mixer.q_rank, split="rows"),
            LinearSpec("o_a", ((f"{at}.wo_a", inner),), heads // mixer.out_groups, op="block_linear", split="rows"),
            LinearSpec("o_b", ((f"{at}.wo_b", self.hidden),), inner, split="columns"),
        )

    def _compressors(self, at: str, mixer: SparseMlaSpec) -> tuple[LinearSpec, ...]:
        made = []
        for name, stem, width in _compressors(mixer):
            rows = (2 if mixer.overlap else 1) * width
            made.append(LinearSpec(name, ((f"{at}.{stem}.wkv", rows), (f"{at}.{stem}.wgate", rows)), self.hidden))
        if index := mixer.index:
            made.append(LinearSpec("index_q", ((f"{at}.indexer.wq_b", index.heads * index.dim),), mixer.q_rank))
            made.append(LinearSpec("index_weights", ((f"{at}.indexer.weights_proj", index.heads),), self.hidden))
        return tuple(made)

    def _experts(self, at: str, moe: ScoredMoeSpec) -> tuple[LinearSpec, ...]:
        shared, each = f"{at}.shared_experts", [f"{at}.experts.{e}" for e in range(moe.experts)]
        up = tuple((f"{e}.{name}", moe.size) for e in each for name in ("w1", "w3"))
        down = tuple((f"{e}.w2", self.hidden) for e in each)
        grouped = dict(op="grouped_linear", experts=moe.experts)
        return (
            LinearSpec("router", ((f"{at}.gate", moe.experts),), self.hidden),
            LinearSpec("experts_gate_up", up, self.hidden, split="rows", **grouped),
            LinearSpec("experts_down", down, moe.size, split="columns", **grouped),
            LinearSpec("gate_up", ((f"{shared}.w1", moe.size), (f"{shared}.w3", moe.size)), self.hidden, split="rows"),
            LinearSpec("down", ((f"{shared}.w2", self.hidden),), moe.size, split="columns"),
        )

    def _hyper(self, at: str, target: str, rows: int, scales: int) -> list[TensorSpec]:
        shapes = {"fn": (rows, self.hyper.streams * self.hidden), "base": (rows,), "scale": (scales,)}
        return [TensorSpec(f"{at}_{name}", f"{target}_{name}", shape) for name, shape in shapes.items()]

    def head(self, at: str) -> list[TensorSpec]:
        """What weighs the streams before the last norm."""
        return self._hyper(f"{at}hc_head", "hyper_head", self.hyper.streams, 1)

    def draft(self, mixer: SparseMlaSpec, moe: ScoredMoeSpec, vocab: int) -> DraftSpec:
        norms = tuple(TensorSpec(f"mtp.0.{name}.weight", name, (self.hidden,)) for name in ("enorm", "hnorm", "norm"))
        linears = tuple(LinearSpec(n, ((f"mtp.0.{n}", self.hidden),), self.hidden) for n in ("e_proj", "h_proj"))
        layers = (self.layer("mtp.0", mixer, moe, vocab),)
        return DraftSpec(
            "mtp", self.hidden, layers=layers, linears=linears, tensors=(*norms, *self.head("mtp.0.")), prefix="mtp."
        )


def _compressors(mixer: SparseMlaSpec) -> list[tuple[str, str, int]]:
    """(name of its linear, of its module, width of a row) of the compressors that a layer has."""
    own = [("compress", "compressor", mixer.head_dim)] if mixer.rate else []
    return own + ([("index", "indexer.compressor", mixer.index.dim)] if mixer.index else [])


def _items(mixer: SparseMlaSpec) -> tuple[tuple[str, Item], ...]:
    """A ring of raw rows; pages of compressed rows; rings of the values and scores that the open groups are made of."""
    turned = mixer.rope.dim
    flat = mixer.head_dim - turned
    # An exponent for each 64 channels that are not turned, and one byte that fills up (fp8_ds_mla).
    row = (Plane("flat", (flat,)), Plane("turned", (turned,), "activation"))
    row += (ScalePlane("scales", (-(-flat // _SCALED) + 1,), "uint8"),)
    back = mixer.window - 1
    items: list[tuple[str, Item]] = [("rows", Ring(row, back, back, write_first=True))]
    rate, times = mixer.rate, 2 if mixer.overlap else 1
    for name, _, width in _compressors(mixer):
        planes = row if name == "compress" else (Plane("k", (width,)), ScalePlane("scale", (1,), "float32"))
        items.append((name, SparsePaged(planes, rate=rate, page=_PAGE if mixer.index else 1)))
        state = tuple(Plane(part, (times * width,), "float32") for part in ("values", "scores"))
        items.append((f"{name}_state", Ring(state, times * rate - 1, (times - 1) * rate, write_first=True)))
    return tuple(items)
