"""GET /status and GET /plan through the life of a server; the page's files."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import pytest
from fake_engine import FakeEngine, Info, SlowLoad

from offroad import __version__
from offroad.engine import Engine, make_plan
from offroad.sample.params import SamplingParams
from offroad.schedule.request import Request
from offroad.serve import status as module
from offroad.settings import Settings
from offroad.weights.locate import open_source

ABC = [{"role": "user", "content": "abc"}]
DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "web.md"
MEMORY = {
    "total": 1000,
    "budget": 800,
    "weights": 300,
    "kv": 200,
    "states": 50,
    "graphs": 7,
    "workspace": 20,
    "tables": 3,
    "headroom": 220,
    "history_blocks": 101,
}


class Planned(FakeEngine):
    """With a plan that divides memory."""

    def __init__(self, settings, progress) -> None:
        super().__init__(settings, progress)
        plan = {"memory": MEMORY, "block": 64, "cells": []}
        self.info = Info(model="fake", plan_json=json.dumps(plan))


def run(made, work, start: bool = True):
    async def main():
        async with made.http(start) as http:
            return await work(http)

    return asyncio.run(main())


def paths(value, prefix: str = "") -> set[str]:
    """The dotted names of all fields in a document; those of lists' entries after `[]`."""
    if isinstance(value, list):
        return {path for entry in value for path in paths(entry, prefix + "[]")}
    if not isinstance(value, dict):
        return {prefix}
    return {path for name, inner in value.items() for path in paths(inner, f"{prefix}.{name}" if prefix else name)}


def test_idle(stack):
    async def work(http):
        answer = await http.get("/status")
        return answer, await http.get("/plan")

    answer, plan = run(stack(make=Planned), work)
    body = answer.json()
    assert answer.headers["cache-control"] == "no-store"
    assert (body["state"], body["reason"], body["loading"]) == ("ready", None, None)
    assert (body["version"], body["models"]) == (__version__, ["fake"])
    assert 0 <= body["uptime_seconds"] < 20
    assert body["engine"] == {
        "family": "fake",
        "device": "none",
        "dtype": "float32",
        "max_model_len": 512,
        "max_num_seqs": 16,
        "plan_fingerprint": "f00d",
        "load_seconds": 0.0,
        "restarts": 0,
        "seconds_since_step": None,
    }
    parts = ("total", "budget", "weights", "kv", "states", "graphs", "workspace", "tables", "headroom")
    assert body["memory"] == {f"{part}_bytes": MEMORY[part] for part in parts}
    # Before the first step the engine has told nothing, and the plan knows how many blocks there are.
    assert body["kv_blocks"] == {"total": 100, "used": 0, "cached": 0, "free": 100, "tokens_per_block": 64}
    assert body["requests"] == {
        "unfinished": 0,
        "running_sequences": 0,
        "waiting_sequences": 0,
        "sequences": [],
        "unlisted": 0,
    }
    assert body["rates"]["decode_tokens_per_second"] == 0
    assert (body["rates"]["draft_acceptance"], body["rates"]["prefix_cache_hit_rate"]) == (None, None)
    assert plan.json() == {"memory": MEMORY, "block": 64, "cells": []}


def test_running_requests_by_id_and_never_by_text(stack):
    made = stack(make=Planned)

    async def work(http):
        chat = {"messages": [{"role": "user", "content": "secret words"}], "max_tokens": 400, "n": 2}
        running = asyncio.create_task(http.post("/v1/chat/completions", json=chat))
        while made.client.stats.generated_tokens < 10:
            await asyncio.sleep(0.005)
        told = await http.get("/status")
        done = await running
        return told, done.json(), (await http.get("/status")).json()

    told, done, after = run(made, work)
    body = told.json()
    assert "secret" not in told.text
    first, second = body["requests"]["sequences"]
    assert first["id"] == second["id"]
    assert first["id"].startswith(done["id"])
    assert (first["index"], second["index"]) == (0, 1)
    assert 0 < first["age_seconds"] < 20
    assert {name: first[name] for name in ("state", "prompt_tokens", "cached_tokens")} == {
        "state": "decode",
        "prompt_tokens": 12,
        "cached_tokens": 1,
    }
    assert first["computed_tokens"] == 12 + first["generated_tokens"]
    assert body["requests"]["unfinished"] == 1
    assert body["requests"]["running_sequences"] == 2
    assert body["engine"]["seconds_since_step"] < 5
    assert body["kv_blocks"]["used"] + body["kv_blocks"]["free"] == body["kv_blocks"]["total"] == 100
    assert after["requests"]["sequences"] == []
    assert after["totals"]["generated_tokens"] == 800
    seconds = after["rates"]["window_seconds"]
    assert after["rates"]["decode_tokens_per_second"] == pytest.approx(800 / seconds, rel=0.01)


