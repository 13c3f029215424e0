"""The built-in page in a real browser, where one is installed."""

import re
import shutil
from contextlib import contextmanager

import pytest
from playwright.sync_api import expect, sync_playwright
from stand_in import StandIn, chat_model, chat_tokenizer, failing, generated, plain_model, saying, serving, wait_until

from mlx_dspark.server.security import Guard

BROWSER = next(filter(None, map(shutil.which, ("chromium-headless-shell", "chromium", "chromium-browser",
                                               "google-chrome", "chrome"))), None)
expect.set_options(timeout=20_000)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed: apt-get install chromium")
WORDS = ["", "let us", " count to", " <b>ten</b>"]


def talker():
    return chat_model(tokenizer=chat_tokenizer(thinking=False))


@pytest.fixture(scope="module")
def browser():
    with sync_playwright() as tools:
        running = tools.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield running
        running.close()


@contextmanager
def page_of(browser, engine, model, guard=None):
    """The page of a server; whatever it logs or breaks fails the test."""
    with serving(engine, model, guard, drain=0) as address:
        page = browser.new_page()
        problems = []
        page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda request: problems.append(request.url) if not request.url.startswith(
            (address, "data:")) else None)
        page.set_default_timeout(20_000)
        page.goto(address)
        page.problems = problems
        yield page
        page.close()


def ask(page, text="hello"):
    page.fill("#text", text)
    page.click("#send")


def test_a_conversation_and_its_rounds(browser):
    engine = StandIn(saying(*WORDS))
    with page_of(browser, engine, talker()) as page:
        expect(page.locator("#model")).to_have_text("small")
        ask(page)
        page.wait_for_selector("article.answer[data-done]")
        answer = page.locator("article.answer").last
        assert answer.inner_text() == "let us count to <b>ten</b>"  # the model's text is no HTML
        assert answer.locator("b").count() == 0
        assert answer.locator(".draft").count() > 0 and answer.locator(".own").count() == 3
        expect(page.locator("#rounds")).to_have_text("3")
        assert float(page.inner_text("#tau")) > 1
        assert page.locator("#bars .kept").count() == 3
        ask(page, "again")
        expect(page.locator("article.answer[data-done]")).to_have_count(2)
        said = talker().tokenizer.decode(engine.seen[1].prompt)
        assert said == "<user>hello<assistant>let us count to <b>ten</b><user>again<assistant>"
        expect(page.locator("#server-tau")).to_have_text("2.50")
        assert page.problems == []


def test_rejected_drafts_are_shown_on_demand(browser):
    with page_of(browser, StandIn(generated), plain_model()) as page:
        page.fill("#max-tokens", "24")
        ask(page, "import os\n")
        page.wait_for_selector("article.answer[data-done]")
        rejected = page.locator("article.answer del.rejected")
        assert rejected.count() > 0 and not rejected.first.is_visible()
        hidden = page.locator("article.answer").inner_text()
        page.check("#show-rejected")
        assert rejected.first.is_visible() and len(page.locator("article.answer").inner_text()) > len(hidden)
        assert re.fullmatch(r"\d+ of \d+", page.inner_text("#accepted")) and page.inner_text("#reason")
        assert page.problems == []


def test_stop_leaves_the_engine_free(browser):
    engine = StandIn(saying(*["more "] * 2000, pause=0.03))
    with page_of(browser, engine, talker()) as page:
        ask(page)
        page.wait_for_selector("article.answer .round")
        page.click("#stop")
        expect(page.locator("#note")).to_contain_text("stopped")
        expect(page.locator("#send")).to_be_enabled()
        assert wait_until(lambda: engine.finished == {"cancelled": 1}) and page.problems == []


def test_a_failure_is_shown(browser):
    with page_of(browser, StandIn(failing), talker()) as page:
        ask(page)
        page.wait_for_selector("article.failed")
        assert page.inner_text("article.failed") == "the engine failed: out of memory"


def test_the_key_is_asked_for(browser):
    with page_of(browser, StandIn(saying("hi")), talker(), Guard(key="secret")) as page:
        page.wait_for_selector("#key-row:not([hidden])")
        assert "API key" in page.inner_text("#note")
        page.fill("#key", "secret")
        page.press("#key", "Tab")
        expect(page.locator("#model")).to_have_text("small")
        ask(page)
        page.wait_for_selector("article.answer[data-done]")
        assert page.locator("article.answer").inner_text() == "hi"
