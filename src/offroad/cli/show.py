"""`offroad show`: what a checkpoint is, from its headers."""

from __future__ import annotations

import json
import sys
from collections import Counter
from typing import Any

from offroad.cli.options import Json, Model, with_settings
from offroad.cli.table import size


@with_settings("model")
def show(model: Model, json_output: Json = False, *, flags: dict[str, Any], config: str | None) -> None:
    """Show what a model is.

    Architecture, layers, heads, quantisation, context, chat template and sizes, from headers only.
    """
    from offroad.cli.progress import LoadProgress
    from offroad.settings import Settings
    from offroad.weights.locate import open_source

    settings = Settings.resolve({**flags, "model": model}, config)
    with LoadProgress(("pull",)) as progress:
        source = open_source(settings, lambda fraction, note: progress("pull", fraction, note))
    facts = describe(settings.model, source)
    if json_output:
        json.dump(facts, sys.stdout, indent=2)
        print()
    else:
        print(render(facts))


def describe(name: str, source: Any) -> dict[str, Any]:
    """Facts of a `Source` for a program. Raises ModelError for an architecture that is not served."""
    from offroad.models.registry import resolve_model
    from offroad.models.spec import AttentionSpec

    spec = resolve_model(source.config).spec
    files = source.tokenizer()
    kinds: Counter[str] = Counter()
    nbytes: Counter[str] = Counter()
    parameters = 0
    for header in source.headers.values():
        kinds[header.kind] += 1
        nbytes[header.kind] += header.nbytes
        count = 1
        for length in header.shape:
            count *= length
        parameters += count
    mixers = [layer.mixer for layer in spec.layers if isinstance(layer.mixer, AttentionSpec)]
    windows = sorted({m.window for m in mixers if m.window})
    return {
        "name": name,
        "path": str(source.path),
        "architecture": (source.config.get("architectures") or [None])[0],
        "family": spec.family,
        "parameters": parameters,
        "layers": len(spec.layers),
        "window_layers": sum(1 for m in mixers if m.window),
        "windows": windows,
        "recurrent_layers": len(spec.layers) - len(mixers),
        "experts": sorted({layer.moe.experts for layer in spec.layers if layer.moe}),
        "hidden": spec.hidden,
        "ffn": sorted({layer.ffn.size for layer in spec.layers}),
        "heads": sorted({m.heads for m in mixers}),
        "kv_heads": sorted({m.kv_heads for m in mixers}),
        "head_dim": sorted({m.head_dim for m in mixers}),
        "vocab": spec.vocab,
        "context": spec.max_len,
        "tied_head": spec.head is None,
        "chat_template": files.chat_template is not None,
        "eos_ids": list(files.eos_ids),
        "nbytes": sum(nbytes.values()),
        "stored": [{"kind": kind, "tensors": kinds[kind], "nbytes": nbytes[kind]} for kind, _ in nbytes.most_common()],
    }


def render(facts: dict[str, Any]) -> str:
    """The facts as aligned lines."""

    def several(values: list[int]) -> str:
        return ", ".join(str(value) for value in values)

    layers = str(facts["layers"])
    if facts["window_layers"]:
        layers += f" ({facts['window_layers']} of them with a window of {several(facts['windows'])})"
    lines = [
        ("model", facts["name"]),
        ("path", facts["path"]),
        ("architecture", f"{facts['architecture']} ({facts['family']})"),
        ("parameters", f"{facts['parameters'] / 1e6:,.1f} M"),
        ("layers", layers),
        ("hidden, ffn", f"{facts['hidden']}, {several(facts['ffn'])}"),
        ("heads", f"{several(facts['heads'])} query, {several(facts['kv_heads'])} KV, of {several(facts['head_dim'])}"),
        ("vocabulary", f"{facts['vocab']:,}" + (" (head tied to the embedding)" if facts["tied_head"] else "")),
        ("context", f"{facts['context']:,} tokens"),
        ("template", "yes" if facts["chat_template"] else "none: chat is refused"),
        ("on disk", size(facts["nbytes"])),
    ]
    lines += [
        ("" if i else "stored as", f"{e['kind']}: {e['tensors']} tensors, {size(e['nbytes'])}")
        for i, e in enumerate(facts["stored"])
    ]
    return "\n".join(f"{name:<14}{value}" for name, value in lines)
