"""The HTTP layer: access, request framing, and connection timeouts."""

import asyncio
import errno
import http.client
import json
import os
import re
import signal
import socket
import ssl
import subprocess
import threading
import time
import urllib.error
import urllib.request
from contextlib import ExitStack, suppress

import families
import pytest
from server_load import is_empty
from server_process import ask, serving, until

import llmc
from llmc.cli import main
from llmc.server import connection, serve
from llmc.server.access import Access
from llmc.server.app import Api
from llmc.server.limits import ServerLimits
from llmc.server.model import Model
from llmc.server.tls import tls_context

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
KEY = {"authorization": "Bearer key-1"}
LONG = {"prompt": [5, 6], "max_tokens": 60, "n": 128, "ignore_eos": True, "temperature": 1}
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
PAGE = "http://app.test:3000"


@pytest.fixture(scope="module")
def impatient(case_tp1):
    """A server with a key, short timeouts and an allowed origin."""
    with serving(case_tp1, "--api_key", "key-1", "--header_timeout", 1, "--write_timeout", 1,
                 "--allowed_origins", json.dumps([PAGE]), "--max_waiting", 400) as own:
        yield own


def asked(server, method, path, body=None, **headers):
    """Send a request with the given Host and Origin; return status, headers and text."""
    own = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    own.putrequest(method, path, skip_host="host" in headers)
    data = b"" if body is None else json.dumps(body).encode()
    for name, value in {"content-type": "application/json", "content-length": str(len(data)),
                        **headers}.items():
        own.putheader(name, value)
    own.endheaders(data)
    answer = own.getresponse()
    text = answer.read().decode()
    own.close()
    return answer.status, answer.headers, text


def error_of(text):
    return json.loads(text)["error"]


# Host and Origin.


@pytest.mark.parametrize(("host", "status"), [
    ("localhost", 200), ("LocalHost:9", 200), ("127.0.0.1", 200), ("127.0.0.1:8000", 200),
    ("[::1]", 200), ("[::1]:8000", 200), ("evil.test", 403), ("127.0.0.1.evil.test", 403),
    ("localhost.evil.test:80", 403), ("localhost@evil.test", 403), ("10.0.0.1", 403), ("", 403),
    ("localhost:80:80", 403)])
def test_at_a_loopback_address_only_loopback_names_are_hosts(server, host, status):
    for method, path, body in (("GET", "/", None), ("POST", CHAT, BODY)):
        got, _, text = asked(server, method, path, body, host=host)
        assert got == status, text
        if status == 403:
            assert error_of(text)["code"] == "host_not_allowed"


def test_beyond_loopback_every_host_is_accepted_unless_an_option_names_some():
    for address, given, expected in (("127.0.0.1", None, ()), ("0.0.0.0", None, ("*",)),
                                     ("0.0.0.0", ["a.test"], ["a.test"]),
                                     ("127.0.0.1", ["*"], ["*"])):
        with socket.create_server((address, 0)) as bound:
            assert serve._for_address(Access(given), bound).allowed_hosts == expected


@pytest.mark.parametrize(("origin", "status"), [
    ("http://127.0.0.1:{port}", 200), ("https://127.0.0.1:{port}", 200), (None, 200),
    ("http://127.0.0.1:1", 403), ("http://localhost:{port}", 403), ("http://evil.test", 403),
    ("null", 403), ("file://127.0.0.1:{port}", 403)])
def test_a_page_of_another_origin_cannot_post(server, origin, status):
    headers = {} if origin is None else {"origin": origin.format(port=server.port)}
    got, _, text = asked(server, "POST", CHAT, BODY, **headers)
    assert got == status, text
    if status == 403:
        assert error_of(text)["code"] == "origin_not_allowed"
    assert asked(server, "GET", "/version", **headers)[0] == 200


def preflight(server, origin, **headers):
    return asked(server, "OPTIONS", CHAT, origin=origin, access_control_request_method="POST",
                 access_control_request_headers="content-type, authorization", **headers)


