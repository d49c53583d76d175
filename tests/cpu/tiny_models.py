"""Tiny random checkpoints of every family, written by transformers; nothing is downloaded."""

from __future__ import annotations

import json
from pathlib import Path

import torch

COMMON = dict(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=300,
    max_position_embeddings=512,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def tiny_config(family: str):
    """A transformers config of `family`, small but with every feature that the family has."""
    from transformers import Gemma3TextConfig, LlamaConfig, Qwen2Config, Qwen3Config

    if family == "llama":
        return LlamaConfig(**COMMON, tie_word_embeddings=False, rope_theta=10000.0)
    if family == "llama3":
        scaling = dict(
            rope_type="llama3",
            rope_theta=10000.0,
            factor=4.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=64,
        )
        return LlamaConfig(**COMMON, tie_word_embeddings=True, rope_parameters=scaling)
    if family == "qwen2":
        return Qwen2Config(**COMMON, tie_word_embeddings=True)
    if family == "qwen3":
        return Qwen3Config(**COMMON, head_dim=32, tie_word_embeddings=False)
    if family == "gemma3":
        values = COMMON | dict(num_hidden_layers=7)
        return Gemma3TextConfig(
            **values, head_dim=32, sliding_window=20, query_pre_attn_scalar=24, rope_local_base_freq=1000.0
        )
    if family.startswith("qwen3_5"):
        return _qwen3_5(family)
    if family.startswith("gemma4"):
        return _gemma4(family)
    raise ValueError(family)


def _gemma4(family: str):
    from transformers import Gemma4TextConfig

    rope = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    }
    values = COMMON | dict(
        num_hidden_layers=6,
        head_dim=16,
        global_head_dim=32,
        sliding_window=16,
        final_logit_softcapping=30.0,
        tie_word_embeddings=True,
        layer_types=["sliding_attention"] * 5 + ["full_attention"],
        hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=300,
        rope_parameters=rope,
    )
    if family == "gemma4_e":  # like E2B
        values |= dict(
            num_hidden_layers=10,
            num_key_value_heads=1,
            layer_types=(["sliding_attention"] * 4 + ["full_attention"]) * 2,
            num_kv_shared_layers=5,
            use_double_wide_mlp=True,
            hidden_size_per_layer_input=8,
        )
    else:  # like 31B, or 26B-A4B
        values |= dict(attention_k_eq_v=True, num_global_key_value_heads=1)
    if family == "gemma4_moe":
        values |= dict(enable_moe_block=True, num_experts=8, top_k_experts=2, moe_intermediate_size=24)
    return Gemma4TextConfig(**values)


def _qwen3_5(family: str):
    from transformers import Qwen3_5MoeTextConfig, Qwen3_5TextConfig

    rope = dict(
        rope_type="default",
        rope_theta=1e7,
        partial_rotary_factor=0.25,
        mrope_interleaved=True,
        mrope_section=[2, 1, 1],
    )
    values = COMMON | dict(
        num_hidden_layers=4,
        head_dim=32,
        linear_conv_kernel_dim=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=6,
        layer_types=["linear_attention"] * 3 + ["full_attention"],
        rope_parameters=rope,
    )
    if family == "qwen3_5_moe":
        del values["intermediate_size"]
        experts = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32)
        return Qwen3_5MoeTextConfig(**values, **experts, shared_expert_intermediate_size=48, tie_word_embeddings=False)
    return Qwen3_5TextConfig(**values, tie_word_embeddings=family == "qwen3_5_tied")


HYBRIDS = ("gemma4", "gemma4_e", "gemma4_moe", "qwen3_5", "qwen3_5_moe")
FAMILIES = ("llama", "llama3", "qwen2", "qwen3", "gemma3", *HYBRIDS)


def tiny_tokenizer() -> str:
    """A byte-level BPE tokenizer.json with 300 entries: 3 special ones, 256 bytes, chat tags, the rest merged pairs."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from tokenizers.pre_tokenizers import ByteLevel

    letters = sorted(ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(["<pad>", "<bos>", "<eos>", *letters])}
    merges = []
    for a, b in [("t", "h"), ("th", "e"), ("i", "n"), ("Ġ", "a"), ("e", "r")]:
        merges.append((a, b))
        vocab[a + b] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<pad>", "<bos>", "<eos>"])
    tokenizer.add_special_tokens(
        [AddedToken(f"<|{tag}|>", special=True) for tag in ("system", "user", "assistant", "end")]
    )
    return tokenizer.to_str()


def _initialise(family: str, name: str, parameter: torch.Tensor) -> None:
    """Larger than the default, so that a wrong norm, bias, decay or rotation changes the tokens."""
    if name.endswith("dt_bias"):
        parameter.uniform_(-4.0, 1.0)
    elif name.endswith("A_log"):
        parameter.uniform_(-2.0, 2.0)
    elif family.startswith("gemma4"):
        # Scores are q k^T of normed vectors: weights of 1 would give a softmax that is nearly one-hot.
        if "router" in name and "proj" not in name:
            parameter.uniform_(0.5, 1.5)
        elif "norm" in name:
            scale = parameter.shape[0] ** -0.25 if "q_norm" in name or "k_norm" in name else 1.0
            parameter.normal_(1.0, 0.1).mul_(scale)
        else:
            parameter.normal_(0.0, 0.08)
    elif family.startswith("qwen3_5"):
        parameter.normal_(float("linear_attn.norm" in name), 0.1 if parameter.ndim == 1 else 0.08)
    else:
        parameter.normal_(0.0, 0.3 if parameter.ndim == 1 else 2.0 / parameter.shape[-1] ** 0.5)
        if "norm" in name and family != "gemma3":
            parameter.add_(1.0)


def write_tiny(family: str, folder: Path, seed: int = 0) -> torch.nn.Module:
    """Saves a tiny checkpoint with a tokenizer and chat template to `folder`; returns transformers' model in fp32."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config(family), attn_implementation="eager").float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            _initialise(family, name, parameter)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.uniform_(0.3, 0.9)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(tiny_tokenizer())
    config = {"chat_template": TEMPLATE, "bos_token": "<bos>", "eos_token": "<eos>", "add_bos_token": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return model
