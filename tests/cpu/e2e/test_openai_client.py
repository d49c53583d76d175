"""OpenAI's own client against a real server with a real engine."""

from __future__ import annotations

import openai
import pytest
from served import served

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is the time?"}]


@pytest.fixture(scope="module")
def client(tiny):
    folder, _ = tiny("qwen3")
    with served(folder, "--max-num-seqs", "4") as address:
        yield openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)


def test_chat_streamed_and_not_are_the_same(client):
    asked = dict(
        model="tiny", messages=MESSAGES, temperature=0.7, seed=5, max_tokens=20, extra_body={"ignore_eos": True}
    )
    whole = client.chat.completions.create(**asked)
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 20
    assert whole.choices[0].finish_reason == "length"
    assert [model.id for model in client.models.list()] == ["tiny"]


def test_completions_with_choices_stop_and_logprobs(client):
    asked = dict(model="tiny", prompt=[5, 6, 7] * 30, max_tokens=12, temperature=0, extra_body={"ignore_eos": True})
    first = client.completions.create(**asked, n=2, logprobs=3)
    assert first.choices[0].text == first.choices[1].text
    assert len(first.choices[0].logprobs.tokens) == 12
    again = client.completions.create(**asked)
    assert again.choices[0].text == first.choices[0].text
    assert again.usage.prompt_tokens_details.cached_tokens == 64
    stop = first.choices[0].text[4:6]
    cut = client.completions.create(**asked, stop=stop)
    assert (cut.choices[0].finish_reason, stop in cut.choices[0].text) == ("stop", False)
    assert first.choices[0].text.startswith(cut.choices[0].text)


def test_errors_are_openais(client):
    with pytest.raises(openai.BadRequestError, match="context"):
        client.completions.create(model="tiny", prompt=[5] * 600)
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="a")
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(model="tiny", messages=MESSAGES, extra_body={"colour": "red"})
    assert error.value.param == "colour"
