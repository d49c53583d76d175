"""A checkpoint in a Hugging Face folder: `config.json`, safetensors (one file or shards), tokenizer files."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch

from offroad.errors import ModelError
from offroad.weights.quantised import quantisation
from offroad.weights.source import Headers, Stored, TensorHeader, TokenizerFiles

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.uint8,  # exponents, as bytes
}
_SIZES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U64": 8,
    "U32": 4,
    "U16": 2,
    "U8": 1,
    "BOOL": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
}
_REPAIR = "download the file again"
_HEADER_LIMIT = 100_000_000  # as in the safetensors library


@dataclass(frozen=True)
class _Entry:
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises ModelError if it cannot be read or is none."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(
            f"file {path.name}", found=str(error)[:200], accepted="a readable JSON file", next=_REPAIR
        ) from error
    if not isinstance(values, dict):
        raise ModelError(f"file {path.name}", found=type(values).__name__, accepted="a JSON object", next=_REPAIR)
    return values


def _with_side_file(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """The config with a `quantization_config` from a file of its own if it has none, as older tools write it."""
    if quantisation(config):
        return config
    inner = _optional(folder / "hf_quant_config.json").get("quantization")
    if isinstance(inner, dict):
        return {**config, "quantization_config": {"quant_method": "modelopt", **inner}}
    for name in ("quantize_config.json", "quant_config.json"):
        if values := _optional(folder / name):
            awq = {"w_bit", "q_group_size", "zero_point"} & values.keys()
            method = values.get("quant_method") or values.get("method") or ("awq" if awq else "gptq")
            return {**config, "quantization_config": {**values, "quant_method": method}}
    return config


class SafetensorsSource:
    """A `Source` over a folder. Opening reads headers only; tensors come through memory maps."""

    conventions: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()

    def __init__(self, folder: Path) -> None:
        self.path = folder
        self.config = _with_side_file(folder, read_json(folder / "config.json"))
        self._entries: dict[str, _Entry] = {}
        self._maps: dict[Path, np.ndarray] = {}
        for file in self._files():
            for name, entry in _header(file).items():
                if name in self._entries:
                    raise ModelError(
                        f"tensor {name}",
                        found=f"in {self._entries[name].file.name} and in {file.name}",
                        accepted="each tensor once",
                        next="remove the file that does not belong to the model",
                    )
                self._entries[name] = entry
        self._check_index()
        self.headers: Headers = {
            name: TensorHeader(name, entry.shape, entry.dtype.lower(), entry.end - entry.start)
            for name, entry in self._entries.items()
        }

    def _files(self) -> list[Path]:
        if (self.path / INDEX).is_file():
            shards = sorted(set(self._weight_map().values()))
            if missing := [shard for shard in shards if not (self.path / shard).is_file()]:
                raise ModelError(
                    f"shards of {self.path.name}",
                    found=f"no {', '.join(missing[:5])}",
                    accepted=f"the {len(shards)} files that {INDEX} names",
                    next="download the missing files",
                )
            return [self.path / shard for shard in shards]
        if (self.path / SINGLE).is_file():
            return [self.path / SINGLE]
        files = sorted(self.path.glob("*.safetensors"))
        if not files:
            raise ModelError(
                f"folder {self.path.name}",
                found="no safetensors file",
                accepted=f"{SINGLE}, or {INDEX} and its shards",
                next="convert the weights to safetensors, or give a GGUF file",
            )
        return files

    def _weight_map(self) -> dict[str, str]:
        names = read_json(self.path / INDEX).get("weight_map")
        plain = isinstance(names, dict) and all(isinstance(v, str) and Path(v).name == v for v in names.values())
        if not plain or not names:
            raise ModelError(
                f"file {INDEX}: weight_map",
                found=type(names).__name__,
                accepted="file names by tensor name",
                next=_REPAIR,
            )
        return names

    def _check_index(self) -> None:
        if not (self.path / INDEX).is_file():
            return
        for name, shard in self._weight_map().items():
            if name not in self._entries or self._entries[name].file.name != shard:
                raise ModelError(f"tensor {name}", found=f"not in {shard}", accepted=f"as {INDEX} says", next=_REPAIR)

    def read(self, name: str) -> Stored:
        """The tensor in its own dtype and shape. Raises ModelError for a dtype that no format uses."""
        entry = self._entries[name]
        if entry.dtype not in _DTYPES:
            raise ModelError(f"tensor {name}", found=f"stored as {entry.dtype}", accepted=", ".join(_DTYPES))
        if entry.file not in self._maps:
            self._maps[entry.file] = np.memmap(entry.file, np.uint8, "c")  # copy on write: torch wants writable memory
        raw = self._maps[entry.file][entry.start : entry.end]
        if entry.start % 8:  # an array must be aligned
            raw = raw.copy()
        return Stored(self.headers[name], torch.from_numpy(raw).view(_DTYPES[entry.dtype]).reshape(entry.shape))

    def tokenizer(self) -> TokenizerFiles:
        return tokenizer_files(self.path, self.config)


def _header(file: Path) -> dict[str, _Entry]:
    """Entries of one file, with absolute byte ranges; every range lies inside the file and fits its shape."""
    where, size = f"safetensors file {file.name}", file.stat().st_size
    with file.open("rb") as stream:
        head = stream.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
        if not 2 <= length <= min(size - 8, _HEADER_LIMIT):
            raise ModelError(
                where,
                found=f"{size} bytes with a header of {length}",
                accepted="a whole safetensors file",
                next=_REPAIR,
            )
        try:
            values = json.loads(stream.read(length), object_pairs_hook=lambda pairs: _unique(pairs, where))
        except (ValueError, RecursionError) as error:
            raise ModelError(f"{where}: header", found=str(error)[:200], accepted="JSON", next=_REPAIR) from error
    if not isinstance(values, dict):
        raise ModelError(f"{where}: header", found=type(values).__name__, accepted="a JSON object", next=_REPAIR)
    values.pop("__metadata__", None)
    entries = {name: _entry(file, name, value, 8 + length) for name, value in values.items()}
    end = max((entry.end for entry in entries.values()), default=8 + length)
    if end != size:
        raise ModelError(where, found=f"{size} bytes", accepted=f"{end} bytes, as its header says", next=_REPAIR)
    return entries


def _unique(pairs: list[tuple[str, Any]], where: str) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ModelError(f"{where}: header", found=f"{twice!r} twice", accepted="each name once", next=_REPAIR)
    return values


def _entry(file: Path, name: str, value: Any, base: int) -> _Entry:
    def whole(numbers: Any) -> bool:
        return isinstance(numbers, list) and all(type(number) is int and number >= 0 for number in numbers)

    def bad(found: Any, accepted: str) -> ModelError:
        return ModelError(
            f"safetensors file {file.name}: tensor {name}", found=str(found)[:200], accepted=accepted, next=_REPAIR
        )

    value = value if isinstance(value, dict) else {}
    dtype, shape, span = value.get("dtype"), value.get("shape"), value.get("data_offsets")
    if not (isinstance(dtype, str) and dtype in _SIZES):
        raise bad(f"dtype {dtype!r}", ", ".join(_SIZES))
    if not (whole(shape) and whole(span) and len(span) == 2):
        raise bad(f"shape {shape}, data_offsets {span}", "whole numbers")
    if span[1] - span[0] != prod(shape) * _SIZES[dtype]:
        raise bad(f"{span[1] - span[0]} bytes", f"{prod(shape) * _SIZES[dtype]} for {shape} of {dtype}")
    return _Entry(file, dtype, tuple(shape), base + span[0], base + span[1])


def tokenizer_files(folder: Path, config: dict[str, Any]) -> TokenizerFiles:
    """What the text side needs, from a folder. Raises ModelError if there is no tokenizer.json."""
    if not (folder / "tokenizer.json").is_file():
        others = ", ".join(name for name in ("tokenizer.model", "vocab.json") if (folder / name).is_file())
        raise ModelError(
            f"folder {folder.name}: tokenizer",
            found=others or "none",
            accepted="tokenizer.json",
            next="save the tokenizer with transformers' `save_pretrained`, which writes tokenizer.json",
        )
    settings = _optional(folder / "tokenizer_config.json")
    special = _optional(folder / "special_tokens_map.json")
    generation = _optional(folder / "generation_config.json")
    return TokenizerFiles(
        tokenizer_json=(folder / "tokenizer.json").read_text(encoding="utf-8"),
        chat_template=_template(folder, settings),
        bos_token=_text(settings.get("bos_token", special.get("bos_token"))),
        eos_token=_text(settings.get("eos_token", special.get("eos_token"))),
        eos_ids=_eos_ids(generation, config),
        add_bos=bool(settings.get("add_bos_token", False)),
        generation=generation,
    )


def _eos_ids(generation: dict[str, Any], config: dict[str, Any]) -> tuple[int, ...]:
    """All ids of the first of the three that names any; a multimodal config nests its text model's."""
    text = config.get("text_config")
    for values in (generation, config, text if isinstance(text, dict) else {}):
        eos = values.get("eos_token_id")
        if ids := tuple(i for i in (eos if isinstance(eos, list) else [eos]) if isinstance(i, int)):
            return ids
    return ()


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _text(token: Any) -> str | None:
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


def _template(folder: Path, settings: dict[str, Any]) -> str | None:
    """`chat_template.jinja`, else `chat_template.json`, else the one named "default" of tokenizer_config.json."""
    if (folder / "chat_template.jinja").is_file():
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    template = _optional(folder / "chat_template.json").get("chat_template", settings.get("chat_template"))
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None
