"""A checkpoint of any shape that nobody has to download: headers from a config, tensors drawn when they are read."""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch

from offroad.models.registry import resolve_model
from offroad.weights.load import expected_tensors
from offroad.weights.source import Headers, Stored, TensorHeader, TokenizerFiles


class RandomSource:
    """A `Source` whose bf16 tensors are functions of their names; linears keep the size of what goes through them."""

    path = Path("random")
    conventions: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()

    def __init__(self, config: dict[str, Any], device: str) -> None:
        self.config, self.device = config, device
        spec = resolve_model(config).spec
        fused = {linear.fused: () for layer in spec.layers for linear in layer.linears if linear.fused}
        self.headers: Headers = {
            name: TensorHeader(name, shape, "bf16", 2 * torch.Size(shape).numel())
            for name, shape in expected_tensors(spec, fused).items()
        }
        plus_one = [
            t for t in (*spec.tensors, *(t for la in spec.layers for t in la.tensors)) if t.transform == "plus_one"
        ]
        self.plus_one = {tensor.name for tensor in plus_one}

    def read(self, name: str) -> Stored:
        header = self.headers[name]
        seed = int.from_bytes(blake2b(name.encode(), digest_size=6).digest(), "little")
        generator = torch.Generator(self.device).manual_seed(seed)
        value = torch.empty(header.shape, device=self.device, dtype=torch.float32)
        if name.endswith("A_log"):
            value.uniform_(-2, 2, generator=generator)
        elif name.endswith("dt_bias"):
            value.uniform_(-4, 1, generator=generator)
        elif name.endswith("layer_scalar"):
            value.uniform_(0.7, 1.0, generator=generator)
        elif len(header.shape) == 1:
            value.normal_(0.0 if name in self.plus_one else 1.0, 0.1, generator=generator)
            if name.endswith(("q_norm.weight", "k_norm.weight")) and name not in self.plus_one:
                value *= header.shape[0] ** -0.25  # scores are not divided by sqrt(dim): keep the softmax soft
        else:
            value.normal_(0.0, header.shape[-1] ** -0.5, generator=generator)
        return Stored(header, value.to(torch.bfloat16))

    def tokenizer(self) -> TokenizerFiles:
        return TokenizerFiles("{}", None, None, None, (), False, {})
