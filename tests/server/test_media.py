"""Images in requests: each interface, OpenAI's client, what URLs reach, and bad pictures."""

import base64
import http.server
import socket
import threading
import time

import numpy as np
import pytest
from media_case import BAD_PICTURES, ROWS, UNUSUAL_PICTURES, data_url, encoded, picture
from PIL import Image
from server_process import until

CHAT = "/v1/chat/completions"
RED, BLUE = picture("red"), picture("blue", (61, 47))


@pytest.fixture
def server(media_server):
    return media_server


def parts(*urls, text="what is it?"):
    return [*({"type": "image_url", "image_url": {"url": url}} for url in urls),
            {"type": "text", "text": text}]


def ask(server, *content, **fields):
    """Return status and body of a chat completion."""
    status, _, body = server.post(CHAT, {
        "messages": [{"role": "user", "content": [*content]}], "max_tokens": 3, **fields})
    return status, body


def test_images_of_openai_s_client_take_their_tokens(server):
    counts = []
    for urls in ((), (data_url(RED),), (data_url(RED), data_url(BLUE))):
        answer = server.client.chat.completions.create(
            model="tiny", max_tokens=3, messages=[{"role": "user", "content": parts(*urls)}])
        assert answer.usage.completion_tokens == 3
        counts.append(answer.usage.prompt_tokens)
    assert np.diff(counts).tolist() == [ROWS, ROWS]
    chunks = list(server.client.chat.completions.create(
        model="tiny", max_tokens=3, stream=True, stream_options={"include_usage": True},
        messages=[{"role": "user", "content": parts(data_url(RED))}]))
    assert chunks[-1].usage.prompt_tokens == counts[1]
    # Without an object, and with a detail.
    url = data_url(RED)
    for image in (url, {"url": url, "detail": "low"}):
        status, body = ask(server, {"type": "image_url", "image_url": image},
                           {"type": "text", "text": "what is it?"})
        assert (status, body["usage"]["prompt_tokens"]) == (200, counts[1])


def test_answers_depend_on_the_image(server):
    """An image's rows are cached for itself alone, and not for another with the same tokens."""
    scores = []
    for data in (RED, BLUE, RED):
        status, body = ask(server, *parts(data_url(data)), logprobs=True)
        assert status == 200
        scores.append([own["logprob"] for own in body["choices"][0]["logprobs"]["content"]])
    assert scores[0] == pytest.approx(scores[2], abs=1e-5)
    assert np.abs(np.subtract(scores[0], scores[1])).max() > 1e-3


def test_prompt_logprobs_have_no_values_at_images(server):
    status, body = ask(server, *parts(data_url(RED)), prompt_logprobs=1)
    found = body["prompt_logprobs"]
    assert status == 200 and len(found) == body["usage"]["prompt_tokens"]
    assert [own is None for own in found].count(True) == 1 + ROWS


def test_anthropic_s_client_sends_an_image(server):
    anthropic = pytest.importorskip("anthropic", reason="needs the extra test-serve")
    client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    data = base64.b64encode(RED).decode()
    answer = client.messages.create(model="tiny", max_tokens=3, messages=[{
        "role": "user", "content": [
            image_block(type="base64", media_type="image/png", data=data),
            {"type": "text", "text": "what is it?"}]}])
    assert answer.usage.output_tokens == 3


def test_responses_keep_their_images(server):
    content = [{"type": "input_text", "text": "what?"},
               {"type": "input_image", "image_url": data_url(RED), "detail": "auto"}]
    first = server.client.responses.create(model="tiny", max_output_tokens=3, input=[
        {"role": "user", "content": content}])
    plain = server.client.responses.create(model="tiny", max_output_tokens=3, input="what?")
    assert first.usage.input_tokens == plain.usage.input_tokens + ROWS
    second = server.client.responses.create(model="tiny", max_output_tokens=3, input="and?",
                                            previous_response_id=first.id)
    assert second.usage.input_tokens > first.usage.input_tokens + 3
    status, _, body = server.post("/v1/responses", {"input": [{"role": "user", "content": [
        {"type": "input_image", "file_id": "file-1"}]}]})
    assert status == 400 and body["error"]["param"] == "input"
    assert "input_image of part 0 of message 0" in body["error"]["message"]


def message(*blocks, **fields):
    return {"model": "tiny", "max_tokens": 3, "messages": [
        {"role": "user", "content": [*blocks, {"type": "text", "text": "what?"}]}], **fields}


def image_block(**source):
    return {"type": "image", "source": source}


