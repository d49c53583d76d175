"""The page on a real server and the demo model, where that has been pulled: what it shows is what the engine did."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("playwright")
from playwright.sync_api import Page, expect  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "cpu" / "e2e"))
from served import served  # noqa: E402

from offroad.errors import OffroadError  # noqa: E402
from offroad.settings import Settings  # noqa: E402
from offroad.weights.locate import open_source  # noqa: E402

MODEL = "smollm2-135m"


@pytest.fixture(scope="module")
def address(browser):
    try:
        open_source(Settings(model=MODEL, offline=True))
    except OffroadError:
        pytest.skip(f"{MODEL} is not here: offroad pull {MODEL}")
    with served(Path(MODEL), "--offline", "--threads", "1", "--max-model-len", "2048") as found:
        yield found


def ask(page: Page, text: str, count: int) -> str:
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")
    expect(page.locator("article.assistant[aria-busy=false]")).to_have_count(count, timeout=60000)
    return page.locator("article.assistant").last.locator("> .facts").inner_text()


def test_chat_and_status_of_a_real_model(browser, address):
    page = browser.new_page()
    page.goto(address)
    page.get_by_role("button", name="Settings").click()
    page.locator("#set-temperature").fill("0")
    page.get_by_role("button", name="Save").click()
    facts = ask(page, "What is the capital of France?", 1)
    said = page.locator("article.assistant .markdown")
    expect(said).to_have_text("The capital of France is Paris.")
    assert re.search(r"^8 tokens · [\d.]+ tokens/s · first after [\d.]+ m?s · prompt 37 run \+ 0 cached$", facts)
    page.get_by_role("button", name="Retry").click()
    expect(page.locator("article.assistant[aria-busy=false]")).to_have_count(1)
    expect(said).to_have_text("The capital of France is Paris.")
    # The question, its answer and the next question: whole blocks of 64 tokens come from the cache.
    long = ask(page, "Tell me " + "more and " * 60 + "more about it in one sentence.", 2)
    again = ask(page, "Thank you.", 3)
    assert "0 cached" in long
    assert int(re.search(r"\+ (\d+) cached", again)[1]) >= 64
    page.get_by_label("Message", exact=True).fill("Write a long story about a lighthouse.")
    page.keyboard.press("Enter")
    expect(page.locator("article.assistant")).to_have_count(4)
    page.get_by_role("tab", name="Status").click()
    row = page.locator("#status tbody tr")
    expect(row).to_have_count(1)
    expect(row.locator("td").first).to_have_text("decode", timeout=20000)
    expect(page.locator("#plan details", has_text="attention.decode").first.locator("code").first).to_have_text(
        "cpu.attention"
    )
    expect(page.get_by_role("img", name="KV blocks: Used")).to_be_visible()
    page.get_by_role("tab", name="Chat").click()
    page.keyboard.press("Escape")
    expect(page.locator("article.assistant").last.locator("> .facts")).to_have_text("stopped")
    page.get_by_role("tab", name="Status").click()
    expect(row).to_have_count(0)
    page.close()
