"""A checkpoint in one GGUF file, in Hugging Face's names and row order."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from offroad.errors import ModelError
from offroad.weights.gguf_config import architecture_of, config_of, renamer
from offroad.weights.gguf_file import GgufFile, GgufTensor
from offroad.weights.gguf_tokenizer import tokenizer_of
from offroad.weights.source import Headers, Stored, TensorHeader, TokenizerFiles

_DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


class GgufSource:
    """A `Source` over a GGUF file. Opening reads the metadata only; tensors come through the memory map.

    Rows of q and k of the "llama" architecture are stored in the order of interleaved rotation; they are put back into
    halves, which on quantised rows is only a reordering. Gemma's norm weights already include the one.
    """

    notes: tuple[str, ...] = ()

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = GgufFile(path)
        self._architecture = architecture_of(self._file)
        self.config = config_of(self._file)
        self.conventions = frozenset({"norm_plus_one"}) if self._architecture == "gemma3" else frozenset()
        rename = renamer(self._architecture)
        self._stored: dict[str, GgufTensor] = {}
        for tensor in self._file.tensors.values():
            if tensor.name == "rope_freqs.weight":
                continue  # in the config, as rope_scaling
            name = rename(tensor.name)
            if name in self._stored:
                raise ModelError(
                    f"{self._file.where}: tensor {tensor.name}",
                    found="its Hugging Face name twice",
                    accepted="each tensor once",
                )
            self._stored[name] = tensor
        self.headers: Headers = {
            name: TensorHeader(name, tensor.shape, tensor.kind, tensor.nbytes) for name, tensor in self._stored.items()
        }

    def read(self, name: str) -> Stored:
        """The tensor; float kinds in their shape, block kinds as uint8 [n, bytes per row]."""
        tensor = self._stored[name]
        data = torch.from_numpy(self._file.raw(tensor))
        if tensor.kind in _DTYPES:
            data = data.view(_DTYPES[tensor.kind]).reshape(tensor.shape)
        else:
            data = data.reshape(*tensor.shape[:-1], -1)
        heads = self._rotated_heads(name)
        return Stored(self.headers[name], data if heads is None else data[self._halves(name, tensor.shape[0], heads)])

    def _rotated_heads(self, name: str) -> int | None:
        if self._architecture != "llama":
            return None
        if ".self_attn.q_proj." in name:
            return self.config["num_attention_heads"]
        return self.config["num_key_value_heads"] if ".self_attn.k_proj." in name else None

    def _halves(self, name: str, rows: int, heads: int) -> torch.Tensor:
        if heads < 1 or rows % (2 * heads):
            raise ModelError(
                f"{self._file.where}: tensor {name}", found=f"{rows} rows", accepted=f"{heads} heads of an even size"
            )
        return torch.from_numpy(np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(-1).copy())

    @cached_property
    def _tokenizer(self) -> TokenizerFiles:
        return tokenizer_of(self._file)

    def tokenizer(self) -> TokenizerFiles:
        return self._tokenizer
