"""The environment variables that offroad or its libraries read: one table, which `doctor` prints."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Variable:
    """A variable, what it is for, and whether its value must not be shown."""

    name: str
    meaning: str
    secret: bool = False


VARIABLES = (
    Variable("OFFROAD_HOME", "where pulled models and compiled kernels are kept; default ~/.cache/offroad"),
    Variable("HF_HOME", "where the hub's files are kept"),
    Variable("HF_TOKEN", "access to gated models on the hub", secret=True),
    Variable("HF_HUB_OFFLINE", "1: the hub library opens no connection"),
    Variable("TRITON_CACHE_DIR", "where Triton keeps compiled kernels; default ~/.triton/cache"),
    Variable("CC", "the C compiler for CPU kernels"),
    Variable("OMP_NUM_THREADS", "threads of torch on the CPU, where --threads does not say"),
    Variable("CUDA_VISIBLE_DEVICES", "which GPUs this process sees"),
)


def in_force() -> dict[str, str | None]:
    """Each variable's value; None where it is not set; `(set)` for a secret."""
    found = {}
    for variable in VARIABLES:
        value = os.environ.get(variable.name)
        found[variable.name] = "(set)" if value and variable.secret else value
    return found
