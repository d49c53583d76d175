"""What a request asks of the sampler. Names and meanings as in vLLM and the OpenAI API."""

from __future__ import annotations

import msgspec

from offroad.errors import RequestError

MAX_LOGPROBS = 20
_MOST = 2**31 - 1  # of numbers that travel to the engine, and are added to there


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How to draw tokens and when to stop; checked when made (RequestError names the field).

    `logprobs` None: none; k: the chosen token's and the k best, before temperature and filters (log-softmax of the raw
    logits); `prompt_logprobs`: the same for the prompt's tokens, which then resumes nothing. `temperature` 0 is greedy.
    `top_k` 0 or -1: off. `seed` None: one is drawn at submission.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        for name in ("stop", "stop_token_ids"):
            value = getattr(self, name)
            if isinstance(value, (str, list)):
                msgspec.structs.force_setattr(self, name, (value,) if isinstance(value, str) else tuple(value))
        if self.top_k == -1:
            msgspec.structs.force_setattr(self, "top_k", 0)
        checks = [
            ("n", 1 <= self.n <= 128, "1 to 128"),
            ("temperature", 0.0 <= self.temperature <= 100.0, "0 to 100"),
            ("top_p", 0.0 < self.top_p <= 1.0, "more than 0, at most 1"),
            ("top_k", 0 <= self.top_k <= _MOST, f"0 or -1 (off), or 1 to {_MOST}"),
            ("min_p", 0.0 <= self.min_p <= 1.0, "0 to 1"),
            ("presence_penalty", -2.0 <= self.presence_penalty <= 2.0, "-2 to 2"),
            ("frequency_penalty", -2.0 <= self.frequency_penalty <= 2.0, "-2 to 2"),
            ("repetition_penalty", 0.0 < self.repetition_penalty <= 100.0, "more than 0"),
            ("seed", self.seed is None or -(2**63) <= self.seed < 2**63, "a 64-bit integer"),
            ("max_tokens", self.max_tokens is None or self.max_tokens >= 1, "1 or more"),
            ("min_tokens", 0 <= self.min_tokens <= min(self.max_tokens or _MOST, _MOST), "0 to max_tokens"),
            ("stop", len(self.stop) <= 16 and all(self.stop), "up to 16 strings that are not empty"),
            ("stop_token_ids", all(isinstance(t, int) for t in self.stop_token_ids), "token ids"),
            ("logprobs", self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS, f"0 to {MAX_LOGPROBS}"),
            (
                "prompt_logprobs",
                self.prompt_logprobs is None or 0 <= self.prompt_logprobs <= MAX_LOGPROBS,
                f"0 to {MAX_LOGPROBS}",
            ),
            ("logit_bias", all(-100 <= b <= 100 for b in (self.logit_bias or {}).values()), "biases of -100 to 100"),
        ]
        for name, ok, accepted in checks:
            if not ok:
                found = getattr(self, name)
                found = list(found) if isinstance(found, tuple) else found
                raise RequestError(name, param=name, found=found, accepted=accepted)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    def check_vocab(self, vocab: int) -> None:
        """RequestError when an id of `logit_bias` or `stop_token_ids` is not within a vocabulary of `vocab` tokens."""
        for name, ids in (("logit_bias", self.logit_bias or {}), ("stop_token_ids", self.stop_token_ids)):
            outside = [i for i in ids if not 0 <= i < vocab]
            if outside:
                raise RequestError(
                    name, param=name, found=f"token id {outside[0]}", accepted=f"ids of 0 to {vocab - 1}"
                )
