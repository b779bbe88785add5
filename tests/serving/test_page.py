"""Tests of the page in Chromium: it describes the model, streams, branches, keeps states, and shows a model's words as text."""

import importlib.util
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from serving_runs import LETTERS, Running, wait_until

from rwkv.generation.prefill import prefill
from rwkv.generation.state_files import save_context
from rwkv.pretrained import RWKV
from rwkv.tokenizer.tokenizers import ByteTokenizer

CHROMIUM = Path("/usr/bin/chromium")
INSTALLED = importlib.util.find_spec("playwright") is not None and CHROMIUM.is_file()
pytestmark = [pytest.mark.programs,
              pytest.mark.skipif(not INSTALLED, reason="needs Debian's /usr/bin/chromium and the package playwright")]
CHAT, COMPLETIONS = "**/v1/chat/completions", "**/v1/completions"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[[str], Any]]:
    """Yields open_page(url), which opens the page there.

    Asserts that the page asks no other address for anything and has no errors of its own.
    """
    errors: list[str] = []
    context = browser.new_context()

    def open_page(url: str) -> Any:
        page = context.new_page()
        page.set_default_timeout(20_000)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("request", lambda request: errors.extend([] if request.url.startswith(url) else [request.url]))
        page.goto(url)
        return page

    yield open_page
    context.close()
    assert errors == []


@pytest.fixture
def page(open_page: Callable[[str], Any], server: Running) -> Any:
    return open_page(server.url)


def add_fields(page: Any, path: str = CHAT, **fields: Any) -> list[dict[str, Any]]:
    """Adds the fields to each later request of the page to `path`.

    Returns a list of the requests as the page sends them.
    """
    sent: list[dict[str, Any]] = []

    def change(route: Any) -> None:
        sent.append(route.request.post_data_json)
        route.continue_(post_data=json.dumps(sent[-1] | fields))

    page.unroute(path)
    page.route(path, change)
    return sent


def answer_with(page: Any, text: str) -> list[dict[str, Any]]:
    """Makes the model answer this text from now on."""
    return add_fields(page, grammar={"syntax": "lark", "definition": f"start: {json.dumps(text)}"})


def say(page: Any, text: str) -> None:
    page.get_by_label("Message").fill(text)
    page.get_by_label("Message").press("Enter")
    wait_until_done(page)


def wait_until_done(page: Any) -> None:
    wait_until(lambda: page.locator("#stop-button").is_disabled())


def turns(page: Any) -> list[str]:
    return page.locator("article .words").all_text_contents()


def press(page: Any, name: str, which: int = 0) -> None:
    page.get_by_role("button", name=name, exact=True).nth(which).click()
    wait_until_done(page)


def test_the_first_view(page: Any, server: Running) -> None:
    model = httpx.get(f"{server.url}/v1/models").json()["data"][0]
    first = page.locator("#first")
    wait_until(lambda: first.get_by_role("heading").text_content() == model["id"])
    facts = first.locator("#facts").text_content()
    for fact in (model["meta"]["generation"], f"{model['meta']['parameters']:,}", model["meta"]["template"]):
        assert fact in facts
    assert page.get_by_label("Temperature").get_attribute("placeholder") == str(int(model["meta"]["defaults"]["temperature"]))
    requests = answer_with(page, "yes")
    prompts = first.get_by_role("button")
    assert prompts.count() == 3
    question = prompts.first.text_content()
    prompts.first.click()
    wait_until_done(page)
    assert turns(page) == [question, "yes"]
    assert not first.is_visible()
    assert {"temperature", "top_p", "max_tokens", "seed", "stop"}.isdisjoint(requests[0])


def test_a_conversation(page: Any) -> None:
    add_fields(page, max_tokens=8, logit_bias=LETTERS)
    say(page, "<b>hello</b>")
    first = turns(page)
    assert first[0] == "<b>hello</b>"
    assert len(first[1]) == 8
    assert page.locator("article b").count() == 0
    page.reload()
    assert turns(page) == first
    press(page, "Retry")
    assert len(turns(page)) == 2
    page.get_by_role("button", name="Edit").click()
    assert page.get_by_label("Message").input_value() == "<b>hello</b>"
    assert turns(page) == []


