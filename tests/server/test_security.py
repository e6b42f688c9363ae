"""Chat templates and requests cannot extract secrets or paths from a server."""

import hmac
import json
import os
import re
import shutil
import site
import socket
import urllib.request
from pathlib import Path

import pytest
from server_process import serving

from llmc.artifacts.manifest import read_manifest
from llmc.server.errors import ApiError
from llmc.server.limits import ServerLimits

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "{{ 7 * 7 }}{% include '/etc/passwd' %}"}],
        "max_tokens": 1}
KEY = {"authorization": "Bearer key-1"}
# An absolute path of the host; the server's URL paths do not match.
OF_THE_HOST = re.compile(rf"(?<![\w.<])/(?:{'|'.join(map(re.escape, os.listdir('/')))})(?![\w-])")


@pytest.fixture(scope="module")
def secret(case_tp1, tmp_path_factory):
    """A server with a case directory that tests may damage, and the directory."""
    case = tmp_path_factory.mktemp("hidden") / "secret" / "case"
    shutil.copytree(case_tp1, case)
    with serving(case, "--api_key", "key-1", "--max_request_bytes", 20_000,
                 "--max_batch_size", 1, "--max_waiting", 0) as own:
        yield own, case


@pytest.fixture
def templated(secret):
    """Factory by chat template: the response to a chat."""
    server, case = secret
    path = case / read_manifest(case).tokenizer.chat_template
    before = path.read_text()

    def ask(template):
        path.write_text(template)
        return server.post(CHAT, BODY, **KEY)

    yield ask
    path.write_text(before)


def assert_hides(text, case):
    """Assert that a text has no paths of the host and no Python internals."""
    for own in (case, case.parent, "secret", Path.home(), *site.getsitepackages(), "Traceback",
                "root:x:0"):
        assert str(own) not in text, text
    assert not OF_THE_HOST.search(text), text


GLOBALS = "__init__.__globals__"


@pytest.mark.parametrize(("template", "reason"), [
    ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "access to attribute '__class__'"),
    ("{{ ''['__class__']['__mro__'] }}", "access to attribute '__class__'"),
    ("{{ (''|attr('__class__')).x }}", "access to attribute '__class__'"),
    ("{{ ['']|map(attribute='__class__.__mro__')|list }}", "access to attribute '__class__'"),
    (f"{{{{ cycler.{GLOBALS}.os.popen('id').read() }}}}", "access to attribute '__init__'"),
    (f"{{{{ joiner.{GLOBALS} }}}}", "access to attribute '__init__'"),
    (f"{{{{ namespace.{GLOBALS} }}}}", "access to attribute '__init__'"),
    ("{{ lipsum.__globals__.os }}", "access to attribute '__globals__'"),
    ("{{ raise_exception.__globals__.json }}", "access to attribute '__globals__'"),
    ("{{ strftime_now.__self__.sleep(9) }}", "access to attribute '__self__'"),
    ("{% macro m() %}{% endmacro %}{{ m._func.__globals__ }}", "access to attribute '_func'"),
    ("{{ (messages|map('upper')).gi_frame.f_globals }}", "access to attribute 'gi_frame'"),
    ("{{ self._TemplateReference__context.eval_ctx }}", "access to attribute '_Templ"),
    (f"{{{{ '{{0.{GLOBALS}}}'.format(cycler) }}}}", "access to attribute '__init__'"),
    (f"{{% set f = '{{0.{GLOBALS}}}'.format %}}{{{{ f(cycler) }}}}", "access to attribute"),
    (f"{{{{ ('{{0.{GLOBALS}}}'|attr('format'))(cycler) }}}}", "access to attribute"),
    (f"{{{{ '{{c.{GLOBALS}}}'.format_map({{'c': cycler}}) }}}}", "access to attribute"),
    ("{{ messages.append(1) }}", "access to attribute 'append'"),
    ("{{ messages[0].update(role='x') }}", "access to attribute 'update'"),
    ("{% include '/etc/passwd' %}", "no loader for this environment"),
    ("{% import 'os' as os %}{{ os.environ }}", "no loader for this environment"),
    ("{% extends '/etc/passwd' %}", "no loader for this environment"),
    ("{% for i in range(10 ** 9) %}{% endfor %}", "Range too big"),
    ("{% set r = range(99999) %}{% for a in r %}{% for b in r %}{% endfor %}{% endfor %}",
     "it takes more than 2 s of CPU time"),
    ("{% for a in messages recursive %}{{ loop(messages) }}{% endfor %}", "RecursionError"),
    ("{{ raise_exception('no') }}", "(no)"),
    ("{{ messages[0].content.hex.x }}", "has no attribute 'hex'"),
    ("{{ 10 ** (10 ** 9) }}", "it takes more than 2 s of CPU time"),
    ("{{ 'a' * 10 ** 10 }}", "it takes more than 256 MiB of memory"),
    ("{{ '%9999999999d' % 1 }}", "it takes more than 256 MiB of memory"),
    ("{{ messages[0].content.center(10 ** 10) }}", "it takes more than 256 MiB of memory"),
    ("{% set n = namespace(s='a') %}{% for i in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
     "it takes more than 256 MiB of memory"),
    ("{% macro m(n) %}{{ m(n) }}{{ m(n) }}{% endmacro %}{{ m(1) }}", "RecursionError"),
    ("{{ 1 / 0 }}", "ZeroDivisionError"),
    ("{% for m in", "unexpected 'end of template'"), ("{{ 'a' * (10 ** 30) }}", "OverflowError")])