def test_messages_take_images(server, media_dir):
    in_base64 = image_block(type="base64", media_type="image/png",
                            data=base64.b64encode(RED).decode())
    by_url = image_block(type="url", url=f"file://{media_dir}/red.png")
    plain, with_image = (server.post("/v1/messages/count_tokens", message(*blocks))[2][
        "input_tokens"] for blocks in ((), (in_base64,)))
    assert with_image == plain + ROWS
    for block in (in_base64, by_url):
        status, _, body = server.post("/v1/messages", message(block))
        usage = body["usage"]
        assert status == 200
        assert usage["input_tokens"] + usage["cache_read_input_tokens"] == with_image
    result = {"type": "tool_result", "tool_use_id": "t", "content": [in_base64]}
    assert server.post("/v1/messages", message(result))[0] == 200
    status, _, body = server.post("/v1/messages", message(image_block(type="file", file_id="f")))
    assert status == 400 and "neither base64 with media_type and data, nor a url" in \
        body["error"]["message"]


def test_tokenize_shows_the_tokens_of_images(server):
    status, _, body = server.post("/tokenize", {
        "messages": [{"role": "user", "content": parts(data_url(RED))}],
        "return_token_strs": True})
    assert status == 200 and body["token_strs"].count("<image>") == ROWS


def test_models_say_what_they_take(server):
    assert server.client.models.list().data[0].input_modalities == ["text", "image"]


@pytest.mark.parametrize("name", BAD_PICTURES)
def test_bad_pictures_are_refused_by_name(server, name):
    data, reason = BAD_PICTURES[name]
    status, body = ask(server, *parts(data_url(RED), data_url(data)))
    error = body["error"]
    assert status == 400 and error["param"] == "messages" and error["type"] == \
        "invalid_request_error"
    assert "image 1" in error["message"] or "item 1" in error["message"]
    assert reason in error["message"]


def test_every_endpoint_refuses_bad_pictures(server):
    bad = BAD_PICTURES["none"][0]
    block = image_block(type="base64", media_type="image/png", data=base64.b64encode(bad).decode())
    for path, body, param in (
            ("/v1/responses", {"input": [{"role": "user", "content": [
                {"type": "input_image", "image_url": data_url(bad)}]}]}, "input"),
            ("/v1/messages", message(block), None),
            ("/v1/messages/count_tokens", message(block), None),
            ("/tokenize", {"messages": [{"role": "user", "content": parts(data_url(bad))}]},
             "messages")):
        status, _, answer = server.post(path, body)
        assert status == 400 and "image 0: 10 bytes are no image" in answer["error"]["message"]
        assert param is None or answer["error"]["param"] == param


def test_a_bad_picture_leaves_other_requests_alone(server):
    stream = server.client.chat.completions.create(
        model="tiny", max_tokens=100, stream=True, extra_body={"ignore_eos": True},
        stream_options={"include_usage": True},
        messages=[{"role": "user", "content": parts(text="hello")}])
    next(iter(stream))
    for data, _ in BAD_PICTURES.values():
        assert ask(server, *parts(data_url(data)))[0] == 400
    assert [*stream][-1].usage.completion_tokens == 100
    assert ask(server, *parts(data_url(RED)))[0] == 200


def test_unusual_pictures_are_taken(server):
    for data in UNUSUAL_PICTURES.values():
        assert ask(server, *parts(data_url(data)))[0] == 200


def test_a_request_may_have_only_so_many_and_so_large_images(server):
    status, body = ask(server, *parts(*[data_url(RED)] * 4))
    assert status == 400 and "has 4 images, this server takes at most 3 in a prompt" in \
        body["error"]["message"]
    noise = encoded(Image.effect_noise((500, 500), 90))
    assert 170_000 < len(noise) < 500_000
    status, body = ask(server, *parts(*[data_url(noise)] * 3))
    assert status == 400 and "bytes, the limit is 500000; give fewer" in body["error"]["message"]


def test_images_of_all_requests_take_a_bounded_memory(server):
    """An image of this model takes 9,408 bytes; 20,000 are allowed."""
    stream = server.client.chat.completions.create(
        model="tiny", max_tokens=400, stream=True, extra_body={"ignore_eos": True},
        messages=[{"role": "user", "content": parts(data_url(RED))}])
    next(iter(stream))
    status, headers, body = server.post(CHAT, {"max_tokens": 3, "messages": [
        {"role": "user", "content": parts(data_url(RED), data_url(BLUE))}]})
    assert (status, headers["Retry-After"]) == (429, "1")
    assert "take 18816 bytes once preprocessed, those of other requests take 9408 of at most " \
        "20000" in body["error"]["message"]
    assert ask(server, *parts())[0] == 200
    stream.close()
    until(lambda: '"server_load":0' in server.get("/load"))
    assert ask(server, *parts(data_url(RED), data_url(BLUE)))[0] == 200