def test_pages_of_allowed_origins_are_served_and_their_preflights_need_no_key(impatient):
    status, headers, _ = preflight(impatient, PAGE)
    assert status == 200 and headers["access-control-allow-origin"] == PAGE
    assert "POST" in headers["access-control-allow-methods"]
    assert "authorization" in headers["access-control-allow-headers"]
    assert headers["access-control-allow-credentials"] is None
    for key, expected in ((KEY, 200), ({}, 401)):  # a page can read the reason
        status, headers, _ = asked(impatient, "POST", CHAT, BODY, origin=PAGE, **key)
        assert status == expected and headers["access-control-allow-origin"] == PAGE
    status, headers, _ = preflight(impatient, "http://evil.test")
    assert status == 400 and headers["access-control-allow-origin"] is None
    assert asked(impatient, "POST", CHAT, BODY, origin="http://evil.test", **KEY)[0] == 403
    assert preflight(impatient, PAGE, host="evil.test")[0] == 403


def test_without_allowed_origins_there_is_no_cors(server):
    status, headers, text = preflight(server, PAGE)
    assert status == 405 and headers["access-control-allow-origin"] is None, text


@pytest.mark.parametrize(("options", "said"), [
    (("--allowed_origins", "http://a.test/"), "allowed_origins has 'http://a.test/'"),
    (("--allowed_origins", "a.test"), "give origins such as http://localhost:3000"),
    (("--allowed_methods", "[1]"), "--allowed_methods is '[1]', expected a list"),
    (("--allowed_hosts", "[a"), "--allowed_hosts is '[a', expected a list"),
    (("--header_timeout", "0"), "header_timeout is 0.0, expected more"),
    (("--port", "65536"), "--port 65536 is not from 0 to 65535"),
    (("--ssl_keyfile", "none.pem"), "without --ssl_certfile"),
    (("--ssl_certfile", "none.pem"), "'none.pem' cannot be used (No such file or directory)"),
    (("--ssl_certfile", __file__), "give a PEM certificate and its unencrypted key"),
    (("--ssl_certfile", "a", "--ssl_cert_reqs", "2"), "requires --ssl_ca_certs")])
def test_invalid_options_are_refused_before_the_model_is_loaded(capsys, options, said):
    with pytest.raises(SystemExit) as caught:
        main(["serve", "nowhere", *options])
    assert caught.value.code == 2
    assert said in capsys.readouterr().err


def test_lists_are_json_or_have_commas(monkeypatch):
    seen = []
    monkeypatch.setattr(serve, "serve", lambda case_dir, **given: seen.append(given["access"]))
    for hosts, origins in (("a, b", PAGE), ('["a", "b"]', f'["{PAGE}"]')):
        main(["serve", ".", "--allowed-hosts", hosts, "--allowed-origins", origins],
             standalone_mode=False)
    assert seen == [Access(["a", "b"], [PAGE], ["*"], ["*"], False)] * 2
    main(["serve", "."], standalone_mode=False)
    assert seen[2] == Access(None, [], ["*"], ["*"], False)


# Framing.


def raw(server, *parts):
    """Send bytes; return the response until the server closes."""
    with socket.create_connection(("127.0.0.1", server.port), 30) as own:
        for part in parts:
            own.sendall(part)
        return b"".join(iter(lambda: own.recv(65536), b""))


def head(*lines, method="POST", version="1.1"):
    return "\r\n".join([f"{method} /tokenize HTTP/{version}", "Host: localhost",
                        "Content-Type: application/json", *lines, "", ""]).encode()


@pytest.mark.parametrize("method", ["POST", "HEAD"])
@pytest.mark.parametrize(("lines", "version", "said"), [
    (["Content-Length: 5", "Transfer-Encoding: chunked"], "1.1", "both Content-Length and"),
    (["Transfer-Encoding: chunked", "content-length:0"], "1.1", "both Content-Length and"),
    (["Content-Length: 5", "Content-Length: 5"], "1.1", "several Content-Length values"),
    (["Content-Length: 5", "Content-Length: 6"], "1.1", "not valid HTTP/1.1"),
    (["Content-Length: 5, 5"], "1.1", "several Content-Length values"),
    (["Content-Length: +5"], "1.1", "not valid HTTP/1.1"),
    (["X-Folded: a", " b", "Content-Length: 0"], "1.1", "obs-fold"),
    (["X-Folded: a", "\tContent-Length: 0"], "1.1", "obs-fold"),
    (["Transfer-Encoding: chunked"], "1.0", "an HTTP/1.0 request has"),
    (["Transfer-Encoding: gzip, chunked"], "1.1", "not valid HTTP/1.1"),
    (["X : a"], "1.1", "not valid HTTP/1.1")])
