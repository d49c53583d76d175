"""A model as data: what each layer computes, remembers and loads. Nothing here imports a kernel or reads a weight.

A model file turns a checkpoint's `config.json` into a `ModelSpec`; the plan, the loader, the cache and the runner read
only that. A layer remembers *items* (none, one or several); an item is `Paged` (history, or window if `window` is set),
a `Ring` in the sequence's slot, or `Shared` with another layer.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Literal

Store = Literal["rows", "replay"]  # how a ring whose rows follow from records keeps what rejected drafts may undo


@dataclass(frozen=True)
class Plane:
    """One array of an item's row: `shape` per row, e.g. `("k", (kv_heads, head_dim))`.

    `dtype` "kv" and "activation" stand for the plan's; others are names of dtypes.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "kv"

    @property
    def numel(self) -> int:
        total = 1
        for size in self.shape:
            total *= size
        return total


@dataclass(frozen=True)
class ScalePlane(Plane):
    """Scales that lie beside a row of an 8-bit cache; absent where the cache has whole numbers of 16 or 32 bits."""


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
class SparsePaged(Paged):
    """Rows of which readers pick some: a page has `page` rows or more, as many as their kernels work on at a time."""

    page: int = 1


@dataclass(frozen=True)
class Ring:
    """Rows in the slot: the row of position p is `p % capacity`, capacity = back + k (+ 1 if written before read).

    `back`: rows before the next token that it reads. `resume`: rows before a boundary that a checkpoint must hold.
    `records`: what a token's row can be made of, given the row before it; where there are such, the store may be
    "replay": one row, and records of the tokens behind it, at most `lag` before a step.
    """

    planes: tuple[Plane, ...]
    back: int
    resume: int
    store: Store = "rows"
    write_first: bool = False
    records: tuple[Plane, ...] = ()
    lag: int = 0

    def capacity(self, k: int) -> int:
        """Rows in a slot."""
        return self.back if self.store == "replay" else self.back + k + self.write_first

    def replayed(self, k: int) -> int:
        """Records in a slot: those that a step reads, and its own."""
        return self.lag + k + 1 if self.store == "replay" else 0


@dataclass(frozen=True)
class Shared:
    """Reads the item of the same name of another layer, and gets no handle that writes."""

    layer: int


Item = Paged | Ring | Shared


@dataclass(frozen=True)
class RopeSpec:
    """Rotary embedding: angles `p * base^(-2i/dim) / factor`, halves rotated as in GPT-NeoX (Hugging Face).

    `sections` (of the height and of the width stream): positions are three streams (time, height, width), of which
    height turns angles 1, 4, .. below 3 * sections[0] and width 2, 5, .. below 3 * sections[1]; time turns the others.
    """

    dim: int
    base: float
    scaling: tuple[tuple[str, float | str], ...] = ()  # sorted items of the checkpoint's rope_scaling, default none
    sections: tuple[int, int] | None = None


@dataclass(frozen=True)
class AttentionSpec:
    """Softmax attention: `softmax(scale * q k^T) v`, causal, over the last `window` positions if set.

    `qk_norm`: q and k are normed per head, with weights; `v_norm`: v is, without. `k_eq_v`: there is no projection of
    v, which is k as projected. `own_kv` False: the layer has queries only and reads another layer's item.
    `output_gate`: each head's query rows are followed by as many gate rows; the output is multiplied by their sigmoid.
    """

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    rope: RopeSpec
    window: int | None = None
    qk_norm: bool = False
    softcap: float | None = None
    v_norm: bool = False
    k_eq_v: bool = False
    own_kv: bool = True
    output_gate: bool = False

    @property
    def q_width(self) -> int:
        """Rows of the query projection, gates included."""
        return self.heads * self.head_dim * (2 if self.output_gate else 1)


@dataclass(frozen=True)
class GatedDeltaSpec:
    """Gated DeltaNet: a causal convolution of `kernel` columns, then for each value head a recurrent state
    [key_dim, value_dim], `S = e^g S + k (beta (v - (e^g S)^T k))^T`, out `S^T q`, normed and multiplied by an
    activated gate. Value head j uses key head `j // (value_heads / key_heads)`."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    gate: Literal["silu", "sigmoid"] = "silu"

    @property
    def channels(self) -> int:
        """Columns that are convolved: q, k and v of all heads."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def value_width(self) -> int:
        return self.value_heads * self.value_dim


