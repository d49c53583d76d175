"""Checkpoints written by the compressed-tensors library, and what the library itself makes of their weights."""

from __future__ import annotations

import json
import re
import shutil
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import torch
from compressed_tensors.compressors import BaseCompressor, ModelCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    apply_quantization_config,
)
from compressed_tensors.quantization.lifecycle.forward import dequantize
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]


def scheme(name: str, targets: tuple[str, ...] = ("Linear",)) -> QuantizationScheme:
    """A scheme by a short name: w4-g32, w4-g32-asym, w8-channel, int8-channel, fp8-block32x32, nvfp4, mxfp8, ..."""
    kind, *rest = name.split("-")
    floats = dict(num_bits=8 if "8" in kind else 4, type="float", symmetric=True)
    if kind in ("mxfp4", "mxfp8"):
        args = QuantizationArgs(**floats, strategy="group", group_size=32, scale_dtype=torch.uint8)
        return QuantizationScheme(targets=list(targets), weights=args, format=f"{kind}-{_PACKED[kind]}")
    if kind == "nvfp4":
        args = QuantizationArgs(**floats, strategy="tensor_group", group_size=16, scale_dtype=torch.float8_e4m3fn)
        return QuantizationScheme(targets=list(targets), weights=args, format="nvfp4-pack-quantized")
    how, size = re.fullmatch(r"(g|block|channel|tensor)([\dx]*)", rest[0]).groups()
    where: dict = dict(strategy="group" if how == "g" else how)
    if how == "g":
        where["group_size"] = int(size)
    if how == "block":
        where["block_structure"] = [int(side) for side in size.split("x")]
    if kind == "fp8":
        return QuantizationScheme(
            targets=list(targets), weights=QuantizationArgs(**floats, **where), format="float-quantized"
        )
    bits = int(kind.removeprefix("int").removeprefix("w"))
    args = QuantizationArgs(num_bits=bits, type="int", symmetric="asym" not in rest, **where)
    packed = "int-quantized" if kind.startswith("int") else "pack-quantized"
    inputs = QuantizationArgs(num_bits=8, strategy="token", dynamic=True) if kind.startswith("int") else None
    return QuantizationScheme(targets=list(targets), weights=args, input_activations=inputs, format=packed)


_PACKED = {"mxfp4": "pack-quantized", "mxfp8": "quantized"}


def _extremes(weight: torch.Tensor, args: QuantizationArgs) -> tuple[torch.Tensor, torch.Tensor]:
    """Smallest and largest weight of what shares a scale."""
    if args.strategy == "tensor":
        return weight.min().reshape(1), weight.max().reshape(1)
    if args.strategy == "channel":
        return weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    if args.strategy == "block":
        rows, columns = args.block_structure
        padded = torch.nn.functional.pad(weight, (0, -weight.shape[1] % columns, 0, -weight.shape[0] % rows))
        blocks = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
        return blocks.amin((1, 3)), blocks.amax((1, 3))
    groups = weight.unflatten(1, (-1, args.group_size))
    return groups.amin(-1), groups.amax(-1)


def compress(weight: torch.Tensor, made: QuantizationScheme, dtype: torch.dtype = torch.bfloat16) -> Tensors:
    """A weight's tensors by local name, as the library writes them; scales in `dtype` where the format has floats."""
    args, low_high = made.weights, _extremes(weight, made.weights)
    state = {"weight": weight}
    if args.strategy == "tensor_group":
        overall = state["weight_global_scale"] = (6 * 448 / weight.abs().max()).reshape(1)
        state["weight_scale"], _ = calculate_qparams(*low_high, args, global_scale=overall)
    else:
        scale, zero = calculate_qparams(*low_high, args)
        state["weight_scale"] = scale if made.format.startswith("mx") else scale.to(dtype)
        if not args.symmetric:
            state["weight_zero_point"] = zero
    return BaseCompressor.get_value_from_registry(made.format).compress(state, made)


def oracle(state: Tensors, made: QuantizationScheme) -> torch.Tensor:
    """The library's own weight, computed in fp32."""
    compressor, args = BaseCompressor.get_value_from_registry(made.format), made.weights
    if made.format == "nvfp4-pack-quantized":  # the library decompresses in bf16
        packed = state["weight_packed"]
        codes = unpack_fp4_from_uint8(packed, packed.shape[0], packed.shape[1] * 2, dtype=torch.float32)
        scale, overall = state["weight_scale"].float(), state["weight_global_scale"]
        return dequantize(codes, scale, args=args, global_scale=overall, dtype=torch.float32)
    if made.format.startswith("mx"):  # powers of two: bf16 holds the products exactly
        return compressor.decompress(state, made)["weight"].float()
    return compressor.decompress(state | {"weight_scale": state["weight_scale"].float()}, made)["weight"]


def _save(tensors: Tensors, folder: Path) -> None:
    own = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}
    save_file(own, folder / "model.safetensors")


@dataclass
class Written:
    """A quantised checkpoint: its folder, its tensors, the library's weights by the name that each has in the file, and
    the reference model with them."""

    folder: Path
    tensors: Tensors
    weights: Tensors
    reference: torch.nn.Module

    def save(self, **config) -> None:
        """Writes the tensors, and changes of the quantization_config."""
        _save(self.tensors, self.folder)
        path = self.folder / "config.json"
        values = json.loads(path.read_text())
        values["quantization_config"] |= config
        path.write_text(json.dumps(values))


