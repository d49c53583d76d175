"""The app for launchers: made of settings alone, it loads in its lifespan and ends with it."""

from __future__ import annotations

import asyncio

import pytest
from fake_engine import FakeEngine
from fake_text import FakeText
from starlette.testclient import TestClient

from offroad.errors import ModelError, SettingsError
from offroad.execute.client import EngineClient, State
from offroad.execute.launch import in_thread
from offroad.serve import app as apps
from offroad.serve.service import Service
from offroad.settings import Settings


@pytest.fixture
def services(monkeypatch):
    """What `create_app` makes, on fake engines."""
    made: list[Service] = []

    def service(settings: Settings, client: EngineClient) -> Service:
        client = EngineClient(settings, launch=in_thread(FakeEngine))
        made.append(Service(settings, client, lambda files, settings: FakeText({})))
        return made[-1]

    monkeypatch.setattr(apps, "Service", service)
    monkeypatch.setattr(apps, "configure", lambda settings: None)
    return made


def test_lifespan_loads_and_drains(services):
    with TestClient(apps.create_app(Settings(model="fake"))) as http:
        [service] = services
        assert http.get("/health").json() == {"status": "ready"}
        answer = http.post("/v1/completions", json={"prompt": "abc", "max_tokens": 3})
        assert answer.json()["choices"][0]["text"] == "abc"
        with http.stream("POST", "/v1/completions", json={"prompt": "abc", "max_tokens": 3, "stream": True}) as stream:
            assert "[DONE]" in stream.read().decode()
    assert service.client.state is State.DEAD


def test_keys_hold_there_too(services):
    with TestClient(apps.create_app(Settings(model="fake", api_key=("k",)))) as http:
        assert http.get("/v1/models").status_code == 401
        assert http.get("/v1/models", headers={"Authorization": "Bearer k"}).status_code == 200


def test_below_a_path(services):
    app = apps.create_app(Settings(model="fake", api_key=("k",)))
    with TestClient(app, root_path="/llm") as http:
        assert http.get("/llm/health").status_code == 200
        assert http.get("/llm/v1/models").status_code == 401


def test_a_load_that_fails_fails_the_lifespan(services):
    app = apps.create_app(Settings(model="broken"))

    async def main() -> None:
        async with app.router.lifespan_context(app):
            raise AssertionError("it has begun")

    with pytest.raises(ModelError, match="holes"):
        asyncio.run(main())
    assert services[0].client.state is State.DEAD


def test_settings_that_cannot_be_used_are_refused_at_once(services, tmp_path):
    with pytest.raises(SettingsError):
        apps.create_app(Settings(model="fake", api_key_file=str(tmp_path / "none")))


def test_without_a_lifespan_it_says_that_it_is_loading(services):
    http = TestClient(apps.create_app(Settings(model="fake")))
    assert (http.get("/health").status_code, http.get("/v1/models").status_code) == (503, 200)
    assert http.post("/v1/completions", json={"prompt": "x"}).status_code == 503
