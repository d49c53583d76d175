"""OpenAI's asynchronous client, and requests that meet a value that is not finite."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import httpx
import openai
import pytest
from safetensors.torch import load_file, save_file
from served import served

POISON = 200
IGNORE = {"ignore_eos": True}


@pytest.fixture(scope="module")
def address(tiny, tmp_path_factory):
    """A llama that is as good as any until token POISON comes, and then meets infinity times zero in layer 0.

    Its embedding alone points along dimension 0, so there the norm gives about 8 where it gives some 1 for others;
    gate x up is then 8 x 8 x 9e36, more than fp32 holds, and the down projection's column for it is zero.
    """
    folder = Path(shutil.copytree(tiny("llama")[0], tmp_path_factory.mktemp("poisoned") / "model"))
    tensors = load_file(folder / "model.safetensors")
    embedding, mlp = tensors["model.embed_tokens.weight"], "model.layers.0.mlp."
    embedding[:, 0] = 0.0
    embedding[POISON] = 0.0
    embedding[POISON, 0] = 1000.0
    tensors["lm_head.weight"][POISON] = 0.0
    tensors["model.layers.0.post_attention_layernorm.weight"][0] = 1.0
    for name in ("gate_proj", "up_proj"):
        tensors[f"{mlp}{name}.weight"][0] = 0.0
        tensors[f"{mlp}{name}.weight"][0, 0] = 3e18
    tensors[f"{mlp}down_proj.weight"][:, 0] = 0.0
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with served(folder, "--max-num-seqs", "4") as address:
        yield address


def test_many_at_once_are_the_same_as_one_by_one(address):
    chat = dict(model="tiny", messages=[{"role": "user", "content": "hello"}], max_tokens=24, temperature=0.8)

    async def streamed(client: openai.AsyncOpenAI, seed: int) -> list[str]:
        texts = ["", ""]
        stream = await client.chat.completions.create(**chat, seed=seed, n=2, stream=True, extra_body=IGNORE)
        async for chunk in stream:
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
        return texts

    async def whole(client: openai.AsyncOpenAI, seed: int) -> list[str]:
        answer = await client.chat.completions.create(**chat, seed=seed, n=2, extra_body=IGNORE)
        return [choice.message.content for choice in answer.choices]

    async def drive() -> None:
        async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
            together = await asyncio.gather(*(streamed(client, seed) for seed in range(8)))
            alone = [await whole(client, seed) for seed in range(8)]
            assert together == alone
            assert len({text for texts in alone for text in texts}) > 8, "seeds and choices must differ"

    asyncio.run(drive())


def test_completions_streamed_with_usage_and_logprobs(address):
    client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
    asked = dict(model="tiny", prompt=[5, 6, 7], max_tokens=10, seed=3, temperature=1.0, logprobs=2, extra_body=IGNORE)
    whole = client.completions.create(**asked)
    chunks = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole.choices[0].text
    found = [value for chunk in chunks if chunk.choices for value in chunk.choices[0].logprobs.token_logprobs]
    assert found == pytest.approx(whole.choices[0].logprobs.token_logprobs, abs=1e-4)
    assert (chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens) == (3, 10)


def test_a_value_that_is_not_finite_ends_one_request_and_no_other(address):
    client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
    good = dict(model="tiny", prompt=[5, 6, 7] * 10, max_tokens=8, temperature=0, extra_body=IGNORE)
    first = client.completions.create(**good).choices[0].text
    with pytest.raises(openai.InternalServerError, match="layer 0 gave a value that is not finite"):
        client.completions.create(**good | {"prompt": [5, POISON, 6]})
    # The first token is fine and is POISON itself, so that the stream has begun when the value comes.
    forced = good | {"logit_bias": {str(POISON): 100}}
    pieces = []
    with pytest.raises(openai.APIError, match="not finite"):
        for chunk in client.completions.create(**forced, stream=True):
            pieces.append(chunk)
    assert pieces
    with httpx.stream("POST", f"{address}/v1/completions", json=_plain(forced) | {"stream": True}) as answer:
        events = [line for line in answer.iter_lines() if line.startswith("data: ")]
    assert '"error"' in events[-2]
    assert events[-1] == "data: [DONE]"
    assert client.completions.create(**good).choices[0].text == first
    metrics = httpx.get(f"{address}/metrics").text
    assert 'offroad_request_success_total{finished_reason="error"} 3.0' in metrics
    assert "offroad_num_requests_running 0.0" in metrics
    assert "offroad_kv_cache_usage_ratio 0.0" in metrics


def _plain(asked: dict) -> dict:
    return {name: value for name, value in asked.items() if name != "extra_body"} | IGNORE
