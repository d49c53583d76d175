"""GET /status: what the server does now. GET /plan: which kernel runs where and why.

Both answer at once, also while a model loads or a step takes long: they tell what the engine was last seen to do
(`execute/watch.py`) and ask it nothing. No text of a request is told. Every field is described in docs/web.md.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.responses import Response

from offroad import __version__
from offroad.execute.client import State
from offroad.execute.messages import EngineInfo
from offroad.execute.watch import WINDOW_SECONDS, Submitted
from offroad.schedule.request import SequenceState, Stats
from offroad.serve.errors import json_response
from offroad.serve.service import Service

# A page shows no more, and a long queue would make each look at it dear.
LISTED_AT_MOST = 200
_PARTS = ("total", "budget", "weights", "kv", "states", "graphs", "workspace", "tables", "headroom")
_TOTALS = (
    *("prompt_tokens", "prefill_tokens", "generated_tokens"),
    *("prefix_query_tokens", "prefix_matched_tokens", "prefix_resumed_tokens"),
    *("draft_tokens", "accepted_draft_tokens", "preemptions", "steps", "step_seconds"),
)


def routes(service: Service) -> APIRouter:
    """The router of one server; uptime counts from this call."""
    router, board = APIRouter(), _Board(service)

    @router.get("/status")
    async def status() -> Response:
        """What the server does now."""
        return json_response(board.status(), headers={"Cache-Control": "no-store"})

    @router.get("/plan")
    async def plan() -> Response:
        """The document of `offroad plan --json`, as the running engine made it; 503 until it has."""
        if service.client.info is None:
            service.client.require_ready()
        return Response(service.client.info.plan_json, media_type="application/json")

    return router


class _Board:
    def __init__(self, service: Service) -> None:
        self._service, self._client, self._watch = service, service.client, service.client.watch
        self._began = time.monotonic()
        self._read: tuple[EngineInfo | None, dict[str, Any]] = (None, {})

    def status(self) -> dict[str, Any]:
        """The document."""
        client, info = self._client, self._client.info
        now = Stats() if client.state is State.DEAD else client.stats  # what a dead engine held is gone
        return {
            "state": "failed" if client.state is State.DEAD else client.state.value,
            "reason": None if client.death is None else str(client.death),
            "loading": self._loading(),
            "version": __version__,
            "models": list(self._service.names),
            "uptime_seconds": round(time.monotonic() - self._began, 3),
            "engine": self._engine(info),
            "memory": self._memory(),
            "kv_blocks": self._blocks(now),
            "requests": self._requests(now),
            "rates": self._rates(),
            "totals": {name: getattr(client.stats, name) for name in _TOTALS},
        }

    def _loading(self) -> dict[str, Any] | None:
        progress = self._watch.progress
        if self._client.state is not State.LOADING or progress is None:
            return None
        return {"phase": progress.phase, "fraction": round(progress.fraction, 4), "note": progress.note}

    def _engine(self, info: EngineInfo | None) -> dict[str, Any]:
        """What is loaded, by the names that `EngineInfo` has; all of it null until then."""
        names = ("family", "device", "dtype", "max_model_len", "max_num_seqs", "plan_fingerprint", "load_seconds")
        step = self._watch.last_step
        return {name: getattr(info, name, None) for name in names} | {
            "restarts": self._client.restarts,
            "seconds_since_step": None if step is None else round(self._watch.clock() - step, 3),
        }

    def _plan(self) -> dict[str, Any]:
        """The plan, decoded once for each engine."""
        info = self._client.info
        if self._read[0] is not info:
            self._read = (info, {} if info is None else msgspec.json.decode(info.plan_json))
        return self._read[1]

    def _memory(self) -> dict[str, int] | None:
        memory = self._plan().get("memory")
        return None if memory is None else {f"{part}_bytes": memory[part] for part in _PARTS}

    def _blocks(self, stats: Stats) -> dict[str, Any]:
        planned = self._plan().get("memory", {}).get("history_blocks", 1) - 1  # block 0 is the bin
        total, used, cached = stats.kv_blocks_total or planned, stats.kv_blocks_used, stats.kv_blocks_cached
        return {
            "total": total,
            "used": used,
            "cached": cached,
            "free": max(0, total - used - cached),
            "tokens_per_block": self._plan().get("block"),
        }

    def _requests(self, stats: Stats) -> dict[str, Any]:
        now, sent = self._watch.clock(), self._watch.requests
        known = [sequence for sequence in self._watch.sequences if sequence.request_id in sent]
        seen = {sequence.request_id for sequence in known}
        # What the engine has not told of yet: just sent, or its grammar is being compiled.
        known += [
            SequenceState(id, 0, "waiting", request.prompt, 0, 0, 0) for id, request in sent.items() if id not in seen
        ]
        listed = [_sequence(entry, sent[entry.request_id], now) for entry in known[:LISTED_AT_MOST]]
        return {
            "unfinished": len(sent),
            "running_sequences": stats.running,
            "waiting_sequences": stats.waiting,
            "sequences": listed,
            "unlisted": len(known) - len(listed),
        }

    def _rates(self) -> dict[str, Any]:
        seconds, then, now = self._watch.window()

        def grown(name: str) -> int:
            return getattr(now, name) - getattr(then, name)

        def rate(name: str) -> float:
            return round(grown(name) / seconds, 3) if seconds else 0.0

        def share(part: str, whole: str) -> float | None:
            return round(grown(part) / grown(whole), 4) if grown(whole) else None

        return {
            "window_seconds": round(min(seconds, WINDOW_SECONDS), 3),
            "decode_tokens_per_second": rate("generated_tokens"),
            "prefill_tokens_per_second": rate("prefill_tokens"),
            "draft_acceptance": share("accepted_draft_tokens", "draft_tokens"),
            "prefix_cache_hit_rate": share("prefix_resumed_tokens", "prefix_query_tokens"),
        }


def _sequence(state: SequenceState, request: Submitted, now: float) -> dict[str, Any]:
    return {
        "id": state.request_id,
        "index": state.index,
        "state": state.state,
        "age_seconds": round(now - request.began, 3),
        "prompt_tokens": state.prompt,
        "cached_tokens": state.cached,
        "computed_tokens": state.computed,
        "generated_tokens": state.generated,
    }