def test_requests_that_the_engine_has_not_told_of_wait(stack, monkeypatch):
    made = stack(make=Planned)

    async def work(http):
        body = {"prompt": ["abc", "defgh", "i"], "max_tokens": 300}
        running = asyncio.create_task(http.post("/v1/completions", json=body))
        while made.client.unfinished < 3:
            await asyncio.sleep(0)
        made.client.watch.sequences = made.client.watch.sequences[:0]
        told = (await http.get("/status")).json()["requests"]
        monkeypatch.setattr(module, "LISTED_AT_MOST", 2)
        cut = (await http.get("/status")).json()["requests"]
        await running
        return told, cut

    told, cut = run(made, work)
    assert [(s["state"], s["prompt_tokens"], s["generated_tokens"]) for s in told["sequences"]] == [
        ("waiting", 3, 0),
        ("waiting", 5, 0),
        ("waiting", 1, 0),
    ]
    assert (told["unlisted"], len(cut["sequences"]), cut["unlisted"], cut["unfinished"]) == (0, 2, 1, 3)


def test_the_life_of_an_engine(stack):
    made = stack(make=SlowLoad)

    async def work(http):
        seen = [(await http.get("/status")).json()]
        starting = asyncio.create_task(made.service.start())
        while made.client.watch.progress is None:
            await asyncio.sleep(0.01)
        seen.append((await http.get("/status")).json())
        plan = await http.get("/plan")
        await starting
        seen.append((await http.get("/status")).json())
        await http.post("/v1/completions", json={"prompt": "!raise", "max_tokens": 9})
        answer = await http.get("/status")
        seen.append(answer.json())
        return seen, plan, answer.status_code, (await http.get("/plan")).status_code

    (new, loading, ready, failed), plan, code, plan_after = run(made, work, start=False)
    assert [entry["state"] for entry in (new, loading, ready, failed)] == ["loading", "loading", "ready", "failed"]
    assert (new["loading"], ready["loading"]) == (None, None)
    assert loading["loading"] == {"phase": "load", "fraction": 0.5, "note": "half"}
    assert (loading["memory"], loading["engine"]["device"], loading["engine"]["restarts"]) == (None, None, 0)
    assert (plan.status_code, plan_after) == (503, 200)
    assert (code, "a device error" in failed["reason"]) == (200, True)
    assert failed["totals"]["generated_tokens"] == 2
    assert (failed["requests"]["running_sequences"], failed["kv_blocks"]["used"]) == (0, 0)
    # A plan without a division of memory, as a fake engine's, is none to show.
    assert ready["memory"] is None


def test_draining(stack):
    made = stack()

    async def work(http):
        running = asyncio.create_task(http.post("/v1/completions", json={"prompt": "abc", "max_tokens": 200}))
        while not made.client.unfinished:
            await asyncio.sleep(0.005)
        draining = asyncio.create_task(made.client.drain(10))
        await asyncio.sleep(0)
        told = (await http.get("/status")).json()
        await running
        await draining
        return told

    told = run(made, work)
    assert (told["state"], told["requests"]["unfinished"]) == ("draining", 1)


def test_every_field_is_described(stack):
    made = stack(make=Planned)

    async def work(http):
        running = asyncio.create_task(http.post("/v1/completions", json={"prompt": "abc", "max_tokens": 300}))
        while not made.client.stats.running:
            await asyncio.sleep(0.005)
        body = (await http.get("/status")).json()
        await running
        return body | {"loading": {"phase": "load", "fraction": 0.5, "note": ""}}

    described = set(re.findall(r"^\| `([\w.\[\]]+)` \|", DOCUMENT.read_text(), re.M))
    assert paths(run(made, work)) == described


def test_a_look_is_cheap(stack):
    """Two hundred requests are told in milliseconds, without a word to the engine."""
    made = stack(make=Planned, max_num_seqs=300)

    async def work(http):
        body = {"prompt": ["!never"] * 250, "max_tokens": 5}
        running = asyncio.create_task(http.post("/v1/completions", json=body))
        while made.client.stats.running < 250:
            await asyncio.sleep(0.01)
        sent, made.client._send = made.client._send, lambda command: pytest.fail(f"asked the engine: {command}")
        loop = asyncio.get_running_loop()
        took = []
        for _ in range(5):
            began = loop.time()
            told = (await http.get("/status")).json()
            took.append(loop.time() - began)
        made.client._send = sent
        await made.client.drain(0)
        await running
        return told["requests"], min(took)

    requests, took = run(made, work)
    assert (requests["unfinished"], len(requests["sequences"]), requests["unlisted"]) == (250, 200, 50)
    assert took < 0.05


