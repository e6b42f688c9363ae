"""Responses to clients if the server or its device fails."""

import asyncio
import json
import logging
import subprocess
import sys
import threading

import families
import pytest
from server_process import ask

import llmc
from llmc.server.app import Api
from llmc.server.limits import ServerLimits
from llmc.server.model import Model


def test_nan_logits_are_a_500_and_counted(nan_case):
    async def main():
        async with llmc.AsyncLLM(nan_case) as llm:
            app = Api([Model(llm, "tiny")], ServerLimits()).app()
            body = {"prompt": [5, 7], "max_tokens": 2, "logprobs": 1}
            status, text = await ask(app, "/v1/completions", body)
            error = json.loads(text)["error"]
            assert (status, error["type"]) == (500, "server_error") and "NaN" in error["message"]
            status, _ = await ask(app, "/v1/completions", body | {"prompt": [5, 6]})
            assert status == 200
            _, text = await ask(app, "/metrics")
            counted = [line for line in text.splitlines()
                       if line.startswith("llmc:nan_logits_total")]
            assert [line.split()[-1] for line in counted] == ["1.0"]

    asyncio.run(main())


@pytest.mark.parametrize("error", [llmc.LlmcError("/secret is on fire"), RuntimeError("/secret")])
def test_a_failed_step_ends_running_requests_and_health(case_tp1, monkeypatch, error):
    """The reason is only in the log."""
    # With log-probabilities each token is sent; the texts of five in a row may be empty.
    body = {"prompt": [5, 6], "max_tokens": 40, "ignore_eos": True, "logprobs": 1}

    async def main():
        async with llmc.AsyncLLM(case_tp1) as llm:
            app = Api([Model(llm, "tiny")], ServerLimits()).app()
            rank, = families.ranks(llm)
            compute, left, answered = rank.compute, iter(range(5)), threading.Event()

            def fail(step):
                if next(left, None) is None:
                    answered.wait(30)  # unread output is dropped then
                    raise error
                return compute(step)

            monkeypatch.setattr(rank, "compute", fail)
            status, text = await ask(app, "/v1/completions", body | {"stream": True}, answered)
            assert status == 200 and text.count("data: ") >= 2
            told = json.loads(text.strip().split("data: ")[-1])["error"]
            assert told["type"] == "server_error" and "/secret" not in text
            for path, given in (("/health", None), ("/v1/completions", body)):
                status, text = await ask(app, path, given)
                assert status == 503 and "must be restarted" in text
                assert "/secret" not in text

    logging.getLogger("llmc.server").setLevel(logging.CRITICAL)
    asyncio.run(main())


def test_internal_errors_are_logged_and_not_exposed(case_tp1, monkeypatch):
    async def main():
        async with llmc.AsyncLLM(case_tp1) as llm:
            app = Api([Model(llm, "tiny")], ServerLimits()).app()
            monkeypatch.setattr(llm, "tokenize", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):  # re-raised for uvicorn, which logs it
                await ask(app, "/tokenize", {"prompt": "the"})
            monkeypatch.undo()
            assert (await ask(app, "/tokenize", {"prompt": "the"}))[0] == 200

    asyncio.run(main())


def test_a_missing_extra_is_named(case_tp1):
    code = ("import sys; sys.modules['starlette'] = None; from llmc.cli import main; "
            f"main(['serve', {str(case_tp1)!r}])")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2 and "the server needs starlette" in done.stderr
    assert "pip install '.[serve]'" in done.stderr
