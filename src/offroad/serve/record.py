"""A record of requests for bug reports and for load of a real shape: JSON lines, without what was said unless asked."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import secrets
from pathlib import Path
from typing import Any

from offroad.errors import SettingsError
from offroad.serve.logs import Exchange
from offroad.serve.security import Keys
from offroad.settings import Settings

log = logging.getLogger("offroad.serve")


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Fields whose values are kept if they are numbers, booleans or one of `_WORDS`.
_KEPT = _words(
    "stream n max_tokens max_completion_tokens max_output_tokens min_tokens temperature top_p top_k min_p seed logprobs"
    " top_logprobs presence_penalty frequency_penalty repetition_penalty ignore_eos echo return_token_ids role type"
    " include_usage reasoning_effort enable_thinking include_reasoning thinking_token_budget budget_tokens effort"
    " parallel_tool_calls tool_choice add_generation_prompt continue_final_message skip_special_tokens"
    " include_stop_str_in_output store strict json_object add_special_tokens return_token_strs"
)
_WORDS = _words(
    "system developer user assistant tool function text input_text output_text message function_call tool_use"
    " function_call_output tool_result thinking image_url auto none required any minimal low medium high xhigh max"
    " json_object json_schema enabled disabled adaptive"
)
# Fields in which there are such fields.
_ENTERED = _words(
    "messages content tools function functions tool_calls tool_choice stream_options response_format json_schema"
    " structured_outputs thinking reasoning input system prompt"
)
# Fields that are named, but told by their size only. The names of all others are not told: they may be anything.
_SIZED = _words(
    "text stop stop_token_ids logit_bias name description parameters arguments schema json regex choice grammar"
    " chat_template_kwargs metadata user cache_salt tool_call_id call_id id input_schema reasoning_content output"
    " instructions tokens model"
)
_NAMED = _KEPT | _ENTERED | _SIZED
_OWN_ID = re.compile("req-[0-9a-f]{24}")
# Answers to requests whose path may be no route of ours but words of the client.
_UNROUTED = frozenset({401, 403, 404, 405})


class Record:
    """A file to which each request is added when it has ended. Only its owner may read it.

    Texts are told by their number of characters and a hash, token ids by their number and a hash. The hash is keyed
    with a secret of this process that is not kept: equal texts of a run are known as equal, and nothing else.
    """

    def __init__(self, path: str, content: bool, keys: Keys, names: tuple[str, ...]) -> None:
        self._content, self._keys, self._names = content, keys, names
        self._secret = secrets.token_bytes(32)
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        except OSError as error:
            raise SettingsError(
                "--record-requests", found=f"{path} ({error.strerror})", accepted="a file that can be written"
            ) from error
        self._closed = False

    @classmethod
    def of(cls, settings: Settings, keys: Keys) -> Record | None:
        """The record that the settings ask for. Raises SettingsError."""
        if settings.record_requests is None:
            return None
        return cls(settings.record_requests, settings.record_content, keys, settings.names)

    def add(self, exchange: Exchange) -> None:
        """Adds a POST request. A file that cannot be written is logged once, and fails no request."""
        if exchange.body is None or self._closed:
            return
        try:
            body = json.loads(exchange.body)
        except (ValueError, RecursionError):
            body = None
        entry = {
            "at": round(exchange.at, 4),
            "id": exchange.id,
            "path": exchange.path,
            "body": body if self._content else self._redacted(body),
            "redacted": not self._content,
            "status": exchange.status,
            "seconds": round(exchange.seconds, 4),
            **exchange.told(),
        }
        if not self._content:
            entry["id"] = exchange.id if _OWN_ID.fullmatch(exchange.id) else self._size(exchange.id)
            entry["path"] = None if exchange.status in _UNROUTED else exchange.path
        line = self._keys.scrub(json.dumps(entry)) + "\n"
        try:
            os.write(self._file, line.encode())
        except OSError as error:
            self.close()
            log.error("the record of requests ends here: %s", error)

    def close(self) -> None:
        """Nothing is added any more. May be called again."""
        if not self._closed:
            self._closed = True
            os.close(self._file)

    def _redacted(self, value: Any) -> Any:
        if isinstance(value, dict):
            told = {name: self._field(name, part) for name, part in value.items() if name in _NAMED}
            return told if len(told) == len(value) else told | {"others": len(value) - len(told)}
        if isinstance(value, list) and not all(isinstance(part, int) for part in value):
            return [self._redacted(part) for part in value]
        return self._size(value)

    def _field(self, name: str, value: Any) -> Any:
        if name == "model" and value in self._names:
            return value
        if name in _KEPT and (isinstance(value, (bool, int, float)) or (isinstance(value, str) and value in _WORDS)):
            return value
        return self._redacted(value) if name in _ENTERED else self._size(value)

    def _size(self, value: Any) -> Any:
        if value is None or isinstance(value, bool):
            return value
        text = value if isinstance(value, str) else json.dumps(value)
        hashed = hashlib.blake2b(text.encode(errors="surrogatepass"), key=self._secret, digest_size=8).hexdigest()
        if isinstance(value, list):
            return {"items": len(value), "hash": hashed}
        return {"chars": len(text), "hash": hashed}


def read_record(path: str | Path) -> list[dict[str, Any]]:
    """The entries of a record in the order in which they came in. Raises SettingsError."""
    entries = []
    try:
        for number, line in enumerate(Path(path).read_text().splitlines(), 1):
            entry = json.loads(line)
            if not isinstance(entry, dict) or not isinstance(entry.get("at"), (int, float)):
                raise ValueError(f"line {number} is no entry")
            entries.append(entry)
    except (OSError, ValueError) as error:
        raise SettingsError(
            f"record {path}", found=str(error), accepted="what `offroad serve --record-requests FILE` has written"
        ) from error
    return sorted(entries, key=lambda entry: entry["at"])
