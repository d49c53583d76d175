"""Keys, web pages of other origins, and what only a server with keys does."""

from __future__ import annotations

import asyncio
import base64
import json

import pytest
from fake_engine import FakeEngine
from hypothesis import given
from hypothesis import strategies as st

from offroad.errors import SettingsError
from offroad.serve.security import Keys
from offroad.settings import Settings

KEY, OTHER = "sk-first-secret", "sk-other-secret"
ABC = {"prompt": "abc", "max_tokens": 2}
CHAT = {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 2}


def asked(made, *requests):
    """The answers to (method, path, headers, body)s, one after the other."""

    async def main():
        async with made.http() as http:
            return [await http.request(m, path, headers=headers, json=body) for m, path, headers, body in requests]

    return asyncio.run(main())


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def basic(key: str) -> dict[str, str]:
    return {"Authorization": "Basic " + base64.b64encode(f"me:{key}".encode()).decode()}


def routes(made) -> list[tuple[str, str]]:
    """Every method and path of the app, OpenAPI's and those of included routers too."""
    found = []
    for path, operations in made.app.openapi()["paths"].items():
        found += [(method.upper(), path.replace("{model}", "fake")) for method in operations]
    return [*found, ("GET", "/openapi.json"), ("GET", "/no/such/route"), ("GET", "/health/x"), ("GET", "//health")]


def test_every_route_but_health_needs_a_key(stack):
    made = stack(api_key=(KEY, OTHER))
    every = routes(made)
    assert {("GET", "/"), ("GET", "/metrics"), ("POST", "/v1/messages"), ("GET", "/plan")} <= set(every)
    answers = asked(made, *[(method, path, {}, None) for method, path in every])
    for (method, path), answer in zip(every, answers, strict=True):
        assert answer.status_code == (200 if path == "/health" else 401), (method, path)
        if path != "/health":
            assert KEY not in answer.text


def test_keys_are_taken_where_clients_put_them(stack):
    made = stack(api_key=(KEY, OTHER))
    good = [bearer(KEY), bearer(OTHER), {"x-api-key": OTHER}, basic(KEY), {"authorization": f"bearer  {KEY} "}]
    bad = [{}, bearer(KEY[:-1]), bearer(KEY + "x"), bearer(""), {"x-api-key": "x"}, basic(""), basic("x")]
    bad += [{"Authorization": KEY}, {"Authorization": "Basic !"}, {"Authorization": "Bearer é".encode("latin-1")}]
    answers = asked(made, *[("POST", "/v1/completions", headers, ABC) for headers in good + bad])
    assert [a.status_code for a in answers] == [200] * len(good) + [401] * len(bad)
    error = answers[-1].json()["error"]
    assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
    assert answers[-1].headers["www-authenticate"] == "Bearer"
    [page, messages] = asked(
        stack(api_key=(KEY,)), ("GET", "/", {}, None), ("POST", "/v1/messages", {"x-api-key": "x"}, CHAT)
    )
    assert page.headers["www-authenticate"].startswith("Basic ")
    assert (messages.status_code, messages.json()["type"]) == (401, "error")
    assert messages.json()["error"]["type"] == "authentication_error"


def test_a_browsers_key_is_not_for_other_sites(stack):
    made = stack(api_key=(KEY,))
    from_page = basic(KEY) | {"Sec-Fetch-Site": "same-origin"}
    from_elsewhere = [basic(KEY) | {"Sec-Fetch-Site": site} for site in ("cross-site", "same-site")]
    answers = asked(
        made,
        *[("GET", "/v1/models", headers, None) for headers in [from_page, *from_elsewhere]],
        ("GET", "/", from_elsewhere[0], None),
    )
    assert [a.status_code for a in answers] == [200, 401, 401, 200]  # the page may be linked to


def test_no_route_and_no_repr_tells_a_key(stack):
    made = stack(api_key=(KEY,), served_model_name=("m",))
    gets = [path for method, path in routes(made) if method == "GET"]
    answers = asked(made, *[("GET", path, bearer(KEY), None) for path in gets])
    assert all(KEY not in a.text and KEY not in str(a.headers) for a in answers)
    assert KEY not in repr(made.settings) + repr(made.service.keys)
    # The engine's process is not told either.
    assert (made.engine.settings.api_key, made.engine.settings.api_key_file) == ((), None)


def test_keys_from_a_file(tmp_path):
    path = tmp_path / "keys"
    path.write_text(f"{KEY}\n\n  {OTHER}  \n")
    keys = Keys.of(Settings(model="m", api_key=("third",), api_key_file=str(path)))
    assert [keys.hold(k.encode()) for k in (KEY, OTHER, "third", "", "x")] == [True, True, True, False, False]
    assert not Keys.of(Settings(model="m"))


