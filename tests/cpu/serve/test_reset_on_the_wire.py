"""The admin's reset of the prefix cache on a real engine: nothing is resumed after it, and no answer changes."""

from __future__ import annotations

import asyncio
import json

from serve_stack import Stack

from offroad.engine import Engine
from offroad.serve.text import model_text
from offroad.settings import Settings

KEY = {"Authorization": "Bearer k"}
PROMPT = {"prompt": [3 + i % 200 for i in range(150)], "max_tokens": 60, "seed": 5, "ignore_eos": True}


def test_reset(tiny):
    engine = Settings.of(model=str(tiny("qwen3_5")[0]), device="cpu", dtype="float32", max_num_seqs=4)
    made = Stack(make=lambda given, progress: Engine(engine, progress), api_key=("k",))
    made.service._make_text = model_text

    async def main():
        async with made.http() as http:

            async def say(**more) -> dict:
                return (await http.post("/v1/completions", json=PROMPT | more, headers=KEY)).json()

            async def reset() -> None:
                assert (await http.post("/admin/reset_prefix_cache", headers=KEY)).status_code == 200

            first, second = await say(), await say()
            await reset()
            third = await say()
            running = asyncio.gather(*[say(seed=seed) for seed in (5, 6, 7)])
            for _ in range(20):
                await reset()
                await asyncio.sleep(0.005)
            during = await running
            await reset()
            await made.client.call("check")
            return first, second, third, during, [await say(seed=seed) for seed in (6, 7)]

    first, second, third, during, alone = asyncio.run(main())
    cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in (first, second, third)]
    assert cached[0] == cached[2] == 0
    assert cached[1] > 100
    assert first["choices"] == second["choices"] == third["choices"] == during[0]["choices"]
    assert json.dumps([answer["choices"] for answer in during[1:]]) == json.dumps([a["choices"] for a in alone])
