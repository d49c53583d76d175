"""What a chat would be to the model, without running it; and routes that are refused by name."""

from __future__ import annotations

import httpx
import openai
import pytest
from fake_engine import FakeEngine
from serve_stack import Stack, Wire


@pytest.fixture(scope="module")
def wired():
    running = Wire(Stack(make=FakeEngine))
    running.stack.service.text.ending = "<assistant>"
    yield running
    running.close()


@pytest.mark.parametrize("path", ["/render", "/v1/chat/completions/render"])
def test_the_prompt_of_a_chat(wired, path):
    body = {
        "messages": [{"role": "system", "content": "Be kind. "}, {"role": "user", "content": "né"}],
        "max_tokens": 3,
    }
    answer = httpx.post(wired.url + path, json=body).json()
    text = "Be kind. né<assistant>"
    assert answer == {
        "prompt": text,
        "prompt_token_ids": list(text.encode()),
        "count": len(text.encode()),
        "max_model_len": 512,
        "marks": [9],
    }
    assert not wired.stack.engine.seen  # nothing ran
    plain = httpx.post(wired.url + path, json=body | {"add_generation_prompt": False}).json()
    assert plain["prompt"] == text.removesuffix("<assistant>")


def test_what_is_rendered_is_checked_as_a_chat_is(wired):
    for body, param in (
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": "x"}], "colour": 1}, "colour"),
    ):
        answer = httpx.post(f"{wired.url}/render", json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert (
        httpx.post(
            f"{wired.url}/render", json={"model": "other", "messages": [{"role": "user", "content": "x"}]}
        ).status_code
        == 404
    )


def test_routes_of_other_models_are_refused_in_openais_shape(wired):
    made = openai.OpenAI(base_url=f"{wired.url}/v1", api_key="none", max_retries=0)
    with made as client, pytest.raises(openai.BadRequestError) as refused:
        client.embeddings.create(model="fake", input="abc")
    error = refused.value.body
    assert (error["code"], error["type"]) == ("unsupported_route", "invalid_request_error")
    assert "embeddings is not supported yet" in error["message"]
    for path in ("/v1/rerank", "/rerank", "/v1/score", "/score", "/classify"):
        assert httpx.post(wired.url + path, json={}).status_code == 400
