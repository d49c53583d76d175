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
        "compression_config",  # an old name of quantization_config
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
        "quantization_config",  # weights/quantised.py reads it
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


# Fields of a multimodal config that say nothing of its text part.
_MULTIMODAL = frozenset(
    [
        "audio_config",
        "audio_token_id",
        "boa_token_id",
        "boi_token_id",
        "eoa_token_id",
        "eoa_token_index",
        "eoi_token_id",
        "image_token_id",
        "language_model_only",
        "text_config",
        "video_token_id",
        "vision_config",
        "vision_end_token_id",
        "vision_soft_tokens_per_image",
        "vision_start_token_id",
    ]
)


class Config:
    """Typed reads of a config; `done()` refuses fields that nobody read and that are not known to be harmless."""

    def __init__(self, values: dict[str, Any], family: str) -> None:
        self.values, self.family = values, family
        self.read: set[str] = set()

    @classmethod
    def text(cls, values: dict[str, Any], family: str) -> Config:
        """The text part of a multimodal config, with what stands outside it; a plain text config as it is."""
        if not isinstance(values.get("text_config"), dict):
            return cls(values, family)
        outside = {name: value for name, value in values.items() if name not in _MULTIMODAL}
        return cls({**values["text_config"], **outside}, family)

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

    def only(self, **fixed: Any) -> None:
        """Each field has the one value that this model file implements, or is absent."""
        for name, value in fixed.items():
            self.expect(name, value)

    def choice(self, name: str, default: str, *accepted: str) -> str:
        """The value of `name`, one of `accepted`."""
        self.expect(name, *accepted)
        return self.values.get(name) or default

    def expect_in(self, where: str, values: dict[str, Any], name: str, accepted: Any) -> None:
        """Takes `name` out of an object in the config; refuses a value other than `accepted`."""
        value = values.pop(name, accepted)
        if value != accepted:
            raise ModelError(
                f"config.json: {where}.{name}",
                found=repr(value),
                accepted=repr(accepted),
                next=f"this variant of {self.family} is not implemented",
            )

    def layer_types(self, usual: str, other: str, interval: int) -> list[str]:
        """The kind of each layer: as listed, else every `interval`-th is `other`. ModelError for an unknown kind."""
        count = self.get("num_hidden_layers", int)
        kinds = self.get("layer_types", list, [other if (i + 1) % interval == 0 else usual for i in range(count)])
        unknown = [(i, kind) for i, kind in enumerate(kinds) if kind not in (usual, other)]
        if unknown:
            raise ModelError(
                f"config.json: layer_types[{unknown[0][0]}]", found=repr(unknown[0][1]), accepted=f"{usual}, {other}"
            )
        if len(kinds) != count:
            raise ModelError(
                "config.json: layer_types", found=f"{len(kinds)} entries", accepted=f"{count}, one a layer"
            )
        return kinds

    def rope(self, base: float) -> tuple[float, tuple[tuple[str, float | str], ...]]:
        """(base, scaling) from `rope_theta` and `rope_scaling`, or from the newer `rope_parameters`."""
        parameters = dict(self.get("rope_parameters", dict, {}))
        old = self.get("rope_scaling", dict, {})
        theta = self.get("rope_theta", float, None)
        scaling = {**parameters, **old}
        base = float(scaling.pop("rope_theta", theta if theta is not None else base))
        return base, self.scaling(scaling)

    def scaling(self, scaling: dict[str, Any]) -> tuple[tuple[str, float | str], ...]:
        """Sorted scaling parameters; empty for "default". ModelError for other kinds, and for parameters that the kind
        does not have."""
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        needed = {
            "default": (),
            "linear": ("factor",),
            "proportional": ("partial_rotary_factor",),
            "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
        }
        if kind not in needed:
            raise ModelError("config.json: rope scaling", found=repr(kind), accepted=", ".join(needed))
        if missing := [name for name in needed[kind] if name not in scaling]:
            raise ModelError(
                f"config.json: rope scaling {kind}", found=f"no {', '.join(missing)}", accepted=", ".join(needed[kind])
            )
        known = {"rope_type", "type", *needed[kind]}
        if unknown := [name for name, value in scaling.items() if name not in known and value is not None]:
            raise ModelError(
                f"config.json: rope {kind}: unknown parameters",
                found=", ".join(f"{name}={scaling[name]!r}" for name in unknown),
                accepted=", ".join(needed[kind]) or "none",
            )
        if kind == "default":
            return ()
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