def test_stop_ends_a_text(page: Any, server: Running) -> None:
    page.get_by_role("tab", name="Completion").click()
    add_fields(page, COMPLETIONS, max_tokens=50000, logit_bias=LETTERS)
    page.get_by_label("Text to continue").fill("once")
    page.get_by_role("button", name="Continue").click()
    wait_until(lambda: len(page.get_by_label("Text to continue").input_value()) > 20)
    # a click by Playwright would wait until the text stops changing the page
    page.evaluate("document.getElementById('stop-button').click()")
    wait_until(lambda: server.running_texts() == 0)
    wait_until_done(page)
    text = page.get_by_label("Text to continue").input_value()
    assert text.startswith("once")
    assert len(text) < 50000


def test_stop_keeps_what_was_written(page: Any, server: Running) -> None:
    add_fields(page, max_tokens=50000, logit_bias=LETTERS)
    page.get_by_label("Message").fill("on and on")
    page.get_by_label("Message").press("Enter")
    wait_until(lambda: len(page.locator("article.assistant .text").text_content()) > 20)
    page.get_by_role("button", name="Stop").click()
    wait_until(lambda: server.running_texts() == 0)
    wait_until_done(page)
    assert len(turns(page)[1]) > 20
    assert not page.locator("#error").is_visible()


def test_an_error_changes_nothing(page: Any) -> None:
    answer_with(page, "yes")
    say(page, "one")
    page.get_by_text("Settings").click()
    page.get_by_label("Temperature").fill("1000")
    say(page, "two")
    wait_until(lambda: page.locator("#error").is_visible())
    assert page.locator("#error").text_content().startswith("temperature: ")
    page.get_by_role("tab", name="Completion").click()
    assert not page.locator("#error").is_visible()
    page.get_by_role("tab", name="Chat").click()
    assert turns(page) == ["one", "yes"]
    assert page.get_by_label("Message").input_value() == "two"
    press(page, "Retry")                 # requests the existing answer again
    assert turns(page) == ["one", "yes"]
    page.get_by_label("Temperature").fill("")
    page.get_by_role("button", name="Send").click()
    wait_until_done(page)
    assert turns(page) == ["one", "yes", "two", "yes"]
    assert not page.locator("#error").is_visible()


def test_wrong_json_is_reported_beside_its_field(page: Any) -> None:
    page.get_by_text("Settings").click()
    for field, wrong in (("schema", "{"), ("schema", "[]"), ("schema", '{"type": 3}'), ("tools", "[1,"), ("tools", "{}"),
                         ("tools", "[3]")):
        before, message = turns(page), page.locator(f"#{field}-wrong")
        page.unroute(CHAT)
        page.locator(f"#{field}").fill(wrong)
        say(page, "one")
        wait_until(message.is_visible)
        assert message.text_content()
        assert turns(page) == before
        assert page.get_by_label("Message").input_value() == "one"
        assert not page.locator("#error").is_visible()
        page.locator(f"#{field}").fill("")
        answer_with(page, "yes")
        say(page, "one")
        assert turns(page) == [*before, "one", "yes"]
        assert not message.is_visible()


def test_a_schema_and_tools_are_sent(open_page: Callable[[str], Any], g1: Running) -> None:
    page = open_page(g1.url)
    page.get_by_text("Settings").click()
    page.locator("#schema").fill(json.dumps({"type": "object", "properties": {"a_b_c": {"enum": [7]}}, "required": ["a_b_c"],
                                             "additionalProperties": False}))
    say(page, "a number")
    assert json.loads(page.locator("article.assistant pre").text_content()) == {"a_b_c": 7}
    page.locator("#schema").fill("")
    page.locator("#tools").fill(json.dumps([{"type": "function", "function": {"name": "clock", "parameters": {
        "type": "object", "properties": {}, "additionalProperties": False}}}]))
    add_fields(page, tool_choice="required")
    say(page, "what time is it?")
    assert "clock({" in turns(page)[-1]
    requests = add_fields(page, max_tokens=4, tool_choice="none", logit_bias=LETTERS)
    say(page, "12:00")
    assert requests[0]["messages"][-1]["role"] == "tool"
    assert turns(page)[-2] == "12:00"
    assert len(turns(page)[-1]) == 4


