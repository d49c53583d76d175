"""What `--speculative-config` says: which drafter, and how many tokens it may propose for a step."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from offroad.errors import PlanError, SettingsError
from offroad.models.spec import ModelSpec
from offroad.weights.source import Headers

METHODS = ("ngram", "mtp")
_FLAG = "--speculative-config"
_EXAMPLE = '{"method": "ngram", "num_speculative_tokens": 4}'
_NEEDS = {"mtp": "a checkpoint that brings multi-token prediction (mtp.*), as Qwen3.5's do"}
_KEYS = {"method": str, "num_speculative_tokens": int, "prompt_lookup_min": int, "prompt_lookup_max": int}


@dataclass(frozen=True)
class Speculation:
    """`tokens`: most drafts in a step; `shortest`, `longest`: of the n-grams that are looked up, in tokens."""

    method: str
    tokens: int
    shortest: int = 2
    longest: int = 5

    @property
    def tapped(self) -> bool:
        """Whether the drafter eats hidden states of all tokens."""
        return self.method == "mtp"


def speculation(text: str) -> Speculation | None:
    """The config in a JSON text; None for an empty one. Raises SettingsError naming the key."""
    if not text.strip():
        return None
    try:
        values = json.loads(text)
    except ValueError as error:
        raise SettingsError(_FLAG, found=str(error), accepted=f"a JSON object, e.g. {_EXAMPLE}") from error
    if not isinstance(values, dict):
        raise SettingsError(_FLAG, found=type(values).__name__, accepted=f"a JSON object, e.g. {_EXAMPLE}")
    for name, value in values.items():
        if name not in _KEYS:
            raise SettingsError(f"{_FLAG}: key", found=name, accepted=", ".join(_KEYS))
        if not isinstance(value, _KEYS[name]) or isinstance(value, bool):
            raise SettingsError(f"{_FLAG}: {name}", found=repr(value), accepted=_KEYS[name].__name__)
    made = Speculation(
        values.get("method", ""),
        values.get("num_speculative_tokens", 4),
        values.get("prompt_lookup_min", 2),
        values.get("prompt_lookup_max", max(5, values.get("prompt_lookup_min", 2))),
    )
    return _checked(made)


def _checked(made: Speculation) -> Speculation:
    checks: list[tuple[str, Any, bool, str]] = [
        ("method", made.method or "none", made.method in METHODS, ", ".join(METHODS)),
        ("num_speculative_tokens", made.tokens, 1 <= made.tokens <= 16, "1 to 16"),
        ("prompt_lookup_min", made.shortest, made.shortest >= 1, "1 or more"),
        ("prompt_lookup_max", made.longest, made.longest >= made.shortest, f"{made.shortest} or more"),
    ]
    for name, found, ok, accepted in checks:
        if not ok:
            raise SettingsError(f"{_FLAG}: {name}", found=found, accepted=accepted)
    return made


def drafting(spec: ModelSpec, headers: Headers, chosen: Speculation | None) -> ModelSpec:
    """The model with the layers of the drafter that `chosen` names, or without any. Raises PlanError if the checkpoint
    has no such drafter: proposing nothing in silence is what it would come to."""
    if chosen is None or chosen.method == "ngram":
        return spec
    draft = spec.draft
    if draft is None or draft.method != chosen.method:
        raise PlanError(
            f"{_FLAG}: method {chosen.method}",
            found=f"a {spec.family} model, which has no such drafter",
            accepted=_NEEDS[chosen.method],
            next='{"method": "ngram"} works with every model',
        )
    missing = [linear.names[0] for linear in draft.linears if linear.names[0] not in headers]
    if missing:
        raise PlanError(
            f"{_FLAG}: method {chosen.method}",
            found=f"no tensor {missing[0]} in the checkpoint",
            accepted=f"a checkpoint with its drafter, {draft.prefix}*",
            next='quantisers often drop these tensors: take another copy, or {"method": "ngram"}',
        )
    return spec.with_drafter()
