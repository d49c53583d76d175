"""What changes logits before temperature: min_tokens, logit_bias and penalties, one row at a time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from offroad.sample.params import SamplingParams


@dataclass(frozen=True)
class Adjustment:
    """The adjustments of one sequence. `stop_ids` are masked while fewer than `min_tokens` tokens were generated; bias
    is kept as ids and values on the device. Penalties are as in vLLM: repetition over prompt and output (a positive
    logit is divided, others are multiplied), frequency and presence over the output alone."""

    prompt_len: int
    min_tokens: int
    stop_ids: Tensor | None
    bias_ids: Tensor | None
    bias: Tensor | None
    repetition: float
    frequency: float
    presence: float

    @classmethod
    def of(cls, params: SamplingParams, prompt_len: int, eos_ids: tuple[int, ...], device: torch.device) -> Adjustment:
        stop = sorted({*eos_ids, *params.stop_token_ids}) if params.min_tokens else []
        bias = params.logit_bias or {}
        return cls(
            prompt_len=prompt_len,
            min_tokens=params.min_tokens if stop else 0,
            stop_ids=torch.tensor(stop, device=device) if stop else None,
            bias_ids=torch.tensor(list(bias), device=device) if bias else None,
            bias=torch.tensor(list(bias.values()), dtype=torch.float32, device=device) if bias else None,
            repetition=params.repetition_penalty,
            frequency=params.frequency_penalty,
            presence=params.presence_penalty,
        )

    @property
    def lasting(self) -> bool:
        """Whether something applies beyond `min_tokens`."""
        return self.bias is not None or self.repetition != 1.0 or self.frequency != 0.0 or self.presence != 0.0

    def apply(self, row: Tensor, known: Tensor) -> None:
        """Change a logits row (fp32 `[vocab]`) in place; `known` int64 `[position]` are the tokens before the draw."""
        if known.shape[0] - self.prompt_len < self.min_tokens:
            row[self.stop_ids] = -torch.inf
        if self.bias is not None:
            row[self.bias_ids] += self.bias
        if self.repetition != 1.0:
            # A token that occurs twice is written twice with the same value, so the order does not matter.
            old = row[known]
            row[known] = torch.where(old > 0, old / self.repetition, old * self.repetition)
        output = known[self.prompt_len :]
        if output.shape[0] and (self.frequency or self.presence):
            counts = torch.zeros(row.shape[0], dtype=torch.int32, device=row.device)
            counts.scatter_add_(0, output, torch.ones_like(output, dtype=torch.int32))
            row[output] = row[output] - (self.frequency * counts[output] + self.presence)
