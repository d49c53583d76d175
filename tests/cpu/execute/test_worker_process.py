"""The engine in its own process: messages, refusals, death of either side."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from fake_engine import FakeEngine

from offroad.errors import EngineDead, ModelError, QueueFull, RequestError
from offroad.execute.client import EngineClient, NotReady, State
from offroad.execute.launch import in_thread
from offroad.execute.messages import Failure
from offroad.sample.params import SamplingParams
from offroad.schedule.request import Request
from offroad.settings import Settings

SRC = Path(__file__).resolve().parents[3] / "src"


def settings(**more) -> Settings:
    return Settings(model="fake", **more)


def request(id: str, text: str = "abc", **params) -> Request:
    return Request(id=id, prompt_ids=list(text.encode()), params=SamplingParams(**params), seed=2**63 - 1)


async def ready(client: EngineClient) -> EngineClient:
    await client.start()
    client.open()
    return client


def in_a_process(**more) -> EngineClient:
    return EngineClient(settings(**more), factory="fake_engine:FakeEngine")


async def tokens(client: EngineClient, req: Request) -> list[int]:
    return [t async for event in client.generate(req) for t in event.token_ids]


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def gone(pid: int, seconds: float = 5.0) -> bool:
    end = time.monotonic() + seconds
    while alive(pid) and time.monotonic() < end:
        time.sleep(0.02)
    return not alive(pid)


def test_process_serves_refuses_checks_and_closes():
    async def main() -> None:
        client, seen = in_a_process(), []
        with pytest.raises(NotReady):
            client.submit([request("early")])
        await client.start(lambda *report: seen.append(report))
        client.open()
        assert seen == [("load", 0.5, "half")]
        assert client.info.max_model_len == 512
        assert client.tokenizer.eos_ids == (256,)
        both = await asyncio.gather(
            tokens(client, request("a", max_tokens=5)), tokens(client, request("b", "xy", max_tokens=3))
        )
        assert both == [list(b"abcab"), list(b"xyx")]
        assert client.stats.generated_tokens == 8
        with pytest.raises(QueueFull):
            await tokens(client, request("c", "!full"))
        with pytest.raises(RequestError) as refused:
            await tokens(client, request("d", "!refuse"))
        assert (refused.value.param, refused.value.found, refused.value.accepted) == (
            "prompt",
            "!refuse",
            "other words",
        )
        await client.call("check")
        running = client.submit([request("e", "!never", max_tokens=5)])
        with pytest.raises(EngineDead, match="held"):
            await client.call("check")
        running.close()
        await client.call("check")
        assert client.unfinished == 0
        pid = client.worker_pid
        await client.close()
        assert not alive(pid)
        with pytest.raises(EngineDead):
            client.submit([request("late")])

    asyncio.run(main())


@pytest.mark.parametrize(
    ("model", "kind", "text"), [("broken", ModelError, "holes"), ("bug", EngineDead, "TypeError: no such thing")]
)
def test_load_failure_arrives_with_its_fields(model, kind, text):
    async def main() -> None:
        client = EngineClient(Settings(model=model), factory="fake_engine:FakeEngine")
        with pytest.raises(kind, match=text) as failed:
            await client.start()
        if kind is ModelError:
            error = failed.value
            assert (error.what, error.found, error.accepted, error.next) == ("weights", "holes", "none", "pull again")
        assert client.state is State.DEAD
        assert gone(client.worker_pid)
        await client.close()

    asyncio.run(main())


@pytest.mark.parametrize(("word", "reason"), [("!die", "SIGKILL"), ("!raise", "a device error")])
def test_death_of_the_engine_fails_every_request(word, reason):
    async def main() -> None:
        client = await ready(in_a_process())
        other = asyncio.create_task(tokens(client, request("other", "abc", max_tokens=400)))
        await asyncio.sleep(0.05)
        got = []
        with pytest.raises(EngineDead, match=reason):
            async for event in client.generate(request("a", word, max_tokens=50)):
                got += event.token_ids
        with pytest.raises(EngineDead, match=reason):
            await other
        assert bytes(got).decode() in word[:2]
        assert client.state is State.DEAD
        with pytest.raises(EngineDead):
            await client.call("check")
        await client.close()

    asyncio.run(main())


def test_worker_ignores_signals_and_ends_with_its_parent():
    program = textwrap.dedent("""
        import asyncio
        from offroad.execute.client import EngineClient
        from offroad.settings import Settings

        async def main():
            client = EngineClient(Settings(model="fake"), factory="fake_engine:FakeEngine")
            await client.start()
            print(client.worker_pid, flush=True)
            await asyncio.sleep(60)

        asyncio.run(main())
    """)
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(SRC), str(Path(__file__).parent)])}
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, env=env)
    worker = int(parent.stdout.readline())
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(worker, number)
    time.sleep(0.2)
    assert alive(worker)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert gone(worker)


def test_parent_death_ends_a_worker_that_still_loads():
    async def main() -> int:
        client = EngineClient(settings(), factory="fake_engine:VerySlowLoad")
        starting = asyncio.create_task(client.start())
        while client.worker_pid is None:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.5)
        client._writer.close()  # what the death of this process would do
        with pytest.raises(EngineDead):
            await starting
        return client.worker_pid

    assert gone(asyncio.run(main()))


def test_capacity_is_known_at_once_and_comes_back():
    async def main() -> None:
        client = await ready(EngineClient(settings(max_num_seqs=2, max_waiting=1), launch=in_thread(FakeEngine)))
        held = [client.submit([request(f"r{i}", "!never")]) for i in range(2)]
        with pytest.raises(QueueFull):
            client.submit([request("x"), request("y")])
        assert client.unfinished == 2
        held.append(client.submit([request("r2", "!never")]))
        with pytest.raises(QueueFull):
            client.submit([request("z")])
        held[0].close()
        assert await tokens(client, request("z", max_tokens=2)) == list(b"ab")
        for subscription in held:
            subscription.close()
        await client.call("check")
        await client.close()

    asyncio.run(main())


def test_what_cannot_be_sent_is_not_counted():
    async def main():
        client = await ready(EngineClient(settings(max_num_seqs=1, max_waiting=1), launch=in_thread(FakeEngine)))
        sound = request("a", max_tokens=3)
        for _ in range(3):
            with pytest.raises(OverflowError):
                client.submit([sound, Request(id="b", prompt_ids=[2**64], params=sound.params)])
            assert client.unfinished == 0
        assert await tokens(client, sound) == list(b"abc")
        await client.close()

    asyncio.run(main())


def test_drain_waits_then_ends_what_is_left():
    async def main() -> None:
        client = await ready(EngineClient(settings(), launch=in_thread(FakeEngine)))
        short = asyncio.create_task(tokens(client, request("short", max_tokens=20)))
        await asyncio.sleep(0.01)
        assert await client.drain(5.0)
        assert await client.drain(0.0)
        assert len(await short) == 20
        with pytest.raises(NotReady, match="shutting down"):
            client.submit([request("late")])
        await client.close()

        client = await ready(EngineClient(settings(), launch=in_thread(FakeEngine)))
        never = asyncio.create_task(tokens(client, request("never", "!never")))
        await asyncio.sleep(0.01)
        assert not await client.drain(0.05)
        with pytest.raises(NotReady, match=r"0\.05 s"):
            await never
        await client.call("check")
        await client.close()

    asyncio.run(main())


def test_a_blocked_server_does_not_stall_steps():
    engines = []

    def make(settings, progress):
        engines.append(FakeEngine(settings, progress))
        return engines[0]

    async def main() -> None:
        client = await ready(EngineClient(settings(), launch=in_thread(make)))
        subscription = client.submit([request("a", "x" * 300, n=100, max_tokens=120, logprobs=20)])
        await anext(subscription)
        end = time.monotonic() + 10  # the event loop stands still; more than a socket buffer of events comes
        while engines[0].generated < 100 * 120 and time.monotonic() < end:
            time.sleep(0.02)
        assert engines[0].generated == 100 * 120
        assert sum([len(event.token_ids) async for event in subscription]) == 100 * 120 - 1
        await client.close()

    asyncio.run(main())


def test_failure_keeps_the_kind_of_error():
    error = RequestError("n", param="n", code="c", found=3, accepted="1", next="less")
    again = Failure.of(error, "testing").error()
    assert type(again) is RequestError
    assert (again.what, again.param, again.code, again.found, again.accepted, again.next) == (
        "n",
        "n",
        "c",
        "3",
        "1",
        "less",
    )
    assert str(again) == str(error)


def test_server_side_needs_no_torch():
    code = "import sys, offroad.serve.server; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(SRC)}).returncode == 0