def test_ambiguous_request_heads_are_refused(server, method, lines, version, said):
    told = raw(server, head(*lines, method=method, version=version)
               + b"0\r\n\r\nGET /version HTTP/1.1\r\nHost: localhost\r\n\r\n")
    status, _, text = told.partition(b"\r\n\r\n")
    assert status.startswith(b"HTTP/1.1 400 ") and b"connection: close" in status, told
    assert len(re.findall(rb"HTTP/1.1 \d", told)) == 1  # the rest is not a request
    assert said in error_of(text)["message"]


def test_an_ambiguous_head_is_refused_also_in_pieces_and_after_another_request(server):
    sound = head("Content-Length: 15") + b'{"prompt": "a"}'
    bad = head("Content-Length: 5", "Transfer-Encoding: chunked")
    told = raw(server, sound, *(bad[place:place + 1] for place in range(len(bad))))
    assert re.findall(rb"HTTP/1.1 (\d+) ", told) == [b"200", b"400"]
    assert re.findall(rb"HTTP/1.1 (\d+) ", raw(server, sound + bad)) == [b"200", b"400"]
    chunks = b'f\r\n{"prompt": "a"}\r\n0\r\n\r\n'
    told = raw(server, head("Transfer-Encoding: chunked", "Connection: close") + chunks)
    assert told.startswith(b"HTTP/1.1 200 ")


def test_a_broken_chunk_in_the_middle_of_a_body_is_refused(server):
    told = raw(server, head("Transfer-Encoding: chunked"), b"1\r\n{\r\n", b"zz\r\n")
    assert re.findall(rb"HTTP/1.1 (\d+) ", told) == [b"400"]
    assert b"not valid HTTP/1.1" in told


# Connections that end.


def test_connections_that_send_no_request_are_closed(impatient):
    """All of 200 connections; another client is served meanwhile."""
    sound = head("Content-Length: 15", "Authorization: Bearer key-1") + b'{"prompt": "a"}'
    half = head("X-Never: ends")[:-2]
    kinds = ((b"",), (half,), (sound, half), (head("Content-Length: 1000000"), b"{"))
    with ExitStack() as stack:
        idle = []
        for index in range(200):
            own = stack.enter_context(socket.create_connection(("127.0.0.1", impatient.port), 30))
            first, *then = kinds[index % 4]
            own.sendall(first)
            if then:  # keep-alive after a response, also with an unread body
                assert own.recv(65536).startswith(b"HTTP/1.1 ")
                own.sendall(then[0])
            idle.append(own)
        ended = threading.Event()

        def trickle():
            """Send some of them one byte at a time."""
            while not ended.wait(0.3):
                for index, own in enumerate(idle):
                    try:
                        own.send(b"a" if index % 4 else b"")
                    except OSError:  # closed already
                        continue

        sender = threading.Thread(target=trickle)
        sender.start()
        try:
            assert impatient.post("/tokenize", {"prompt": "a"}, **KEY)[0] == 200
            for own in idle:
                with suppress(ConnectionResetError):
                    while own.recv(65536):
                        pass
        finally:
            ended.set()
            sender.join()


def stream_without_reading(server, body):
    """Open a connection with a small buffer and request a stream."""
    own = socket.socket()
    own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    own.connect(("127.0.0.1", server.port))
    data = json.dumps(body).encode()
    own.sendall(head(f"Content-Length: {len(data)}", "Authorization: Bearer key-1").replace(
        b"/tokenize", b"/v1/completions") + data)
    return own


def descriptors(server):
    return len(os.listdir(f"/proc/{server.process.pid}/fd"))


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_does_not_read_is_disconnected(impatient, stream):
    """The output exceeds the system's buffers; the request limit of half an hour is not reached."""
    before, seen = descriptors(impatient), len(impatient.log)
    body = LONG | {"n": 64, "logprobs": 20, "stream": stream}
    with stream_without_reading(impatient, body):
        until(lambda: not is_empty(impatient))
        until(lambda: is_empty(impatient) and descriptors(impatient) <= before, 60)
        until(lambda: any(f'"status": {499 if stream else 200}' in line
                          for line in impatient.log[seen:]))


def test_256_simultaneous_disconnects_leak_nothing(impatient):
    with ExitStack() as stack:
        for _ in range(256):
            stack.enter_context(stream_without_reading(impatient, LONG | {"stream": True, "n": 2}))
        until(lambda: json.loads(impatient.get("/load"))["server_load"] > 200, 30)
    until(lambda: is_empty(impatient))
    assert json.loads(impatient.get("/load")) == {"server_load": 0}


