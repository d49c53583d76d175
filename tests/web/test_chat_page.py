"""The chat in a headless Chromium: streaming, thoughts, calls, code, stop, retry, edit, keyboard, errors in words."""

from __future__ import annotations

import json
import re

import pytest

pytest.importorskip("playwright")
from playwright.sync_api import Page, expect  # noqa: E402
from web_engine import TEXTS, answers, bodies, done, send  # noqa: E402

TOOLS = json.dumps(
    [
        {
            "type": "function",
            "function": {
                "name": "search",
                "parameters": {
                    "type": "object",
                    "properties": {"query": {"type": "string"}, "limit": {"type": "integer"}},
                },
            },
        }
    ]
)


def settings(page: Page, **values: str) -> None:
    page.get_by_role("button", name="Settings").click()
    for name, value in values.items():
        field = page.locator(f"#set-{name}")
        field.select_option(value) if name == "thinking" else field.fill(value)
    page.get_by_role("button", name="Save").click()
    expect(page.locator("#settings")).to_be_hidden()


def test_a_chat_streams_and_says_its_figures(page):
    expect(page.locator("#state")).to_have_text("fake")
    sent = bodies(page)
    send(page, "!slow please")
    expect(page.locator("#send")).to_have_text("Stop")
    said = answers(page).locator(".said.markdown")
    expect(said).to_contain_text("word word")
    early = len(said.inner_text())
    page.wait_for_function("n => document.querySelector('.said.markdown').innerText.length > n + 20", arg=early)
    page.keyboard.press("Escape")
    done(page)
    expect(page.locator("#send")).to_have_text("Send")
    expect(answers(page).locator("> .facts")).to_have_text("stopped")
    stopped = said.inner_text()
    assert stopped.startswith("word word")
    send(page, "!hello")
    done(page, 2)
    expect(answers(page).last.locator(".said.markdown")).to_have_text("Hello there, how can I help?")
    facts = answers(page).last.locator("> .facts").inner_text()
    assert re.fullmatch(
        r"29 tokens · [\d.]+ tokens/s · first after [\d.]+ ms · prompt \d+ run \+ 3 cached · "
        r"\d+ of \d+ drafts accepted",
        facts,
    )
    # What was stopped is a turn of the conversation.
    assert [message["role"] for message in sent[1]["messages"]] == ["user", "assistant", "user"]
    assert sent[1]["messages"][1]["content"].strip() == stopped.strip()
    assert page.locator("#live").inner_text() == "Hello there, how can I help?"


def test_stop_by_the_button_ends_the_request(page, served):
    send(page, "!slow")
    expect(answers(page).locator(".said.markdown")).to_contain_text("word")
    page.locator("#send").click()
    done(page)
    page.wait_for_timeout(200)
    assert served.stack.client.unfinished == 0


def test_thoughts_are_folded_and_go_back(page):
    sent = bodies(page)
    send(page, "!think")
    done(page)
    fold = answers(page).locator("details.thoughts")
    assert fold.get_attribute("open") is None
    expect(fold.locator(".said")).to_be_hidden()
    fold.locator("summary").click()
    expect(fold.locator(".said")).to_contain_text("Let me see: 6 * 7.")
    expect(answers(page).locator(".markdown")).to_have_text("It is 42.")
    expect(answers(page).locator(".markdown strong")).to_have_text("42")
    send(page, "!hello")
    done(page, 2)
    assert "That is 42." in sent[1]["messages"][1]["reasoning_content"]


def test_markdown(page):
    send(page, "!md")
    done(page)
    said = answers(page).locator(".markdown")
    assert said.locator("h3").all_inner_texts() == ["Title"]
    assert said.locator("strong").all_inner_texts() == ["bold", "well"]
    assert said.locator("em").all_inner_texts() == ["leaning"]
    assert said.locator("p code").first.inner_text() == "code * here"
    assert said.locator("> ul > li").count() == 3
    assert said.locator("> ul > li > ol > li").all_inner_texts() == ["inner", "more"]
    assert said.locator("> ol > li").all_inner_texts() == ["first", "second"]
    assert said.locator("blockquote").inner_text().strip() == "quoted well"
    assert said.locator("table td").all_inner_texts() == ["1", "x"]
    assert said.locator("pre").inner_text() == 'def f(x):\n    return x < 2 and "**no bold**"'
    assert "a_snake_name, 2 * 3 * 4." in said.inner_text()
    said.get_by_role("button", name="Copy code: python").click()
    expect(page.locator("#live")).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()") == 'def f(x):\n    return x < 2 and "**no bold**"'


