"""A checkpoint with quantised weights seen as if it had plain ones: several tensors under the name of one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from offroad.errors import ModelError
from offroad.quant.formats.awq import Awq
from offroad.quant.formats.base import REPAIR, Claim, Format
from offroad.quant.formats.compressed_tensors import CompressedTensors
from offroad.quant.formats.fp8 import Fp8
from offroad.quant.formats.gptq import Gptq
from offroad.quant.formats.modelopt import ModelOpt
from offroad.quant.formats.mxfp4 import Mxfp4
from offroad.quant.packed import Packed
from offroad.weights.source import Headers, Source, Stored, TensorHeader

FORMATS: dict[str, Format] = {
    "awq": Awq(),
    "compressed-tensors": CompressedTensors(),
    "fp8": Fp8(),
    "gptq": Gptq(),
    "modelopt": ModelOpt(),
    "mxfp4": Mxfp4(),
}


def quantisation(config: dict[str, Any]) -> dict[str, Any] | None:
    """The config's `quantization_config`, wherever it stands; None: the checkpoint is not quantised.

    The first compressed-tensors checkpoints call it `compression_config`.
    """
    inner = config.get("text_config") or {}
    named = [values.get(name) for name in ("quantization_config", "compression_config") for values in (config, inner)]
    return next((values for values in named if values), None)


@dataclass(frozen=True)
class Quantised:
    """A source whose quantised weights have one header each, and are read in their canonical layout."""

    base: Source
    claims: dict[str, Claim]
    headers: Headers
    notes: tuple[str, ...]
    kv: tuple[str, ...] = ()

    def read_kv(self, name: str) -> torch.Tensor:
        """A scale of the KV cache."""
        return self.base.read(name).data

    def __getattr__(self, name: str) -> Any:
        return getattr(self.base, name)

    def read(self, name: str) -> Stored:
        """Raises ModelError for scales that are not finite, and what the base raises."""
        claim = self.claims.get(name)
        if claim is None:
            return self.base.read(name)
        packed = claim.decode(lambda tensor: self.base.read(tensor).data)
        assert (packed.n, packed.k) == (torch.Size(claim.shape[:-1]).numel(), claim.shape[-1]), claim.name
        assert packed.perm is None or claim.kind.endswith("+order"), claim.name  # the plan must have known
        return Stored(self.headers[name], _numbers(packed), packed)


def _numbers(packed: Packed) -> torch.Tensor:
    return packed.tensors["w" if packed.layout == "dense" else "q"]


def quantised(source: Source) -> Source:
    """The source with its quantised weights claimed by their format; as it is if nothing is quantised.

    Raises ModelError for an unknown format, for tensors that the format excludes, and for scales without a weight.
    """
    config = quantisation(source.config)
    if config is None:
        return source
    method = str(config.get("quant_method") or config.get("method") or "").lower()
    if method not in FORMATS:
        raise ModelError("quantization_config: quant_method", found=method or "absent", accepted=", ".join(FORMATS))
    form = FORMATS[method]
    found = form.claims(source.headers, config)
    taken = {tensor for claim in found.claims for tensor in claim.tensors} | set(found.others) | set(found.kv)
    headers = {name: header for name, header in source.headers.items() if name not in taken}
    if left := sorted(name for name in headers if name.endswith(form.suffixes)):
        raise ModelError(
            f"tensor {left[0]}",
            found=f"no weight that it belongs to ({len(left)} of them)",
            accepted=f"a quantised weight beside it ({method})",
            next=REPAIR,
        )
    claims = [claim.measured(lambda tensor: source.read(tensor).data) for claim in found.claims]
    for claim in claims:
        if claim.name in headers:
            raise ModelError(
                f"tensor {claim.name}",
                found=f"there, and made by {claim.tensors[0]} too",
                accepted="each weight once",
                next=REPAIR,
            )
        nbytes = sum(source.headers[tensor].nbytes for tensor in claim.tensors)
        headers[claim.name] = TensorHeader(claim.name, claim.shape, claim.kind, nbytes)
    if not found.claims:
        found.notes.append(f"the config says that weights are quantised ({method}), and the file has none that are")
    by_name = {claim.name: claim for claim in claims}
    return Quantised(source, by_name, headers, (*source.notes, *found.notes), tuple(found.kv))
