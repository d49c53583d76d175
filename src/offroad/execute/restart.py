"""An engine that has ended is started again, a few times and ever later: a crash may pass, a defect does not."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from offroad.errors import OffroadError
from offroad.execute.client import EngineClient

log = logging.getLogger("offroad.execute")
RESTARTS, WINDOW_SECONDS = 5, 600.0
FIRST_SECONDS = 1.0


async def keep_running(client: EngineClient, start: Callable[[], Awaitable[None]]) -> None:
    """Calls `start` whenever the engine has ended, until it has been called `RESTARTS` times within the window.

    The first time after a second, then after twice as long each time. Returns when it gives up; cancel it before
    `client.close()`.
    """
    starts: list[float] = []
    while True:
        await client.ended.wait()
        starts = [at for at in starts if time.monotonic() - at < WINDOW_SECONDS]
        if len(starts) >= RESTARTS:
            log.error("the engine has ended %d times and is not started again: %s", len(starts) + 1, client.death)
            return
        delay = FIRST_SECONDS * 2 ** len(starts)
        log.warning(
            "the engine is started again in %g s (%d of %d): %s", delay, len(starts) + 1, RESTARTS, client.death
        )
        await asyncio.sleep(delay)
        starts.append(time.monotonic())
        try:
            await start()
        except OffroadError as error:
            log.error("the engine could not be started again: %s", error)
        else:
            log.warning("the engine is ready again")
