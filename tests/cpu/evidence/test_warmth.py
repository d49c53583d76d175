"""The chat benchmark: what is asked, figures of each turn, the engine and the server as targets."""

import json
from types import SimpleNamespace

import httpx
import pytest

from offroad.errors import OffroadError
from offroad.evidence import perf, warmth
from offroad.schedule.request import TokenEvent

CHAT = warmth.Chat(turns=3, prompt_tokens=10, output_tokens=2)


class FakeEngine:
    """Answers each request at once with 7 and 8; half of its prompt is found, and 4 tokens less are resumed."""

    def __init__(self):
        self.info, self.requests, self.waiting, self.error = SimpleNamespace(vocab=100), [], [], None

    def submit(self, request):
        self.requests.append(request)
        self.waiting.append(request)

    def has_work(self):
        return bool(self.waiting)

    def step(self):
        request = self.waiting.pop()
        half = len(request.prompt_ids) // 2
        common = dict(request_id=request.id, index=0, error=self.error)
        return [
            TokenEvent(**common, token_ids=[7], cached=half - 4, matched=half),
            TokenEvent(**common, token_ids=[8], finish_reason="length"),
        ]


def test_each_prompt_is_the_one_before_with_its_answer_and_new_tokens():
    engine = FakeEngine()
    turns = warmth.sweep(perf.EngineTarget(engine), CHAT, lambda note: None)
    first, one, two, three, *cold = engine.requests
    assert len(one.prompt_ids) == 10
    assert two.prompt_ids[:12] == [*one.prompt_ids, 7, 8]
    assert three.prompt_ids[:24] == [*two.prompt_ids, 7, 8]
    assert [turn["prompt"] for turn in turns] == [10, 22, 34]
    assert [(turn["matched"], turn["resumed"]) for turn in turns] == [(5, 1), (11, 7), (17, 13)]
    assert all(turn["ttft_ms"] > 0 and turn["cold_ttft_ms"] > 0 for turn in turns)
    assert [request.prompt_ids for request in cold] == [r.prompt_ids for r in (one, two, three)]
    # The turns share a salt, what is cold shares one with nobody, and the next chat is another.
    assert one.salt == two.salt == three.salt
    assert len({request.salt for request in (first, one, *cold)}) == 5
    warmth.sweep(perf.EngineTarget(engine), CHAT, lambda note: None)
    assert engine.requests[8].prompt_ids == one.prompt_ids
    assert engine.requests[8].salt != one.salt


def test_a_turn_that_fails_ends_the_benchmark():
    engine = FakeEngine()
    engine.error = "layer 3"
    with pytest.raises(OffroadError, match="layer 3"):
        warmth.ask_engine(perf.EngineTarget(engine), [1], 2, "")


def server(metrics: list[str], ids: list[list[int]]):
    """A server target that answers in the process, and the bodies it was sent."""
    target, bodies = perf.ServerTarget.__new__(perf.ServerTarget), []
    target.url, target.model = "http://test", "tiny"

    def handle(request):
        if request.url.path == "/metrics":
            return httpx.Response(200, text=metrics.pop(0))
        bodies.append(json.loads(request.content))
        usage = {"completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 64}}
        events = [*({"choices": [{"token_ids": some}]} for some in ids), {"choices": [], "usage": usage}]
        return httpx.Response(200, text="".join(f"data: {json.dumps(event)}\n\n" for event in events))

    target.client = httpx.Client(transport=httpx.MockTransport(handle))
    return target, bodies


def test_the_server_as_a_target():
    count = "# HELP\noffroad_prefix_cache_matched_tokens_total {}\noffroad_steps 9\n"
    target, bodies = server([count.format("100.0"), count.format("228.0")], [[], [5], [6]])
    reply = warmth.ask_server(target, [1, 2, 3], 2, "pepper")
    assert (reply.ids, reply.resumed, reply.matched) == ([5, 6], 64, 128)
    assert reply.first > 0
    assert bodies[0]["prompt"] == [1, 2, 3]
    assert bodies[0]["cache_salt"] == "pepper"


def test_a_server_without_the_counter_or_without_ids():
    target, _ = server(["other 1\n"] * 2, [[5, 6]])
    assert warmth.ask_server(target, [1], 2, "").matched is None
    target, _ = server([""] * 2, [])
    with pytest.raises(OffroadError, match="2 token ids"):
        warmth.ask_server(target, [1], 2, "")


def test_a_table():
    points = [dict(prompt=80, matched=None, resumed=0, ttft_ms=5.04, cold_ttft_ms=6.0)]
    points.append(dict(prompt=190, matched=128, resumed=64, ttft_ms=7.0, cold_ttft_ms=21.06))
    record = {"target": {"model": "tiny", "device": None}, "load": vars(CHAT), "points": points}
    lines = warmth.render(record).splitlines()
    assert "a chat of 3 turns with 10 new tokens and answers of 2" in lines[0]
    assert [line.split() for line in lines[2:]] == [
        ["1", "80", "-", "0", "5.0", "6.0"],
        ["2", "190", "128", "64", "7.0", "21.1"],
    ]
