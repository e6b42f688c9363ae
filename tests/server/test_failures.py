"""What clients see where the server, or its device, fails."""

import asyncio
import json
import logging
import subprocess
import sys
import threading

import families
import pytest

import llmc
from llmc.server.app import Api
from llmc.server.limits import Limits
from llmc.server.model import Model


async def ask(app, path, body=None, answered=None):
    """A status and a body, by the application itself; the event is set as the body begins."""
    sent, asked = [], asyncio.Event()

    async def receive():
        if asked.is_set():
            await asyncio.Event().wait()  # the client stays
        asked.set()
        return {"type": "http.request", "body": json.dumps(body).encode()}

    async def send(message):
        sent.append(message)
        if answered is not None and message.get("body"):
            answered.set()

    await app({"type": "http", "asgi": {"spec_version": "2.3"}, "http_version": "1.1",
               "method": "GET" if body is None else "POST", "path": path, "raw_path": path.encode(),
               "query_string": b"", "headers": [(b"content-type", b"application/json")],
               "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 1), "scheme": "http"},
              receive, send)
    return sent[0]["status"], b"".join(own.get("body", b"") for own in sent[1:]).decode()


@pytest.mark.parametrize("error", [llmc.LlmcError("/secret is on fire"), RuntimeError("/secret")])
def test_a_step_that_fails_ends_what_runs_and_the_server_says_so(case_tp1, monkeypatch, error):
    """Why is for the log."""
    # With log-probabilities each token is told; the texts of five in a row may be empty.
    body = {"prompt": [5, 6], "max_tokens": 40, "ignore_eos": True, "logprobs": 1}

    async def main():
        async with llmc.AsyncLLM(case_tp1) as llm:
            app = Api(Model(llm, "tiny"), Limits()).app()
            rank, = families.ranks(llm)
            compute, left, answered = rank.compute, iter(range(5)), threading.Event()

            def fail(step):
                if next(left, None) is None:
                    answered.wait(30)  # what is not read by then is gone
                    raise error
                return compute(step)

            monkeypatch.setattr(rank, "compute", fail)
            status, text = await ask(app, "/v1/completions", body | {"stream": True}, answered)
            assert status == 200 and text.count("data: ") >= 2
            told = json.loads(text.strip().split("data: ")[-1])["error"]
            assert told["type"] == "server_error" and "/secret" not in text
            for path, given in (("/health", None), ("/v1/completions", body)):
                status, text = await ask(app, path, given)
                assert status == 503 and "has to be loaded again" in text
                assert "/secret" not in text

    logging.getLogger("llmc.server").setLevel(logging.CRITICAL)
    asyncio.run(main())


def test_what_fails_in_the_server_is_its_log_s_matter(case_tp1, monkeypatch):
    async def main():
        async with llmc.AsyncLLM(case_tp1) as llm:
            app = Api(Model(llm, "tiny"), Limits()).app()
            monkeypatch.setattr(llm, "tokenize", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):  # for uvicorn, which logs it
                await ask(app, "/tokenize", {"prompt": "the"})
            monkeypatch.undo()
            assert (await ask(app, "/tokenize", {"prompt": "the"}))[0] == 200

    asyncio.run(main())


def test_without_the_extra_the_command_says_what_to_install(case_tp1):
    code = ("import sys; sys.modules['starlette'] = None; from llmc.cli import main; "
            f"main(['serve', {str(case_tp1)!r}])")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2 and "the server needs starlette" in done.stderr
    assert "pip install '.[serve]'" in done.stderr