def test_an_abort_shows_in_the_gauges_while_a_step_still_runs(case_tp1, monkeypatch):
    async def run():
        async with llmc.AsyncLLM(case_tp1, max_batch_size=4) as llm:
            rank, = families.ranks(llm)
            compute = rank.compute
            hold, running, go_on = threading.Event(), threading.Event(), threading.Event()

            def slow(step):
                time.sleep(0.02)
                if hold.is_set():
                    running.set()
                    assert go_on.wait(30)
                return compute(step)

            monkeypatch.setattr(rank, "compute", slow)
            params = llmc.SamplingParams(max_tokens=50, ignore_eos=True)

            async def client(number):
                async for _ in llm.generate([5, 6, number], params):
                    pass

            clients = [asyncio.create_task(client(number)) for number in range(7, 47)]
            while llm.metrics()["waiting"] != 36:
                await asyncio.sleep(0.01)
            hold.set()
            await asyncio.to_thread(running.wait, 30)
            assert llm.metrics()["running"] == 4
            for own in clients[1:]:
                own.cancel()
            await asyncio.wait(clients[1:])
            now = llm.metrics()
            assert (now["running"], now["waiting"]) == (1, 0)
            assert 0 < now["cache_usage"] <= 1 / 4 * 64 / 16  # blocks of one sequence
            go_on.set()
            await clients[0]
            assert llm.metrics()["cache_usage"] == 0

    asyncio.run(run())


@pytest.fixture(scope="module")
def scarce(case_tp1):
    """A server limited to 64 open files, with a short drain time after SIGTERM."""
    with serving(case_tp1, "--max_batch_size", 1, "--drain_timeout", 1, "--allowed_hosts",
                 "chat.test", descriptors=64) as own:
        yield own


def test_without_free_descriptors_connections_wait_and_the_log_stays_short(scarce):
    with ExitStack() as stack:
        before, started = len(scarce.log), time.monotonic()
        for _ in range(100):
            stack.enter_context(socket.create_connection(("127.0.0.1", scarce.port), 30))
        until(lambda: any("connections are open" in line for line in scarce.log))
        time.sleep(1)
        told = scarce.log[before:]
        assert 1 <= len(told) <= time.monotonic() - started + 1 and "exception" not in "".join(told)
    assert json.loads(scarce.get("/version"))["version"]
    assert scarce.post(CHAT, BODY)[0] == 200
    for host, status in (("chat.test", 200), ("CHAT.test:99", 200), ("localhost", 200),
                         ("evil.test", 403)):
        assert asked(scarce, "GET", "/version", host=host)[0] == status


def test_failed_accepts_are_retried(monkeypatch):
    monkeypatch.setattr(connection, "_RETRY", 0.01)
    warned = []
    monkeypatch.setattr(connection.LOGGER, "warning", lambda text, *given: warned.append(
        text % given))

    async def run():
        loop, left = asyncio.get_running_loop(), [OSError(errno.EMFILE, "Too many open files"),
                                                  ConnectionAbortedError()]
        accept, made = loop.sock_accept, []

        async def refusing(listening):
            if left:
                raise left.pop()
            return await accept(listening)

        class Protocol(asyncio.Protocol):
            def connection_made(self, transport):
                made.append(transport)
                transport.close()

        monkeypatch.setattr(loop, "sock_accept", refusing)
        bound = socket.socket()
        bound.bind(("127.0.0.1", 0))
        acceptor = connection.Acceptor(bound, lambda closed: Protocol(), None, 1, 8)
        _, writer = await asyncio.open_connection(*bound.getsockname())
        while not made:
            await asyncio.sleep(0.01)
        writer.close()
        await acceptor.close()

    asyncio.run(run())
    assert warned == ["accepting a connection failed (Too many open files); further ones wait"]


