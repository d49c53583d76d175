"""What `--speculative-config` says: which drafter, and how many tokens it may propose for a step."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

from offroad.errors import PlanError, SettingsError
from offroad.models.spec import ModelSpec
from offroad.weights.source import Headers

METHODS = ("ngram", "mtp", "draft_model", "gemma4_assistant")
DUMMY = "dummy"  # drafts of no meaning, for speed tests: not among the methods that are offered
SEPARATE = ("draft_model", "gemma4_assistant")  # drafters that are checkpoints of their own
AUTO = "auto"
# The most drafts that `auto` may take: each costs memory for states of recurrent layers, and is less likely than the
# one before.
_MOST = {AUTO: 4, "ngram": 6, "mtp": 3}
FLAG = "--speculative-config"
_EXAMPLE = '{"method": "ngram", "num_speculative_tokens": 4}'
_NEEDS = {"mtp": "a checkpoint that brings multi-token prediction (mtp.*), as Qwen3.5's do"}
_KEYS = {
    "method": str,
    "model": str,
    "num_speculative_tokens": int,
    "prompt_lookup_min": int,
    "prompt_lookup_max": int,
    "acceptance": float,
}


@dataclass(frozen=True)
class Speculation:
    """`tokens`: most drafts in a step, of which `auto` takes as many as pay; `shortest`, `longest`: of the n-grams that
    are looked up, in tokens. `model` names the drafter's checkpoint, where that is another than the model's.
    `acceptance`: of dummy drafts, the share of those at one place that is accepted where those before it were."""

    method: str
    tokens: int
    shortest: int = 2
    longest: int = 5
    model: str = ""
    auto: bool = False
    acceptance: float | None = None

    @property
    def tapped(self) -> bool:
        """Whether the drafter eats hidden states of all tokens."""
        return self.method == "mtp"


def speculation(text: str) -> Speculation | None:
    """The config in a JSON text; None for an empty one. Raises SettingsError naming the key.

    "auto" alone takes the drafter that comes with the checkpoint, else prompt lookup, and as many drafts as pay.
    """
    if not text.strip():
        return None
    if text.strip() == AUTO:
        return Speculation(AUTO, _MOST[AUTO], auto=True)
    try:
        values = json.loads(text)
    except ValueError as error:
        raise SettingsError(FLAG, found=str(error), accepted=f"a JSON object, e.g. {_EXAMPLE}") from error
    if not isinstance(values, dict):
        raise SettingsError(FLAG, found=type(values).__name__, accepted=f"a JSON object, e.g. {_EXAMPLE}")
    for name, value in values.items():
        if name not in _KEYS:
            raise SettingsError(f"{FLAG}: key", found=name, accepted=", ".join(_KEYS))
        if name == "num_speculative_tokens" and value == AUTO:
            continue
        kinds = (int, float) if _KEYS[name] is float else _KEYS[name]
        if not isinstance(value, kinds) or isinstance(value, bool):
            raise SettingsError(f"{FLAG}: {name}", found=repr(value), accepted=_KEYS[name].__name__)
    method, tokens = values.get("method", ""), values.get("num_speculative_tokens", 4)
    made = Speculation(
        method,
        _MOST.get(method, 4) if tokens == AUTO else tokens,
        values.get("prompt_lookup_min", 2),
        values.get("prompt_lookup_max", max(5, values.get("prompt_lookup_min", 2))),
        values.get("model", ""),
        tokens == AUTO,
        values.get("acceptance"),
    )
    return _checked(made)


def offered(text: str) -> Speculation | None:
    """`speculation` of a text, for an engine whose answers are to mean something. Raises SettingsError for dummy drafts
    too."""
    made = speculation(text)
    if made is not None and made.method == DUMMY:
        raise SettingsError(
            f"{FLAG}: method",
            found=f"{DUMMY}, whose answers mean nothing",
            accepted=", ".join(METHODS),
            next="`offroad bench engine` measures verify steps with it",
        )
    return made


def _checked(made: Speculation) -> Speculation:
    separate, dummy, rate = made.method in SEPARATE, made.method == DUMMY, made.acceptance
    wanted_rate = "a number of 0 to 1" if dummy else f"none with {made.method}"
    wanted = "the drafter's checkpoint: a folder, a GGUF file or a name" if separate else f"none with {made.method}"
    checks: list[tuple[str, Any, bool, str]] = [
        ("method", made.method or "none", dummy or made.method in METHODS, ", ".join(METHODS)),
        ("model", made.model or "none", bool(made.model) == separate, wanted),
        ("num_speculative_tokens", made.tokens, 1 <= made.tokens <= 16, "1 to 16"),
        ("prompt_lookup_min", made.shortest, made.shortest >= 1, "1 or more"),
        ("prompt_lookup_max", made.longest, made.longest >= made.shortest, f"{made.shortest} or more"),
        ("acceptance", "none" if rate is None else rate, _rate(rate) if dummy else rate is None, wanted_rate),
    ]
    for name, found, ok, accepted in checks:
        if not ok:
            raise SettingsError(f"{FLAG}: {name}", found=found, accepted=accepted)
    return made


def _rate(value: float | None) -> bool:
    return value is not None and 0.0 <= value <= 1.0


def chosen(asked: Speculation | None, spec: ModelSpec, headers: Headers) -> Speculation | None:
    """What was asked, "auto" replaced by what the checkpoint has."""
    if asked is None or asked.method != AUTO:
        return asked
    brings = spec.draft is not None and all(linear.names[0] in headers for linear in spec.draft.linears)
    method = spec.draft.method if brings and spec.draft is not None else "ngram"
    return replace(asked, method=method, tokens=_MOST[method])


def drafting(spec: ModelSpec, headers: Headers, used: Speculation | None) -> ModelSpec:
    """The model with the layers of the drafter that `used` names, or without any. Raises PlanError if the checkpoint
    has no such drafter: proposing nothing in silence is what it would come to."""
    if used is None or used.method in ("ngram", DUMMY):
        return spec
    draft = spec.draft
    if draft is None or draft.method != used.method:
        raise PlanError(
            f"{FLAG}: method {used.method}",
            found=f"a {spec.family} model, which has no such drafter",
            accepted=_NEEDS.get(used.method, f"a drafter of method {used.method}"),
            next='{"method": "ngram"} works with every model',
        )
    missing = [linear.names[0] for linear in draft.linears if linear.names[0] not in headers]
    if missing:
        raise PlanError(
            f"{FLAG}: method {used.method}",
            found=f"no tensor {missing[0]} in the checkpoint",
            accepted=f"a checkpoint with its drafter, {draft.prefix}*",
            next='quantisers often drop these tensors: take another copy, or {"method": "ngram"}',
        )
    return spec.with_drafter()