def test_the_server_goes_away_and_comes_back(open_page: Callable[[str], Any], start: Callable[..., Running]) -> None:
    server = start()
    page = open_page(server.url)
    answer_with(page, "yes")
    say(page, "one")
    add_fields(page, max_tokens=4096, logit_bias=LETTERS)
    page.get_by_label("Message").fill("two")
    page.get_by_label("Message").press("Enter")
    wait_until(lambda: len(turns(page)) == 4 and len(turns(page)[3]) > 20)
    server.end()
    wait_until(lambda: "does not answer" in page.locator("#error").text_content())
    assert len(turns(page)[3]) > 20      # what was written stays
    written = turns(page)
    say(page, "three")
    wait_until(lambda: "does not answer" in page.locator("#error").text_content())
    assert turns(page) == written
    assert page.get_by_label("Message").input_value() == "three"
    start(f"port={server.port}")
    wait_until(lambda: not page.locator("#error").is_visible())
    requests = answer_with(page, "yes")
    page.get_by_role("button", name="Send").click()
    wait_until_done(page)
    assert turns(page) == [*written, "three", "yes"]
    assert "state" not in requests[-1]       # the states are gone with the server that had them


def test_branches_read_nothing_again(page: Any) -> None:
    requests = answer_with(page, "yes")
    for text in ("one", "two", "three"):
        say(page, text)
    assert [message["content"] for message in requests[-1]["messages"]] == ["three"]
    press(page, "Branch")
    assert turns(page) == ["one", "yes"]
    say(page, "else")
    assert turns(page) == ["one", "yes", "else", "yes"]
    assert [message["content"] for message in requests[-1]["messages"]] == ["else"]
    tokens = re.findall(r"read (\d+) of (\d+)", page.locator("#speed").text_content())
    assert int(tokens[0][0]) < int(tokens[0][1])
    page.get_by_role("button", name="Earlier branch").click()
    assert turns(page) == ["one", "yes", "two", "yes", "three", "yes"]
    press(page, "Branch", 1)
    assert turns(page) == ["one", "yes", "two", "yes"]
    press(page, "Forward")
    assert turns(page) == ["one", "yes", "two", "yes", "three", "yes"]
    press(page, "Retry", 1)
    assert turns(page) == ["one", "yes", "two", "yes"]
    assert page.get_by_role("button", name="Earlier branch").count() == 2


def test_a_message_before_the_model_s_facts_arrive_keeps_its_state(page: Any) -> None:
    routes: list[Any] = []
    page.route("**/v1/models", lambda route: routes.append(route))
    page.reload()
    requests = answer_with(page, "yes")
    page.get_by_label("Message").fill("one")
    page.get_by_label("Message").press("Enter")
    wait_until(lambda: page.locator("article").count() == 2 and (len(routes) == 2 or bool(requests)))
    page.unroute("**/v1/models")
    for route in routes:
        route.continue_()
    wait_until_done(page)
    say(page, "two")
    assert turns(page) == ["one", "yes", "two", "yes"]
    assert [message["content"] for message in requests[-1]["messages"]] == ["two"]


def test_states_are_saved_opened_and_deleted(page: Any, server: Running) -> None:
    before = {state["id"] for state in httpx.get(f"{server.url}/v1/states").json()["data"]}

    def new_states() -> set[str]:
        return {state["id"] for state in httpx.get(f"{server.url}/v1/states").json()["data"]} - before

    requests = answer_with(page, "yes")
    say(page, "one")
    say(page, "two")
    press(page, "Save", 1)
    wait_until(lambda: page.locator("#kept nav").count() == 1)
    page.get_by_role("button", name="Clear").click()
    assert turns(page) == []
    wait_until(lambda: len(new_states()) == 1)                 # the states that were not saved are deleted
    page.get_by_role("button", name="Open").click()
    assert turns(page) == ["one", "yes", "two", "yes"]
    say(page, "three")
    assert requests[-1]["state"] in new_states()
    assert [message["content"] for message in requests[-1]["messages"]] == ["three"]
    with page.expect_download() as downloaded:
        page.get_by_role("button", name="File", exact=True).click()
    saved = downloaded.value.path()
    page.get_by_label("State file").set_input_files({"name": "a.safetensors", "mimeType": "application/octet-stream",
                                                     "buffer": saved.read_bytes()})
    wait_until(lambda: len(turns(page)) == 1)
    say(page, "four")
    assert turns(page)[1:] == ["four", "yes"]
    page.get_by_role("button", name="Delete").click()
    wait_until(lambda: page.locator("#kept nav").count() == 0)


def test_a_state_of_unknown_length_is_listed_by_its_size(page: Any, model: RWKV, tmp_path: Path) -> None:
    path = tmp_path / "own.safetensors"
    save_context(path, prefill(model, torch.tensor([[*b"once"]]))._replace(last_ids=(*b"once",)), model, ByteTokenizer())
    page.get_by_text("States", exact=True).click()
    page.get_by_label("State file").set_input_files(path)
    wait_until(lambda: len(turns(page)) == 1)
    answer_with(page, "yes")
    say(page, "one")
    press(page, "Save")
    listed = page.locator("#kept nav span")
    wait_until(lambda: listed.count() == 1)
    assert re.fullmatch(r"[\d.]+ KiB: one", listed.text_content())
    page.get_by_role("button", name="Delete").click()
    wait_until(lambda: listed.count() == 0)


