"""Tiny quantised checkpoints, in memory and in folders."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from encoders import Encoded
from safetensors.torch import load_file, save_file

from offroad.quant.packed import Packed, dequantise
from offroad.weights.quantised import quantised
from offroad.weights.source import Stored, TensorHeader

KINDS = {
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.float8_e4m3fn: "f8_e4m3",
    torch.float8_e8m0fnu: "f8_e8m0",
}
_LINEAR = re.compile(r"(layers\..*(proj|proj_qkv|proj_z)|lm_head)\.weight$")  # neither routers and gates nor embeddings
Encode = Callable[[str, torch.Tensor], Encoded | None]  # a module's name and weight; None: it stays as it is


@dataclass
class Memory:
    """A source over tensors."""

    tensors: dict[str, torch.Tensor]
    quantization: dict[str, Any]
    notes: tuple[str, ...] = ()

    @property
    def config(self) -> dict[str, Any]:
        return {"quantization_config": self.quantization}

    @property
    def headers(self) -> dict[str, TensorHeader]:
        return {name: TensorHeader(name, tuple(t.shape), KINDS[t.dtype], t.nbytes) for name, t in self.tensors.items()}

    def read(self, name: str) -> Stored:
        tensor = self.tensors[name]
        if tensor.dtype == torch.float8_e8m0fnu:  # as files are read
            tensor = tensor.view(torch.uint8)
        return Stored(self.headers[name], tensor)


def named(stem: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"{stem}{end}": tensor for end, tensor in tensors.items()}


def opened(tensors: dict[str, torch.Tensor], quantization: dict[str, Any]):
    """The checkpoint as the loader sees it."""
    return quantised(Memory(tensors, quantization))


def read(source, name: str) -> Packed:
    """The weight in its canonical layout; checks that the plan could foretell it."""
    stored = source.read(name)
    packed, header = stored.packed, source.headers[name]
    assert packed is not None
    assert header.kind.partition(".")[0] == packed.layout
    assert (packed.perm is None) == (not header.kind.endswith("+order"))
    assert all(tensor.is_contiguous() for tensor in packed.tensors.values())
    return packed


def meaning(source, name: str) -> torch.Tensor:
    return dequantise(read(source, name)).reshape(source.headers[name].shape)


def random_weight(n: int, k: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed)) * 0.1


def experts(
    encode: Callable[[torch.Tensor], Encoded], n: int, k: int, count: int = 3
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Tensors of all experts [count, ...] and their meaning [count, n, k]."""
    each = [encode(random_weight(n, k, seed)) for seed in range(count)]
    tensors = {end: torch.stack([tensors[end] for tensors, _ in each]) for end in each[0][0]}
    return tensors, torch.stack([expected for _, expected in each])


def write(
    plain: Path, folder: Path, quantization: dict[str, Any], encode: Encode, change: Callable | None = None
) -> dict[str, torch.Tensor]:
    """Quantises the plain checkpoint into `folder`/quantised, and writes what that means into `folder`/meaning; gives
    the meaning. `change` may rearrange the quantised tensors."""
    tensors, means = {}, {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        encoded = encode(name.removesuffix(".weight"), tensor) if _LINEAR.search(name) else None
        means[name] = tensor if encoded is None else encoded[1]
        tensors |= {name: tensor} if encoded is None else named(name.removesuffix("weight"), encoded[0])
    for kind, held in (("quantised", tensors if change is None else change(tensors)), ("meaning", means)):
        shutil.copytree(plain, folder / kind)
        save_file({name: t.contiguous() for name, t in held.items()}, folder / kind / "model.safetensors")
    config = json.loads((plain / "config.json").read_text())
    (folder / "quantised" / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    return means
