"""The drafter that comes with Qwen3.5: one attention layer over pairs (hidden state before a token, the token)."""

from __future__ import annotations

import torch

from offroad.models.qwen3_5 import Qwen3_5
from offroad.ops.bound import Ops
from offroad.run.rows import Rows


class Qwen3_5Mtp:
    """The forward pass over bound ops."""

    def forward(self, rows: Rows, hidden: torch.Tensor, ops: Ops) -> torch.Tensor:
        """Normed hidden states of the wanted pairs, [wanted, hidden]: what the head scores for the position after each,
        and what stands in for `hidden` there.

        `hidden` [tokens, hidden]: the model's own normed states of the position before each token of `rows`, whose
        angles are those of that position too. The embedding comes first in what `fc` reads.
        """
        own, [layer] = ops.drafter, ops.layers
        pair = own.norm("pre_fc_norm_embedding", ops.embed(rows.ids)), own.norm("pre_fc_norm_hidden", hidden)
        x = own.linear("fc", torch.cat(pair, dim=-1))
        h = layer.attention_block(layer.norm("input_norm", x), rows)[rows.wanted]
        x = x[rows.wanted]
        return (layer.mlp_block(h, x) if layer.moe is None else Qwen3_5.moe_block(layer, h, x))[0]
