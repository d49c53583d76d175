"""`offroad quantize`: a checkpoint with its linears quantised, written a shard at a time."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from offroad.errors import ModelError, SettingsError
from offroad.models.registry import resolve_source
from offroad.models.spec import LinearSpec, ModelSpec
from offroad.quant.encode import ENCODERS, Encoder, config_of
from offroad.quant.packed import dequantise
from offroad.quant.scheme import canonical
from offroad.weights.config_source import KEPT
from offroad.weights.load import expected_tensors, matrix, verify_headers
from offroad.weights.source import Source, Stored

SHARD_BYTES = 2 * 1024**3
Progress = Callable[[float, str], None]


def quantise(source: Source, target: Path, scheme: str, progress: Progress) -> dict[str, int]:
    """Writes the checkpoint with its linears in `scheme` to the folder `target`; gives the number of modules by group.

    Everything else is kept as it is (fp32 becomes bf16 but for 1-D tensors). Raises SettingsError for an unknown scheme
    or a folder that is not empty, ModelError for what the scheme cannot hold; then nothing is left behind.
    """
    if scheme not in ENCODERS:
        raise SettingsError("--scheme", found=scheme, accepted=", ".join(ENCODERS))
    if target.exists() and any(target.iterdir()):
        raise SettingsError(f"folder {target}", found="not empty", accepted="a new or empty folder")
    encoder = ENCODERS[scheme]
    resolved, source = resolve_source(source)
    verify_headers(resolved.spec, source)
    groups = _groups(resolved.spec, encoder)
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        _write_shards(_encoded(source, resolved.spec, encoder, groups, progress), partial)
        _write_config(source, partial, encoder, groups, list(expected_tensors(resolved.spec, source.headers)))
        if target.exists():
            target.rmdir()
        partial.rename(target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    counts: dict[str, int] = {}
    for group in groups.values():
        counts[str(group)] = counts.get(str(group), 0) + 1
    return counts


def _groups(spec: ModelSpec, encoder: Encoder) -> dict[str, int]:
    """The group of each module that is quantised. Raises ModelError for one that the scheme cannot hold."""
    groups = {}
    for linear in (linear for layer in spec.layers for linear in layer.linears if linear.name not in KEPT):
        _check(linear, encoder)
        for module, _ in linear.parts:
            groups[module] = encoder.group(linear.k)
    return groups


def _check(linear: LinearSpec, encoder: Encoder) -> None:
    if encoder.group(linear.k) is None:
        accepted = f"a multiple of {encoder.groups[-1]} for {encoder.name}"
        raise ModelError(f"module {linear.parts[0][0]}", found=f"{linear.k} columns", accepted=accepted)


def _encoded(
    source: Source, spec: ModelSpec, encoder: Encoder, groups: dict[str, int], progress: Progress
) -> Iterator[tuple[str, torch.Tensor]]:
    names = list(expected_tensors(spec, source.headers))
    tensors = [*spec.tensors, *(tensor for layer in spec.layers for tensor in layer.tensors)]
    added = "norm_plus_one" in source.conventions
    raised = {tensor.name for tensor in tensors if added and tensor.transform == "plus_one"}
    fused = {linear.fused: linear for layer in spec.layers for linear in layer.linears if linear.fused}
    for i, name in enumerate(names):
        progress(i / len(names), name)
        stored, module = source.read(name), name.removesuffix(".weight")
        if name not in fused and module not in groups:
            yield name, _plain(stored, name in raised)
            continue
        weight = dequantise(canonical(matrix(stored)))
        if not torch.isfinite(weight).all():
            raise ModelError(f"tensor {name}", found="a value that is not finite", accepted="finite weights")
        # Experts that stand in one tensor are written by expert, as readers of the format want them.
        parts = fused[name].parts if name in fused else ((module, len(weight)),)
        for (part, _), rows in zip(parts, weight.split([count for _, count in parts]), strict=True):
            for suffix, tensor in encoder.encode(rows, groups[part]).items():
                yield part + suffix, tensor.contiguous()


def _plain(stored: Stored, has_one: bool) -> torch.Tensor:
    """A tensor that is not quantised, as Hugging Face's files have it. `has_one`: the source has added the one that
    the model adds to it."""
    if len(stored.header.shape) != 2:
        return stored.data - 1 if has_one else stored.data.clone()
    weight = dequantise(canonical(stored)) if stored.header.kind.startswith("gguf") else stored.data
    return weight.to(torch.bfloat16, copy=True)


def _write_shards(tensors: Iterator[tuple[str, torch.Tensor]], folder: Path) -> None:
    from safetensors.torch import save_file

    files: list[dict[str, torch.Tensor]] = [{}]
    names: list[list[str]] = []
    size = 0

    def flush() -> None:
        save_file(files[-1], folder / f"shard-{len(names)}.safetensors", metadata={"format": "pt"})
        names.append(list(files[-1]))
        files[-1] = {}

    for name, tensor in tensors:
        nbytes = tensor.numel() * tensor.element_size()
        if files[-1] and size + nbytes > SHARD_BYTES:
            flush()
            size = 0
        files[-1][name] = tensor
        size += nbytes
    flush()
    weight_map = {}
    for i, listed in enumerate(names):
        name = "model.safetensors" if len(names) == 1 else f"model-{i + 1:05d}-of-{len(names):05d}.safetensors"
        (folder / f"shard-{i}.safetensors").rename(folder / name)
        weight_map |= dict.fromkeys(listed, name)
    if len(names) > 1:
        index = {"metadata": {}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def _write_config(source: Source, folder: Path, encoder: Encoder, groups: dict[str, int], names: list[str]) -> None:
    by_group: dict[int, list[str]] = {}
    for module, group in groups.items():
        by_group.setdefault(group, []).append(module)
    matrices = [n.removesuffix(".weight") for n in names if n.endswith(".weight") and len(source.headers[n].shape) == 2]
    ignored = sorted(set(matrices) - groups.keys() - {"model.embed_tokens"})
    config = dict(source.config) | {"quantization_config": config_of(encoder, by_group, ignored or ["lm_head"])}
    config.setdefault("torch_dtype", "bfloat16")
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    files = source.tokenizer()
    (folder / "tokenizer.json").write_text(files.tokenizer_json)
    settings = {
        "bos_token": files.bos_token,
        "eos_token": files.eos_token,
        "add_bos_token": files.add_bos,
        "chat_template": files.chat_template,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (folder / "tokenizer_config.json").write_text(
        json.dumps({k: v for k, v in settings.items() if v is not None}, indent=2)
    )
    generation = dict(files.generation) | {"eos_token_id": list(files.eos_ids)}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2))
