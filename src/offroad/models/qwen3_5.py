"""Qwen3.5, 3.6 and 3.8 (text): three Gated DeltaNet layers to one of gated attention, dense or with experts.

Pre-norm blocks with 1 + w: `h += mixer(norm(h)); h += mlp(norm(h))`. A checkpoint may be the text part of a multimodal
one, and may carry a one-layer drafter (`mtp.*`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from offroad.errors import ModelError
from offroad.models import parts
from offroad.models.config import Config
from offroad.models.spec import (
    AttentionSpec,
    DraftSpec,
    FfnSpec,
    GatedDeltaSpec,
    LayerSpec,
    LinearSpec,
    Mixer,
    ModelSpec,
    MoeSpec,
    Paged,
    Plane,
    Ring,
    RopeSpec,
    TensorSpec,
)
from offroad.ops.bound import LayerOps, Ops
from offroad.run.rows import Rows

ARCHITECTURES = {
    "Qwen3_5ForCausalLM": "qwen3_5_text",
    "Qwen3_5ForConditionalGeneration": "qwen3_5",
    "Qwen3_5MoeForCausalLM": "qwen3_5_moe_text",
    "Qwen3_5MoeForConditionalGeneration": "qwen3_5_moe",
}
_PREFIXES = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head", "lm_head"),
)


def model_spec(values: dict[str, Any]) -> ModelSpec:
    """The spec of a Qwen3.5 checkpoint. Raises ModelError for variants that are not implemented."""
    config = Config.text(values, "qwen3_5")
    family, hidden = values["model_type"], config.get("hidden_size", int)
    kinds = config.layer_types("linear_attention", "full_attention", config.get("full_attention_interval", int, 4))
    config.only(hidden_act="silu", attention_bias=False, attn_output_gate=True, mtp_use_dedicated_embeddings=False)
    attention, delta = _attention(config), _delta_spec(config)
    state = config.choice("mamba_ssm_dtype", "float32", "float32", "bfloat16", "float16")
    ffn, moe = _ffn(config, "moe" in family)
    made = _Layers(hidden, ffn, moe, state)
    vocab, tied = config.get("vocab_size", int), config.get("tie_word_embeddings", bool, False)
    spec = ModelSpec(
        family="qwen3_5_moe" if moe else "qwen3_5",
        hidden=hidden,
        vocab=vocab,
        max_len=config.get("max_position_embeddings", int),
        norm_eps=config.get("rms_norm_eps", float, 1e-6),
        layers=tuple(
            made.layer(f"model.layers.{i}", attention if kind == "full_attention" else delta)
            for i, kind in enumerate(kinds)
        ),
        embed="model.embed_tokens",
        tensors=(TensorSpec("model.norm.weight", "norm", (hidden,), "plus_one"),),
        head=None if tied else LinearSpec("head", (("lm_head", vocab),), hidden),
        draft=made.draft(attention) if config.get("mtp_num_hidden_layers", int, 1) == 1 else None,
        ignored=(r"model\.visual\..*", r"visual\..*", *((r"lm_head\.weight",) if tied else ())),
        prefixes=_PREFIXES,
        notes=("text only: the vision tower is not loaded",) if "vision_config" in values else (),
    )
    config.done()
    return spec


def _attention(config: Config) -> AttentionSpec:
    heads, dim = config.get("num_attention_heads", int), config.get("head_dim", int, 256)
    parameters = dict(config.get("rope_parameters", dict, {}))
    config.expect_in("rope_parameters", parameters, "mrope_interleaved", True)
    sections = _sections(parameters.pop("mrope_section", None) or [11, 11, 10])
    turned = parameters.pop("partial_rotary_factor", None) or config.get("partial_rotary_factor", float, 0.25)
    config.get("partial_rotary_factor", float, None)
    base = float(parameters.pop("rope_theta", None) or config.get("rope_theta", float, 1e7))
    rope = RopeSpec(int(dim * turned), base, config.scaling(parameters), sections)
    return AttentionSpec(
        heads, config.get("num_key_value_heads", int), dim, dim**-0.5, rope, qk_norm=True, output_gate=True
    )


def _sections(found: Any) -> tuple[int, int]:
    """Angles of the height and of the width stream; the rest are time's."""
    if not isinstance(found, list) or [type(count) for count in found] != [int] * 3:
        raise ModelError(
            "config.json: rope_parameters.mrope_section", found=repr(found), accepted="three numbers of angles"
        )
    return found[1], found[2]


def _delta_spec(config: Config) -> GatedDeltaSpec:
    gate = config.choice("output_gate_type", "swish", "swish", "silu", "sigmoid")
    keys, values = config.get("linear_num_key_heads", int), config.get("linear_num_value_heads", int)
    if keys < 1 or values % keys:
        raise ModelError(
            "config.json: field 'linear_num_value_heads'", found=str(values), accepted=f"a multiple of {keys} key heads"
        )
    return GatedDeltaSpec(
        keys,
        values,
        config.get("linear_key_head_dim", int),
        config.get("linear_value_head_dim", int),
        config.get("linear_conv_kernel_dim", int),
        "sigmoid" if gate == "sigmoid" else "silu",
    )


def _ffn(config: Config, moe: bool) -> tuple[FfnSpec, MoeSpec | None]:
    """The dense mlp, or the shared expert and the experts."""
    config.only(mlp_only_layers=[])  # dense checkpoints have it too
    if not moe:
        return FfnSpec(config.get("intermediate_size", int), "silu"), None
    config.only(norm_topk_prob=True, decoder_sparse_step=1)
    for name in ("intermediate_size", "router_aux_loss_coef", "output_router_logits"):
        config.read.add(name)  # training, or the size of layers that there are none of
    experts = MoeSpec(
        config.get("num_experts", int),
        config.get("num_experts_per_tok", int),
        config.get("moe_intermediate_size", int),
        "silu",
    )
    return FfnSpec(config.get("shared_expert_intermediate_size", int), "silu"), experts


