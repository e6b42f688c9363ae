"""The page at / in a browser: user interaction and its requests."""

import base64
import io
import json
import re
import shutil

import media_case
import pytest
from PIL import Image

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
    """The page; `asked` has its requests, `wrong` its console messages."""
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
    """Wait for a text; the page's policy forbids playwright's wait_for_function."""
    from playwright.sync_api import expect
    expect(page.locator(place)).to_have_text(text)


def say(page, text):
    page.fill("#text", text)
    page.press("#text", "Enter")


def bodies(page):
    return [request.post_data_json for request in page.asked
            if request.url.endswith("/v1/chat/completions")]


def answered(page, count=1):
    """Wait for `count` answers with their token counts."""
    page.locator(".assistant .note").nth(count - 1).wait_for()


def events(*deltas):
    """Return the server-sent events of a completion."""
    chunks = [{"choices": [{"delta": delta}]} for delta in deltas]
    chunks.append({"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 2}})
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"


def echo(page):
    """Echo each message, three characters per delta."""
    def answer(route):
        text = route.request.post_data_json["messages"][-1]["content"]
        pieces = [{"content": text[at:at + 3]} for at in range(0, len(text), 3)]
        route.fulfill(content_type="text/event-stream", body=events(*pieces))
    page.route("**/v1/chat/completions", answer)


def rendered(page, text):
    """Return the HTML of an answer after `echo`, without buttons and presentational attributes."""
    page.click("#new")
    say(page, text)
    answered(page)
    html = page.locator(".content").inner_html()
    html = re.sub(r"<button.*?</button>| (class|tabindex|title)=\"[^\"]*\"", "", html)
    return html.replace(' target="_blank" rel="noopener noreferrer"', " new")


def hold(page):
    """Stream the deltas of `push` as answers. `window.sent` holds each request's messages."""
    page.evaluate("""() => {
        const real = window.fetch;
        window.sent = [];
        window.fetch = async (url, options) => {
            if (url !== "v1/chat/completions") return real(url, options);
            window.sent.push(JSON.parse(options.body).messages);
            return new Response(new ReadableStream({start(stream) {
                window.stream = stream;
                options.signal.addEventListener("abort", () => stream.error(options.signal.reason));
            }}));
        };
    }""")


def push(page, **delta):
    """Send a delta of the answer that `hold` streams."""
    text = f"data: {json.dumps({'choices': [{'delta': delta}]})}\n\n"
    page.evaluate("text => window.stream.enqueue(new TextEncoder().encode(text))", text)


def test_an_answer_and_its_token_counts_are_shown(page):
    page.fill("#max_tokens", "30")
    page.fill("#temperature", "1")
    page.fill("#seed", "1")
    say(page, "the fox")
    answered(page)
    assert page.text_content(".user") == "the fox"
    assert "tokens, first after" in page.text_content(".assistant .note")
    assert page.text_content("#send") == "Send" and page.wrong == []


def test_sampling_controls_and_the_conversation_are_sent(page):
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
    page.fill("#temperature", "0")  # sampled tokens may all have empty text
    say(page, "the")
    answered(page)


def test_an_answer_is_stopped(page, server):
    page.route("**/metrics", lambda route: route.abort())
    page.route("**/v1/chat/completions", lambda route: None)  # it never ends
    say(page, "go on")
    sees(page, "#send", "Stop")
    page.click("#new")
    sees(page, "#send", "Send")
    assert page.query_selector(".error") is None


def break_off(page):
    """Break the connection of `hold`'s stream."""
    page.evaluate("window.stream.error(new TypeError('connection lost'))")


def test_a_message_without_an_answer_returns_to_the_box_and_not_into_the_conversation(page):
    hold(page)
    say(page, "one")
    push(page, content="first")
    page.evaluate("window.stream.close()")
    sees(page, "#send", "Send")
    say(page, "two")
    sees(page, "#send", "Stop")
    page.fill("#text", "a draft")
    break_off(page)
    sees(page, ".error", "connection lost")
    assert page.input_value("#text") == "two\na draft"
    say(page, "three")
    page.keyboard.press("Escape")
    sees(page, "#send", "Send")
    assert page.input_value("#text") == "three"
    assert page.locator(".user").all_text_contents() == ["one"]
    assert page.locator(".assistant").count() == 1
    page.press("#text", "Enter")
    sees(page, "#send", "Stop")
    assert page.evaluate("window.sent[3]") == [
        {"role": "user", "content": "one"}, {"role": "assistant", "content": "first"},
        {"role": "user", "content": "three"}]
    page.click("#new")
    sees(page, "#send", "Send")
    assert page.input_value("#text") == "" and page.text_content("#messages") == ""
    assert page.wrong == []


def test_part_of_an_answer_and_an_empty_one_stay_in_the_conversation(page):
    hold(page)
    say(page, "one")
    push(page, content="begun")
    break_off(page)
    sees(page, ".error", "connection lost")
    assert page.input_value("#text") == "" and page.text_content(".content") == "begun"
    say(page, "two")
    page.evaluate("window.stream.close()")
    sees(page, "#send", "Send")
    say(page, "three")
    sees(page, "#send", "Stop")
    assert [own["content"] for own in page.evaluate("window.sent[2]")] == [
        "one", "begun", "two", "", "three"]
    assert page.wrong == []


def test_a_proxy_s_error_is_shown_by_its_status(page):
    page.route("**/v1/chat/completions", lambda route: route.fulfill(
        status=502, content_type="text/html", body="<h1>Bad gateway</h1>"))
    say(page, "the")
    sees(page, ".error", "502 Bad Gateway")
    assert page.input_value("#text") == "the"


MARKDOWN = {
    "# One\n### Three ###\n####### seven": "<h1>One</h1><h3>Three</h3><p>####### seven</p>",
    "Title\n===\nLess\n---": "<h1>Title</h1><h2>Less</h2>",
    "one\ntwo\n\nthree": "<p>one<br>two</p><p>three</p>",
    "**b** *i* ***bi*** __b__ _i_ ~~d~~":
        "<p><strong>b</strong> <em>i</em> <em><strong>bi</strong></em> <strong>b</strong> "
        "<em>i</em> <del>d</del></p>",
    "a_b_c 2 * 3 * 4 **open \\*x\\* ~5 ~6": "<p>a_b_c 2 * 3 * 4 **open *x* ~5 ~6</p>",
    "*a **b** c* and **d *e***":
        "<p><em>a <strong>b</strong> c</em> and <strong>d <em>e</em></strong></p>",
    "`*a*` ``b ` c`` `open": "<p><code>*a*</code> <code>b ` c</code> `open</p>",
    "- a\n- b\n  - c\n    1. d\n    2. e\n- f":
        "<ul><li><p>a</p></li><li><p>b</p><ul><li><p>c</p><ol start=\"1\"><li><p>d</p></li>"
        "<li><p>e</p></li></ol></li></ul></li><li><p>f</p></li></ul>",
    "3. a\n  - b\n\n   more\n4. c":
        "<ol start=\"3\"><li><p>a</p><ul><li><p>b</p></li></ul><p>more</p></li>"
        "<li><p>c</p></li></ol>",
    "1. a\n   ```sh\n   ls\n     -l\n   ```\n2. b":
        "<ol start=\"1\"><li><p>a</p><div><div><span>sh</span></div><pre><code>ls\n  -l</code>"
        "</pre></div></li><li><p>b</p></li></ol>",
    "> a\n> > b\n> - c\n\nd":
        "<blockquote><p>a</p><blockquote><p>b</p></blockquote><ul><li><p>c</p></li></ul>"
        "</blockquote><p>d</p>",
    "a\n\n---\n* * *\nb": "<p>a</p><hr><hr><p>b</p>",
    "```py title=x\n# **a**\n\n<b>\n```\nafter":
        "<div><div><span>py</span></div><pre><code># **a**\n\n&lt;b&gt;</code></pre></div>"
        "<p>after</p>",
    "~~~\n```\n~~~\n\n    x\n      y":
        "<div><div><span></span></div><pre><code>```</code></pre></div>"
        "<div><div><span></span></div><pre><code>x\n  y</code></pre></div>",
    "````\nopen\n```": "<div><div><span></span></div><pre><code>open\n```</code></pre></div>",
    "Table:\n| a | b | c |\n|:-|-:|:-:|\n| *x* | y \\| z |\n\nend":
        "<p>Table:</p><div><table><thead><tr><th style=\"text-align: left;\">a</th>"
        "<th style=\"text-align: right;\">b</th><th style=\"text-align: center;\">c</th></tr>"
        "</thead><tbody><tr><td style=\"text-align: left;\"><em>x</em></td>"
        "<td style=\"text-align: right;\">y | z</td><td style=\"text-align: center;\"></td></tr>"
        "</tbody></table></div><p>end</p>",
    "a | b\nno table": "<p>a | b<br>no table</p>",
    "[a *b*](https://e.com/x \"t\") <http://e.com> (see https://e.com/a_(b)).":
        "<p><a href=\"https://e.com/x\" new>a <em>b</em></a> "
        "<a href=\"http://e.com/\" new>http://e.com</a> "
        "(see <a href=\"https://e.com/a_(b)\" new>https://e.com/a_(b)</a>).</p>",
    "![alt](https://e.com/i.png) [![in](https://e.com/j.png)](https://e.com)":
        "<p><a href=\"https://e.com/i.png\" new>alt</a> <a href=\"https://e.com/\" new>in</a></p>",
}


def test_markdown_becomes_elements(page):
    echo(page)
    for text, html in MARKDOWN.items():
        assert rendered(page, text) == html
    assert page.wrong == []


HOSTILE = [
    "<script>window.hit = 1</script>",
    "<img src=x onerror=\"window.hit = 1\">",
    "<svg onload=window.hit=1><iframe srcdoc='<script>parent.hit=1</script>'>",
    "[x](javascript:window.hit=1) [x](<javascript:window.hit=1>) [x](JaVaScRiPt:window.hit=1)",
    "[x](&#106;avascript:window.hit=1) [x](java\tscript:window.hit=1) <javascript:window.hit=1>",
    "[x](data:text/html,<script>window.hit=1</script>) [x](vbscript:x) [x](file:///etc/passwd)",
    "[x](//elsewhere.example) [x](/metrics) [x](x\" onclick=\"window.hit=1)",
    "[x](https://e.com/\"onmouseover=\"window.hit=1) ![x](https://e.com/i.png\"onerror=\"x)",
    "```\"><script>window.hit=1</script>\n</code></pre><script>window.hit=1</script>\n```",
    "`</code><img src=x onerror=window.hit=1>`",
    "| <img src=x onerror=window.hit=1> |\n|---|\n| <script>window.hit=1</script> |",
    "# <style>*{display:none}</style>\n- <a href=javascript:window.hit=1>x</a>\n> <form><input>",
]


def test_model_text_cannot_inject_scripts_requests_or_links(page):
    echo(page)
    for text in HOSTILE:
        rendered(page, text)
        content = page.locator(".content")
        assert content.locator(":not(p, h1, ul, li, blockquote, div, span, button, pre, code, "
                               "table, thead, tbody, tr, th, td, a)").count() == 0, text
        for link in content.locator("a").all():
            assert link.get_attribute("href").startswith("https://e.com/")
            assert link.get_attribute("rel") == "noopener noreferrer"
            assert link.get_attribute("target") == "_blank"
        attributes = page.evaluate("""() => [...new Set([...document.querySelectorAll(
            ".content *")].flatMap(own => own.getAttributeNames()))]""")
        assert {*attributes} <= {"href", "title", "target", "rel", "class", "type", "tabindex",
                                 "style"}
    assert page.evaluate("window.hit") is None and page.wrong == []


def test_the_policy_forbids_markup_from_strings_and_handlers(page):
    refused = page.evaluate("""() => ["innerHTML", "onclick"].map(name => {
        try { document.body.setAttribute(name, "window.hit = 1"); document.body[name] = "<b>"; }
        catch (error) { return error.name; }
    })""")
    assert refused == ["TypeError", "TypeError"]


def test_long_and_deep_text_is_rendered_in_a_bounded_depth(page):
    echo(page)
    rendered(page, "*" * 3000 + "a" + "*" * 3000)
    for text in ("> " * 3000 + "a", "- " * 3000 + "a", "*a " * 2000 + "a* " * 2000,
                 "[" * 3000 + "](https://e.com)" * 100, "`" * 3000 + "```x` " * 100):
        rendered(page, text)
        assert page.evaluate("""() => Math.max(...[...document.querySelectorAll(
            ".content *")].map(own => { let depth = 0;
            for (; own.className !== "message assistant"; own = own.parentNode) depth++;
            return depth; }))""") < 64
    assert page.wrong == []


def test_markdown_is_rendered_while_it_streams(page):
    hold(page)
    say(page, "go")
    push(page, content="Some **bo")
    sees(page, ".content p", "Some **bo")
    push(page, content="ld**\n\n```py")
    sees(page, ".content strong", "bold")
    push(page, content="thon\nx = **1**")
    sees(page, ".content pre code", "x = **1**")
    sees(page, ".code span", "python")
    page.evaluate("window.paragraph = document.querySelector('.content p')")
    page.locator(".code button").focus()
    push(page, content="\ny = 2\n```\nand *more*")
    sees(page, ".content pre code", "x = **1**\ny = 2")
    sees(page, ".content em", "more")
    assert page.evaluate("document.querySelector('.content p') === window.paragraph")
    assert page.evaluate("document.activeElement.textContent") == "Copy code"
    assert page.locator(".assistant").get_attribute("aria-busy") == "true"
    page.evaluate("window.stream.close()")
    sees(page, "#send", "Send")
    assert page.locator(".assistant").get_attribute("aria-busy") is None and page.wrong == []


def test_code_and_answers_are_copied(page, server):
    page.context.grant_permissions(["clipboard-read", "clipboard-write"], origin=server.url)
    echo(page)
    text = "**Run**:\n\n```sh\nls  <dir>\n\n\tpwd\n```\nDone."
    rendered(page, text)
    read = "navigator.clipboard.readText()"
    page.get_by_role("button", name="Copy code").press("Enter")
    sees(page, ".code button", "Copied")
    assert page.evaluate(read) == "ls  <dir>\n\n\tpwd"
    sees(page, ".code button", "Copy code")
    page.get_by_role("button", name="Copy answer").click()
    sees(page, ".assistant > button", "Copied")
    assert page.evaluate(read) == text
    # Without the Clipboard API, as on a page served by plain HTTP from another host.
    page.evaluate("Object.defineProperty(navigator, 'clipboard', "
                  "{value: undefined, configurable: true})")
    page.locator(".code button").click()
    sees(page, ".code button", "Copied")
    assert page.evaluate("document.activeElement.textContent") == "Copied"
    page.evaluate("delete navigator.clipboard")
    assert page.evaluate(read) == "ls  <dir>\n\n\tpwd" and page.wrong == []


def test_reasoning_is_folded_above_the_answer_and_not_sent_again(page):
    hold(page)
    say(page, "go")
    push(page, reasoning_content="First *this*.")
    summary = page.locator(".assistant summary")
    summary.wait_for()
    assert not page.locator(".reasoning em").is_visible()
    push(page, content="Then that.")
    sees(page, ".content", "Then that.")
    summary.press("Enter")
    sees(page, ".reasoning em", "this")
    assert page.locator(".reasoning em").is_visible()
    assert page.evaluate("""() => document.querySelector(".reasoning").compareDocumentPosition(
        document.querySelector(".content")) === Node.DOCUMENT_POSITION_FOLLOWING""")
    push(page, reasoning_content=" <b>And</b>")
    sees(page, ".reasoning .markdown", "First this. <b>And</b>")
    assert page.locator(".reasoning").get_attribute("open") is not None
    page.evaluate("window.stream.close()")
    sees(page, "#send", "Send")
    say(page, "again")
    sees(page, "#send", "Stop")
    assert page.evaluate("window.sent[1]") == [
        {"role": "user", "content": "go"}, {"role": "assistant", "content": "Then that."},
        {"role": "user", "content": "again"}]


def test_escape_stops_and_a_new_conversation_has_nothing_of_the_stopped_answer(page):
    hold(page)
    say(page, "one")
    push(page, content="begun")
    sees(page, ".content", "begun")
    page.keyboard.press("Escape")
    sees(page, "#send", "Send")
    assert page.locator(".assistant .copy").count() == 1
    say(page, "two")
    push(page, content="more")
    sees(page, ".assistant:last-child .content", "more")
    page.click("#new")
    sees(page, "#send", "Send")
    assert page.evaluate("document.activeElement.id") == "text"
    say(page, "three")
    sees(page, "#send", "Stop")
    assert page.evaluate("window.sent[2]") == [{"role": "user", "content": "three"}]
    assert page.wrong == []


def test_fields_have_labels_and_the_key_is_taken_on_enter(page, server):
    for name in ("System prompt", "Temperature", "Top p", "Top k", "Min p", "Repetition penalty",
                 "Max tokens", "Seed", "API key", "Message"):
        assert page.get_by_label(name, exact=True).count() == 1, name
    page.get_by_label("API key").fill("secret")
    with page.expect_request("**/v1/models") as asked:
        page.get_by_label("API key").press("Enter")
    assert asked.value.headers["authorization"] == "Bearer secret"
    assert page.url == f"{server.url}/" and page.input_value("#key") == "secret"


RED = media_case.picture("red", (40, 30))


@pytest.fixture
def picture_page(browser, media_server):
    """The page of a model that takes pictures."""
    own = browser.new_page()
    own.asked, own.wrong = [], []
    own.on("request", lambda request: own.asked.append(request))
    own.on("pageerror", lambda error: own.wrong.append(str(error)))
    own.on("console", lambda told: own.wrong.append(told.text) if told.type == "error" else None)
    own.goto(media_server.url)
    own.wait_for_selector("#attach")
    yield own
    assert own.wrong == []
    own.close()


def files_of(page, event, *files, target="#text"):
    """Dispatch `paste` or `drop` with files: pairs of type and bytes."""
    listed = [[kind, base64.b64encode(data).decode()] for kind, data in files]
    page.evaluate("""([event, target, files]) => {
        const transfer = new DataTransfer();
        for (const [type, data] of files)
            transfer.items.add(new File([Uint8Array.from(atob(data), c => c.charCodeAt(0))],
                                        "file", {type}));
        const Kind = event === "paste" ? ClipboardEvent : DragEvent;
        document.querySelector(target).dispatchEvent(new Kind(event, {
            clipboardData: transfer, dataTransfer: transfer, bubbles: true, cancelable: true}));
    }""", [event, target, listed])


def test_pictures_are_chosen_pasted_dropped_removed_and_sent(picture_page):
    page = picture_page
    page.set_input_files("#file", {"name": "a.png", "mimeType": "image/png", "buffer": RED})
    page.locator("#pictures img").first.wait_for()
    files_of(page, "paste", ("image/png", media_case.picture("blue")))
    files_of(page, "drop", ("image/png", media_case.picture("green")), target="#messages")
    page.locator("#pictures img").nth(2).wait_for()
    page.get_by_label("Remove picture 2").click()
    assert page.locator("#pictures img").count() == 2
    page.fill("#max_tokens", "3")
    page.fill("#temperature", "0")
    say(page, "what is it?")
    answered(page)
    assert page.locator("#pictures img").count() == 0
    assert page.text_content(".user") == "what is it?" and page.locator(".user img").count() == 2
    sent = bodies(page)[0]["messages"][0]["content"]
    assert [own["type"] for own in sent] == ["image_url", "image_url", "text"]
    assert sent[0]["image_url"]["url"] == media_case.data_url(RED)
    say(page, "and now?")
    answered(page, 2)
    assert bodies(page)[1]["messages"][0]["content"] == sent


def test_a_picture_without_text_is_sent(picture_page):
    page = picture_page
    files_of(page, "paste", ("image/png", RED))
    page.locator("#pictures img").first.wait_for()
    page.press("#text", "Enter")
    answered(page)
    assert [own["type"] for own in bodies(page)[0]["messages"][0]["content"]] == ["image_url"]


def test_pictures_return_to_the_box_if_there_is_no_answer(picture_page):
    page = picture_page
    files_of(page, "paste", ("image/png", b"no picture"))
    page.locator("#pictures img").first.wait_for()
    say(page, "what is it?")
    page.wait_for_selector(".error")
    assert "image 0" in page.text_content(".error")
    assert page.input_value("#text") == "what is it?"
    assert page.locator("#pictures img").count() == 1 and page.locator(".user").count() == 0
    page.click("#new")
    assert page.locator("#pictures img").count() == 0
    page.wrong.clear()  # the browser reports the status 400


def test_large_pictures_are_sent_smaller_and_other_files_are_refused(picture_page):
    page = picture_page
    noise = media_case.encoded(Image.effect_noise((3000, 1500), 90))
    assert len(noise) > 1 << 20
    files_of(page, "drop", ("text/plain", b"text"), ("image/png", noise))
    sees(page, ".error", "file is no picture")
    page.locator("#pictures img").first.wait_for()
    url = page.get_attribute("#pictures img", "src")
    image = Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2])))
    assert (image.format, image.size) == ("JPEG", (2048, 1024))


def test_a_model_without_pictures_has_no_button_for_them(page):
    assert page.is_hidden("#attach")
    files_of(page, "paste", ("image/png", RED))
    files_of(page, "drop", ("image/png", RED))
    page.wait_for_timeout(100)
    assert page.locator("#pictures img").count() == 0 and page.wrong == []
