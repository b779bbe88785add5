"""The page in Chromium: it types, streams, stops, edits and reloads, and shows a model's words as text."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serving_runs import Running, wait_until

CHROMIUM = Path("/usr/bin/chromium")
SEEN = importlib.util.find_spec("playwright") is not None and CHROMIUM.is_file()
pytestmark = [pytest.mark.programs,
              pytest.mark.skipif(not SEEN, reason="needs Debian's /usr/bin/chromium and the package playwright")]


@pytest.fixture
def page(server: Running) -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox"])
        shown = browser.new_page()
        errors: list[str] = []
        shown.on("pageerror", lambda error: errors.append(str(error)))
        shown.on("request", lambda request: errors.extend([] if request.url.startswith(server.url) else [request.url]))
        shown.goto(server.url)
        yield shown
        assert errors == []
        browser.close()


def test_a_conversation(page: Any, server: Running, tmp_path: Path) -> None:
    page.get_by_label("Message").fill("<b>hello</b>")
    page.get_by_label("Message").press("Enter")
    answer = page.locator("article.assistant p")
    wait_until(lambda: server.running_texts() == 0 and page.locator("#stop-button").is_disabled())
    assert page.locator("article.user p").text_content() == "<b>hello</b>"
    assert page.locator("article b").count() == 0
    page.reload()
    assert page.locator("article").count() == 2
    page.get_by_role("button", name="Retry").click()
    wait_until(lambda: page.locator("#stop-button").is_disabled())
    assert answer.count() == 1
    page.get_by_role("button", name="Edit").click()
    assert page.get_by_label("Message").input_value() == "<b>hello</b>"
    assert page.locator("article").count() == 0
    page.screenshot(path=str(tmp_path / "page.png"))


STOP = """() => {
    const button = document.getElementById('stop-button'), enabled = !button.disabled;
    button.click();
    return enabled;
}"""


def _stopped(page: Any, server: Running) -> bool:
    """Whether Stop was pressed while a text was written, which may end by itself at any time."""
    before = server.metric("timemix_generated_tokens_total")
    page.get_by_role("button", name="Continue").click()
    pressed = False

    def pressed_or_ended() -> bool:
        nonlocal pressed
        pressed = page.evaluate(STOP)
        return pressed or (server.metric("timemix_generated_tokens_total") > before and server.running_texts() == 0)

    wait_until(pressed_or_ended)
    return pressed


def test_stop_ends_a_text(page: Any, server: Running) -> None:
    page.get_by_role("tab", name="Completion").click()
    page.get_by_text("Settings").click()
    page.get_by_label("Most tokens").fill("50000")
    page.get_by_label("Text to continue").fill("once")
    stopped = any(_stopped(page, server) for _ in range(10))
    assert stopped
    wait_until(lambda: server.running_texts() == 0)
    assert page.get_by_label("Text to continue").input_value().startswith("once")


def test_an_error_is_shown(page: Any) -> None:
    page.get_by_text("Settings").click()
    page.get_by_label("Temperature").fill("1000")
    page.get_by_label("Message").fill("a")
    page.get_by_role("button", name="Send").click()
    wait_until(lambda: page.locator("#error").is_visible())
    assert "temperature" in page.locator("#error").text_content()
