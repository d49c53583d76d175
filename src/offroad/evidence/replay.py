"""Sends the requests of a record to a server again, in the rhythm in which they came."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections import Counter
from dataclasses import dataclass
from statistics import quantiles
from typing import Any

import httpx

from offroad.errors import OffroadError

_WORDS = "The quick brown fox jumps over the lazy dog, and nobody knows why it does so every single day of the year. "
_LIMITS = httpx.Limits(max_connections=None)


@dataclass(frozen=True)
class Sent:
    """One request and how it went. Seconds from its sending: to the first byte of the body, to the last."""

    path: str
    status: int
    first: float
    seconds: float


def body_of(entry: dict[str, Any], ids: list[int]) -> tuple[str, Any] | None:
    """Path and body for an entry; None: it is one without texts that has made no tokens, so nothing is known to send.

    A redacted request becomes a completion with as many tokens, in and out. Its prompt is cut from a ring of `ids`, at
    a place that depends on the hash of what it began with: prompts that began the same do so again.
    """
    if not entry.get("redacted", True):
        return entry["path"], entry["body"]
    prompt, answer = entry.get("prompt_tokens"), entry.get("completion_tokens")
    if not prompt or not answer:
        return None
    body = entry.get("body") or {}
    start = int(_first_hash(body) or "0", 16) % len(ids)
    choices = len(entry.get("finish_reasons") or [None])
    return "/v1/completions", {
        "prompt": list(itertools.islice(itertools.cycle(ids), start, start + prompt)),
        "max_tokens": max(1, answer // choices),
        "ignore_eos": True,
        "n": choices,
        "stream": body.get("stream") is True,
    }


def _first_hash(value: Any) -> str | None:
    """The first hash in a redacted body."""
    if isinstance(value, dict):
        if isinstance(value.get("hash"), str):
            return value["hash"]
        value = [
            value[name] for name in ("system", "instructions", "messages", "prompt", "input") if name in value
        ] or [*value.values()]
    return next((found for part in value if (found := _first_hash(part))), None) if isinstance(value, list) else None


async def replay(entries: list[dict[str, Any]], url: str, speed: float, key: str | None) -> tuple[list[Sent], int]:
    """What was sent, and how many entries were left out. `speed` 2: in half the time. Raises OffroadError.

    A request that gets no answer has status 0.
    """
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with httpx.AsyncClient(base_url=url, headers=headers, limits=_LIMITS, timeout=None) as http:
        ids = await _ids(http) if any(entry.get("redacted", True) for entry in entries) else []
        bodies = [(entry["at"] - entries[0]["at"], body_of(entry, ids)) for entry in entries]
        began = time.perf_counter()
        running = [
            asyncio.create_task(_send(http, *body, wait=began + at / speed - time.perf_counter()))
            for at, body in bodies
            if body is not None
        ]
        return list(await asyncio.gather(*running)), len(bodies) - len(running)


async def _ids(http: httpx.AsyncClient) -> list[int]:
    try:
        answer = await http.post("/tokenize", json={"prompt": _WORDS * 8, "add_special_tokens": False})
    except httpx.HTTPError as error:
        raise OffroadError(
            f"no answer from {http.base_url}", found=str(error) or type(error).__name__, next="is the server running?"
        ) from error
    if answer.status_code != 200:
        raise OffroadError(
            f"{http.base_url} makes no tokens",
            found=f"status {answer.status_code}: {answer.text[:200]}",
            accepted="an offroad server, its key if it has one",
        )
    return answer.json()["tokens"]


async def _send(http: httpx.AsyncClient, path: str, body: Any, wait: float) -> Sent:
    await asyncio.sleep(max(wait, 0))
    began, first = time.perf_counter(), 0.0
    try:
        async with http.stream("POST", path, content=json.dumps(body)) as answer:
            async for _ in answer.aiter_raw():
                first = first or time.perf_counter() - began
    except httpx.HTTPError:
        return Sent(path, 0, first, time.perf_counter() - began)
    return Sent(path, answer.status_code, first, time.perf_counter() - began)


def summary(sent: list[Sent], left_out: int) -> dict[str, Any]:
    """Counts by status, and the quantiles of the times of requests that were answered with 200, in seconds."""
    good = [one for one in sent if one.status == 200]
    return {
        "sent": len(sent),
        "left_out": left_out,
        "statuses": {str(status): count for status, count in sorted(Counter(one.status for one in sent).items())},
        "first_byte_seconds": _quantiles([one.first for one in good]),
        "seconds": _quantiles([one.seconds for one in good]),
    }


def _quantiles(values: list[float]) -> dict[str, float] | None:
    if not values:
        return None
    cuts = quantiles(values, n=100, method="inclusive") if len(values) > 1 else values * 99
    return {"p50": round(cuts[49], 4), "p95": round(cuts[94], 4), "max": round(max(values), 4)}
