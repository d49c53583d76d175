"""The Status tab, and both tabs on a phone, in the dark, and by axe-core's rules of accessibility."""

from __future__ import annotations

import pytest

pytest.importorskip("playwright")
from playwright.sync_api import Page, expect  # noqa: E402

RULES = {"runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]}


def send(page: Page, text: str, wait: bool = True) -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")
    if wait:
        expect(page.locator("article[aria-busy=true]")).to_have_count(0)


def value(page: Page, name: str) -> str:
    return page.locator("#status dl > div", has=page.get_by_text(name, exact=True)).locator("dd").first.inner_text()


def test_the_server_its_memory_and_rates(page):
    send(page, "!hello")
    page.get_by_role("tab", name="Status").click()
    expect(page.get_by_role("heading", name="Memory as planned")).to_be_visible()
    assert (value(page, "State"), value(page, "Model"), value(page, "Device")) == ("ready", "fake", "a card, float32")
    assert value(page, "Engine restarts") == "0"
    memory = page.get_by_role("img", name="Memory: ")
    expect(memory).to_have_attribute(
        "aria-label",
        "Memory: Weights 3.0 GiB, KV cache 5.0 GiB, Recurrent states 512 MiB, Graphs 256 MiB, Workspace 256 MiB, "
        "Tables 1.0 MiB, Left over 3.0 GiB",
    )
    widths = page.locator("#status .bar").nth(1).locator(".piece").evaluate_all("l => l.map(e => e.offsetWidth)")
    assert widths[1] / widths[0] == pytest.approx(5 / 3, rel=0.05)
    assert page.get_by_text("12.0 GiB may be used of the device's 16.0 GiB.").is_visible()
    blocks = page.get_by_role("img", name="KV blocks: ")
    expect(blocks).to_have_attribute("aria-label", "KV blocks: Cached 20 blocks, Free 80 blocks")
    assert float(value(page, "Decode, tokens/s")) > 0
    assert value(page, "Drafts accepted") == "60.0%"


def test_running_requests_are_listed_while_they_run(page):
    send(page, "!slow", wait=False)
    page.get_by_role("tab", name="Status").click()
    row = page.locator("#status tbody tr")
    expect(row).to_have_count(1)
    expect(row.locator("th")).to_contain_text("chatcmpl-")
    expect(row.locator("td").nth(0)).to_have_text("decode")
    assert row.locator("td").nth(2).inner_text() == "5"  # bytes of "!slow"
    before = int(row.locator("td").nth(4).inner_text())
    page.wait_for_function(
        "n => Number(document.querySelector('#status tbody td:nth-child(6)').innerText) > n", arg=before
    )
    page.keyboard.press("Escape")
    expect(row).to_have_count(1)  # Escape stops an answer where it is seen
    page.get_by_role("tab", name="Chat").click()
    page.keyboard.press("Escape")
    page.get_by_role("tab", name="Status").click()
    expect(row).to_have_count(0)
    expect(page.get_by_text("0 running, 0 waiting.")).to_be_visible()


def test_the_plan_unfolds(page):
    page.get_by_role("tab", name="Status").click()
    plan = page.locator("#plan")
    expect(plan.locator("h3")).to_have_text(
        ["Notes", "Outside layers (model)", "Layers 0-2,4-6", "Layers 3,7", "Layers 0-7"]
    )
    cell = plan.locator("details", has_text="attention.prefill")
    expect(cell.locator("summary")).to_have_text("attention.prefill triton.flash 1 refused")
    expect(cell.get_by_text("needs mma_fp8")).to_be_hidden()
    cell.locator("summary").click()
    expect(cell.get_by_text("cuda.mma: needs mma_fp8, the device has mma_f16")).to_be_visible()
    expect(cell.get_by_text("the fastest that the device can run")).to_be_visible()
    page.wait_for_timeout(2200)  # two looks at the server later it is still unfolded
    expect(cell.get_by_text("the fastest that the device can run")).to_be_visible()
    assert plan.get_by_text("triton.linear triton.w4").is_visible()


def test_status_is_asked_for_only_where_it_is_seen(page):
    expect(page.locator("#state")).to_have_text("fake")
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url.rpartition("/")[2]))
    page.wait_for_timeout(2500)
    assert asked == []
    page.get_by_role("tab", name="Status").click()
    page.wait_for_timeout(2500)
    assert 2 <= asked.count("status") <= 4
    assert asked.count("plan") == 1
    page.evaluate("Object.defineProperty(document, 'hidden', { get: () => true })")
    page.wait_for_timeout(1200)
    asked.clear()
    page.wait_for_timeout(2200)
    assert asked == []


def test_a_loading_server_says_so(page):
    loading = {"phase": "load", "fraction": 0.43, "note": "12 of 30"}
    reply = page.request.get(page.url + "status").json()
    none = {"device": None, "plan_fingerprint": None}
    told = reply | {"state": "loading", "loading": loading, "memory": None, "engine": reply["engine"] | none}
    page.route("**/status", lambda route: route.fulfill(json=told))
    page.reload()
    expect(page.locator("#state")).to_have_text("fake: loading, load 43%")
    page.get_by_role("tab", name="Status").click()
    expect(page.get_by_text("There is a plan once the engine is loaded.")).to_be_visible()
    assert value(page, "State") == "loading (load, 43%)"
    page.unroute("**/status")
    expect(page.locator("#state")).to_have_text("fake")
    failed = reply | {"state": "failed", "reason": "the engine's process has ended; found: SIGKILL"}
    page.route("**/status", lambda route: route.fulfill(json=failed))
    expect(page.locator("#state")).to_have_text("fake: the engine has ended")
    expect(page.locator("#status").get_by_text("SIGKILL")).to_be_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1000])
def test_both_tabs_fit_and_are_accessible(page, scheme, width):
    axe = pytest.importorskip(
        "axe_playwright_python.sync_playwright", reason="no axe: pip install axe-playwright-python"
    )
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size({"width": width, "height": 740})
    send(page, "a question that is not so short, !md")
    send(page, "!think")
    page.locator("details.thoughts summary").last.click()
    page.route("**/v1/chat/completions", lambda route: route.abort())
    send(page, "!second")
    page.unroute("**/v1/chat/completions")

    def check() -> None:
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        wide = """width => [...document.querySelectorAll("main *, header *")]
            .filter(e => e.offsetParent && !e.closest(".wide, pre, .unseen"))
            .filter(e => e.getBoundingClientRect().right > width + 1)
            .map(e => e.outerHTML.slice(0, 80))"""
        assert page.evaluate(wide, width) == []
        found = axe.Axe().run(page, options=RULES).response["violations"]
        assert [(v["id"], [n["html"][:120] for n in v["nodes"]]) for v in found] == []

    check()
    code = page.locator(".markdown pre").first
    code.locator("code").evaluate("e => e.append(' long'.repeat(100))")
    room = "e => { e.scrollLeft = 50; return [e.scrollLeft, e.scrollWidth > e.clientWidth]; }"
    assert code.evaluate(room) == [50, True], "a long line of code is reached by scrolling it"
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 24, 27)"
    assert dark == (scheme == "dark")
    page.get_by_role("button", name="Settings").click()
    check()
    page.keyboard.press("Escape")
    send(page, "!slow", wait=False)
    page.get_by_role("tab", name="Status").click()
    expect(page.locator("#status tbody tr")).to_have_count(1)
    page.locator("#plan details", has_text="attention.prefill").locator("summary").click()
    check()
