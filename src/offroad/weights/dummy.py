"""A checkpoint of any shape that nobody has to download: headers from a config, values drawn when they are read.

Speed and memory depend on shapes and on how weights are stored, not on values. So these are random, made on the device
itself, in the canonical layout of the format that is stood in for. A tensor is a function of its name and the device.
"""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch

from offroad.errors import SettingsError
from offroad.models.registry import resolve_model
from offroad.quant.packed import Packed, group_of
from offroad.weights.config_source import assumed_headers
from offroad.weights.quantised import quantisation
from offroad.weights.source import Headers, Stored, TensorHeader, TokenizerFiles

_STD_OF_CODES = 4.61  # of the integers 0 to 15, each as likely
# Bytes without exponent bit 3: |x| < 2, and no NaN; each such byte as likely gives this root mean square.
_FP8_MASK, _RMS_OF_FP8 = 0xBF, 0.61
_PLAIN = "none"


def _ints(group: int) -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": group, "symmetric": True}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }


# What a checkpoint of the scheme has as its `quantization_config`.
SCHEMES: dict[str, dict[str, Any] | None] = {
    _PLAIN: None,
    "w4a16-g32": _ints(32),
    "w4a16-g128": _ints(128),
    "fp8-block": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}


class DummySource:
    """A `Source` without files. Linears keep the size of what goes through them, so that activations stay finite over
    any number of layers, and norms are about 1.

    `quantization` names a scheme (None: the config's own): it is that of the linears of layers, but for those that
    quantisers leave alone; the embedding, the head, norms and the rest are bf16.
    """

    path = Path("dummy")
    conventions: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ("weights are random numbers: answers mean nothing",)

    def __init__(self, config: dict[str, Any], device: torch.device | str, quantization: str | None = None) -> None:
        if quantization is not None and quantization not in SCHEMES:
            raise SettingsError("--quantization", found=quantization, accepted=", ".join(SCHEMES))
        scheme = quantisation(config) if quantization is None else SCHEMES[quantization]
        self.config, self.device = _without_quantisation(config), torch.device(device)
        spec = resolve_model(self.config).spec
        self.headers: Headers = assumed_headers(spec, "bf16", scheme)
        tensors = (*spec.tensors, *(tensor for layer in spec.layers for tensor in layer.tensors))
        self.plus_one = {tensor.name for tensor in tensors if tensor.transform == "plus_one"}

    def read(self, name: str) -> Stored:
        header = self.headers[name]
        family = header.kind.partition(".")[0]
        generator = torch.Generator(self.device).manual_seed(_seed(name))
        if family == "affine4":
            return _stored(header, self._affine4(header, generator))
        if family == "fp8":
            return _stored(header, self._fp8(header, generator))
        if family != "bf16":
            raise SettingsError("dummy weights", found=header.kind, accepted="bf16, 4-bit integers, fp8 blocks")
        return Stored(header, self._dense(name, header, generator))

    def _dense(self, name: str, header: TensorHeader, generator: torch.Generator) -> torch.Tensor:
        value = torch.empty(header.shape, device=self.device, dtype=torch.bfloat16)
        if name.endswith("A_log"):
            return value.uniform_(-2, 2, generator=generator)
        if name.endswith("dt_bias"):
            return value.uniform_(-4, 1, generator=generator)
        if name.endswith("layer_scalar"):
            return value.uniform_(0.7, 1.0, generator=generator)
        if len(header.shape) > 1:
            return value.normal_(0.0, header.shape[-1] ** -0.5, generator=generator)
        value.normal_(0.0 if name in self.plus_one else 1.0, 0.1, generator=generator)
        if name.endswith(("q_norm.weight", "k_norm.weight")) and name not in self.plus_one:
            value *= header.shape[0] ** -0.25  # scores are not always divided by sqrt(dim): keep the softmax soft
        return value

    def _bytes(self, rows: int, columns: int, generator: torch.Generator) -> torch.Tensor:
        """uint8 [rows, columns], each value as likely, drawn four at a time."""
        words = torch.empty(-(-rows * columns // 4), dtype=torch.int32, device=self.device)
        words.random_(-(2**31), 2**31, generator=generator)
        return words.view(torch.uint8)[: rows * columns].view(rows, columns)

    def _scales(self, rows: int, groups: int, size: float, generator: torch.Generator) -> torch.Tensor:
        """fp32 [rows, groups] about `size`, that bf16 could hold: a file's would be no wider."""
        s = torch.empty((rows, groups), dtype=torch.bfloat16, device=self.device)
        return s.uniform_(0.8 * size, 1.2 * size, generator=generator).float()

    def _affine4(self, header: TensorHeader, generator: torch.Generator) -> Packed:
        n, k = _matrix(header)
        group = group_of(header.kind, k)
        s = self._scales(n, -(-k // group), k**-0.5 / _STD_OF_CODES, generator)
        return Packed("affine4", n, k, {"q": self._bytes(n, k // 2, generator), "s": s, "m": -8.0 * s}, group)

    def _fp8(self, header: TensorHeader, generator: torch.Generator) -> Packed:
        n, k = _matrix(header)
        group = group_of(header.kind, k)
        q = self._bytes(n, k, generator).bitwise_and_(_FP8_MASK).view(torch.float8_e4m3fn)
        blocks = self._scales(-(-n // group), -(-k // group), k**-0.5 / _RMS_OF_FP8, generator)
        s = blocks.repeat_interleave(group, dim=0)[:n].contiguous()
        return Packed("fp8", n, k, {"q": q, "s": s}, group)

    def tokenizer(self) -> TokenizerFiles:
        return TokenizerFiles("{}", None, None, None, (), False, {})


def _seed(name: str) -> int:
    return int.from_bytes(blake2b(name.encode(), digest_size=6).digest(), "little")


def _matrix(header: TensorHeader) -> tuple[int, int]:
    """(rows, columns); experts stand one below the other."""
    k = header.shape[-1]
    return torch.Size(header.shape).numel() // k, k


def _stored(header: TensorHeader, packed: Packed) -> Stored:
    return Stored(header, packed.tensors["q"], packed)


def _without_quantisation(config: dict[str, Any]) -> dict[str, Any]:
    """The config of the plain model: headers have the model's names, as if a format had claimed its tensors."""
    kept = {name: value for name, value in config.items() if name not in ("quantization_config", "compression_config")}
    if isinstance(inner := kept.get("text_config"), dict):
        kept["text_config"] = {name: value for name, value in inner.items() if name != "quantization_config"}
    return kept
