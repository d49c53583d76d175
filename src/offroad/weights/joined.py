"""Two checkpoints seen as one: a model's, and a drafter's under a prefix of its names."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from offroad.weights import kv_scales
from offroad.weights.source import Headers, Source, Stored

Prefixes = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Joined:
    """`base` with the tensors of `other` behind `prefix`; config, tokenizer and path are the base's. `prefixes` are
    what the names of other's KV scales begin with in its file, as `ModelSpec.prefixes`. There are no conventions: the
    spec says how each is stored."""

    base: Source
    other: Source
    prefix: str
    prefixes: Prefixes = ()
    conventions: frozenset[str] = frozenset()
    headers: Headers = field(init=False)
    kv: tuple[str, ...] = field(init=False)
    notes: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        under = {self.prefix + name: header for name, header in self.other.headers.items()}
        headers = self.base.headers | {name: replace(header, name=name) for name, header in under.items()}
        assert len(headers) == len(self.base.headers) + len(under), "no name of the model begins with the prefix"
        object.__setattr__(self, "headers", headers)
        object.__setattr__(self, "kv", (*getattr(self.base, "kv", ()), *self._other_kv()))
        object.__setattr__(self, "notes", (*self.base.notes, *(f"drafter: {note}" for note in self.other.notes)))

    def _other_kv(self) -> dict[str, str]:
        """The other's KV scales: its file's names by those that this source gives them."""
        names: tuple[str, ...] = getattr(self.other, "kv", ())
        return {self.prefix + kv_scales.short(name, self.prefixes): name for name in names}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.base, name)

    def read(self, name: str) -> Stored:
        """The tensor from whichever checkpoint has it."""
        if not name.startswith(self.prefix):
            return self.base.read(name)
        return replace(self.other.read(name.removeprefix(self.prefix)), header=self.headers[name])

    def read_kv(self, name: str) -> torch.Tensor:
        """A scale of the KV cache."""
        if name.startswith(self.prefix):
            return self.other.read_kv(self._other_kv()[name])  # type: ignore[attr-defined]
        return self.base.read_kv(name)  # type: ignore[attr-defined]