def test_a_stream_looks_like_the_whole(page):
    """However a text is cut, the same nodes come of it, and blocks that have settled are left alone."""
    same = page.evaluate(
        """async texts => {
            const { Writer, node, blocks } = await import("/web/markdown.js");
            const bad = [];
            for (const text of texts) for (const step of [1, 2, 3, 7, 50]) {
                const grown = document.createElement("div"), whole = document.createElement("div");
                const writer = new Writer(grown);
                for (let i = step; i < text.length + step; i += step) writer.update(text.slice(0, i));
                whole.append(...blocks(text).map(block => node(block)));
                if (grown.innerHTML !== whole.innerHTML) bad.push([step, grown.innerHTML, whole.innerHTML]);
                if (blocks(text).map(block => block.raw).join("") !== text) bad.push(["raw", text]);
            }
            return bad;
        }""",
        TEXTS,
    )
    assert same == []


def test_what_a_model_says_is_text(page):
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    send(page, "!evil <b>me</b>")
    done(page)
    assert page.evaluate("window.hurt") is None
    assert answers(page).locator("script, img, svg, a, b, [onclick], [onmouseover]").count() == 0
    assert page.locator("article.user b").count() == 0
    expect(answers(page).locator(".markdown")).to_contain_text("<script>window.hurt = 1</script>")
    assert not [url for url in asked if "evil.example" in url]


def test_calls_are_shown_and_answered(page):
    settings(page, tools=TOOLS)
    sent = bodies(page)
    send(page, "!call")
    done(page)
    call = answers(page).locator(".call")
    expect(call.locator(".code-head span")).to_have_text("calls search")
    assert json.loads(call.locator("pre").inner_text()) == {"query": "a < b", "limit": 7}
    page.get_by_label("Result of search").fill("found it")
    page.get_by_role("button", name="Send the result").click()
    done(page, 2)
    expect(answers(page).last.locator(".markdown")).to_have_text("The tool said so.")
    *_, called, result = sent[1]["messages"]
    assert result == {"role": "tool", "tool_call_id": called["tool_calls"][0]["id"], "content": "found it"}
    assert sent[1]["tools"][0]["function"]["name"] == "search"


def test_retry_and_edit(page):
    sent = bodies(page)
    send(page, "!first")
    done(page)
    send(page, "!second")
    done(page, 2)
    answers(page).first.get_by_role("button", name="Retry").click()
    done(page, 1)
    expect(page.locator("article")).to_have_count(2)
    assert sent[2]["messages"] == [{"role": "user", "content": "!first"}]
    page.get_by_role("button", name="Edit").click()
    area = page.get_by_label("Edit the message")
    expect(area).to_be_focused()
    page.keyboard.press("Escape")
    expect(area).to_have_count(0)
    expect(page.locator("article.user .said")).to_have_text("!first")
    page.get_by_role("button", name="Edit").click()
    area.fill("now !second")
    page.keyboard.press("Enter")
    done(page, 1)
    expect(page.locator("article")).to_have_count(2)
    expect(answers(page).locator(".markdown")).to_have_text("Second answer.")
    assert sent[3]["messages"] == [{"role": "user", "content": "now !second"}]


def test_settings_are_sent_checked_and_kept(page):
    sent = bodies(page)
    settings(page, system="Be brief.", temperature="0.5", max_tokens="7", thinking="off")
    page.reload()
    send(page, "!hello")
    done(page)
    body = sent[0]
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    assert (body["temperature"], body["max_tokens"], body["enable_thinking"]) == (0.5, 7, False)
    expect(answers(page).locator("> .facts")).to_contain_text("cut at the limit of tokens")
    for field, value, words in (
        ("temperature", "hot", "Temperature: a number"),
        ("max_tokens", "1.5", "Max tokens: a whole number"),
        ("tools", "{}", "Tools: a JSON list"),
    ):
        page.get_by_role("button", name="Settings").click()
        page.locator(f"#set-{field}").fill(value)
        page.get_by_role("button", name="Save").click()
        expect(page.locator("#settings-error")).to_contain_text(words)
        expect(page.locator(f"#set-{field}")).to_be_focused()
        page.keyboard.press("Escape")