def test_the_page_and_its_files(stack):
    async def work(http):
        page = await http.get("/")
        names = set(re.findall(r'(?:href|src)="([^"]+)"', page.text))
        found = {name: await http.get(f"/{name}") for name in names}
        scripts = [f for name, f in found.items() if name.endswith(".js")]
        while scripts:
            for name in re.findall(r'from "\./([^"]+)"', scripts.pop().text):
                if (path := f"web/{name}") not in found:
                    found[path] = await http.get(f"/{path}")
                    scripts.append(found[path])
        wrong = [await http.get(path) for path in ("/web/none.js", "/web/", "/web/..%2fapp.py", "/web/__init__.py")]
        return page, found, wrong

    page, found, wrong = run(stack(), work)
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    kinds = {name: answer.headers["content-type"].partition(";")[0] for name, answer in found.items()}
    assert {
        kinds[f"web/{name}.js"] for name in ("app", "api", "chat", "turns", "markdown", "settings", "status", "dom")
    } == {"text/javascript"}
    assert (kinds["web/style.css"], kinds["web/icon.svg"]) == ("text/css", "image/svg+xml")
    assert len(found) == len(list(Path(module.__file__).with_name("web").iterdir())) - 1, "all files are used"
    for answer in (page, *found.values()):
        assert answer.status_code == 200
        assert answer.headers["content-security-policy"].startswith("default-src 'self'; ")
        assert "unsafe" not in answer.headers["content-security-policy"]
        assert answer.headers["x-content-type-options"] == "nosniff"
        text = re.sub(r'xmlns="[^"]+"', "", answer.text)
        assert "://" not in text, "nothing comes from elsewhere"
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text)
    assert not re.search(r"<script(?! type=\"module\" src=)|<style|\son\w+=|\sstyle=", page.text)
    assert [answer.status_code for answer in wrong] == [404] * 4


@pytest.fixture(scope="module")
def engine(tiny):
    folder, _ = tiny("llama")
    settings = Settings(
        model=str(folder), device="cpu", max_num_seqs=1, max_num_batched_tokens=16, kv_cache_memory_bytes=2**22
    )
    made = Engine(settings)
    yield made
    made.close()


def test_the_plan_is_that_of_the_command(engine):
    """`/plan` is what the engine says, and that is the document of `offroad plan --json`."""
    document = make_plan(engine.settings, open_source(engine.settings)).to_json()
    assert json.loads(engine.info.plan_json) == json.loads(json.dumps(document))
    memory = document["memory"]
    assert {name: memory[name] >= 0 for name in module._PARTS} == dict.fromkeys(module._PARTS, True)
    parts = ("weights", "kv", "states", "graphs", "workspace", "tables")
    assert sum(memory[part] for part in parts) == memory["used"] == memory["budget"] - memory["headroom"]


def test_how_far_sequences_are(engine):
    """As the engine tells it: a prompt in chunks, then its answer; another waits; a third begins with the same text."""
    prompt = [i % 200 + 3 for i in range(100)]
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    for name in ("a", "b"):
        engine.submit(Request(id=name, prompt_ids=prompt, params=params))
    seen = [engine.sequences()]
    while engine.has_work():
        engine.step()
        seen.append(engine.sequences())
    first, second = seen[1]
    assert [(s.request_id, s.state, s.prompt, s.cached, s.computed, s.generated) for s in seen[0]] == [
        ("a", "waiting", 100, 0, 0, 0),
        ("b", "waiting", 100, 0, 0, 0),
    ]
    assert (first.state, first.computed, first.generated, second.state) == ("prefill", 16, 0, "waiting")
    of_a = [s for step in seen for s in step if s.request_id == "a"]
    assert [s.computed for s in of_a] == [0, 16, 32, 48, 64, 80, 96, 100, 101, 102]
    assert [(s.state, s.generated) for s in of_a[7:]] == [("decode", 1), ("decode", 2), ("decode", 3)]
    # 64 tokens of the prompt are a block that the first request has left in the cache.
    of_b = [s for step in seen for s in step if s.request_id == "b" and s.state != "waiting"]
    assert {(s.cached, s.prompt) for s in of_b} == {(64, 100)}
    assert (of_b[0].state, of_b[0].computed, of_b[-1].computed) == ("prefill", 80, 102)
    stats = engine.stats()
    assert (stats.prompt_tokens, stats.prefill_tokens, stats.prefix_resumed_tokens) == (200, 136, 64)
    assert (stats.kv_blocks_used, stats.kv_blocks_cached) == (0, 1)
