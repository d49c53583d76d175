"""Attaches a drafter that is a checkpoint of its own: two checkpoints become one spec and one source.

So plan, budget, caches and loader know of one model, whose last layers are the drafter's.
"""

from __future__ import annotations

import re
from dataclasses import replace

import tokenizers

from offroad.errors import PlanError
from offroad.models import gemma4_assistant
from offroad.models.registry import Resolved, resolve_source
from offroad.models.spec import DraftSpec, Item, LayerSpec, LinearSpec, ModelSpec, Ring, Shared, TensorSpec
from offroad.settings import Settings
from offroad.speculate.config import FLAG, Speculation, speculation
from offroad.weights.config_source import ConfigSource
from offroad.weights.joined import Joined
from offroad.weights.locate import open_source
from offroad.weights.quantised import quantised
from offroad.weights.source import Source

PREFIX = "draft."  # how the names of a drafter's tensors begin


def attach(settings: Settings, source: Source) -> tuple[Resolved, Source]:
    """The spec and class for a checkpoint, and the checkpoint under the names that the spec uses; with the drafter that
    the settings name, if that is another checkpoint. Reads headers and tokenizers only.

    Raises ModelError for a checkpoint that is not served, PlanError for a drafter that does not fit the model.
    """
    resolved, named = resolve_source(source)
    chosen = speculation(settings.speculative_config)
    if chosen is None or not chosen.model:
        return resolved, named
    raw = open_source(settings.replace(model=chosen.model, revision=None))
    own = _as_stored(_without_drafter(resolved.spec), named)
    if chosen.method == "draft_model":
        found, drafter = resolve_source(raw)
        made = _without_drafter(found.spec)
        _check_vocabulary(chosen, own, made.vocab)
        ignored, prefixes = made.ignored, made.prefixes
        draft = _whole(_as_stored(made, drafter), len(own.layers))
    else:
        drafter, prefixes = quantised(raw), ()
        own, draft = gemma4_assistant.join(own, raw.config)
        ignored = gemma4_assistant.IGNORED
    _compare_tokenizers(chosen, source, raw)
    draft = _renamed(draft)
    ignored = (*own.ignored, *(f"{re.escape(PREFIX)}(?:{pattern})" for pattern in ignored))
    notes = own.notes
    if draft.max_len is not None and draft.max_len < own.max_len:
        notes += (f"no drafts from position {draft.max_len} on, where the drafter's context ends",)
    spec = replace(own, draft=draft, ignored=ignored, notes=notes)
    return replace(resolved, spec=spec), Joined(named, drafter, PREFIX, prefixes)


def _without_drafter(spec: ModelSpec) -> ModelSpec:
    """The model without the drafter that its own checkpoint may bring, whose tensors are then left alone."""
    if spec.draft is None:
        return spec
    return replace(spec, draft=None, ignored=(*spec.ignored, f"{re.escape(spec.draft.prefix)}.*"))


def _as_stored(spec: ModelSpec, source: Source) -> ModelSpec:
    """The spec for a loader that knows no convention of the source: two checkpoints may have different ones."""
    if "norm_plus_one" not in source.conventions:
        return spec

    def plain(tensors: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
        return tuple(replace(t, transform="") if t.transform == "plus_one" else t for t in tensors)

    layers = tuple(replace(layer, tensors=plain(layer.tensors)) for layer in spec.layers)
    return replace(spec, layers=layers, tensors=plain(spec.tensors))


def _whole(spec: ModelSpec, behind: int) -> DraftSpec:
    """A model as the drafter of one that has `behind` layers."""

    def moved(item: Item) -> Item:
        if isinstance(item, Shared):
            return Shared(item.layer + behind)
        # The pending token has run when a checkpoint is taken, which needs the rows before it.
        return replace(item, write_first=True) if isinstance(item, Ring) else item

    layers = (replace(layer, items=tuple((name, moved(item)) for name, item in layer.items)) for layer in spec.layers)
    return DraftSpec(
        method="draft_model",
        hidden=spec.hidden,
        layers=tuple(layers),
        linears=(spec.embedding, *((spec.head,) if spec.head else ()), *spec.linears),
        tensors=spec.tensors,
        prefix=PREFIX,
        family=spec.family,
        norm_eps=spec.norm_eps,
        embed_scale=spec.embed_scale,
        logit_softcap=spec.logit_softcap,
        max_len=spec.max_len,
    )


def _renamed(draft: DraftSpec) -> DraftSpec:
    """The drafter with its tensors' names behind the prefix."""

    def linear(old: LinearSpec) -> LinearSpec:
        parts = tuple((PREFIX + module, rows) for module, rows in old.parts)
        return replace(old, parts=parts, fused=old.fused and PREFIX + old.fused)

    def tensor(old: TensorSpec) -> TensorSpec:
        return replace(old, name=PREFIX + old.name)

    def layer(old: LayerSpec) -> LayerSpec:
        return replace(old, linears=tuple(map(linear, old.linears)), tensors=tuple(map(tensor, old.tensors)))

    return replace(
        draft,
        layers=tuple(map(layer, draft.layers)),
        linears=tuple(map(linear, draft.linears)),
        tensors=tuple(map(tensor, draft.tensors)),
    )


def _check_vocabulary(chosen: Speculation, spec: ModelSpec, vocab: int) -> None:
    if vocab != spec.vocab:
        raise PlanError(
            f"{FLAG}: model {chosen.model}",
            found=f"a vocabulary of {vocab} tokens",
            accepted=f"the model's {spec.vocab}",
            next="take a drafter of the same family, whose tokenizer is the model's",
        )


def _compare_tokenizers(chosen: Speculation, source: Source, drafter: Source) -> None:
    """Raises PlanError where an id means another token. An assistant may come without a tokenizer, and a config without
    weights has none to compare."""
    there = (drafter.path / "tokenizer.json").is_file() or chosen.method == "draft_model"
    if not there or isinstance(source, ConfigSource) or isinstance(drafter, ConfigSource):
        return
    own, other = source.tokenizer().tokenizer_json, drafter.tokenizer().tokenizer_json
    if own == other:
        return
    words, others = (tokenizers.Tokenizer.from_str(text).get_vocab(with_added_tokens=True) for text in (own, other))
    if different := sorted(words.items() ^ others.items(), key=lambda entry: (entry[1], entry[0])):
        number = different[0][1]
        here, there = ({i: token for token, i in vocab.items()}.get(number) for vocab in (words, others))
        raise PlanError(
            f"{FLAG}: model {chosen.model}",
            found=f"a tokenizer of which token {number} is {there!r}",
            accepted=f"that of {source.path.name}, of which it is {here!r} ({len(different)} entries differ)",
            next="take a drafter of the same family, whose tokenizer is the model's",
        )
