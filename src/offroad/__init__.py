"""offroad: an LLM serving engine for hybrid, quantised models on the hardware that people own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["LLM", "OffroadError", "PlanError", "SamplingParams", "__version__"]

if TYPE_CHECKING:
    from offroad.errors import OffroadError, PlanError
    from offroad.llm import LLM
    from offroad.sample.params import SamplingParams

_HOMES = {
    "LLM": "offroad.llm",
    "SamplingParams": "offroad.sample.params",
    "OffroadError": "offroad.errors",
    "PlanError": "offroad.errors",
}


def __getattr__(name: str) -> Any:
    # torch takes seconds to import, and `offroad --help` does not need it.
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'offroad' has no attribute {name!r}")
