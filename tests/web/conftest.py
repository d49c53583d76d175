"""A headless Chromium and a server on a scripted engine. Without Playwright or Chromium everything here is skipped."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

CPU = Path(__file__).resolve().parents[1] / "cpu"
sys.path[:0] = [str(CPU / "serve"), str(CPU / "execute")]


@pytest.fixture(scope="module")
def browser():
    """Ended with its module: while it is there an event loop runs in this thread, and other tests run their own."""
    api = pytest.importorskip("playwright.sync_api", reason="no playwright: pip install playwright")
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("no chromium: apt-get install chromium")
    with api.sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        yield made
        made.close()


@pytest.fixture(scope="module")
def served(browser):
    """A server whose engine says what the last `!word` of a prompt names; see `web_engine.SAYS`."""
    from serve_stack import Stack, Wire
    from web_engine import PageEngine, PageText

    stack = Stack(make=PageEngine)
    stack.service._make_text = lambda files, settings: PageText()
    running = Wire(stack)
    yield running
    running.close()


@pytest.fixture
def page(browser, served):
    """A page of the server at the size of a small laptop; errors of scripts fail the test."""
    context = browser.new_context(
        viewport={"width": 1000, "height": 760}, permissions=["clipboard-read", "clipboard-write"]
    )
    made = context.new_page()
    made.set_default_timeout(8000)
    broken: list[str] = []
    made.on("pageerror", lambda error: broken.append(str(error)))
    made.on(
        "console", lambda message: broken.append(message.text) if "Content Security Policy" in message.text else None
    )
    made.goto(served.url)
    yield made
    context.close()
    assert not broken