def test_placeholders_in_text_are_no_images(server):
    status, body = ask(server, *parts(data_url(RED), text="<image> and more"))
    assert status == 400 and body["error"]["param"] == "messages"
    assert "2 placeholders '<image>' for 1 images" in body["error"]["message"]


def test_what_the_model_does_not_take_is_refused(server):
    sound = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
    for part, reason in (
            (sound, "message 0 has audio, and this model takes text and images only"),
            ({"type": "image", "image": "/etc/passwd"}, "a part of type 'image'"),
            ({"type": "video_url", "video_url": {"url": "data:"}}, "'video_url'"),
            ({"type": "image_url"}, 'give {"url": "…"}'),
            ({"type": "image_url", "image_url": {"url": 5}}, 'give {"url": "…"}')):
        status, body = ask(server, part)
        assert status == 400 and reason in body["error"]["message"]
        assert body["error"]["param"] == "messages"


def test_a_model_without_images_says_so(request):
    text_server = request.getfixturevalue("tool_server")
    status, body = ask(text_server, *parts(data_url(RED)))
    assert status == 400
    assert "message 0 has an image, and this model takes text only" in body["error"]["message"]
    assert text_server.client.models.list().data[0].input_modalities == ["text"]


class Site(http.server.BaseHTTPRequestHandler):
    """Pictures, redirects and answers that never end."""

    held = threading.Semaphore(0)  # released when a client of /slow has gone

    def do_GET(self):
        targets = {"/away": "http://169.254.169.254/latest/meta-data", "/file": "file:///etc/passwd",
                   "/round": "/round", "/moved": "/red.png",
                   "/other": f"http://[::1]:{self.server.server_port}/red.png"}
        self.send_response(302 if self.path in targets else 200 if self.path in (
            "/red.png", "/large", "/slow") else 404)
        if self.path in targets:
            self.send_header("Location", targets[self.path])
        self.end_headers()
        if self.path == "/red.png":
            self.wfile.write(RED)
        elif self.path == "/large":
            self.wfile.write(bytes(600_000))
        elif self.path == "/slow":
            try:
                while True:
                    self.wfile.write(b"x")
                    time.sleep(0.02)
            except OSError:
                Site.held.release()

    def log_message(self, *arguments):
        pass


@pytest.fixture(scope="module")
def site():
    own = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Site)
    threading.Thread(target=own.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{own.server_port}"
    own.shutdown()
    own.server_close()


def test_allowed_urls_are_read(server, site, media_dir):
    for url in (f"{site}/red.png", f"{site}/moved", f"file://{media_dir}/red.png"):
        assert ask(server, *parts(url))[0] == 200


BAD_URLS = {
    "/away": "does not allow URLs of the host '169.254.169.254'", "/file": "is no http URL",
    "/round": "redirects more than 3 times", "/other": "does not allow URLs of the host '::1'",
    "/nothing": "answers 404", "/large": "more than 500000 bytes", "/slow": "within 2 s",
    "http://example.com/a.png": "does not allow URLs of the host 'example.com'",
    "http://127.0.0.1:1/a.png": "cannot be read", "file:///etc/passwd": "is no file below",
    "ftp://127.0.0.1/a": "has the scheme 'ftp'", "/etc/passwd": "has the scheme ''",
    "http://localhost@example.com/": "host 'example.com'", "http://127.0.0.1:x/": "is no URL",
    "data:,a": "begins with", "data:image/png;base64,*": "invalid base64"}


@pytest.mark.parametrize("url", BAD_URLS)
def test_other_urls_are_refused(server, site, url):
    own = url if not url.startswith("/") or url == "/etc/passwd" else site + url
    status, body = ask(server, *parts(own))
    assert status == 400 and body["error"]["param"] == "messages"
    assert BAD_URLS[url] in body["error"]["message"]


def test_others_are_answered_while_urls_are_slow(server, site):
    Site.held = threading.Semaphore(0)
    slow = [threading.Thread(target=ask, args=(server, *parts(f"{site}/slow"))) for _ in range(20)]
    for own in slow:
        own.start()
    started = time.monotonic()
    assert ask(server, *parts(data_url(RED)))[0] == 200
    assert ask(server, *parts())[0] == 200
    assert time.monotonic() - started < 2  # the slow ones take as long
    for own in slow:
        own.join()


def test_a_client_that_disconnects_ends_the_fetch(server, site):
    Site.held = threading.Semaphore(0)
    body = str({"messages": [{"role": "user", "content": parts(f"{site}/slow")}]}).replace(
        "'", '"').encode()
    own = socket.create_connection(("127.0.0.1", server.port))
    own.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
                b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    time.sleep(0.3)
    own.close()
    assert Site.held.acquire(timeout=1.2)  # before media_timeout
    until(lambda: '"server_load":0' in server.get("/load"))
