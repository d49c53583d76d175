"""What goes wrong, as the page says it: errors of the server, lost connections, keys."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("playwright")
from playwright.sync_api import expect  # noqa: E402
from web_engine import answers, bodies, done, send  # noqa: E402


def test_errors_in_words(page):
    def answer(status: int, message: str, headers: dict | None = None):
        body = json.dumps({"error": {"message": message, "type": "t", "param": None, "code": None}})
        return lambda route: route.fulfill(
            status=status, body=body, headers={"Content-Type": "application/json", **(headers or {})}
        )

    url = "**/v1/chat/completions"
    begun = 'data: {"choices":[{"index":0,"delta":{"content":"Begun"}}]}\n\n'
    failed = begun + 'data: {"error":{"message":"layer 3 is not finite"}}\n\ndata: [DONE]\n\n'
    stream = {"Content-Type": "text/event-stream"}
    cases = [
        (
            answer(503, "the model is still loading", {"Retry-After": "2"}),
            ["cannot answer now", "still loading", "again in 2 s"],
        ),
        (answer(429, "300 requests are unfinished", {"Retry-After": "1"}), ["busy", "300 requests"]),
        (answer(400, "the model does not think"), ["cannot do what was asked", "does not think"]),
        (lambda route: route.fulfill(status=502, body="<html>bad gateway"), ["answered with status 502"]),
        (lambda route: route.abort(), ["cannot be reached"]),
        (lambda route: route.fulfill(body=begun, headers=stream), ["connection was lost in the middle", "kept above"]),
        (lambda route: route.fulfill(body=failed, headers=stream), ["ended with an error", "layer 3 is not finite"]),
    ]
    send(page, "!first")
    done(page)
    for handler, words in cases:
        page.route(url, handler)
        send(page, "!second")
        problem = answers(page).last.get_by_role("alert")
        for text in words:
            expect(problem).to_contain_text(text)
        expect(page.locator("#send")).to_have_text("Send")
        page.unroute(url)
    expect(answers(page).last.locator(".markdown")).to_have_text("Begun")
    sent = bodies(page)
    answers(page).last.get_by_role("alert").get_by_role("button", name="Retry").click()
    expect(answers(page).last.locator(".markdown")).to_have_text("Second answer.")
    # Questions that got no answer are not sent again; one that got a part of it is.
    assert [message["content"] for message in sent[0]["messages"]] == [
        "!first",
        "First answer.",
        "!second",
        "Begun",
        "!second",
    ]


def test_a_lost_server_is_told(browser):
    from serve_stack import Stack, Wire
    from web_engine import PageEngine, PageText

    stack = Stack(make=PageEngine)
    stack.service._make_text = lambda files, settings: PageText()
    running = Wire(stack)
    page = browser.new_page()
    page.goto(running.url)
    send(page, "!slow")
    expect(answers(page).locator(".said.markdown")).to_contain_text("word")
    stack.client.kill()
    running.do(stack.client.drain(0))
    expect(answers(page).get_by_role("alert")).to_contain_text("shutting down")
    running.close()
    page.get_by_role("button", name="Retry").last.click()
    expect(answers(page).get_by_role("alert")).to_contain_text("cannot be reached")
    page.locator("#tab-status").click()
    expect(page.locator("#status .problem")).to_contain_text("cannot be reached")
    page.close()


def test_a_key_is_asked_for_and_kept_in_the_tab(browser):
    from serve_stack import Stack, Wire
    from web_engine import PageEngine, PageText

    stack = Stack(make=PageEngine)
    stack.service._make_text = lambda files, settings: PageText()
    inner = stack.app

    async def guard(scope, receive, send):
        open_path = scope.get("path") == "/" or scope.get("path", "").startswith("/web/")
        given = dict(scope.get("headers", ())).get(b"authorization")
        if scope["type"] != "http" or open_path or given == b"Bearer sesame":
            return await inner(scope, receive, send)
        body = b'{"error": {"message": "this server needs an API key", "type": "t", "param": null, "code": null}}'
        headers = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]
        await send({"type": "http.response.start", "status": 401, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    stack.app = guard
    running = Wire(stack)
    context = browser.new_context()
    page = context.new_page()
    page.goto(running.url)
    expect(page.locator("#state")).to_have_text("The server wants an API key.")
    send(page, "!hello")
    problem = answers(page).get_by_role("alert")
    expect(problem).to_contain_text("The server wants an API key.")
    page.get_by_role("button", name="Enter a key").click()
    expect(page.locator("#set-key")).to_be_focused()
    page.keyboard.type("wrong")
    page.keyboard.press("Enter")
    expect(problem).to_contain_text("does not accept this API key")
    page.get_by_role("button", name="Enter a key").click()
    page.locator("#set-key").fill("sesame")
    page.keyboard.press("Enter")
    expect(answers(page).locator(".markdown")).to_have_text("Hello there, how can I help?")
    expect(page.locator("#state")).to_have_text("fake")
    assert "sesame" not in page.content()
    assert page.evaluate("JSON.stringify(localStorage) + document.cookie") == "{}"
    other = context.new_page()
    other.goto(running.url)
    expect(other.locator("#state")).to_have_text("The server wants an API key.")
    context.close()
    running.close()
