"""A model as data: what each layer computes, remembers and loads. Nothing here imports a kernel or reads a weight.

A model file turns a checkpoint's `config.json` into a `ModelSpec`; the plan, the loader, the cache and the runner read
only that. A layer remembers *items* (none, one or several); an item is `Paged` (history, or window if `window` is set),
a `Ring` in the sequence's slot, or `Shared` with another layer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class Plane:
    """One array of an item's row: `shape` per row, e.g. `("k", (kv_heads, head_dim))`."""

    name: str
    shape: tuple[int, ...]
    dtype: str | None = None  # None: the plan's KV dtype

    @property
    def numel(self) -> int:
        total = 1
        for size in self.shape:
            total *= size
        return total


@dataclass(frozen=True)
class Paged:
    """Rows in pages: the row of position p is `page table[slot, p // B]`, row `(p % B) // rate`.

    `window` None means history: every row stays. Otherwise rows are retired once no query can see them; `keep` is the
    number of old tokens a later reader needs (window - 1, or more when speculating). At rate r only the position that
    closes a group of r has a row. Below `first` there is no row.
    """

    planes: tuple[Plane, ...]
    window: int | None = None
    keep: int = 0
    rate: int = 1
    first: int = 0


@dataclass(frozen=True)
class Ring:
    """Rows in the slot: the row of position p is `p % capacity`, capacity = back + k (+ 1 if written before read).

    `back`: rows before the next token that it reads. `resume`: rows before a boundary that a checkpoint must hold.
    """

    planes: tuple[Plane, ...]
    back: int
    resume: int
    store: Literal["rows", "replay"] = "rows"
    write_first: bool = False

    def capacity(self, k: int) -> int:
        return self.back + k + self.write_first


@dataclass(frozen=True)
class Shared:
    """Reads the item of the same name of another layer, and gets no handle that writes."""

    layer: int


Item = Paged | Ring | Shared


@dataclass(frozen=True)
class RopeSpec:
    """Rotary embedding: angles `p * base^(-2i/dim) / factor`, halves rotated as in GPT-NeoX (Hugging Face)."""

    dim: int
    base: float
    scaling: tuple[tuple[str, float | str], ...] = ()  # sorted items of the checkpoint's rope_scaling, default none


@dataclass(frozen=True)
class AttentionSpec:
    """Softmax attention: `softmax(scale * q k^T) v`, causal, over the last `window` positions if set."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    rope: RopeSpec
    window: int | None = None
    qk_norm: bool = False
    softcap: float | None = None


@dataclass(frozen=True)
class FfnSpec:
    """Gated MLP: `down(act(gate x) * up x)`."""

    size: int
    activation: Literal["silu", "gelu_tanh"]


@dataclass(frozen=True)
class LinearSpec:
    """One linear of the running model, `[n, k]`; `parts`: the checkpoint modules stacked along n, with their rows."""

    name: str
    parts: tuple[tuple[str, int], ...]
    k: int
    bias: bool = False

    @property
    def n(self) -> int:
        return sum(rows for _, rows in self.parts)


@dataclass(frozen=True)
class TensorSpec:
    """One unpacked tensor: its name in the checkpoint (Hugging Face names), where it goes, and how it is changed.

    `transform` "plus_one": the checkpoint holds w and the model multiplies by 1 + w (a source may say that it has
    added the one already, see `Source.conventions`).
    """

    name: str
    target: str
    shape: tuple[int, ...]
    transform: Literal["", "plus_one"] = ""


@dataclass(frozen=True)
class LayerSpec:
    """One layer: mixer, feed-forward, what it remembers and what it loads."""

    mixer: AttentionSpec
    ffn: FfnSpec
    items: tuple[tuple[str, Item], ...]
    linears: tuple[LinearSpec, ...]
    tensors: tuple[TensorSpec, ...]
    needs: frozenset[str] = frozenset()


@dataclass(frozen=True)
class ModelSpec:
    """The whole model. `tensors` are those outside layers; `head` None means tied to the embedding."""

    family: str
    hidden: int
    vocab: int
    max_len: int
    norm_eps: float
    layers: tuple[LayerSpec, ...]
    embed: str
    tensors: tuple[TensorSpec, ...]
    head: LinearSpec | None = None
    embed_scale: float = 1.0
    logit_softcap: float | None = None
    ignored: tuple[str, ...] = field(default=())  # checkpoint tensors that are known and not used (regular expressions)
