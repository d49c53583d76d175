"""Tiny Gemma-4 assistants, written by transformers, and what transformers' own module drafts."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tiny_models import tiny_config, tiny_tokenizer


def write_assistant(family: str, folder: Path, ordered: bool) -> torch.nn.Module:
    """Saves an assistant for the tiny model of `family`; returns transformers' model in fp32."""
    from transformers import Gemma4AssistantConfig, Gemma4AssistantForCausalLM

    target = tiny_config(family).to_dict()
    kept = ("vocab_size", "head_dim", "num_key_value_heads", "attention_k_eq_v", "sliding_window", "rope_parameters")
    text = {name: target[name] for name in kept} | dict(
        model_type="gemma4_text",
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        global_head_dim=32,
        num_global_key_value_heads=1 if family != "gemma4_e" else None,
        layer_types=["sliding_attention"] * 3 + ["full_attention"],
        num_kv_shared_layers=4,
        hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=0,
        enable_moe_block=False,
        use_double_wide_mlp=False,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    config = Gemma4AssistantConfig(
        text_config=text,
        backbone_hidden_size=target["hidden_size"],
        use_ordered_embeddings=ordered,
        num_centroids=20,
        centroid_intermediate_top_k=4,
    )
    torch.manual_seed(3)
    model = Gemma4AssistantForCausalLM(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.normal_(1.0, 0.1).mul_(parameter.shape[0] ** -0.25 if "q_norm" in name else 1.0)
            else:
                parameter.normal_(0.0, 0.12)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.uniform_(0.3, 0.9)
        if ordered:
            model.masked_embedding.token_ordering.copy_(torch.randperm(target["vocab_size"]))
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(tiny_tokenizer())
    (folder / "tokenizer_config.json").write_text(json.dumps({}))
    return model


@torch.inference_mode()
def oracle(
    target: torch.nn.Module, assistant: torch.nn.Module, known: list[int], count: int
) -> tuple[list[int], list[torch.Tensor]]:
    """Greedy drafts behind the pending token known[-1], and the logits of each, over the keys and values of a clean
    pass of the model: what transformers does in its first round."""
    out = target(torch.tensor([known[:-1]]), output_hidden_states=True, return_shared_kv_states=True, use_cache=True)
    shared, hidden, token = out.shared_kv_states, out.hidden_states[-1][:, -1:], known[-1]
    drafts, logits = [], []
    for _ in range(count):
        embedded = target.get_input_embeddings()(torch.tensor([[token]]))
        found = assistant(
            inputs_embeds=torch.cat((embedded, hidden), dim=-1),
            position_ids=torch.tensor([[len(known) - 1]]),
            shared_kv_states=dict(shared),
        )
        logits.append(found.logits[0, 0])
        hidden, token = found.last_hidden_state, int(logits[-1].argmax())
        drafts.append(token)
    return drafts, logits