def test_terminated_requests_get_a_reason_and_sighup_is_ignored(scarce):
    """The last test of `scarce`, as it ends the server."""
    scarce.process.send_signal(signal.SIGHUP)
    request = urllib.request.Request(f"{scarce.url}/v1/completions",
                                     json.dumps(LONG | {"stream": True}).encode(),
                                     {"content-type": "application/json"})
    plain = []
    client = threading.Thread(target=lambda: plain.append(asked(scarce, "POST", "/v1/completions",
                                                                LONG)))
    with urllib.request.urlopen(request, timeout=30) as stream:
        client.start()
        until(lambda: json.loads(scarce.get("/load"))["server_load"] == 2)
        scarce.process.send_signal(signal.SIGTERM)
        last = stream.read().decode().strip().split("\n\n")[-1]
    client.join()
    assert error_of(last.split("data: ")[1])["type"] == "server_error"
    (status, _, text), = plain
    assert status == 503 and "the server is shutting down" in error_of(text)["message"]
    assert scarce.process.wait(20) == 0
    _, log = scarce.end()
    assert "Traceback" not in log and '"exception"' not in log


# Responses and logs.


NAME = "a" * 5_000_000


@pytest.mark.parametrize(("path", "body", "said"), [
    ("/v1/completions", {"prompt": "a", "model": NAME}, "this server has 'tiny'"),
    ("/v1/completions", {"prompt": "a", "logit_bias": {NAME: 1}}, "logit_bias.aaa"),
    ("/v1/completions", {"prompt": "a", "guided_regex": "(" + NAME[:1000]}, "be compiled"),
    ("/v1/completions", {"prompt": "a", "stop": [NAME], "use_beam_search": True, "n": 2},
     "does not go with beam_width"),
    (CHAT, BODY | {"tool_choice": {"function": {"name": NAME}}}, "which is not in tools"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": NAME}]}]},
     "this model takes text only"),
    ("/" + NAME[:10_000], {}, "unknown path /aaa")])
def test_client_text_is_truncated_in_errors(server, path, body, said):
    _, _, answer = server.post(path, body)
    message = answer["error"]["message"]
    assert said in message and len(message) <= 1001, message
    assert len(answer["error"]["param"] or "") <= 64


def test_client_text_is_truncated_in_the_log(server):
    before = len(server.log)
    body = {"prompt": [5], "max_tokens": 1, **{f"{NAME[:9000]}{index}": 1 for index in range(99)}}
    status, headers, _ = server.post("/v1/completions", body)
    assert status == 200
    assert asked(server, NAME[:9000], "/" + NAME[:5000])[0] in (404, 405)
    until(lambda: len(server.log) >= before + 2)
    assert all(len(line) < 3000 for line in server.log)
    own, = (line for line in server.log if headers["x-request-id"] in line)
    assert len(json.loads(own)["ignored"]) == 21 and json.loads(own)["ignored"][-1] == "…"


def test_a_prompt_beyond_the_context_has_openai_s_error(server):
    word = "zq" * 200
    for path, body, param, said in (
            (CHAT, {"messages": [{"role": "user", "content": word}]}, "messages",
             "your messages resulted in 4\\d\\d tokens"),
            ("/v1/completions", {"prompt": [5] * 65}, "prompt", "your prompt has 65 tokens"),
            ("/v1/completions", {"prompt": [[5], [5] * 65], "stream": True}, "prompt",
             "your prompt has 65 tokens"),
            ("/v1/responses", {"input": word}, "input", "your input has 4\\d\\d tokens")):
        status, _, answer = server.post(path, body)
        error = answer["error"]
        assert (status, error["code"], error["param"]) == (400, "context_length_exceeded", param)
        assert re.fullmatch(f"This model's maximum context length is 64 tokens. However, {said}. "
                            f"Please reduce the length of the {param}.", error["message"])
    assert server.post("/v1/completions", {"prompt": [5] * 64})[0] == 200


def test_a_completion_beyond_the_kv_cache_has_openai_s_error(secure):
    server, context = secure
    with pytest.raises(urllib.error.HTTPError) as caught:
        over_tls(server, context, "/v1/completions", {"prompt": [5] * 40, "max_tokens": 60})
    error = error_of(caught.value.read())
    assert error["code"] == "context_length_exceeded" and error["message"].startswith(
        "This model's maximum context length is 48 tokens. However, you requested 65 tokens (40 in "
        "the prompt, 25 in the completion).")
    over_tls(server, context, "/v1/completions", {"prompt": [5] * 40, "max_tokens": 9})


def test_vllm_s_paths_exist(server):
    listed = json.loads(server.get("/v1/models"))
    assert json.loads(server.get("/v1/models/")) == listed and listed["data"][0]["id"] == "tiny"
    assert [asked(server, method, "/ping")[0] for method in ("GET", "POST")] == [200, 200]
    assert json.loads(server.get("/load")) == {"server_load": 0}