def test_a_chat_template_stays_in_its_sandbox(secret, templated, template, reason):
    _, case = secret
    status, headers, answer = templated(template)
    assert status == 400 and reason in answer["error"]["message"], answer
    assert_hides(json.dumps(answer) + str(headers), case)
    assert templated("{{ messages[0].content }}")[0] == 200


def test_client_text_is_not_evaluated_as_a_template(secret, templated):
    server, _ = secret
    text = BODY["messages"][0]["content"]
    templated("{{ messages[0].content }}")
    (told, plain) = (server.post("/tokenize", own, **KEY)[2]["tokens"] for own in (
        {"messages": BODY["messages"]}, {"prompt": text, "add_special_tokens": False}))
    assert told == plain
    status, _, answer = server.post(CHAT, BODY | {"chat_template": "{{ 1 }}"}, **KEY)
    assert status == 400 and "chat_template is not supported" in answer["error"]["message"]
    # Variables of the template, except ones that would shadow built-in ones.
    status, _, answer = server.post("/tokenize", {
        **BODY, "chat_template_kwargs": {"messages": [], "raise_exception": "x"}}, **KEY)
    assert status == 200 and answer["tokens"] == plain


@pytest.mark.parametrize("verdict", [False, True])
@pytest.mark.parametrize("given", ["key-1", "key-2", "k", "", "key-1key-1", "kéy-1", "ключ"])
@pytest.mark.parametrize("key", ["key-1", "kéy-1"])
def test_keys_are_compared_in_constant_time(monkeypatch, key, given, verdict):
    compared = []
    monkeypatch.setattr(hmac, "compare_digest", lambda *both: compared.append(both) or verdict)
    check = ServerLimits(api_keys={"1": key}).check_key
    if verdict:
        check("/tokenize", b"Bearer " + given.encode())
    else:
        with pytest.raises(ApiError, match="the API key is missing or wrong"):
            check("/tokenize", b"Bearer " + given.encode())
    assert compared == [(given.encode(), key.encode())]  # bytes, not necessarily ASCII


def test_a_key_may_have_any_bytes():
    for key in ("key-1", "kéy-1", os.fsdecode(b"key-\xff")):
        check = ServerLimits(api_keys={"1": key}).check_key
        check("/tokenize", b"Bearer " + os.fsencode(key))
        for wrong in (b"", b"Bearer", b"Bearer key", b"Bearer \xff", b"Basic " + os.fsencode(key)):
            with pytest.raises(ApiError):
                check("/tokenize", wrong)


def raw(server, request):
    """Send bytes; return the response."""
    with socket.create_connection(("127.0.0.1", server.port), 10) as own:
        own.sendall(request)
        own.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: own.recv(65536), b"")).decode("utf-8", "replace")


def test_no_answer_names_a_path_of_the_host(secret):
    server, case = secret
    own = case / read_manifest(case).tokenizer.chat_template
    seen = {}

    def ask(path, body, **headers):
        status, told, answer = server.post(path, body, **KEY | headers)
        assert_hides(json.dumps(answer) + str(told), case)
        seen.setdefault(status, []).append(answer)

    for path in ("/", "/health", "/version", "/metrics", "/openapi.json"):
        with urllib.request.urlopen(server.url + path) as answer:
            assert_hides(answer.read().decode() + str(answer.headers), case)
    for name in ("", "/tiny", "/other", "/../../etc/passwd"):
        request = urllib.request.Request(f"{server.url}/v1/models{name}", headers=KEY)
        try:
            told = urllib.request.urlopen(request).read().decode()
        except urllib.error.HTTPError as error:
            told = error.read().decode().replace(name, "")  # text of the client
            seen.setdefault(error.code, []).append(told)
        assert_hides(told, case)
    completion = {"prompt": [5], "max_tokens": 1}
    for path, body in (("/v1/completions", b"{"), ("/v1/completions", {"prompt": [9999]}),
                       ("/v1/completions", completion | {"model": "other"}),
                       ("/v1/completions", completion | {"echo": True}),
                       ("/v1/completions", completion | {"guided_regex": "("}),
                       ("/v1/completions", completion | {"guided_grammar": "%import x\nstart: ("}),
                       ("/v1/completions", completion | {"guided_json": {
                           "$ref": "http://127.0.0.1:9/schema"}}),
                       ("/v1/responses", {"input": "a", "previous_response_id": "x"}),
                       ("/detokenize", {"tokens": [10 ** 9]}), ("/tokenize", {}),
                       ("/v1/completions", b" " * 30_000), ("/nowhere", {}), ("/health", {})):
        ask(path, body)
    ask("/tokenize", {"prompt": "a"}, **{"content-type": "text/plain"})
    ask("/tokenize", {"prompt": "a"}, authorization="Bearer no")
    long = {"prompt": [5], "max_tokens": 60, "n": 128, "ignore_eos": True, "stream": True}
    busy = urllib.request.Request(f"{server.url}/v1/completions", json.dumps(long).encode(),
                                  {"content-type": "application/json", **KEY})
    with urllib.request.urlopen(busy) as stream:
        stream.readline()
        ask("/v1/completions", completion)
    for name in (own.name, "tokenizer_config.json"):
        own.with_name(name).rename(own.with_name("away"))
        own.with_name(name).mkdir()
        ask(CHAT, BODY)
        own.with_name(name).rmdir()
        ask(CHAT, BODY)
        own.with_name("away").rename(own.with_name(name))
    for request in (b"\0\n\n", b"GET http://[ HTTP/1.1\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n",
                    b"POST /tokenize HTTP/1.1\r\nContent-Length: x\r\n\r\n",
                    b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n"):
        assert_hides(raw(server, request).replace("/" + "a" * 100_000, ""), case)
    assert {400, 401, 404, 405, 413, 415, 429} <= {*seen}, {*seen}
