"""Requests that come, go and break off at random: nothing leaks, nothing is lost, nobody gets another's tokens."""

from __future__ import annotations

import asyncio
import random

import httpx
import pytest
from served import served

from offroad import LLM, SamplingParams
from offroad.schedule.request import Request

WINDOWED = "gemma3"


def params_of(rng: random.Random) -> dict:
    sampled = rng.random() < 0.5
    values = dict(temperature=0.9, top_p=0.9) if sampled else dict(temperature=0.0)
    return values | dict(
        seed=rng.randrange(1000), max_tokens=rng.choice([3, 30, 120]), ignore_eos=True, n=rng.choice([1, 1, 1, 2])
    )


def prompt_of(rng: random.Random, shared: list[int]) -> list[int]:
    own = [rng.randrange(3, 290) for _ in range(rng.randrange(1, 120))]
    return shared[: rng.choice([0, 64, 150])] + own


@pytest.fixture(scope="module")
def shared() -> list[int]:
    rng = random.Random(7)
    return [rng.randrange(3, 290) for _ in range(150)]


def test_200_requests_in_process_leave_nothing(tiny, shared):
    folder, _ = tiny(WINDOWED)
    llm = LLM(
        str(folder),
        device="cpu",
        max_num_seqs=6,
        max_num_batched_tokens=64,
        kv_cache_memory_bytes=5_250_000,
        max_model_len=400,
    )
    engine, rng = llm.engine, random.Random(1)
    open_requests: dict[str, Request] = {}
    ended: dict[str, set[int]] = {}
    tokens: dict[str, dict[int, list[int]]] = {}
    aborted: set[str] = set()
    requests: list[Request] = []
    while len(requests) < 200 or engine.has_work():
        if len(requests) < 200 and rng.random() < 0.8:
            params = SamplingParams(**params_of(rng))
            request = Request(
                id=f"r{len(requests)}", prompt_ids=prompt_of(rng, shared), params=params, seed=params.seed
            )
            requests.append(request)
            engine.submit(request)
            open_requests[request.id] = request
        if open_requests and rng.random() < 0.03:
            victim = rng.choice(sorted(open_requests))
            engine.abort(victim)
            aborted.add(victim)
        for event in engine.step():
            tokens.setdefault(event.request_id, {}).setdefault(event.index, []).extend(event.token_ids)
            if event.finish_reason:
                done = ended.setdefault(event.request_id, set())
                assert event.index not in done, "ended twice"
                assert event.finish_reason == ("abort" if event.request_id in aborted else "length")
                done.add(event.index)
                if len(done) == open_requests[event.request_id].params.n:
                    del open_requests[event.request_id]
        if rng.random() < 0.1:
            engine.check()
    engine.check()
    assert not open_requests
    assert {request.id: set(range(request.params.n)) for request in requests} == ended
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.kv_blocks_used) == (0, 0, 0)
    assert stats.preemptions > 0
    assert stats.prefix_resumed_tokens > 0
    complete = [request for request in requests if request.id not in aborted]
    assert len(complete) > 100
    alone = LLM(str(folder), device="cpu", max_num_seqs=2, enable_prefix_caching=False)
    for request in rng.sample(complete, 40):
        [result] = alone.generate({"prompt_token_ids": request.prompt_ids}, request.params)
        assert [out.token_ids for out in result.outputs] == [tokens[request.id][i] for i in range(request.params.n)]


def test_200_requests_over_http_with_disconnects(tiny, shared):
    folder, _ = tiny(WINDOWED)
    rng = random.Random(2)
    bodies = [
        {"model": "tiny", "prompt": prompt_of(rng, shared), "return_token_ids": True} | params_of(rng)
        for _ in range(200)
    ]
    delays = [rng.random() * 8 for _ in bodies]
    cut = [rng.random() * 0.5 if rng.random() < 0.25 else None for _ in bodies]

    async def ask(client: httpx.AsyncClient, body: dict, delay: float, patience: float | None) -> dict | None:
        await asyncio.sleep(delay)
        try:
            answer = await asyncio.wait_for(client.post("/v1/completions", json=body), patience)
        except TimeoutError:
            return None  # the connection is closed: the server sees a disconnect
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def drive(address: str) -> tuple[list[dict | None], str]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=address, timeout=120, limits=limits) as client:
            health = asyncio.create_task(slowest_health(client))
            answers = await asyncio.gather(*map(ask, [client] * len(bodies), bodies, delays, cut))
            health.cancel()
            for _ in range(100):
                metrics = (await client.get("/metrics")).text
                if "offroad_num_requests_running 0.0" in metrics and "offroad_num_requests_waiting 0.0" in metrics:
                    break
                await asyncio.sleep(0.1)
            again = [await ask(client, body, 0, None) for body in [bodies[i] for i in sample(answers)]]
            assert [tokens(a) for a in again] == [tokens(answers[i]) for i in sample(answers)]
            return answers, metrics

    async def slowest_health(client: httpx.AsyncClient) -> None:
        while True:
            assert (await client.get("/health")).status_code == 200
            await asyncio.sleep(0.2)

    def sample(answers: list[dict | None]) -> list[int]:
        return [i for i, answer in enumerate(answers) if answer is not None][:30]

    def tokens(answer: dict) -> list[list[int]]:
        return [choice["token_ids"] for choice in answer["choices"]]

    flags = ["--max-num-seqs", "6", "--max-num-batched-tokens", "64", "--kv-cache-memory-bytes", "5250000"]
    with served(folder, *flags, "--max-model-len", "400") as address:
        answers, metrics = asyncio.run(drive(address))
    for body, answer, patience in zip(bodies, answers, cut, strict=True):
        assert answer is not None or patience is not None, "a request was lost"
        if answer is not None:
            assert [choice["finish_reason"] for choice in answer["choices"]] == ["length"] * body["n"]
            assert answer["usage"]["completion_tokens"] == body["max_tokens"] * body["n"]
    assert "offroad_num_requests_running 0.0" in metrics
    assert "offroad_num_requests_waiting 0.0" in metrics
    assert "offroad_kv_cache_usage_ratio 0.0" in metrics
