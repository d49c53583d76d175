"""One sequence of a request as the scheduler sees it: limits, stop conditions and what its events say."""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np

from offroad.cache.sequence import Sequence
from offroad.schedule.request import Request, TokenEvent, TokenLogprobs
from offroad.schedule.step import Logprobs, PromptLogprobs, Start, Want


def sequence_seed(seed: int, index: int) -> int:
    """The seed of sequence `index` of a request: the request's own for the first, else a hash of both."""
    if index == 0:
        return seed
    digest = blake2b(b"%d:%d" % (seed, index), digest_size=8, person=b"offroad.seed")
    return int.from_bytes(digest.digest(), "little", signed=True)


@dataclass(eq=False)
class Job(Sequence):
    """A sequence with its request.

    `age` orders sequences by arrival. `limit`: known tokens at which it ends. `leader`: the sibling whose prompt it
    waits for; `shared`: siblings need not wait for this one (any more). `starved`: the last step that was in flight
    when memory was missing, -1: it was not. `last`: the last step that it was in. `drafts`, `accepted_drafts`: how many
    were looked at for it, and how many of them were what the model said. `prompt_scores`: log-probabilities of the
    prompt's tokens from the second on, as far as they are known; it is `fresh` until they are all.
    """

    request: Request = None  # type: ignore[assignment]
    index: int = 0
    age: int = 0
    seed: int = 0
    limit: int = 0
    wants: Want = Want.SAMPLE
    stops: frozenset[int] = frozenset()
    leader: Job | None = None
    shared: bool = True
    starved: int = -1
    last: int = -1
    counted: bool = False
    announced: bool = False
    first_resume: tuple[int, int] = field(default=(0, 0))
    drafts: int = 0
    accepted_drafts: int = 0
    prompt_scores: list[TokenLogprobs] = field(default_factory=list)

    @classmethod
    def of(cls, request: Request, index: int, age: int, root: bytes, max_len: int) -> Job:
        params, prompt = request.params, len(request.prompt_ids)
        stops = set(params.stop_token_ids)
        if not params.ignore_eos:
            stops.update(request.eos_ids)
        return cls(
            tokens=list(request.prompt_ids),
            root=root,
            wanted_marks=request.marks,
            request=request,
            index=index,
            age=age,
            seed=sequence_seed(request.seed, index),
            stops=frozenset(stops),
            limit=max_len if params.max_tokens is None else min(max_len, prompt + params.max_tokens),
            wants=Want.SAMPLE if params.logprobs is None else Want.SAMPLE | Want.LOGPROBS,
            fresh=index == 0 and params.prompt_logprobs is not None and prompt > 1,
        )

    @property
    def prompt_len(self) -> int:
        return len(self.request.prompt_ids)

    def start(self) -> Start:
        """What the device is told when this sequence begins in its slot."""
        tokens = np.array(self.tokens, np.int64)
        request = self.request
        return Start(
            self.slot,
            tokens,
            self.committed,
            self.prompt_len,
            request.params,
            self.seed,
            eos_ids=request.eos_ids,
            guide=request.guide,
        )

    def accept(self, known: int, sampled: list[int]) -> tuple[list[int], str | None, int | None]:
        """(tokens to tell, finish reason, stop token) for tokens sampled after `known` ones: stops at the first end."""
        minimum = self.prompt_len + self.request.params.min_tokens
        for i, token in enumerate(sampled):
            total = known + i + 1
            if token in self.stops and total >= minimum:
                return sampled[: i + 1], "stop", token
            if total >= self.limit:
                return sampled[: i + 1], "length", None
        return sampled, None, None

    def event(
        self,
        tokens: list[int],
        finish: str | None = None,
        stop: int | None = None,
        error: str | None = None,
        logprobs: list[TokenLogprobs] | None = None,
    ) -> TokenEvent:
        """An event of this sequence; the first one tells what came from the prefix cache."""
        first, self.announced = not self.announced, True
        matched, cached = self.first_resume if first else (0, 0)
        asked = self.index == 0 and self.request.params.prompt_logprobs is not None
        return TokenEvent(
            request_id=self.request.id,
            index=self.index,
            token_ids=tokens,
            logprobs=logprobs,
            finish_reason=finish,
            stop_reason=stop,
            error=error,
            cached=cached,
            matched=matched,
            drafts=self.drafts,
            accepted_drafts=self.accepted_drafts,
            prompt_logprobs=self.prompt_scores if first and asked and not self.fresh else None,
        )

    def wanted(self, final: bool, chunk: bool) -> int:
        """What a row of this sequence asks for; `final`: it samples."""
        wants = self.wants if final else Want.NOTHING
        return wants | Want.PROMPT if chunk and self.fresh else wants

    def score(self, start: int, found: PromptLogprobs) -> None:
        """Takes the log-probabilities of the tokens behind those of a chunk that began at `start`. After a preemption
        they come again; those that are known stay."""
        count = self.request.params.prompt_logprobs
        known, end = len(self.prompt_scores), self.prompt_len - 1
        for i in range(known - start, min(len(found.chosen), end - start)):
            top = zip(found.top_ids[i, :count].tolist(), found.top[i, :count].tolist(), strict=True)
            self.prompt_scores.append(TokenLogprobs(float(found.chosen[i]), list(top), int(found.ranks[i])))
        self.fresh = len(self.prompt_scores) < end

    def logprobs(self, found: Logprobs | None, row: int, tokens: int) -> list[TokenLogprobs] | None:
        """The log-probabilities of the row's first `tokens` tokens, cut to what the request asked for; None: it did
        not ask."""
        count = self.request.params.logprobs
        if count is None:
            return None
        assert found is not None, "a step with Want.LOGPROBS answers with log-probabilities"
        ids, values = found.top_ids[row, :tokens, :count].tolist(), found.top[row, :tokens, :count].tolist()
        chosen = found.chosen[row, :tokens].tolist()
        return [TokenLogprobs(c, list(zip(i, v, strict=True))) for c, i, v in zip(chosen, ids, values, strict=True)]
