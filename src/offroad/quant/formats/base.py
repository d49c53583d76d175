"""What every format of quantised checkpoints answers: which tensors make which weight, and how.

A format reads headers and the config's `quantization_config`. The tensors in the file decide; where a list in the
config disagrees with them, the format says so in a note.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from offroad.errors import ModelError
from offroad.quant.packed import Packed
from offroad.weights.source import Headers

FLOAT = ("f32", "bf16", "f16")  # what scales are stored as
Read = Callable[[str], torch.Tensor]  # a tensor of the file by name, in its own dtype
REPAIR = "the file is damaged, or was written by a tool with other rules: quantise the model again, or report it"


@dataclass(frozen=True)
class Claim:
    """A weight that several tensors make.

    `name` is what it is called where it is not quantised (`X.weight`, or a fused tensor of experts), `shape` its shape
    there. `kind` is `layout.detail`, the canonical layout and what a person calls the scheme ("affine4.w4a16-g128");
    it ends with "+order" if the weight has a `perm`.
    `tensors` are all that belong to it; `decode` reads what it needs of them and gives the canonical weight
    [prod(shape[:-1]), shape[-1]]. Where headers cannot tell the shape, `measure` reads it from a tensor of metadata.
    """

    name: str
    shape: tuple[int, ...]
    kind: str
    tensors: tuple[str, ...]
    decode: Callable[[Read], Packed]
    measure: Callable[[Read], tuple[int, ...]] | None = None

    def measured(self, read: Read) -> Claim:
        """The claim with the shape that its metadata say."""
        return self if self.measure is None else replace(self, shape=self.measure(read), measure=None)


@dataclass
class Claims:
    """What a format finds in a checkpoint. `others`: tensors of it that make no weight, e.g. input scales.
    `kv`: scales of a KV cache (weights/kv_scales.py reads them)."""

    claims: list[Claim] = field(default_factory=list)
    others: list[str] = field(default_factory=list)
    kv: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class Format(Protocol):
    """A way of storing quantised weights. `suffixes` end the names of tensors that only it (or a relative) uses: one
    that no claim covers is an error."""

    suffixes: tuple[str, ...]

    def claims(self, headers: Headers, config: dict[str, Any]) -> Claims:
        """What `headers` hold. Raises ModelError naming a tensor whose shape or dtype is not the format's."""
        ...


def expect(headers: Headers, name: str, kinds: tuple[str, ...], shape: tuple[int, ...] | None = None) -> None:
    """Raises ModelError unless tensor `name` is there, stored as one of `kinds`, in `shape`."""
    header = headers.get(name)
    if header is None:
        raise ModelError(f"tensor {name}", found="absent", accepted="a tensor of a quantised weight", next=REPAIR)
    if header.kind not in kinds:
        raise ModelError(f"tensor {name}", found=f"stored as {header.kind}", accepted=" or ".join(kinds), next=REPAIR)
    if shape is not None and header.shape != shape:
        raise ModelError(
            f"tensor {name}", found=f"shape {list(header.shape)}", accepted=f"shape {list(shape)}", next=REPAIR
        )


def sizes(headers: Headers, name: str, kinds: tuple[str, ...], rank: int) -> tuple[int, ...]:
    """The shape of tensor `name`. Raises ModelError unless it is stored as one of `kinds` and has `rank` dimensions."""
    expect(headers, name, kinds)
    shape = headers[name].shape
    if len(shape) != rank or 0 in shape:
        raise ModelError(f"tensor {name}", found=f"shape {list(shape)}", accepted=f"{rank} dimensions", next=REPAIR)
    return shape


def scales(read: Read, name: str) -> torch.Tensor:
    """A tensor of scales in fp32; bytes are exponents (E8M0). Raises ModelError if one is not finite."""
    value = read(name)
    value = _powers(value) if value.dtype == torch.uint8 else value.float()
    if not torch.isfinite(value).all():
        raise ModelError(f"tensor {name}", found="a scale that is not finite", accepted="finite scales", next=REPAIR)
    return value


def _powers(exponents: torch.Tensor) -> torch.Tensor:
    """2^(byte - 127) in fp32; 255 is NaN. Byte 0 is a subnormal number, which shifting into place would make 0."""
    bits = exponents.int() << 23
    bits[exponents == 0] = 1 << 22
    bits[exponents == 255] = 0x7FC00000
    return bits.view(torch.float32)


def module(name: str) -> str:
    """What lists of modules call the weight `name`."""
    return name.removesuffix(".weight")


def note_listed(found: Claims, listed: Callable[[str], bool]) -> None:
    """Notes claims whose module the config lists as not quantised."""
    wrong = sorted(m for m in (module(claim.name) for claim in found.claims) if listed(m))
    if wrong:
        count = f" ({len(wrong)} such)" if len(wrong) > 1 else ""
        found.notes.append(
            f"{wrong[0]} is listed as not quantised, and the file has it quantised{count}: the file decides"
        )