@dataclass(frozen=True)
class IndexSpec:
    """Chooses compressed rows: `sum_h w_h relu(q_h k)` over keys of `dim`, of which the `top_k` largest are read."""

    heads: int
    dim: int
    top_k: int


@dataclass(frozen=True)
class SparseMlaSpec:
    """Attention of `heads` queries over rows of `head_dim` that are keys and values in one (DeepSeek-V4).

    A query sees the last `window` rows and, at `rate` > 0, compressed rows: one for each `rate` tokens whose group has
    ended; all of them, or those that `index` picks. `overlap`: a row is made of its group and of the one before. Each
    head has a sink, a logit without a value. RoPE turns neighbouring pairs of the last `rope.dim` channels, and turns
    the output back. Queries come out of `q_rank` channels; `out_groups` groups of heads are projected to `out_rank`
    channels each, and those together to the hidden size.
    """

    heads: int
    head_dim: int
    scale: float
    rope: RopeSpec
    window: int
    q_rank: int
    out_groups: int
    out_rank: int
    rate: int = 0
    overlap: bool = False
    index: IndexSpec | None = None


Mixer = AttentionSpec | GatedDeltaSpec | SparseMlaSpec


@dataclass(frozen=True)
class FfnSpec:
    """Gated MLP: `down(act(gate x) * up x)`."""

    size: int
    activation: Literal["silu", "gelu_tanh"]


@dataclass(frozen=True)
class MoeSpec:
    """Experts: gated MLPs of `size`, `top_k` of them for a token, weighted by the softmax over all, renormed to 1."""

    experts: int
    top_k: int
    size: int
    activation: Literal["silu", "gelu_tanh"]


@dataclass(frozen=True)
class ScoredMoeSpec(MoeSpec):
    """Experts weighted by `sqrt(softplus(score))` of the chosen ones, renormed to `scale`; chosen by the score plus a
    bias, or by the token's id if `hashed`. Inputs of their activation are clamped at `limit`, the shared one's too."""

    scale: float = 1.0
    limit: float = 0.0
    hashed: bool = False


@dataclass(frozen=True)
class HyperSpec:
    """A residual of `streams` streams: a block reads a weighted sum of them, and its output is added to each after they
    were mixed by a matrix that `iterations` of Sinkhorn made doubly stochastic. All weights depend on the input."""

    streams: int
    iterations: int
    eps: float


@dataclass(frozen=True)
class LinearSpec:
    """One linear of the running model, `[n, k]`; `parts`: the checkpoint modules stacked along n, with their rows.

    Ranks of tensor parallelism divide its rows (of each part), its columns, or nothing, as `split` says.
    `op` says who reads it: "grouped_linear" holds the weights of `experts` experts one below the other, "block_linear"
    the blocks of a block-diagonal matrix, of k columns each. `fused` names a tensor [experts, n / experts, k] that a
    checkpoint may have instead of the parts.
    """

    name: str
    parts: tuple[tuple[str, int], ...]
    k: int
    bias: bool = False
    op: Literal["linear", "grouped_linear", "block_linear", "embed"] = "linear"
    experts: int = 0
    fused: str = ""
    split: Literal["rows", "columns", "none"] = "none"

    @property
    def names(self) -> list[str]:
        """The parts' tensors."""
        return [f"{module}.weight" for module, _ in self.parts]

    def tensors(self, there: Collection[str]) -> list[str]:
        """The checkpoint's tensors that make it: the fused one if `there` is one, else the parts'."""
        return [self.fused] if self.fused in there else self.names

    @property
    def use(self) -> str:
        """How cells name it."""
        return self.op if self.name == self.op else f"{self.op}:{self.name}"

    @property
    def n(self) -> int:
        return sum(rows for _, rows in self.parts)


@dataclass(frozen=True)
class TensorSpec:
    """One unpacked tensor: its name in the checkpoint (Hugging Face names), where it goes, and how it is changed.

    `transform` "plus_one": the checkpoint holds w and the model multiplies by 1 + w (a source may say that it has
    added the one already, see `Source.conventions`); "matrix": all dimensions but the first become one; "index": whole
    numbers from 0 to below their count, kept as int64.
    """

    name: str
    target: str
    shape: tuple[int, ...]
    transform: Literal["", "plus_one", "matrix", "index"] = ""