MARKDOWN = """# A *title*
Some **bold** and `co*d*e`, 2*3*4, snake_case_name <img src=x onerror=alert(1)>
[good](https://example.com/a_(b)) [bad](javascript:alert(1)) [worse](data:text/html,x)
- one
  - inner
- two
3. three
> said
| a | b |
|---|:-:|
| 1 | <b>2</b> |
```html
<script>alert(1)</script>
  # kept
```
the end"""


def test_markdown_becomes_nodes(page: Any) -> None:
    answer_with(page, MARKDOWN)
    say(page, "show")
    text = page.locator("article.assistant .text")
    assert text.locator("h3 em").text_content() == "title"
    assert text.locator("strong").text_content() == "bold"
    assert text.locator("p code").text_content() == "co*d*e"
    assert "2*3*4, snake_case_name <img src=x onerror=alert(1)>" in text.locator("p").first.text_content()
    assert [link.get_attribute("href") for link in text.locator("a").all()] == ["https://example.com/a_(b)"]
    assert text.locator("ul > li > ul > li").text_content() == "inner"
    assert text.locator("ul").first.locator("> li").count() == 2
    assert text.locator("ol").get_attribute("start") == "3"
    assert text.locator("blockquote").text_content() == "said"
    assert text.locator("td").all_text_contents() == ["1", "<b>2</b>"]
    assert text.locator("pre").text_content() == "<script>alert(1)</script>\n  # kept"
    assert text.locator("img, script, b").count() == 0
    text.get_by_role("button", name="Copy").click()
    wait_until(lambda: text.locator(".code button").text_content() != "Copy")


def test_every_text_is_shown_quickly(page: Any) -> None:
    for text in ("[" * 20000, "- " * 20000, "> " * 20000, "*" * 20001, "`" * 20001, "_a" * 20000, "|" * 20001,
                 "# " + " " * 20000 + "x", "[a](http://x" * 5000, "1. a\n" * 5000, " - a\n- b\n" * 5000):
        assert page.evaluate("text => { const began = performance.now(); markdown(text); return performance.now() - began; }",
                             text) < 2000, text[:20]


SIZES = """() => ({
    wide: [...document.querySelectorAll('body, header, main, footer, article')].filter(one => one.scrollWidth > one.clientWidth
        && !one.matches('pre')).map(one => one.tagName),
    high: [...document.querySelectorAll('button, summary')].filter(one => one.checkVisibility()
        && one.getBoundingClientRect().height > 2.2 * parseFloat(getComputedStyle(one).lineHeight)).map(one => one.textContent),
    outside: [...document.querySelectorAll('button, summary, input, textarea')].filter(one => one.checkVisibility()
        && one.getBoundingClientRect().right > innerWidth).map(one => one.textContent),
})"""


WIDTHS = (320, 400, 1600)


def fits(page: Any) -> bool:
    """Asserts that everything fits at every width, and returns True."""
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 700})
        assert page.evaluate(SIZES) == {"wide": [], "high": [], "outside": []}, width
    return True


def test_a_narrow_window(page: Any) -> None:
    assert fits(page)
    answer_with(page, MARKDOWN.replace("# kept", "x" * 300).replace("| a |", f"| {'a' * 200} |").replace("Some", "y" * 300))
    say(page, "w" * 300)
    press(page, "Retry")
    say(page, "next")
    assert fits(page)
    for panel in ("Settings", "States"):
        page.get_by_text(panel, exact=True).click()
        assert fits(page)
        page.get_by_text(panel, exact=True).click()


LIGHTNESS = """selector => [getComputedStyle(document.querySelector(selector)).color,
    getComputedStyle(document.body).backgroundColor]
    .map(color => color.match(/[0-9.]+/g).slice(0, 3).reduce((a, b) => a + +b, 0))"""


def test_dark_and_light(page: Any) -> None:
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        for selector in ("body", "#prompts button", "#message", "summary", "#facts dt"):
            text, back = page.evaluate(LIGHTNESS, selector)
            assert (text > back) == (scheme == "dark")
            assert abs(text - back) > 250