@dataclass(frozen=True)
class _Layers:
    """Makes layers; `state` is the dtype of recurrent states."""

    hidden: int
    ffn: FfnSpec
    moe: MoeSpec | None
    state: str

    def layer(self, at: str, mixer: Mixer, first: int = 0) -> LayerSpec:
        hidden, moe, size = self.hidden, self.moe, self.ffn.size
        if isinstance(mixer, AttentionSpec):
            linears = parts.attention(f"{at}.self_attn", mixer, hidden)
            tensors = parts.qk_norms(f"{at}.self_attn", mixer, "plus_one")
            row = (mixer.kv_heads, mixer.head_dim)
            items = (("kv", Paged((Plane("k", row), Plane("v", row)), first=first)),)
            blocks = ("attention_block",)
        else:
            linears, tensors, items = self._delta(f"{at}.linear_attn", mixer)
            blocks = ()
        if moe is None:
            linears, blocks = linears + parts.mlp(f"{at}.mlp", size, hidden), (*blocks, "mlp_block")
        else:
            linears += parts.mlp(f"{at}.mlp.shared_expert", size, hidden)
            linears += parts.experts(f"{at}.mlp.experts", moe, hidden)
            router = ((f"{at}.mlp.gate", moe.experts), (f"{at}.mlp.shared_expert_gate", 1))
            linears += (LinearSpec("router", router, hidden),)
        norms = {"input_layernorm": "input_norm", "post_attention_layernorm": "mlp_norm"}
        tensors += parts.norms(at, norms, hidden, "plus_one")
        return LayerSpec(mixer, self.ffn, items, linears, tensors, moe, blocks)

    def _delta(self, at: str, spec: GatedDeltaSpec):
        heads, width = spec.value_heads, spec.value_width
        linears = (
            LinearSpec(
                "qkvz", ((f"{at}.in_proj_qkv", spec.channels), (f"{at}.in_proj_z", width)), self.hidden, split="rows"
            ),
            LinearSpec("ba", ((f"{at}.in_proj_b", heads), (f"{at}.in_proj_a", heads)), self.hidden, split="rows"),
            LinearSpec("o", ((f"{at}.out_proj", self.hidden),), width, split="columns"),
        )
        tensors = (
            TensorSpec(f"{at}.conv1d.weight", "conv", (spec.channels, 1, spec.kernel), "matrix"),
            TensorSpec(f"{at}.A_log", "a_log", (heads,)),
            TensorSpec(f"{at}.dt_bias", "dt_bias", (heads,)),
            TensorSpec(f"{at}.norm.weight", "delta_norm", (spec.value_dim,)),
        )
        back, state = spec.kernel - 1, (heads, spec.key_dim, spec.value_dim)
        records = (
            Plane("key", (spec.key_heads, spec.key_dim), "float32"),
            Plane("delta", (heads, spec.value_dim), "float32"),
            Plane("decay", (heads,), "float32"),
        )
        items = (
            # Programs of a key head read columns while others store new ones: a column more keeps these apart.
            ("conv", Ring((Plane("raw", (spec.channels,), "activation"),), back, back, write_first=True)),
            ("state", Ring((Plane("s", state, self.state),), 1, 1, records=records)),
        )
        return linears, tensors, items

    def draft(self, attention: AttentionSpec) -> DraftSpec:
        names = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
        layer = self.layer("mtp.layers.0", attention, first=1)
        carry = Ring((Plane("hidden", (self.hidden,), "activation"),), 1, 1)
        return DraftSpec(
            method="mtp",
            hidden=self.hidden,
            layers=(replace(layer, items=(*layer.items, ("carry", carry))),),
            linears=(LinearSpec("fc", (("mtp.fc", self.hidden),), 2 * self.hidden),),
            tensors=tuple(TensorSpec(f"mtp.{name}.weight", name, (self.hidden,), "plus_one") for name in names),
            prefix="mtp.",
        )


class Qwen3_5:
    """The forward pass over bound ops."""

    def forward(self, rows: Rows, ops: Ops) -> torch.Tensor:
        """Normed hidden states of the wanted tokens, [wanted, hidden]."""
        residual = ops.embed(rows.ids)
        h = ops.layers[0].norm("input_norm", residual)
        last = len(ops.layers) - 1
        for i, layer in enumerate(ops.layers):
            h = layer.attention_block(h, rows) if "kv" in layer.views else self.delta_block(layer, h, rows)
            if i == last:  # nothing is stored after this: only the wanted tokens go on
                h, residual = h[rows.wanted], residual[rows.wanted]
            h, residual = layer.mlp_block(h, residual) if layer.moe is None else self.moe_block(layer, h, residual)
            ops.observe(i, residual)
        return h

    @staticmethod
    def delta_block(layer: LayerOps, h: torch.Tensor, rows: Rows) -> torch.Tensor:
        return layer.linear("o", layer.gated_delta(layer.linear("qkvz", h), layer.linear("ba", h), rows))

    @staticmethod
    def moe_block(layer: LayerOps, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h, residual = layer.add_norm(x, residual, layer.tensors["mlp_norm"])
        logits = layer.linear("router", h)  # of experts, then of the shared one's gate
        weights, experts = layer.route(logits[:, :-1])
        mixed = layer.experts(h, weights, experts, layer.linear("down", layer.gated_linear(h)), logits[:, -1:])
        return layer.add_norm(mixed, residual, layer.following)