@dataclass(frozen=True)
class LayerSpec:
    """One layer: mixer, feed-forward, what it remembers and what it loads."""

    mixer: Mixer
    ffn: FfnSpec
    items: tuple[tuple[str, Item], ...]
    linears: tuple[LinearSpec, ...]
    tensors: tuple[TensorSpec, ...]
    moe: MoeSpec | None = None
    blocks: tuple[str, ...] = ("attention_block", "mlp_block")  # the blocks that the model calls


@dataclass(frozen=True)
class HyperLayerSpec(LayerSpec):
    """A layer whose residual is several streams."""

    hyper: HyperSpec = HyperSpec(1, 1, 0.0)


@dataclass(frozen=True)
class DraftSpec:
    """A drafter: its layers, and what stands outside them. `prefix`: how the names of all its tensors begin; a
    checkpoint with one of them must have all. `method`: what proposes with it (see `offroad.speculate`).

    A drafter that is a whole model has a linear "embed" (and "head", unless that is tied to it) and computes with its
    own `norm_eps`, `embed_scale` and `logit_softcap`; others take the model's. `family` says whose forward pass it is.
    It drafts for positions below `max_len`; None: for all. `clusters`: how many clusters of tokens its head scores; 0:
    it scores all tokens.
    """

    method: str
    hidden: int
    layers: tuple[LayerSpec, ...]
    linears: tuple[LinearSpec, ...]
    tensors: tuple[TensorSpec, ...]
    prefix: str
    family: str = ""
    norm_eps: float | None = None
    embed_scale: float = 1.0
    logit_softcap: float | None = None
    max_len: int | None = None
    clusters: int = 0

    @property
    def whole(self) -> bool:
        """Whether it is a model of its own, with an embedding and a head."""
        return any(linear.name == "embed" for linear in self.linears)

    @property
    def tied(self) -> bool:
        """Whether its embedding is its head too."""
        return self.whole and all(linear.name != "head" for linear in self.linears)


@dataclass(frozen=True)
class ModelSpec:
    """The whole model. `tensors` and `linears` are those outside layers; `head` None means tied to the embedding.

    `prefixes`: beginnings of checkpoint names and what stands for them in this spec, tried in order. `draft` is the
    drafter that may be used; `drafted` says how many of `layers`, the last ones, are the drafter's.
    """

    family: str
    hidden: int
    vocab: int
    max_len: int
    norm_eps: float
    layers: tuple[LayerSpec, ...]
    embed: str
    tensors: tuple[TensorSpec, ...]
    head: LinearSpec | None = None
    linears: tuple[LinearSpec, ...] = ()
    draft: DraftSpec | None = None
    drafted: int = 0
    embed_scale: float = 1.0
    logit_softcap: float | None = None
    ignored: tuple[str, ...] = field(default=())  # checkpoint tensors that are known and not used (regular expressions)
    prefixes: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()  # what a user should know of how the checkpoint is understood

    @property
    def embedding(self) -> LinearSpec:
        return LinearSpec("embed", ((self.embed, self.vocab),), self.hidden, op="embed")

    @property
    def own(self) -> int:
        """How many layers are the model's own."""
        return len(self.layers) - self.drafted

    def with_drafter(self) -> ModelSpec:
        """The model with its drafter's layers behind its own: what is planned, loaded and remembered."""
        assert self.draft is not None, "there is a drafter"
        assert not self.drafted, "a drafter is joined once"
        return replace(self, layers=self.layers + self.draft.layers, drafted=len(self.draft.layers))

    def storing(self, store: Store, lag: int = 0) -> ModelSpec:
        """The model with the rings of its own layers that have records kept so. A drafter runs several times in a step,
        so its rings keep rows: where the records of a slot begin is known once a step."""

        def kept(item: Item) -> Item:
            return replace(item, store=store, lag=lag) if isinstance(item, Ring) and item.records else item

        own = tuple(
            replace(layer, items=tuple((name, kept(item)) for name, item in layer.items))
            for layer in self.layers[: self.own]
        )
        return replace(self, layers=own + self.layers[self.own :])