def test_trace_ids_are_in_the_log_and_the_response(server):
    status, headers, _ = server.post("/tokenize", {"prompt": "a"}, traceparent=TRACE)
    assert status == 200 and headers["traceparent"] == TRACE
    until(lambda: any(f'"traceparent": "{TRACE}"' in line for line in server.log))
    for wrong in (TRACE[:-1], TRACE.upper(), TRACE + "-x"):
        _, headers, _ = server.post("/tokenize", {"prompt": "a"}, traceparent=wrong)
        assert headers["traceparent"] is None


def test_health_says_when_no_step_completes(case_tp1, monkeypatch):
    async def run():
        async with llmc.AsyncLLM(case_tp1) as llm:
            app = Api([Model(llm, "tiny")], ServerLimits(stall_timeout=0.3)).app()
            rank, = families.ranks(llm)
            compute, running, go_on = rank.compute, threading.Event(), threading.Event()

            def stuck(step):
                running.set()
                assert go_on.wait(30)
                return compute(step)

            monkeypatch.setattr(rank, "compute", stuck)
            await asyncio.sleep(0.5)  # an idle server is healthy
            assert (await ask(app, "/health"))[0] == 200

            async def client():
                return [piece async for piece in llm.generate([5, 6], llmc.SamplingParams(
                    max_tokens=2, ignore_eos=True))]

            task = asyncio.create_task(client())
            await asyncio.to_thread(running.wait, 30)
            until(lambda: llm.stalled_seconds() > 0.3)
            for path in ("/health", "/ping"):
                status, text = await ask(app, path)
                assert status == 503 and error_of(text)["code"] == "stalled"
                assert "no step has completed for" in error_of(text)["message"]
            go_on.set()
            assert len(await task) == 2
            until(lambda: llm.stalled_seconds() == 0)
            assert (await ask(app, "/health"))[0] == 200

    asyncio.run(run())


# TLS.


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """A self-signed certificate for localhost, and its key."""
    path = tmp_path_factory.mktemp("tls")
    cert, key = path / "cert.pem", path / "key.pem"
    subprocess.run(["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt",
                    "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", key, "-out", cert,
                    "-days", "2", "-subj", "/CN=localhost", "-addext",
                    "subjectAltName=IP:127.0.0.1"], check=True, capture_output=True)
    return cert, key


@pytest.fixture(scope="module")
def secure(case_tp1, certificate):
    """An HTTPS server that requires client certificates, and a client's SSL context."""
    cert, key = certificate
    with serving(case_tp1, "--ssl_certfile", cert, "--ssl_keyfile", key, "--ssl_ca_certs", cert,
                 "--ssl_cert_reqs", 2, "--header_timeout", 1, "--kv_cache_tokens", 48) as own:
        context = ssl.create_default_context(cafile=cert)
        context.load_cert_chain(cert, key)
        yield own, context


def over_tls(server, context, path, body=None):
    request = urllib.request.Request(server.url + path,
                                     None if body is None else json.dumps(body).encode(),
                                     {"content-type": "application/json", "origin": server.url})
    with urllib.request.urlopen(request, timeout=30, context=context) as answer:
        return answer.read().decode()


def test_https_is_served_to_clients_with_a_certificate(secure, certificate):
    server, context = secure
    assert server.url.startswith("https://")
    assert json.loads(over_tls(server, context, "/version"))["version"]
    assert json.loads(over_tls(server, context, CHAT, BODY))["choices"]
    anonymous = ssl.create_default_context(cafile=certificate[0])
    with pytest.raises(OSError):
        over_tls(server, anonymous, "/version")
    with socket.create_connection(("127.0.0.1", server.port), 30) as own:  # no handshake
        assert own.recv(100) == b""
    assert raw(server, b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n").count(b"200") == 0
    assert "exception" not in "".join(server.log)


def test_an_encrypted_key_is_refused_without_a_prompt(certificate, tmp_path):
    cert, key = certificate
    encrypted = tmp_path / "key.pem"
    subprocess.run(["openssl", "pkey", "-in", key, "-aes256", "-passout", "pass:word", "-out",
                    encrypted], check=True, capture_output=True)
    with pytest.raises(llmc.LlmcError, match="its unencrypted key"):
        tls_context(encrypted, cert, None, 0)
