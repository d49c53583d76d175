"""Which prompts can run at all: refused when they come, with both numbers."""

from __future__ import annotations

from offroad.cache.spec import CacheConfig
from offroad.errors import RequestError


def check_fits(prompt: int, config: CacheConfig) -> None:
    """Raises RequestError if a prompt of so many tokens, and one more, can never be in the caches."""
    if prompt == 0:
        raise RequestError("prompt", param="prompt", found="no token", accepted="1 token or more")
    if prompt + 1 > config.max_len:
        raise RequestError(
            "prompt and one token",
            param="prompt",
            code="context_length_exceeded",
            found=f"{prompt} + 1 tokens",
            accepted=f"at most {config.max_len} tokens",
            next="shorten the prompt",
        )
    need, have = config.blocks(prompt + 1 + config.k), config.history_blocks - 1
    if need > have:
        raise RequestError(
            "memory for the prompt and one token",
            param="prompt",
            code="context_length_exceeded",
            found=f"{prompt} + 1 tokens in {need} blocks",
            accepted=f"at most {have} blocks of {config.block} tokens",
            next="shorten the prompt or raise --kv-cache-memory-bytes",
        )
