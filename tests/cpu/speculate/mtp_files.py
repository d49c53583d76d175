"""Tiny Qwen3.5 checkpoints with a drafter, and the drafter's formulas by transformers' own decoder layer."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tiny_models import tiny_config
from torch.nn.functional import linear


def with_drafter(folder: Path, to: Path, family: str = "qwen3_5", seed: int = 0) -> dict[str, torch.Tensor]:
    """Copies a checkpoint and gives it a drafter with random tensors; returns those."""
    shutil.copytree(folder, to)
    torch.manual_seed(seed)
    layer = decoder_layer(family)
    made = {f"mtp.layers.0.{name}": parameter.detach() for name, parameter in layer.named_parameters()}
    hidden = tiny_config(family).hidden_size
    made |= {
        f"mtp.{name}.weight": torch.empty(hidden) for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    }
    made["mtp.fc.weight"] = torch.empty(hidden, 2 * hidden)
    for tensor in made.values():
        tensor.normal_(0.0, 0.1 if tensor.ndim == 1 else 0.15)
    file = to / "model.safetensors"
    save_file(load_file(file) | made, file, metadata={"format": "pt"})
    return made


def decoder_layer(family: str) -> torch.nn.Module:
    """One full-attention layer as transformers has it."""
    if family == "qwen3_5_moe":
        from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeDecoderLayer as Layer
    else:
        from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer as Layer
    config = tiny_config(family)
    config._attn_implementation = "eager"
    return Layer(config, config.layer_types.index("full_attention")).float().eval()


class Oracle:
    """The drafter over a whole sequence: no cache, no chunks."""

    def __init__(self, model: torch.nn.Module, made: dict[str, torch.Tensor], family: str) -> None:
        self.model, self.made = model, made
        self.layer = decoder_layer(family)
        at = "mtp.layers.0."
        self.layer.load_state_dict({name.removeprefix(at): t for name, t in made.items() if name.startswith(at)})

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * (1 + self.made[f"mtp.{name}.weight"])

    @torch.inference_mode()
    def run(self, ids: list[int], hidden: torch.Tensor) -> torch.Tensor:
        """The drafter's states over pairs (hidden[i], ids[i + 1]) at positions 0, 1, ..; [pairs, hidden]."""
        inner = self.model.model
        pairs = len(hidden)
        embedded = inner.embed_tokens(torch.tensor(ids[1 : pairs + 1]))
        x = torch.cat((self.norm(embedded, "pre_fc_norm_embedding"), self.norm(hidden, "pre_fc_norm_hidden")), -1)
        x = linear(x, self.made["mtp.fc.weight"])[None]
        positions = torch.arange(pairs)[None]
        mask = torch.full((pairs, pairs), float("-inf")).triu(1)[None, None]
        angles = inner.rotary_emb(x, positions.expand(3, 1, -1))
        out = self.layer(x, position_embeddings=angles, attention_mask=mask, position_ids=positions)
        return self.norm(out[0] if isinstance(out, tuple) else out, "norm").reshape(pairs, -1)

    @torch.inference_mode()
    def drafts(self, ids: list[int], count: int) -> tuple[list[int], list[torch.Tensor]]:
        """Greedy drafts behind the pending token ids[-1], and the logits that each was taken from."""
        known, logits = list(ids), []
        hidden = self.model.model(torch.tensor([ids[:-1]])).last_hidden_state[0]
        for _ in range(count):
            state = self.run(known, hidden)[-1:]
            logits.append(self.model.lm_head(state)[0])
            known.append(int(logits[-1].argmax()))
            hidden = torch.cat((hidden, state))
        return known[len(ids) :], logits
