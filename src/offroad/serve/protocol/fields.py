"""Fields that are checked by a table: what is accepted with any value, with some values, and what has a new name."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec
from pydantic import BaseModel, ConfigDict

from offroad.errors import RequestError

# Accepted with any value: they name, group or route requests and leave the answer as it is.
HARMLESS = frozenset({"user", "metadata", "safety_identifier", "prompt_cache_key"})
# Accepted with these values only (and null), since with others they would have to change the answer.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "store": (False,),
    "service_tier": ("auto", "default"),
    "functions": ([],),
    "function_call": ("none",),
    "audio": (),
    "modalities": (["text"],),
    "prediction": (),
    "web_search_options": (),
    "verbosity": (),
    "suffix": (),
    "best_of": (1,),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "early_stopping": (False,),
    "truncate_prompt_tokens": (),
    "spaces_between_special_tokens": (True,),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "logits_processors": (),
    "structural_tag": (),
    "chat_template": (),
    "documents": (),
    "mm_processor_kwargs": (),
    "priority": (0,),
    "request_id": (),
    "return_tokens_as_token_ids": (False,),
    "kv_transfer_params": (),
    "vllm_xargs": (),
    "prompt_embeds": (),
    "prompt_cache_retention": (),
    "reasoning": (),
}
# Fields of chats that mean nothing in a completion.
CHAT_ONLY: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none",),
    "parallel_tool_calls": (True, False),
    "reasoning_effort": (),
    "include_reasoning": (True,),
    "thinking_token_budget": (),
}
# vLLM's former fields for structured output, and where each has gone.
RENAMED = {f"guided_{kind}": f"structured_outputs.{kind}" for kind in ("json", "regex", "choice", "grammar")}
RENAMED |= {
    "guided_decoding_backend": "no field: there is one backend",
    "guided_whitespace_pattern": "structured_outputs.regex",
}


class Strict(BaseModel):
    """An object whose fields are all known, with the types that JSON gives them."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class Body(Strict):
    """The body of a request. `neutral`: further fields that are accepted with some values."""

    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {}

    @classmethod
    def prepared(cls, data: dict[str, Any]) -> dict[str, Any]:
        """The decoded body, checked and mended before its fields are. Raises RequestError."""
        return data


def left_out(name: str, value: Any, table: dict[str, tuple[Any, ...]]) -> bool:
    """Whether a field of a body changes nothing. Raises RequestError: it would, and is not supported."""
    if name in HARMLESS:
        return True
    if name in RENAMED:
        if value is None:
            return True
        raise RequestError(
            f"{name} has a new name", param=name, code="unsupported_field", accepted=RENAMED[name], next="rename it"
        )
    return neutral(name, value, table, name)


def neutral(name: str, value: Any, table: dict[str, tuple[Any, ...]], param: str) -> bool:
    """True: leave the field out. False: it is none of ours, the model decides. Raises RequestError: not supported."""
    if name not in table:
        return False
    if value is None or any(type(value) is type(ok) and value == ok for ok in table[name]):
        return True
    accepted = ", ".join(msgspec.json.encode(ok).decode() for ok in table[name]) or "null"
    raise RequestError(
        f"{param} is not supported yet",
        param=param,
        code="unsupported_field",
        found=short(value),
        accepted=accepted,
        next="leave the field out",
    )


def short(value: Any) -> str:
    text = msgspec.json.encode(value).decode(errors="replace")
    return text if len(text) <= 200 else text[:200] + "..."
