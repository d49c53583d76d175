"""What goes into the engine and what comes out of it, as messages that also travel between processes."""

from __future__ import annotations

import msgspec

from offroad.sample.guide import Guide
from offroad.sample.params import SamplingParams


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt. The engine makes `params.n` sequences of it, with seeds derived from `seed` and the index.

    `marks`: lengths in tokens of prompt prefixes worth a checkpoint (ends of system part and of user turns).
    `salt` keeps the prefix cache apart between users. `eos_ids` end a sequence unless `ignore_eos`.
    `guide` limits what may be drawn.
    """

    id: str
    prompt_ids: list[int]
    params: SamplingParams
    seed: int = 0
    eos_ids: tuple[int, ...] = ()
    marks: tuple[int, ...] = ()
    salt: str = ""
    guide: Guide | None = None


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probability of the chosen token, and the best ones as (token, logprob), best first. `rank`: the place of the
    chosen one among all, 1 for the best; 0: not looked for."""

    logprob: float
    top: list[tuple[int, float]]
    rank: int = 0


class TokenEvent(msgspec.Struct, frozen=True, kw_only=True, tag="token"):
    """New tokens of sequence `index` of a request. `finish_reason` is set on its last event: "stop" (eos or a stop id,
    named in `stop_reason`), "length", "abort", "error" (with `error`) or "refused" (with `error`: the request's fault).
    A finishing eos or stop id is in `token_ids`.

    `cached` are the prompt tokens resumed from the prefix cache, `matched` those found there; `drafts` were looked at
    for the sequence so far, and `accepted_drafts` of them were what the model said. `prompt_logprobs` come with a
    request's first event: of the prompt's tokens from the second on.
    """

    request_id: str
    index: int
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | None = None
    error: str | None = None
    cached: int = 0
    matched: int = 0
    drafts: int = 0
    accepted_drafts: int = 0
    prompt_logprobs: list[TokenLogprobs] | None = None


class SequenceState(msgspec.Struct, frozen=True, array_like=True):
    """How far sequence `index` of a request is. `state`: "waiting", "prefill", "decode", or "preempted" (it gave up its
    memory and waits again). All counts are tokens: `computed` has been run or resumed, `cached` of the prompt was
    resumed from the prefix cache at first, `generated` has been told."""

    request_id: str
    index: int
    state: str
    prompt: int
    cached: int
    computed: int
    generated: int


class Stats(msgspec.Struct, frozen=True, kw_only=True, tag="stats"):
    """The engine's gauges and counters, sent with each step's events. Counters only grow.

    Blocks: `kv_blocks_used` are held by sequences, `kv_blocks_cached` by none and kept for a prefix; the rest is free.
    `prompt_tokens` counts prompts at their admission, `prefill_tokens` what is run of them, again after a preemption.
    Drafts: `draft_rows` are steps of a sequence that had some, `undrafted_steps` steps in which no sequence that could
    have had any; `drafted_by_place` and `accepted_by_place` count by place behind the pending token.
    """

    running: int = 0
    waiting: int = 0
    kv_blocks_used: int = 0
    kv_blocks_cached: int = 0
    kv_blocks_total: int = 0
    prompt_tokens: int = 0
    prefill_tokens: int = 0
    generated_tokens: int = 0
    prefix_query_tokens: int = 0
    prefix_matched_tokens: int = 0
    prefix_resumed_tokens: int = 0
    preemptions: int = 0
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    draft_rows: int = 0
    undrafted_steps: int = 0
    drafted_by_place: list[int] = []
    accepted_by_place: list[int] = []
    steps: int = 0
    step_seconds: float = 0.0
    late_compilations: int = 0
