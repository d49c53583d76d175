"""The table of answers with calls as streams of tokens: what a request makes of them, behind thoughts too, and why it
ended. Tokens are bytes here, so that characters and tags come in parts."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
from fake_text import EOS, FakeText

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "text"))
from golden_calls import GOLDEN, TOOLS

from offroad.sample.params import SamplingParams
from offroad.schedule.request import TokenEvent
from offroad.serve.generation import Generation
from offroad.serve.text import Prompt
from offroad.text.answer import Reading
from offroad.text.reasoning import CHANNEL, DSML_THINK, THINK

THOUGHTS = {"gemma4": CHANNEL, "deepseek_v4": DSML_THINK}


class Events:
    """A subscription to an engine that says these tokens, some at a time, and then ends for `reason`."""

    def __init__(self, name: str, tokens: list[int], pace: int, reason: str) -> None:
        self.name, self.tokens, self.pace, self.reason = name, tokens, pace, reason

    async def __aiter__(self):
        for at in range(0, len(self.tokens), self.pace):
            last = at + self.pace >= len(self.tokens)
            part = self.tokens[at : at + self.pace]
            yield TokenEvent(request_id=self.name, index=0, token_ids=part, finish_reason=self.reason if last else None)

    def close(self) -> None: ...

    def abort(self, request_id: str) -> None: ...


def heard(reading: Reading, text: str, pace: int, reason: str = "stop"):
    """The choice that is made of a text."""
    tokens = [*text.encode(), *([EOS] if reason == "stop" else [])]
    client = SimpleNamespace(submit=lambda requests: Events(requests[0].id, tokens, pace, reason))
    more = {"name": "x", "salt": "", "continues": False, "reading": reading}
    params = SamplingParams(max_tokens=len(tokens))
    generation = Generation(client, FakeText({}), MagicMock(), [Prompt([1])], [params], **more)
    asyncio.run(generation.collect())
    assert generation.usage()["completion_tokens"] == len(tokens)
    return generation.choices[0]


def calls_of(choice) -> list[tuple[str, dict]]:
    assert len({call.id for call in choice.calls}) == len(choice.calls)
    return [(call.name, json.loads(call.arguments)) for call in choice.calls]


@pytest.mark.parametrize("name", sorted(GOLDEN))
def test_answers_as_streams(name):
    for i, (answer, content, calls) in enumerate(GOLDEN[name]):
        choice = heard(Reading(tools=tuple(TOOLS), calls=name), answer, pace=1 + i % 5)
        assert (choice.content, calls_of(choice)) == (content, calls), answer
        assert choice.finish_reason == ("tool_calls" if calls else "stop")


@pytest.mark.parametrize("name", sorted(GOLDEN))
def test_answers_behind_thoughts(name):
    tags = THOUGHTS.get(name, THINK)
    reading = Reading(tags, opened=True, tools=tuple(TOOLS), calls=name)
    said = f"Is 1 < 2? 雪\n{tags.end}"
    for i, (answer, content, calls) in enumerate(GOLDEN[name]):
        choice = heard(reading, said + "\n\n" + answer, pace=1 + i % 5)
        assert (choice.reasoning, choice.content.lstrip(), calls_of(choice)) == (
            "Is 1 < 2? 雪",
            content.lstrip(),
            calls,
        )
        assert choice.reasoning_tokens == len(said.encode())


@pytest.mark.parametrize("name", sorted(GOLDEN))
def test_answers_that_are_cut(name):
    """At a third of each: only whole calls are to be followed, and the reason says if there are any."""
    for answer, _, _ in GOLDEN[name]:
        cut = answer.encode()[: len(answer.encode()) // 3].decode(errors="ignore")
        if cut:
            choice = heard(Reading(tools=tuple(TOOLS), calls=name), cut, pace=3, reason="length")
            assert choice.finish_reason in ("length", "tool_calls")
            if choice.finish_reason == "tool_calls":
                assert calls_of(choice)
