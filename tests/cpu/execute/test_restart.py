"""An engine that ends is started again, with its caches and its vocabulary as new, and not for ever."""

from __future__ import annotations

import asyncio
import logging

import pytest
from fake_engine import FakeEngine

from offroad.errors import EngineDead
from offroad.execute import restart
from offroad.execute.client import EngineClient, NotReady, State
from offroad.execute.launch import in_thread
from offroad.sample.params import SamplingParams
from offroad.schedule.request import Request
from offroad.settings import Settings


def request(id: str, text: str) -> Request:
    return Request(id=id, prompt_ids=list(text.encode()), params=SamplingParams(max_tokens=4), seed=1)


class Made:
    """A client whose engines are counted; from number `bad` on they cannot be loaded."""

    def __init__(self, bad: int = 1000) -> None:
        self.engines: list[FakeEngine] = []

        def make(settings, progress):
            if len(self.engines) >= bad:
                raise OSError("no memory")
            self.engines.append(FakeEngine(settings, progress))
            return self.engines[-1]

        self.client = EngineClient(Settings(model="fake", restart_engine=True), launch=in_thread(make))

    async def start(self) -> None:
        await self.client.start()
        self.client.open()

    async def say(self, text: str) -> bytes:
        return bytes([t async for event in self.client.generate(request(text, text)) for t in event.token_ids])


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr(restart, "FIRST_SECONDS", 0.01)


def test_ends_and_comes_again():
    made = Made()

    async def main() -> None:
        await made.start()
        watch = asyncio.create_task(restart.keep_running(made.client, made.start))
        made.client.teach([b"a"], (0,))
        for count in (1, 2, 3):
            with pytest.raises(EngineDead, match="a device error"):
                await made.say("!raise")
            assert made.client.state is State.DEAD
            with pytest.raises(EngineDead, match="started again"):
                await made.say("abcd")
            while made.client.state is not State.READY:
                await asyncio.sleep(0.005)
            assert await made.say("abcd") == b"abcd"
            assert made.client.death is None
            made.client.teach([b"a"], (0,))  # each engine must be told
            await made.client.call("check")
            assert (len(made.engines), made.client.restarts) == (count + 1, count)
            assert made.engines[-1].taught == ([b"a"], (0,))
        watch.cancel()
        await made.client.close()
        assert made.client.state is State.DEAD

    asyncio.run(main())


def test_gives_up(caplog):
    made = Made(bad=1)

    async def main() -> None:
        await made.start()
        watch = asyncio.create_task(restart.keep_running(made.client, made.start))
        with pytest.raises(EngineDead):
            await made.say("!raise")
        with caplog.at_level(logging.WARNING):
            await asyncio.wait_for(watch, 10)
        with pytest.raises(EngineDead, match="no memory"):
            await made.say("abcd")
        await made.client.close()

    asyncio.run(main())
    told = [r.getMessage() for r in caplog.records if r.name == "offroad.execute"]
    assert sum("could not be started again" in line for line in told) == restart.RESTARTS
    assert "ended 6 times and is not started again" in told[-1]


def test_while_it_is_loaded_again_requests_are_told_why():
    made = Made()

    async def main() -> None:
        await made.start()
        with pytest.raises(EngineDead):
            await made.say("!raise")
        await made.client.start()  # loaded, but not open yet
        with pytest.raises(NotReady, match="a device error"):
            await made.say("abcd")
        made.client.open()
        assert await made.say("abcd") == b"abcd"
        await made.client.close()
        with pytest.raises(EngineDead):
            await made.client.start()

    asyncio.run(main())


def test_a_process_that_cannot_be_started():
    def launch(sock):
        raise OSError("too many processes")

    async def main() -> None:
        client = EngineClient(Settings(model="fake"), launch=launch)
        with pytest.raises(EngineDead, match="too many processes"):
            await client.start()
        assert client.state is State.DEAD
        await client.close()

    asyncio.run(main())
