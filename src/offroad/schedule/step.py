"""What the host asks of the device in one step, and what comes back: integers, the same bytes for every rank."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum, IntFlag

import numpy as np

from offroad.sample.guide import Guide
from offroad.sample.params import SamplingParams


class Kind(IntEnum):
    """What a row does: run a chunk of known tokens, or run its pending token (and drafts) and sample."""

    VERIFY = 0
    CHUNK = 1


class Want(IntFlag):
    """What a row asks for at its last token; PROMPT: a chunk's log-probabilities of the known tokens behind each of its
    own. A chunk that does not reach the end of its prompt wants nothing else."""

    NOTHING = 0
    SAMPLE = 1
    LOGPROBS = 2
    PROMPT = 4


_SAMPLE, _PROMPT = int(Want.SAMPLE), int(Want.PROMPT)  # a member makes an array's operation several times dearer


class Table(IntEnum):
    """The two block tables of a slot."""

    HISTORY = 0
    WINDOW = 1


@dataclass(frozen=True)
class Start:
    """A slot that begins: its known tokens, how many are in the caches already, and how to sample.

    `prompt_len` is the length of the request's own prompt: after a preemption `tokens` also holds generated ones, and
    penalties of presence and frequency count only those. `eos_ids` are the request's: `min_tokens` masks them.
    `guide` limits what may be drawn.
    """

    slot: int
    tokens: np.ndarray  # int64 [known tokens]
    length: int
    prompt_len: int
    params: SamplingParams
    seed: int
    eos_ids: tuple[int, ...] = ()
    guide: Guide | None = None


@dataclass(frozen=True)
class Step:
    """One step. Verify rows come first, then chunks. `width` bounds the tokens a row runs (1 + drafts, or the chunk).

    `tables` rows are (slot, Table, column, block); they are applied before anything runs. `restores` rows are
    (checkpoint, slot, boundary), copied at the head; `captures` rows are (checkpoint, slot, boundary), copied at the
    tail iff the old length < boundary <= the new one.
    """

    number: int
    slot: np.ndarray  # int32 [rows]
    kind: np.ndarray  # uint8 [rows]
    width: np.ndarray  # int32 [rows]
    wants: np.ndarray  # uint8 [rows]
    tables: np.ndarray = field(default_factory=lambda: np.zeros((0, 4), np.int32))
    restores: np.ndarray = field(default_factory=lambda: np.zeros((0, 3), np.int32))
    captures: np.ndarray = field(default_factory=lambda: np.zeros((0, 3), np.int32))
    starts: tuple[Start, ...] = ()

    @property
    def samples(self) -> np.ndarray:
        """Which rows sample, bool [rows]."""
        return (self.wants & _SAMPLE) > 0

    @property
    def scores(self) -> np.ndarray:
        """Which rows ask for log-probabilities of the prompt, bool [rows]."""
        return (self.wants & _PROMPT) > 0


@dataclass(frozen=True)
class PromptLogprobs:
    """Of one chunk: `chosen` and `ranks` (1: the best) [tokens], `top_ids` and `top` [tokens, MAX_LOGPROBS], of the
    known tokens behind each of its own; the last of a prompt has one less, since what is behind it is sampled."""

    chosen: np.ndarray
    ranks: np.ndarray
    top_ids: np.ndarray
    top: np.ndarray


@dataclass(frozen=True)
class Logprobs:
    """`chosen` [rows, k + 1], `top_ids` and `top` [rows, k + 1, MAX_LOGPROBS], by token of `StepResult.tokens`; zeros
    where nothing was asked or drawn."""

    chosen: np.ndarray
    top_ids: np.ndarray
    top: np.ndarray


@dataclass(frozen=True)
class StepResult:
    """`accepted` int32 [rows]: by how much each row's length moved (a chunk: its width; verify: 1 + accepted drafts).

    `tokens` int64 [rows, k + 1]: what was sampled; a row that wants nothing holds -1. A chunk with Want.SAMPLE samples
    one token, which becomes the pending token at the new length. `bad_layer` int16 [rows]: -1, or the first layer with
    a non-finite value (the number of layers: the logits). `drafted` int32 [rows]: drafts that the step looked at;
    None: it had no drafter. `prompt`: by row, for those with Want.PROMPT.
    """

    number: int
    accepted: np.ndarray
    tokens: np.ndarray
    bad_layer: np.ndarray
    logprobs: Logprobs | None = None
    drafted: np.ndarray | None = None
    prompt: dict[int, PromptLogprobs] = field(default_factory=dict)
