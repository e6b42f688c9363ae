"""The page at / in a browser: what a person does with it, and what it asks of whom."""

import re
import shutil

import pytest

CHROMIUM = next(filter(None, map(shutil.which, (
    "chromium-headless-shell", "chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="module")
def browser():
    api = pytest.importorskip("playwright.sync_api", reason="needs the extra test-serve")
    if CHROMIUM is None:
        pytest.skip("needs Chromium, of Debian's package chromium")
    with api.sync_playwright() as playwright:
        own = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield own
        own.close()


@pytest.fixture
def page(browser, server):
    """The page, of which `asked` has the requests and `wrong` what its console said."""
    own = browser.new_page()
    own.asked, own.wrong = [], []
    own.on("request", lambda request: own.asked.append(request))
    own.on("pageerror", lambda error: own.wrong.append(str(error)))
    own.on("console", lambda told: own.wrong.append(told.text) if told.type == "error" else None)
    own.goto(server.url)
    sees(own, "#model", "tiny")
    yield own
    assert {request.url.split("/")[2] for request in own.asked
            if not request.url.startswith("data:")} == {server.url.split("/")[2]}
    own.close()


def sees(page, place, text):
    """Wait for a text. What playwright's wait_for_function does the page's policy forbids."""
    from playwright.sync_api import expect
    expect(page.locator(place)).to_have_text(text)


def say(page, text):
    page.fill("#text", text)
    page.press("#text", "Enter")


def bodies(page):
    return [request.post_data_json for request in page.asked
            if request.url.endswith("/v1/chat/completions")]


def answered(page, count=1):
    """Wait for so many answers, each with what it took."""
    page.locator(".assistant .note").nth(count - 1).wait_for()


def test_an_answer_streams_and_what_it_took_is_told(page):
    page.evaluate("""() => {
        window.lengths = [];
        new MutationObserver(() => window.lengths.push(
            document.querySelector('.assistant')?.textContent.length)).observe(
            document.getElementById('messages'), {subtree: true, childList: true});
    }""")
    page.fill("#max_tokens", "30")
    page.fill("#temperature", "1")
    page.fill("#seed", "1")
    say(page, "the fox")
    answered(page)
    assert page.text_content(".user") == "the fox"
    assert "tokens, first after" in page.text_content(".assistant .note")
    lengths = page.evaluate("window.lengths")
    assert len({*lengths}) > 5 and lengths == sorted(lengths)
    assert page.text_content("#send") == "Send" and page.wrong == []


def test_knobs_and_the_conversation_are_sent(page):
    knobs = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.05,
             "repetition_penalty": 1.1, "max_tokens": 5, "seed": 3}
    for name, value in knobs.items():
        page.fill(f"#{name}", str(value))
    page.fill("#system", "be brief")
    say(page, "one")
    answered(page)
    page.fill("#top_k", "")
    say(page, "two")
    answered(page, 2)
    first, second = bodies(page)
    assert {name: first[name] for name in knobs} == knobs
    assert first["messages"] == [{"role": "system", "content": "be brief"},
                                 {"role": "user", "content": "one"}]
    assert "top_k" not in second
    assert [own["role"] for own in second["messages"]] == ["system", "user", "assistant", "user"]
    page.click("#new")
    assert page.text_content("#messages") == "" and page.wrong == []


def test_throughput_and_cache_are_shown(page):
    page.fill("#max_tokens", "20")
    for _ in range(2):
        say(page, "words that are in the cache the second time")
        answered(page)
        sees(page, "#rate", re.compile(r"^([1-9]|0\.[1-9])"))
        page.click("#new")
    sees(page, "#running", "0")
    assert page.text_content("#waiting") == "0" and page.text_content("#cache").endswith(" %")
    assert page.text_content("#hits").endswith(" %") and page.wrong == []


def test_an_error_is_shown_as_text(page):
    page.fill("#max_tokens", "-1")
    page.eval_on_selector("#form", "own => own.noValidate = true")
    say(page, "<b>the</b>")
    page.wait_for_selector(".error")
    assert "max_tokens -1 is below 0" in page.text_content(".error")
    assert page.query_selector(".user b") is None
    page.route("**/v1/chat/completions", lambda route: route.abort())
    say(page, "the")
    page.locator(".error").nth(1).wait_for()
    page.unroute("**/v1/chat/completions")
    page.fill("#max_tokens", "5")
    page.fill("#temperature", "0")  # drawn tokens may all be without a text
    say(page, "the")
    answered(page)


def test_an_answer_is_stopped(page, server):
    page.route("**/metrics", lambda route: route.abort())
    page.route("**/v1/chat/completions", lambda route: None)  # it takes for ever
    say(page, "go on")
    sees(page, "#send", "Stop")
    page.click("#new")
    sees(page, "#send", "Send")
    assert page.query_selector(".error") is None
