"""A checkpoint on disk seen in one way, whatever its format: a config, headers, tensors, tokenizer files.

Names and conventions are Hugging Face's: a GGUF source translates its own. Headers are read without the data, since the
plan is made from them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from offroad.errors import ModelError

if TYPE_CHECKING:
    import torch  # only named here: the server process reads TokenizerFiles and must not pay for torch

    from offroad.quant.packed import Packed


@dataclass(frozen=True)
class TensorHeader:
    """One stored tensor: logical shape, how it is stored (`f32`, `f16`, `bf16`, `gguf.q4_1`, ...), bytes on disk."""

    name: str
    shape: tuple[int, ...]
    kind: str
    nbytes: int


Headers = dict[str, TensorHeader]


@dataclass(frozen=True)
class Stored:
    """A tensor as the file holds it. `data` is the raw array: the tensor itself for float kinds, uint8
    `[n, bytes per row]` for GGUF block kinds. A weight that several tensors make has `packed` instead."""

    header: TensorHeader
    data: torch.Tensor
    packed: Packed | None = None


@dataclass(frozen=True)
class TokenizerFiles:
    """What the text side needs: the `tokenizer.json` text, the chat template, special tokens, generation defaults."""

    tokenizer_json: str
    chat_template: str | None
    bos_token: str | None
    eos_token: str | None
    eos_ids: tuple[int, ...]
    add_bos: bool
    generation: dict[str, Any]


class Source(Protocol):
    """`conventions` may hold "norm_plus_one": norm weights already include the one that "plus_one" would add. `notes`
    are what a user should know of how the files were understood."""

    path: Path
    config: dict[str, Any]
    headers: Headers
    conventions: frozenset[str]
    notes: tuple[str, ...]

    def read(self, name: str) -> Stored: ...

    def tokenizer(self) -> TokenizerFiles: ...


@dataclass(frozen=True)
class Renamed:
    """A source under other names; `names` has the file's name by the new one."""

    base: Source
    names: dict[str, str]
    headers: Headers

    def __getattr__(self, name: str) -> Any:
        return getattr(self.base, name)

    def read(self, name: str) -> Stored:
        return self.base.read(self.names[name])


def renamed(source: Source, prefixes: tuple[tuple[str, str], ...]) -> Source:
    """The source with beginnings of names replaced (the first that fits). Raises ModelError if two become one."""
    names: dict[str, str] = {}
    for name in source.headers:
        old, new = next(((old, new) for old, new in prefixes if name.startswith(old)), ("", ""))
        short = new + name.removeprefix(old)
        if short in names:
            raise ModelError(f"tensor {short}", found=f"{names[short]} and {name}", accepted="each tensor once")
        names[short] = name
    headers = {short: replace(source.headers[name], name=short) for short, name in names.items()}
    return source if not prefixes else Renamed(source, names, headers)
