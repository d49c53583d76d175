"""An engine without a model: it answers with the prompt again and again, one token of each sequence a step.

Words in the prompt steer it: `!die`, `!raise`, `!nan`, `!eosN`, `!full`, `!never`. Tokens are bytes; 256 is eos.
"""

from __future__ import annotations

import os
import re
import signal
import time

import msgspec

from offroad.errors import ModelError, QueueFull, RequestError
from offroad.schedule.request import Request, SequenceState, Stats, TokenEvent, TokenLogprobs
from offroad.settings import Settings
from offroad.weights.source import TokenizerFiles

VOCAB, EOS, MAX_LEN = 257, 256, 512


class Info(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    family: str = "fake"
    max_model_len: int = MAX_LEN
    max_num_seqs: int = 16
    vocab: int = VOCAB
    dtype: str = "float32"
    device: str = "none"
    plan_summary: str = "nothing planned"
    plan_fingerprint: str = "f00d"
    memory_summary: str = "none"
    load_seconds: float = 0.0
    plan_json: str = '{"cells": []}'


def files(**generation) -> TokenizerFiles:
    return TokenizerFiles("{}", None, None, None, (EOS,), False, generation)


class FakeEngine:
    step_seconds = 0.002
    load_seconds = 0.0

    def __init__(self, settings: Settings, progress) -> None:
        progress("load", 0.5, "half")
        time.sleep(self.load_seconds)
        if settings.model == "broken":
            raise ModelError("weights", found="holes", accepted="none", next="pull again")
        if settings.model == "bug":
            raise TypeError("no such thing")
        self.settings = settings
        self.info = Info(model=settings.model)
        self.source_tokenizer = files()
        self.running: dict[tuple[str, int], list] = {}
        self.pending: list[TokenEvent] = []
        self.seen: list[Request] = []
        self.aborted: list[str] = []
        self.steps = self.generated = self.prompted = 0
        self.closed = False

    def teach(self, tokens: list[bytes], ends: tuple[int, ...]) -> None:
        self.taught = tokens, ends

    def prepare(self, request: Request) -> None:
        if "slow" in request.guide.grammar.text:
            time.sleep(0.5)
        if "wrong" in request.guide.grammar.text:
            raise RequestError("grammar", param=request.guide.param, found="wrong", accepted="right")

    def submit(self, request: Request) -> None:
        text = bytes(t for t in request.prompt_ids if t < 256).decode(errors="replace")
        if "!full" in text:
            raise QueueFull("waiting requests", found=1, accepted=0)
        if "!refuse" in text:
            raise RequestError("prompt", param="prompt", found="!refuse", accepted="other words")
        self.seen.append(request)
        self.prompted += len(request.prompt_ids)
        for i in range(request.params.n):
            self.running[request.id, i] = [request, text, 0]

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)
        for key in [k for k in self.running if k[0] == request_id]:
            del self.running[key]
            self.pending.append(TokenEvent(request_id=request_id, index=key[1], token_ids=[], finish_reason="abort"))

    def has_work(self) -> bool:
        return bool(self.running or self.pending)

    def step(self) -> list[TokenEvent]:
        events, self.pending = self.pending, []
        if not self.running:
            return events
        self.steps += 1
        time.sleep(self.step_seconds)
        for key, entry in list(self.running.items()):
            event = self._event(key, entry)
            if event is None:
                continue
            if event.finish_reason:
                del self.running[key]
            events.append(event)
        return events

    def _event(self, key, entry) -> TokenEvent | None:
        request, text, done = entry
        if "!die" in text and done == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        if "!raise" in text and done == 2:
            raise RuntimeError("a device error")
        if "!never" in text:
            return None
        where = {"request_id": key[0], "index": key[1]}
        if "!nan" in text and done == 2:
            return TokenEvent(**where, token_ids=[], finish_reason="error", error="layer 3 is not finite")
        eos = re.search(r"!eos(\d+)", text)
        stop = eos is not None and int(eos[1]) == done and not request.params.ignore_eos
        token = EOS if stop else request.prompt_ids[(done + key[1]) % len(request.prompt_ids)]
        entry[2] = done = done + 1
        self.generated += 1
        reason = "stop" if stop or token in request.params.stop_token_ids else None
        if reason is None and done >= request.params.max_tokens:
            reason = "length"
        logprobs = None
        if request.params.logprobs is not None:
            top = [(token, -0.5), ((token + 1) % VOCAB, float("-inf"))][: request.params.logprobs]
            logprobs = [TokenLogprobs(-0.5, top)]
        scores = None
        if request.params.prompt_logprobs is not None and done == 1 and key[1] == 0:
            best = [(7, -0.25), (8, -1.5)][: request.params.prompt_logprobs]
            scores = [TokenLogprobs(-float(token), best, token) for token in request.prompt_ids[1:]]
        cached = 1 if key[1] == 0 else 2
        return TokenEvent(
            **where,
            token_ids=[token],
            logprobs=logprobs,
            finish_reason=reason,
            stop_reason=token if reason == "stop" and not stop else None,
            cached=cached if done == 1 else 0,
            prompt_logprobs=scores,
        )

    def stats(self) -> Stats:
        return Stats(
            running=len(self.running),
            kv_blocks_used=len(self.running),
            kv_blocks_total=100,
            steps=self.steps,
            generated_tokens=self.generated,
            prompt_tokens=self.prompted,
            prefix_matched_tokens=8,
            prefix_resumed_tokens=4,
        )

    def sequences(self) -> list[SequenceState]:
        return [
            SequenceState(request.id, index, "decode", prompt := len(request.prompt_ids), 1, prompt + done, done)
            for (_, index), (request, _, done) in self.running.items()
        ]

    def check(self) -> None:
        assert not self.running, f"held: {sorted(self.running)}"

    def reset_prefix_cache(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True


class SlowLoad(FakeEngine):
    load_seconds = 1.5


class VerySlowLoad(FakeEngine):
    load_seconds = 60


class Scripted(FakeEngine):
    """Says what `says` has when a request comes, then eos, `pace` tokens a step. Deaf to prompts and guides."""

    says, pace = "", 3
    step_seconds = 0.0005

    def submit(self, request: Request) -> None:
        super().submit(request)
        for i in range(request.params.n):
            self.running[request.id, i][1] = self.tokens()

    def tokens(self) -> list[int]:
        return [*self.says.encode(), EOS]

    def _event(self, key, entry) -> TokenEvent | None:
        request, tokens, done = entry
        told = tokens[done : done + self.pace][: request.params.max_tokens - done]
        entry[2] = done = done + len(told)
        reason = "stop" if told[-1] == EOS else "length" if done >= request.params.max_tokens else None
        return TokenEvent(request_id=key[0], index=key[1], token_ids=told, finish_reason=reason)
