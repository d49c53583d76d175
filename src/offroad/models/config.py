"""Reading a checkpoint's `config.json` as a contract: every field is used, known to be harmless, or refused."""

from __future__ import annotations

from typing import Any

from offroad.errors import ModelError

# Fields that do not change what a text model computes at inference.
HARMLESS = frozenset(
    [
        "_name_or_path",
        "architectures",
        "attention_dropout",
        "attention_probs_dropout_prob",
        "bos_token_id",
        "chunk_size_feed_forward",
        "dtype",
        "eos_token_id",
        "id2label",
        "initializer_range",
        "is_encoder_decoder",
        "is_llama_config",
        "label2id",
        "max_window_layers",
        "model_type",
        "name_or_path",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "pretraining_tp",
        "problem_type",
        "return_dict",
        "rope_interleaved",
        "task_specific_params",
        "tokenizer_class",
        "torch_dtype",
        "transformers.js_config",
        "transformers_version",
        "unsloth_fixed",
        "use_cache",
    ]
)


class Config:
    """Typed reads of a config; `done()` refuses fields that nobody read and that are not known to be harmless."""

    def __init__(self, values: dict[str, Any], family: str) -> None:
        self.values, self.family = values, family
        self.read: set[str] = set()

    def get(self, name: str, kind: type | tuple[type, ...], default: Any = ...) -> Any:
        """The value of `name`; ModelError if it is absent without a default or of another type."""
        self.read.add(name)
        value = self.values.get(name)
        if value is None:
            if default is ...:
                raise ModelError(
                    f"config.json of a {self.family} model: field {name!r}", found="absent", accepted=str(kind)
                )
            return default
        if isinstance(value, bool) and kind is not bool or not isinstance(value, kind):
            if kind is float and isinstance(value, int) and not isinstance(value, bool):
                return float(value)
            raise ModelError(f"config.json: field {name!r}", found=repr(value), accepted=str(kind))
        return value

    def expect(self, name: str, *accepted: Any) -> None:
        """Refuses a value of `name` that this model file does not implement; an absent field is the first one."""
        self.read.add(name)
        value = self.values.get(name)
        if value is not None and value not in accepted:
            raise ModelError(
                f"config.json: field {name!r}",
                found=repr(value),
                accepted=" or ".join(map(repr, accepted)),
                next=f"this variant of {self.family} is not implemented",
            )

    def rope(self, base: float) -> tuple[float, tuple[tuple[str, float | str], ...]]:
        """(base, scaling) from `rope_theta` and `rope_scaling`, or from the newer `rope_parameters`."""
        parameters = dict(self.get("rope_parameters", dict, {}))
        old = self.get("rope_scaling", dict, {})
        theta = self.get("rope_theta", float, None)
        scaling = {**parameters, **old}
        base = float(scaling.pop("rope_theta", theta if theta is not None else base))
        return base, self.scaling(scaling)

    def scaling(self, scaling: dict[str, Any]) -> tuple[tuple[str, float | str], ...]:
        """Sorted scaling parameters; empty for "default". ModelError for kinds other than linear and llama3."""
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        if kind == "default":
            return ()
        needed = {
            "linear": ("factor",),
            "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
        }
        if kind not in needed:
            raise ModelError("config.json: rope scaling", found=repr(kind), accepted="default, linear, llama3")
        if missing := [name for name in needed[kind] if name not in scaling]:
            raise ModelError(
                f"config.json: rope scaling {kind}", found=f"no {', '.join(missing)}", accepted=", ".join(needed[kind])
            )
        return tuple(sorted([("rope_type", kind), *((name, float(scaling[name])) for name in needed[kind])]))

    def done(self) -> None:
        """Raises ModelError for fields that were not read, since a field unread may change the maths."""
        unread = sorted(n for n, v in self.values.items() if n not in self.read | HARMLESS and v is not None)
        if unread:
            raise ModelError(
                f"config.json of a {self.family} model: unknown fields",
                found=", ".join(f"{name}={self.values[name]!r}"[:80] for name in unread[:5]),
                accepted="fields that offroad implements",
                next="report the model; it may compute something else",
            )