def test_a_new_chat_is_empty(page):
    sent = bodies(page)
    send(page, "!first")
    done(page)
    page.get_by_role("button", name="New chat").click()
    expect(page.locator("article")).to_have_count(0)
    send(page, "!second")
    done(page)
    assert sent[1]["messages"] == [{"role": "user", "content": "!second"}]


def test_the_keyboard_alone(page):
    area = page.get_by_label("Message", exact=True)
    expect(area).to_be_focused()
    page.keyboard.type("two")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("lines !slow")
    assert area.input_value() == "two\nlines !slow"
    page.keyboard.press("Enter")
    expect(page.locator("article.user .said")).to_have_text("two\nlines !slow")
    expect(answers(page).locator(".said.markdown")).to_contain_text("word")
    page.keyboard.press("Escape")
    done(page)
    order: list[str] = []
    for _ in range(12):
        page.keyboard.press("Tab")
        found = "(e => [e.tagName, e.id || e.textContent, getComputedStyle(e).outlineStyle])(document.activeElement)"
        tag, name, outline = page.evaluate(found)
        if tag != "BODY":  # the end, before it begins again
            order.append(name)
            assert outline == "solid", f"the focus is not to be seen on {name}"
    assert {"send", "clear", "tab-chat", "settings-open", "log", "Edit", "Copy", "Retry", "text"} <= set(order)
    assert (
        order.index("send") < order.index("clear") < order.index("tab-chat") < order.index("log") < order.index("Edit")
    )
    page.locator("#tab-chat").focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator("#tab-status")).to_be_focused()
    expect(page.locator("#status")).to_be_visible()
    page.keyboard.press("Home")
    expect(page.locator("#chat")).to_be_visible()
    page.locator("#settings-open").press("Enter")
    expect(page.locator("#set-system")).to_be_focused()
    page.keyboard.press("Escape")
    expect(page.locator("#settings-open")).to_be_focused()


def test_a_long_conversation_stays_responsive(page):
    page.evaluate("""() => {
        window.slowest = 0;
        const note = list => { window.slowest = Math.max(window.slowest, ...list.getEntries().map(e => e.duration)); };
        new PerformanceObserver(note).observe({ type: "longtask" });
    }""")
    for i in range(3):
        send(page, "!long")
        expect(page.locator("article.assistant[aria-busy=false]")).to_have_count(i + 1, timeout=20000)
    assert page.locator(".markdown p").count() == 1200
    assert page.evaluate("window.slowest") < 1000  # milliseconds; a machine of tests is shared


def test_who_reads_above_is_left_there(page):
    def place() -> tuple[int, int]:
        """Pixels from the top of the conversation, and from its end."""
        return page.evaluate(
            "(l => [l.scrollTop, l.scrollHeight - l.scrollTop - l.clientHeight])(document.querySelector('#log'))"
        )

    send(page, "!long")
    done(page)
    assert place()[1] < 100  # the end is in sight
    send(page, "!slow")
    expect(answers(page).last.locator(".said.markdown")).to_contain_text("word word")
    page.locator("#log").hover()
    page.mouse.wheel(0, -3000)
    page.wait_for_timeout(300)
    top, below = place()
    assert below > 1000
    written = answers(page).last.inner_text()
    page.wait_for_function(
        "t => document.querySelectorAll('.assistant')[1].innerText.length > t.length + 40", arg=written
    )
    assert place()[0] == pytest.approx(top, abs=5)
    page.mouse.wheel(0, 100000)
    page.wait_for_timeout(300)
    page.locator("#tab-status").click()
    page.wait_for_timeout(600)
    page.locator("#tab-chat").click()
    page.wait_for_timeout(200)
    assert place()[1] < 100
    page.keyboard.press("Escape")
    done(page, 2)
