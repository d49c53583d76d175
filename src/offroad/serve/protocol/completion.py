"""The body of /v1/completions."""

from __future__ import annotations

from typing import Any, ClassVar

from msgspec.structs import replace

from offroad.errors import RequestError
from offroad.sample.params import SamplingParams
from offroad.serve.protocol.fields import CHAT_ONLY
from offroad.serve.protocol.shared import Generation, token


class CompletionRequest(Generation):
    """Body of /v1/completions."""

    neutral: ClassVar[dict[str, tuple[Any, ...]]] = CHAT_ONLY

    prompt: str | list[str] | list[int] | list[list[int]]
    echo: bool | None = None
    add_special_tokens: bool | None = None
    logprobs: int | None = None

    def max_new_tokens(self) -> int | None:
        return 16 if self.max_tokens is None else 1 if self.prompts_alone else self.max_tokens

    @property
    def prompts_alone(self) -> bool:
        """Whether echoed prompts, and what is asked of them, are all of the answer. The engine draws a token, which is
        not told."""
        return bool(self.echo) and self.max_tokens == 0

    def wanted_logprobs(self) -> int | None:
        return self.logprobs

    def sampling(self, defaults: dict[str, Any], vocab: int) -> SamplingParams:
        """As for a chat; what is echoed with log-probabilities needs those of the prompt."""
        params = super().sampling(defaults, vocab)
        if not self.echo or self.logprobs is None:
            return params
        if self.stream:
            raise RequestError(
                "logprobs",
                param="logprobs",
                found="echo and stream too",
                accepted="echo with logprobs only in an answer that is not streamed",
            )
        return replace(params, prompt_logprobs=max(self.logprobs, self.prompt_logprobs or 0))

    def prompts(self, vocab: int) -> list[str | list[int]]:
        """The prompts, each a text or token ids. Raises RequestError for none, an empty one or an unknown id."""
        given = self.prompt
        prompts = [given] if isinstance(given, str) or (given and isinstance(given[0], int)) else list(given)
        if not prompts or any(isinstance(prompt, list) and not prompt for prompt in prompts):
            raise RequestError("prompt", param="prompt", found="an empty list", accepted="at least one token")
        for ids in prompts:
            if isinstance(ids, list):  # of a million perhaps: the least and the greatest say it for all
                token("prompt", min(ids), vocab)
                token("prompt", max(ids), vocab)
        return prompts