@pytest.mark.parametrize("content", [None, "", "\n \n", "two words\n", f"{KEY}\nkey\u00e9\n"])
def test_files_without_usable_keys_are_refused(tmp_path, content):
    path = tmp_path / "keys"
    if content is not None:
        path.write_text(content)
    with pytest.raises(SettingsError) as refused:
        Keys.of(Settings(model="m", api_key_file=str(path)))
    assert KEY not in str(refused.value)


def test_a_wrong_type_of_key_is_refused_without_showing_it():
    with pytest.raises(SettingsError) as refused:
        Settings.of(model="m", api_key=[KEY, 5])
    assert KEY not in str(refused.value)
    assert Settings.of(model="m", api_key=KEY).api_key == (KEY,)
    with pytest.raises(SettingsError):
        Keys.of(Settings(model="m", api_key=("",)))


@given(st.lists(st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1), min_size=1), st.binary())
def test_only_keys_hold(keys, other):
    made = Keys(tuple(keys))
    assert all(made.hold(key.encode()) for key in keys)
    assert made.hold(other) == (other in [key.encode() for key in keys])


def test_cors_is_off_unless_asked(stack):
    page = {"Origin": "https://a.example", "Sec-Fetch-Site": "cross-site"}
    preflight = page | {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    requests = [("OPTIONS", "/v1/completions", preflight, None), ("POST", "/v1/completions", page | bearer(KEY), ABC)]
    off = asked(stack(api_key=(KEY,)), *requests)
    assert [a.status_code for a in off] == [401, 403]
    assert all("access-control-allow-origin" not in a.headers for a in off)
    assert off[1].json()["error"]["type"] == "permission_error"

    allowed = stack(api_key=(KEY,), allowed_origins=("https://a.example",))
    foreign = page | {"Origin": "https://b.example"}
    on = asked(
        allowed,
        *requests,
        ("POST", "/v1/completions", page, ABC),
        ("POST", "/v1/completions", foreign | bearer(KEY), ABC),
    )
    assert [a.status_code for a in on] == [200, 200, 401, 403]
    assert [a.headers.get("access-control-allow-origin") for a in on] == ["https://a.example"] * 3 + [None]
    [anyone] = asked(stack(allowed_origins=("*",)), requests[1])
    assert (anyone.status_code, anyone.headers["access-control-allow-origin"]) == (200, "*")


def test_pages_of_other_origins_cannot_make_the_server_work(stack):
    made = stack()
    kinds = [
        ({}, 200),  # no browser
        ({"Sec-Fetch-Site": "same-origin", "Origin": "http://offroad"}, 200),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-site", "Origin": "http://offroad:3000"}, 403),
        ({"Origin": "http://offroad"}, 200),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
    ]
    answers = asked(made, *[("POST", "/v1/completions", headers, ABC) for headers, _ in kinds])
    assert [a.status_code for a in answers] == [status for _, status in kinds]
    assert len(made.engine.seen) == 3


@pytest.mark.parametrize("origin", ["a.example", "https://a.example/path", "https://", ""])
def test_origins_are_checked(origin):
    with pytest.raises(SettingsError, match="allowed-origins"):
        Settings(model="m", allowed_origins=(origin,))


class Resettable(FakeEngine):
    resets = 0

    def reset_prefix_cache(self) -> None:
        self.resets += 1
        assert "!never" not in str([entry[1] for entry in self.running.values()])


def test_admin_needs_a_server_with_keys(stack):
    path = "/admin/reset_prefix_cache"
    open_server = stack(Resettable)
    [refused] = asked(open_server, ("POST", path, bearer(KEY), None))
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "forbidden")
    assert "--api-key" in refused.json()["error"]["message"]
    assert open_server.engine.resets == 0
    made = stack(Resettable, api_key=(KEY,))
    none, done, got = asked(
        made, ("POST", path, {}, None), ("POST", path, bearer(KEY), None), ("GET", path, bearer(KEY), None)
    )
    assert [none.status_code, done.status_code, got.status_code] == [401, 200, 405]
    assert (done.json(), made.engine.resets) == ({"status": "ok"}, 1)


def test_admin_while_there_is_no_engine(stack):
    made = stack(Resettable, api_key=(KEY,))

    async def main():
        async with made.http() as http:
            running = asyncio.create_task(
                http.post("/v1/completions", headers=bearer(KEY), json=ABC | {"max_tokens": 90})
            )
            while not made.client.unfinished:
                await asyncio.sleep(0.005)
            during = await http.post("/admin/reset_prefix_cache", headers=bearer(KEY))
            answer = await running
            await made.client.close()
            return during, answer, await http.post("/admin/reset_prefix_cache", headers=bearer(KEY))

    during, answer, after = asyncio.run(main())
    assert (during.status_code, after.status_code) == (200, 503)
    assert answer.json()["choices"][0]["text"] == "abc" * 30


def test_refusals_are_json(stack):
    [refused] = asked(stack(api_key=(KEY,)), ("POST", "/v1/chat/completions", {}, None))
    assert json.loads(refused.text)["error"]["message"].startswith("this server needs an API key")
