"""A model of which only `config.json` is there: enough for a plan; its weights are assumed to be stored as it says."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

from offroad.errors import ModelError
from offroad.models.registry import resolve_model
from offroad.models.spec import LinearSpec, ModelSpec
from offroad.weights.load import expected_tensors
from offroad.weights.quantised import quantisation
from offroad.weights.safetensors_source import read_json
from offroad.weights.source import Headers, Stored, TensorHeader, TokenizerFiles

# What quantisers leave alone, whatever their lists say (specs of the families): small, or choosing.
KEPT = frozenset({"router", "ba", "input_gate", "input_projection", "compress", "index", "index_weights"})
_DTYPES = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}


class ConfigSource:
    """A `Source` without data. Its headers have the model's names, so the config that it gives is of plain weights."""

    conventions: frozenset[str] = frozenset()

    def __init__(self, path: Path) -> None:
        self.path = path
        values = read_json(path)
        quant = quantisation(values)
        self.config = {name: value for name, value in values.items() if name != "quantization_config"}
        if isinstance(inner := self.config.get("text_config"), dict):
            self.config["text_config"] = {n: v for n, v in inner.items() if n != "quantization_config"}
        spec = resolve_model(self.config).spec
        dtype = values.get("dtype") or values.get("torch_dtype") or "bfloat16"
        stored = f"assumed to be {quant.get('quant_method')} in all layers" if quant else f"assumed to be {dtype}"
        self.notes = (f"no weights here: they are {stored}",)
        if quant and spec.family == "deepseek_v4":  # experts of 4 bits unless it says otherwise
            quant = {"expert_dtype": values.get("expert_dtype", "fp4"), **quant}
        self.headers = assumed_headers(spec, _DTYPES.get(dtype, "bf16"), quant)

    def read(self, name: str) -> Stored:
        raise ModelError(f"tensor {name}", found=f"only {self.path.name}", accepted="a folder with weights")

    def tokenizer(self) -> TokenizerFiles:
        raise ModelError("tokenizer", found=f"only {self.path.name}", accepted="a folder with tokenizer.json")


def assumed_headers(spec: ModelSpec, kind: str, quant: dict[str, Any] | None) -> Headers:
    """Headers as a checkpoint of this spec would have them; linears of layers are quantised as `quant` says."""
    fused = {linear.fused: () for layer in spec.layers for linear in layer.linears if linear.fused}
    width = 4 if kind == "f32" else 2
    headers = {
        name: TensorHeader(name, shape, kind, width * prod(shape))
        for name, shape in expected_tensors(spec, fused).items()
    }
    for tensor in (tensor for layer in spec.layers for tensor in layer.tensors if tensor.transform == "index"):
        headers[tensor.name] = TensorHeader(tensor.name, tensor.shape, "i64", 8 * prod(tensor.shape))
    if quant is None:
        return headers
    for linear in (linear for layer in spec.layers for linear in layer.linears if linear.name not in KEPT):
        for name in _weights(linear, headers):
            shape = headers[name].shape
            stored, size = assumed_kind(quant, shape[-1], bool(linear.experts))
            headers[name] = TensorHeader(name, shape, stored, int(size * prod(shape)))
    return headers


def _weights(linear: LinearSpec, headers: Headers) -> list[str]:
    return [name for name in linear.tensors(headers) if name in headers]


def assumed_kind(quant: dict[str, Any], k: int, experts: bool = False) -> tuple[str, float]:
    """(kind, bytes a weight) of a weight of k columns, one of experts or not, under a `quantization_config`. Raises
    ModelError for others."""
    method, groups = str(quant.get("quant_method", "")).lower(), quant.get("config_groups") or {}
    weights = next((group.get("weights") or {} for group in groups.values()), {})
    bits = quant.get("bits") or quant.get("w_bit") or weights.get("num_bits")
    algo = str(quant.get("quant_algo", "")).upper()
    form = str(quant.get("format", ""))
    if "nvfp4" in form or "NVFP4" in algo:
        return "fp4.nvfp4", 0.5 + 1 / 16
    if "mxfp4" in form or method == "mxfp4" or experts and quant.get("expert_dtype") == "fp4":
        return "fp4.mxfp4", 0.5 + 1 / 32
    if method == "fp8" or algo.startswith("FP8") or weights.get("type") == "float":
        block = quant.get("weight_block_size") or [1, k]
        scale = 1 if quant.get("scale_fmt") == "ue8m0" else 4
        return f"fp8.block{block[0]}x{block[1]}", 1 + scale / (block[0] * block[1])
    if bits in (4, 8):
        group = quant.get("group_size") or quant.get("q_group_size") or weights.get("group_size") or -1
        group = k if group < 0 else group
        return f"affine{bits}.w{bits}a16-g{group}", bits / 8 + 2.5 / group
    raise ModelError("quantization_config", found=str(quant)[:120], accepted="a format that offroad reads")
