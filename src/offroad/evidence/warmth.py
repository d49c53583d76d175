"""What later turns of a chat cost: how much of each prompt is resumed, and the time to its first token, warm and cold.

A chat is made of random ids: each turn's prompt is the one before, its answer, and `prompt_tokens` new ones. Afterwards
each prompt is asked once more under a salt of its own, so that nothing of it is cached: that is *cold*.
"""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from offroad.errors import OffroadError
from offroad.evidence import perf

FORMAT = "offroad-turns-1"


@dataclass(frozen=True)
class Chat:
    """What is asked: turns, new tokens in each, tokens of each answer."""

    turns: int
    prompt_tokens: int
    output_tokens: int
    seed: int = 0


@dataclass
class Reply:
    """An answer's ids, seconds to the first one, and prompt tokens that were resumed and found in the prefix cache."""

    ids: list[int] = field(default_factory=list)
    first: float = 0.0
    resumed: int = 0
    matched: int | None = None


@dataclass(frozen=True)
class Turn:
    """Figures of one turn; `matched` None: the server does not tell."""

    prompt: int
    matched: int | None
    resumed: int
    ttft_ms: float
    cold_ttft_ms: float


def sweep(
    target: perf.EngineTarget | perf.ServerTarget, chat: Chat, report: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Runs the chat after a request that is not counted, then its prompts cold."""
    ask = ask_engine if isinstance(target, perf.EngineTarget) else ask_server
    source, vocab, salt = random.Random(chat.seed), target.vocab(), secrets.token_hex(8)

    def new() -> list[int]:
        return [source.randrange(32, vocab) for _ in range(chat.prompt_tokens)]

    ask(target, new(), 2, f"{salt} first")
    ids, prompts, replies = [], [], []
    for number in range(chat.turns):
        report(f"turn {number + 1} of {chat.turns}")
        ids = ids + new()
        reply = ask(target, ids, chat.output_tokens, salt)
        prompts.append(ids)
        replies.append(reply)
        ids = ids + reply.ids
    turns = []
    for number, (prompt, reply) in enumerate(zip(prompts, replies, strict=True)):
        report(f"turn {number + 1} of {chat.turns}, cold")
        cold = ask(target, prompt, 1, f"{salt} {number}")
        turns.append(Turn(len(prompt), reply.matched, reply.resumed, 1e3 * reply.first, 1e3 * cold.first))
    return [asdict(turn) for turn in turns]


def ask_engine(target: perf.EngineTarget, ids: list[int], count: int, salt: str) -> Reply:
    from offroad.sample.params import SamplingParams
    from offroad.schedule.request import Request

    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    reply, began = Reply(matched=0), time.perf_counter()
    target.engine.submit(Request(id=secrets.token_hex(8), prompt_ids=ids, params=params, salt=salt))
    while target.engine.has_work():
        for event in target.engine.step():
            if event.finish_reason in ("error", "abort") or event.error:
                raise OffroadError("a turn of the chat", found=event.error or event.finish_reason)
            reply.first = reply.first or time.perf_counter() - began
            reply.matched, reply.resumed = max(reply.matched, event.matched), max(reply.resumed, event.cached)
            reply.ids += event.token_ids
    return reply


def ask_server(target: perf.ServerTarget, ids: list[int], count: int, salt: str) -> Reply:
    """The same over HTTP; what matched is the difference of a counter, right while nobody else asks."""
    before, reply, began = _matched(target), Reply(), time.perf_counter()
    for event in target.stream(ids, count, return_token_ids=True, cache_salt=salt):
        for choice in event.get("choices", []):
            if choice.get("token_ids"):
                reply.first = reply.first or time.perf_counter() - began
                reply.ids += choice["token_ids"]
        details = (event.get("usage") or {}).get("prompt_tokens_details") or {}
        reply.resumed = details.get("cached_tokens") or reply.resumed
    if len(reply.ids) != count:
        raise OffroadError("a turn of the chat", found=f"{len(reply.ids)} token ids", accepted=f"{count} token ids")
    after = _matched(target)
    reply.matched = None if before is None or after is None else after - before
    return reply


def _matched(target: perf.ServerTarget) -> int | None:
    """The server's count of prompt tokens found in its prefix cache."""
    name = "offroad_prefix_cache_matched_tokens_total "
    for line in target.client.get(target.url + "/metrics").text.splitlines():
        if line.startswith(name):
            return int(float(line.removeprefix(name)))
    return None


def render(record: dict[str, Any]) -> str:
    """The record as a table with a line on what was measured."""
    from offroad.cli.table import table

    target, load = record["target"], record["load"]
    head = (
        f"{target['model']} on {target['device'] or 'an unknown device'}, a chat of {load['turns']} turns with "
        f"{load['prompt_tokens']} new tokens and answers of {load['output_tokens']}"
    )
    rows = [
        (
            number,
            turn["prompt"],
            "-" if turn["matched"] is None else turn["matched"],
            turn["resumed"],
            f"{turn['ttft_ms']:.1f}",
            f"{turn['cold_ttft_ms']:.1f}",
        )
        for number, turn in enumerate(record["points"], 1)
    ]
    return head + "\n" + table(("TURN", "PROMPT", "MATCHED", "RESUMED", "TTFT ms", "COLD TTFT ms"), rows)
