"""The body of /v1/completions."""

from __future__ import annotations

from typing import Any, ClassVar

from offroad.errors import RequestError
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
        return 16 if self.max_tokens is None else self.max_tokens

    def wanted_logprobs(self) -> int | None:
        if self.echo and self.logprobs is not None:
            raise RequestError(
                "logprobs",
                param="logprobs",
                found="echo with logprobs",
                accepted="one of the two: log-probabilities of the prompt are not supported yet",
            )
        return self.logprobs

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
