"""Which model file serves which architecture."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from offroad.errors import ModelError
from offroad.models import deepseek_v4, gemma3, gemma4, llama, qwen3_5
from offroad.models.spec import ModelSpec
from offroad.ops.bound import Ops
from offroad.run.rows import Rows
from offroad.weights.quantised import quantised
from offroad.weights.source import Source, renamed


class Model(Protocol):
    """Plain code that calls ops by name and knows no kernel."""

    def forward(self, rows: Rows, ops: Ops) -> torch.Tensor: ...


@dataclass(frozen=True)
class Resolved:
    """A checkpoint's spec and the class that runs it; None: it is planned only, since ops that it needs have no kernel,
    so that no plan of it can be made on any device."""

    spec: ModelSpec
    model: type[Model] | None


_FAMILIES = (
    (llama, llama.Llama),
    (gemma3, gemma3.Gemma3),
    (gemma4, gemma4.Gemma4),
    (qwen3_5, qwen3_5.Qwen3_5),
    (deepseek_v4, None),
)


def architectures() -> dict[str, str]:
    """Hugging Face architecture names that are served, with their model types."""
    return {name: kind for module, model in _FAMILIES if model for name, kind in module.ARCHITECTURES.items()}


def resolve_model(config: dict[str, Any]) -> Resolved:
    """The spec and class for a `config.json`. Raises ModelError that lists the known architectures."""
    names = config.get("architectures") or []
    kind = config.get("model_type")
    for module, model in _FAMILIES:
        for name, model_type in module.ARCHITECTURES.items():
            if name in names or (not names and kind == model_type):
                return Resolved(module.model_spec({**config, "model_type": model_type}), model)
    found = ", ".join(names) or f"model_type {kind!r}"
    raise ModelError(
        "architecture", found=found, accepted=", ".join(architectures()), next="serve a model of one of these families"
    )


def model_of(family: str) -> type[Model]:
    """The class that runs models of a family, as their specs name it."""
    return next(model for module, model in _FAMILIES if family in module.ARCHITECTURES.values())


def resolve_source(source: Source) -> tuple[Resolved, Source]:
    """The spec and class for a checkpoint, and the checkpoint under the names that the spec uses."""
    resolved = resolve_model(source.config)
    return resolved, renamed(quantised(source), resolved.spec.prefixes)