PROJECTIONS = r".*(proj|proj_qkv|proj_z)$"


def write(
    tiny: tuple[Path, torch.nn.Module],
    folder: Path,
    names: dict[str, str],
    *,
    ignore: tuple[str, ...] = (),
    experts: str = "each",
    dtype: torch.dtype = torch.bfloat16,
) -> Written:
    """The tiny checkpoint with modules that match a pattern of `names` quantised by the scheme of that name; `experts`
    "each" has their tensors by expert, "fused" stacked, "plain" as they are."""
    source, reference = tiny
    shutil.copytree(source, folder)
    schemes = {pattern: scheme(name, (f"re:{pattern}",)) for pattern, name in names.items()}
    written = Written(folder, {}, {}, deepcopy(reference))
    stacks: Tensors = {}
    state = reference.state_dict()
    for name, tensor in state.items():
        if name == "lm_head.weight" and torch.equal(tensor, state["model.embed_tokens.weight"]):
            continue  # tied
        module = name.removesuffix(".weight")
        made = next((made for pattern, made in schemes.items() if re.match(pattern, module)), None)
        if made is None or tensor.ndim == 1 or tensor.ndim == 3 and experts == "plain" or "conv1d" in name:
            written.tensors[name] = tensor
        elif tensor.ndim == 3:
            stacks[name] = _experts(written, module, tensor, made, experts, dtype)
        else:
            parts = compress(tensor, made, dtype)
            written.tensors |= {f"{module}.{part}": value for part, value in parts.items()}
            written.weights[name] = oracle(parts, made)
    loaded = written.reference.load_state_dict(
        {name: weight for name, weight in (written.weights | stacks).items() if name in state}, strict=False
    )
    assert not loaded.unexpected_keys, loaded
    groups = {f"group_{i}": made for i, made in enumerate(schemes.values())}
    form = next(iter(schemes.values())).format if len(schemes) == 1 else "mixed-precision"
    values = QuantizationConfig(config_groups=groups, format=form, ignore=list(ignore))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": values.model_dump(mode="json")}))
    written.save()
    return written


def by_library(
    tiny: tuple[Path, torch.nn.Module], folder: Path, made: QuantizationScheme, ignore: tuple[str, ...]
) -> Written:
    """A checkpoint of which the library writes everything: it applies a config to the model, compresses it, and saves
    tensors and config. Scales are in the model's dtype, fp32, with values that bf16 has."""
    source, reference = tiny
    shutil.copytree(source, folder)
    written, model = Written(folder, {}, {}, deepcopy(reference)), deepcopy(reference)
    config = QuantizationConfig(config_groups={"group_0": made}, ignore=list(ignore))
    apply_quantization_config(model, config, show_progress=False)
    for module in model.modules():
        if getattr(module, "quantization_scheme", None) is not None:
            scale, zero = calculate_qparams(*_extremes(module.weight.data, made.weights), made.weights)
            module.weight_scale.data, module.weight_zero_point.data = scale.bfloat16().float(), zero
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)
    written.tensors = load_file(folder / "model.safetensors")
    for name in written.tensors:
        module = name.removesuffix(".weight_packed")
        if module != name:
            parts = {part.removeprefix(f"{module}."): x for part, x in written.tensors.items() if f"{module}." in part}
            written.weights[f"{module}.weight"] = oracle(parts, made)
    written.reference.load_state_dict(written.weights, strict=False)
    return written


def _experts(
    written: Written, module: str, tensor: torch.Tensor, made: QuantizationScheme, how: str, dtype: torch.dtype
) -> torch.Tensor:
    """Adds the tensors of all experts; gives the library's weights of all, stacked."""
    if how == "fused":
        states = [compress(weight, made, dtype) for weight in tensor]
        parts = {part: torch.stack([state[part] for state in states]) for part in states[0] if part != "weight_shape"}
        written.tensors |= {f"{module}.{part}": value for part, value in parts.items()}
        written.weights[module] = torch.stack([oracle(state, made) for state in states])
        return written.weights[module]
    at, _, last = module.rpartition(".")
    names = ("gate_proj", "up_proj") if last == "gate_up_proj" else (last,)
    whole = []
    for e, weight in enumerate(tensor):
        split = [compress(piece, made, dtype) for piece in weight.chunk(len(names))]
        for name, parts in zip(names, split, strict=True):
            written.tensors |= {f"{at}.{e}.{name}.{part}": value for part, value in parts.items()}
            written.weights[f"{at}.{e}.{name}.weight"] = oracle(parts, made)
        whole.append(torch.cat([oracle(parts, made) for parts in split]))
    return torch.stack(whole)


def folder_of(folder: Path, tensors: Tensors, groups: dict[str, QuantizationScheme | dict], **config) -> Path:
    """A folder with these tensors and a quantization_config; no model, for the source alone."""
    folder.mkdir(exist_ok=True)
    _save(tensors, folder)
    dumped = {name: made if isinstance(made, dict) else made.model_dump(mode="json") for name, made in groups.items()}
    values = {"quant_method": "compressed-tensors", "config_groups": dumped, **config}
    (folder / "config.json").write_text(json.dumps({"quantization_config": values}))
    return folder


def prefixed(module: str, parts: Tensors) -> Tensors:
    return {f"{module}.{part}": value for part, value in parts.items()}
